"""Overlap: launches a step before the host has the sampled tokens of the step before it.

Otherwise a GPU would idle while the host waits for a step's tokens, builds the next step's inputs and launches it. With
overlap the sampled tokens stay on the device, where they become input ids of the next step, and reach the host one
step late. Until then the host has token 0 in their place.

Only steps that need no token which the host lacks can run ahead. Masks, penalties, logprobs, drafts, forks and
preemptions read tokens: such a step waits for the steps before it, and runs as without overlap.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_lite.attention.step_batch import to_device
from vllm_lite.kernels.cuda.sampler import PickedLater
from vllm_lite.protocol.step import Continue, Entry, Finish, ModelOutput, NewRequest, SchedulerOutput
from vllm_lite.worker.batch.rows import NO_ROW, SequenceState
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.model_runner import ModelRunner
from vllm_lite.worker.sampling.sampler import NO_LOGPROBS, Sampler, failures

Execute = Callable[[SchedulerOutput], ModelOutput]
MAX_LAUNCHED = 2
"""Maximum steps whose tokens are only on the device. The engine sends no more ahead."""
READ_NO_TOKENS = (Continue, NewRequest, Finish)


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step whose tokens the host lacks."""

    step: SchedulerOutput
    inputs: StepInputs
    sequences: list[SequenceState]
    """Sequences that get a token, in the order of the samples."""
    lengths: list[int]
    """Number of tokens of each before the step: the index of its new one."""
    picked: PickedLater


class Overlap:
    """Launches steps ahead for one ModelRunner, whose sampler can leave tokens on the device."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._launched: deque[Launched] = deque()
        self._places: dict[int, int] = {}  # handle -> sample of the last step launched, whose token the host lacks

    def __len__(self) -> int:
        return len(self._launched)

    @classmethod
    def of(cls, runner: ModelRunner) -> "Overlap | None":
        """The Overlap of a runner; None if no step can run ahead, because ranks or parts exchange samples on the
        host."""
        sampler = runner.sampler
        if not isinstance(sampler, Sampler) or not sampler.leaves_tokens:
            return None
        return cls(runner, sampler) if all(part.can_run_ahead(()) for part in runner.parts) else None

    def can_launch(self, step: SchedulerOutput) -> bool:
        """Whether the step needs no token that the host lacks."""
        runner, batch = self._runner, self._runner.batch
        return (
            len(self._launched) < MAX_LAUNCHED
            and not step.block_ops
            and all(isinstance(entry, READ_NO_TOKENS) and _is_plain(entry) for entry in step.entries)
            and any(not isinstance(entry, Finish) for entry in step.entries)
            and bool((batch.rows.params["logprobs"][: len(batch.rows)] == NO_LOGPROBS).all())
            and all(part.can_run_ahead(step.entries) for part in runner.parts)
        )

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> None:
        """Launch the step. Raises ProtocolError, as ModelRunner.execute does, for one that does not fit."""
        runner, batch, ranges = self._runner, self._runner.batch, self._runner.ranges
        ranges.step()
        with ranges("inputs"):
            batch.apply(step.entries)
            for entry in step.entries:
                if isinstance(entry, Finish):  # the same step may give its handle to a new sequence
                    self._places.pop(entry.handle, None)
            runner.cache_engine.use(batch.tables.highest_block)
            inputs = batch.build()
        runner.check_size(inputs)
        samples = batch.sample_inputs(inputs)
        with ranges("model"):
            logits = runner.forward.logits(self._with_device_ids(inputs))
        with ranges("sample"):
            picked = self._sampler.launch(logits, samples)
        sequences = [batch.resident[row] for row in inputs.rows[inputs.sampling].tolist()]
        lengths = samples.positions.tolist()
        # The next steady step overwrites this one's arrays, so take() gets copies.
        batch.commit(inputs, np.zeros(len(sequences), np.int64))
        self._places = {sequence.handle: place for place, sequence in enumerate(sequences)}
        self._launched.append(Launched(step, inputs, sequences, lengths, picked))
        runner.progress.advance()

    def is_done(self) -> bool:
        """Whether take() would not wait. Raises DeviceHungError as take() does."""
        return self._launched[0].picked.is_done()

    def take(self) -> ModelOutput:
        """Wait for the oldest launched step, and return its output. Raises DeviceHungError if that takes too long."""
        launched = self._launched.popleft()
        picked = launched.picked.wait()
        if not self._launched:
            self._places = {}
        sequences, tokens = launched.sequences, picked.tokens
        token_ids = self._runner.batch.rows.token_ids
        for sequence, length, token in zip(sequences, launched.lengths, tokens.tolist(), strict=True):
            if sequence.row != NO_ROW:  # not finished since
                token_ids[sequence.row, length] = token
        why = failures(picked.best)
        failed = [(sequences[sample].handle, reason) for sample, reason in why.items()] or None
        step = launched.step
        return ModelOutput(step.generation, step.step, tokens.astype("<u4").tobytes(), failed=failed)

    def _with_device_ids(self, inputs: StepInputs) -> StepInputs:
        """The inputs, with input ids that only the device has taken from there."""
        if not self._launched:
            return inputs
        tokens = self._launched[-1].picked.tokens
        if inputs.is_steady and inputs.handles == list(self._places):
            return replace(inputs, device_ids=tokens)
        # An unknown token is its sequence's last one: only a sequence that has caught up was sampled before.
        lacking = [(i, self._places[handle]) for i, handle in enumerate(inputs.handles) if handle in self._places]
        if not lacking:
            return inputs
        rows, samples = np.array(lacking).T
        device = tokens.device
        ids = to_device(inputs.input_ids, device)
        into = to_device(inputs.query_start_loc[1:][rows].astype(np.int64) - 1, device)
        return replace(inputs, device_ids=ids.index_copy(0, into, tokens[to_device(samples, device)]))


def _is_plain(entry: Entry) -> bool:
    """Whether the entry is not a new sequence with logprobs."""
    return not isinstance(entry, NewRequest) or entry.sampling.logprobs is None


def run_ahead(overlap: Overlap, steps: Sequence[SchedulerOutput], execute: Execute) -> list[ModelOutput]:
    """Run the steps of one message, and return their outputs. `execute` runs those that cannot run ahead."""
    outputs: list[ModelOutput] = []
    for step in steps:
        while len(overlap) == MAX_LAUNCHED or (overlap and not overlap.can_launch(step)):
            outputs.append(overlap.take())
        if overlap.can_launch(step):
            overlap.launch(step)
        else:
            outputs.append(execute(step))
    while overlap:
        outputs.append(overlap.take())
    return outputs
