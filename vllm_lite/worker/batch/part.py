"""StepPart: the interface of a feature in a worker's steps.

A feature (adapters, recurrent states, pooling, ...) is a StepPart. It owns its columns of the persistent batch, sets
its fields of a step's inputs, and acts around the forward pass. The batch and the model runner know no feature by name.
The hooks, in the order of a step:

    moves           KV blocks are copied or swapped
    handlers        apply the entries of the scheduler that belong to the part
    open, close     a sequence starts, and ends; preempted sequences stay open
    add, remove     a sequence gets a row, and loses it
    propose         propose draft tokens, before the inputs are built
    build           set the part's fields of the inputs (not of a steady step, which reuses them)
    prepare         before the forward pass
    before_sample   set the part's fields of the sampler's inputs
    after_hidden    the model has run, or has been launched
    after_sample    the tokens are sampled
    commit          before the rows take over the tokens
    answer          set the part's fields of the ModelOutput (not of a steady step)

A hook that a part does not override costs nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from vllm_lite.protocol.step import Entry, Fork, NewRequest
from vllm_lite.worker.batch.rows import Rows, SequenceState
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs
from vllm_lite.worker.sampling.sampler import Sampled, SampleInputs

Handler = Callable[[Any], None]
"""Applies one entry."""


@dataclass(slots=True)
class StepResult:
    """The sampled tokens of a step."""

    sampled: Sampled
    num_kept: Int64s  # [num_sampling]
    """Number of samples of each sequence that become its tokens: the first ones."""


class StepPart:
    """Base class of all parts, with hooks that do nothing."""

    rows: Rows

    def attach(self, rows: Rows) -> None:
        """Allocate the part's columns for the rows of a batch."""
        self.rows = rows

    def handlers(self) -> Mapping[type, Handler]:
        """Entry type -> handler, for the entries that belong to this part."""
        return {}

    # ---- the rows

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        """Called when a sequence starts."""

    def close(self, sequence: SequenceState) -> None:
        """Called when a sequence has ended."""

    def add(self, row: int, sequence: SequenceState, tokens: NDArray[Any]) -> None:  # tokens: [num_tokens]
        """Called when a sequence with these tokens has got a row."""

    def remove(self, row: int, last: int) -> None:
        """Called before the sequence in `row` loses it; the sequence in row `last`, maybe the same, moves there."""

    # ---- a step

    def moves(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        """Called after block ops were executed, before the entries of the step are applied."""

    def propose(self) -> None:
        """Propose draft tokens to the rows, which compute them behind the sequences' own."""

    def build(self, inputs: StepInputs) -> None:
        """Complete the step's inputs. Raises ProtocolError for a step that this part cannot run."""

    def prepare(self, inputs: StepInputs) -> None:
        """Called before the forward pass."""

    def before_sample(self, samples: SampleInputs, rows: Int64s) -> None:  # rows: [num_samples]
        """Complete the sampler's inputs; called before the forward pass if possible."""

    def after_hidden(self, inputs: StepInputs, hidden: torch.Tensor | None) -> None:
        """Called after the model has run. hidden: [num_wanted, hidden_size]; None if a graph made the logits and no
        part has asked for hidden states (`read`, `shows_hidden`)."""

    def after_sample(self, inputs: StepInputs, result: StepResult) -> None:
        """Called after sampling; a part may lower `num_kept`."""

    def commit(self, inputs: StepInputs, tokens: Int64s, num_kept: Int64s | None) -> None:
        """Called before the tokens are appended to the rows. tokens: [num_samples]; num_kept: [num_sampling], None:
        all."""

    def answer(self, inputs: StepInputs, fields: dict[str, Any]) -> None:
        """Complete the fields of the ModelOutput."""

    # ---- other

    def load_kernels(self, device: torch.device) -> None:
        """Load the kernels that the part's steps may launch on a GPU, before the first request."""

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:  # noqa: ARG002
        """Whether a step of these entries may be launched before the host has the tokens of earlier steps."""
        return True

    def check_integrity(self) -> None:
        """Raise RuntimeError if the state is inconsistent. For tests."""


def hooks(parts: Sequence[StepPart], name: str) -> list[Callable[..., Any]]:
    """The bound methods `name` of the parts that override it."""
    return [getattr(part, name) for part in parts if getattr(type(part), name) is not getattr(StepPart, name)]
