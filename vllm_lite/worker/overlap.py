"""Steps whose tokens are still on the device: a step is launched before the host has the tokens of the one before it.

On a GPU the host would wait for a step's tokens, make the next step's inputs and launch that, and the device would have
nothing to do meanwhile. Here the sampled tokens stay on the device, where they become input ids of the next step, and
come to the host one step late. Until then a sequence has token 0 in their place.

Which steps can go ahead: those that need no token that the host lacks. A mask, a penalty, a logprob, a draft, a fork or
a preemption reads tokens; then the steps before it are ended first, and it runs as every step does without this.
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
"""Steps whose tokens may be on the device alone. The engine sends no more ahead."""
READ_NO_TOKENS = (Continue, NewRequest, Finish)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device is busy with."""

    step: SchedulerOutput
    inputs: StepInputs
    sequences: list[SequenceState]
    """Those that get a token, in the order of the samples."""
    lengths: list[int]
    """How many tokens each had: the place of its new one."""
    picked: PickedLater


class Overlap:
    """Launches steps ahead for one ModelRunner. Its device has a sampler that leaves tokens there."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._launched: deque[Launched] = deque()
        self._places: dict[int, int] = {}  # handle -> sample of the last step launched, whose token the host lacks

    def __len__(self) -> int:
        return len(self._launched)

    @classmethod
    def of(cls, runner: ModelRunner) -> "Overlap | None":
        """None where steps never go ahead: ranks exchange their samples on the host, and so do some parts."""
        sampler = runner.sampler
        if not isinstance(sampler, Sampler) or not sampler.leaves_tokens:
            return None
        return cls(runner, sampler) if all(part.can_run_ahead(()) for part in runner.parts) else None

    def can_launch(self, step: SchedulerOutput) -> bool:
        """Whether nothing in the step asks for a token that the host lacks."""
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
        # A steady step's arrays are overwritten by the next; what `take` needs of them is kept.
        batch.commit(inputs, np.zeros(len(sequences), np.int64))
        self._places = {sequence.handle: place for place, sequence in enumerate(sequences)}
        self._launched.append(Launched(step, inputs, sequences, lengths, picked))
        runner.progress.advance()

    def is_done(self) -> bool:
        """Whether `take` would not wait. Raises DeviceHungError as that does."""
        return self._launched[0].picked.is_done()

    def take(self) -> ModelOutput:
        """The output of the oldest step that was launched. Waits for it, and raises DeviceHungError if that takes
        longer than any step does."""
        launched = self._launched.popleft()
        picked = launched.picked.wait()
        if not self._launched:
            self._places = {}
        sequences, tokens = launched.sequences, picked.tokens
        token_ids = self._runner.batch.rows.token_ids
        for sequence, length, token in zip(sequences, launched.lengths, tokens.tolist(), strict=True):
            if sequence.row != NO_ROW:  # it may have been finished since
                token_ids[sequence.row, length] = token
        why = failures(picked.best)
        failed = [(sequences[sample].handle, reason) for sample, reason in why.items()] or None
        step = launched.step
        return ModelOutput(step.generation, step.step, tokens.astype("<u4").tobytes(), failed=failed)

    def _with_device_ids(self, inputs: StepInputs) -> StepInputs:
        """The inputs, with those ids that only the device knows taken from where they were left."""
        if not self._launched:
            return inputs
        tokens = self._launched[-1].picked.tokens
        if inputs.is_steady and inputs.handles == list(self._places):
            return replace(inputs, device_ids=tokens)
        # What a sequence lacks stands last: it is caught up in this step, or it would not have been sampled before.
        lacking = [(i, self._places[handle]) for i, handle in enumerate(inputs.handles) if handle in self._places]
        if not lacking:
            return inputs
        rows, samples = np.array(lacking).T
        device = tokens.device
        ids = to_device(inputs.input_ids, device)
        into = to_device(inputs.query_start_loc[1:][rows].astype(np.int64) - 1, device)
        return replace(inputs, device_ids=ids.index_copy(0, into, tokens[to_device(samples, device)]))


def _is_plain(entry: Entry) -> bool:
    """Whether a new sequence, if it is one, wants no logprobs."""
    return not isinstance(entry, NewRequest) or entry.sampling.logprobs is None


def run_ahead(overlap: Overlap, steps: Sequence[SchedulerOutput], execute: Execute) -> list[ModelOutput]:
    """The outputs of steps that came together: `execute` runs those that cannot go ahead."""
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
