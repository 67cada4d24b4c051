"""The interface by which a feature takes part in a worker's steps.

A feature (adapters, recurrent states, pooling, ...) is a StepPart. It owns its columns of the persistent batch, puts
into a step's inputs what it has to say of it, and acts around the forward pass. The batch and the model runner know
parts, and no feature by name. In the order of a step:

    moves           blocks of the KV cache are copied or swapped
    handlers        entries of the scheduler that are the part's own
    open, close     a sequence comes and ends; preempted sequences stay open
    add, remove     it gets a row, and loses it
    propose         before the inputs are made: tokens that may follow
    build           the part's share of the inputs (not of a steady step's, which are those of the step before)
    prepare         before the forward pass
    before_sample   its share of what the sampler gets
    after_hidden    the model has run, or has been launched
    after_sample    the tokens are there
    commit          the step counts
    answer          its fields of the answer (not of a steady step's, which has none)

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
"""Carries out one entry."""


@dataclass(slots=True)
class StepResult:
    """The outcome of a step."""

    sampled: Sampled
    num_kept: Int64s  # [num_sampling]
    """Number of samples of each sequence that are its tokens: its first ones."""


class StepPart:
    """The base of all parts, with hooks that do nothing."""

    rows: Rows

    def attach(self, rows: Rows) -> None:
        """Make the part's columns for the rows of a batch."""
        self.rows = rows

    def handlers(self) -> Mapping[type, Handler]:
        """The kinds of entries that this part carries out."""
        return {}

    # ---- the rows

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        """A sequence begins."""

    def close(self, sequence: SequenceState) -> None:
        """It has ended."""

    def add(self, row: int, sequence: SequenceState, tokens: NDArray[Any]) -> None:  # tokens: [num_tokens]
        """The sequence has got this row, and has these tokens."""

    def remove(self, row: int, last: int) -> None:
        """The sequence in `row` loses it, and the one in the row `last`, which may be the same, takes its place."""

    # ---- a step

    def moves(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        """Blocks are moved by this program, before the entries of the step are carried out."""

    def propose(self) -> None:
        """Have the rows compute tokens that may follow."""

    def build(self, inputs: StepInputs) -> None:
        """Complete the step's inputs. Raises ProtocolError for a step that this part cannot do."""

    def prepare(self, inputs: StepInputs) -> None:
        """The step is about to be run."""

    def before_sample(self, samples: SampleInputs, rows: Int64s) -> None:  # rows: [num_samples]
        """Complete what the sampler gets; where possible, this is called before the forward pass."""

    def after_hidden(self, inputs: StepInputs, hidden: torch.Tensor | None) -> None:
        """The model has run. hidden: [num_wanted, hidden_size]; None if the logits were made without showing it, unless
        a part has asked for it (`read`, `shows_hidden`)."""

    def after_sample(self, inputs: StepInputs, result: StepResult) -> None:
        """The tokens are there; a part may lower `num_kept`."""

    def commit(self, inputs: StepInputs, tokens: Int64s, num_kept: Int64s | None) -> None:
        """The rows are about to take over the step. tokens: [num_samples]; num_kept: [num_sampling], None: all."""

    def answer(self, inputs: StepInputs, fields: dict[str, Any]) -> None:
        """Complete the fields of the ModelOutput."""

    # ---- else

    def load_kernels(self, device: torch.device) -> None:
        """Load the kernels that the part's steps may launch on a GPU, before the first request."""

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:  # noqa: ARG002
        """Whether a step of these entries may be launched while the host lacks tokens of those before it."""
        return True

    def check_integrity(self) -> None:
        """Raise RuntimeError if the bookkeeping contradicts itself. For tests, and for when the worker is idle."""


def hooks(parts: Sequence[StepPart], name: str) -> list[Callable[..., Any]]:
    """The methods of this name of the parts that override it."""
    return [getattr(part, name) for part in parts if getattr(type(part), name) is not getattr(StepPart, name)]
