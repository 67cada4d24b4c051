"""InFlight: the steps that have been scheduled and whose results have not been applied yet.

schedule() adds a step, update() removes it. One or more steps are sent to the workers in one message, and their results
come back in one message, in the order in which the steps were scheduled.

On a CPU, engine and workers share the cores with the kernels, and a message in each direction costs a tenth of a small
model's step. So while there are only short decode steps, several are sent together.
"""

from collections import abc, deque
from collections.abc import Iterator
from itertools import accumulate, repeat
from typing import NamedTuple, TypeVar

from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.api import TokenLogprobs
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.step import Continue, ModelOutput, NewRequest, Resume, SchedulerOutput

MESSAGE_S = 0.003
"""Longest time of a message's steps: streams get tokens in such pieces, an arriving request waits for at most two."""
MAX_STEPS = 4
MEASURED_STEPS = 16
Item = TypeVar("Item")


class StepMessage:
    """`num_steps` steps that are sent to the workers together; `num_left` of them have no result yet. `is_plain`: all
    of them only decode or verify drafts. `other_s`: seconds that the workers spent on media and recordings in them."""

    __slots__ = ("is_plain", "num_left", "num_prefill_tokens", "num_steps", "num_tokens", "other_s", "sent_s")

    def __init__(self) -> None:
        self.is_plain, self.other_s = True, 0.0
        self.num_steps = self.num_left = self.num_tokens = self.num_prefill_tokens = 0
        self.sent_s = 0.0


class StepInFlight(NamedTuple):
    """A step without a result. `sampling`: sequences that get a token from it, in the order of its entries. `drafted`:
    those of them that draft, with the maximum number of drafts of each."""

    output: SchedulerOutput
    sampling: list[Sequence]
    message: StepMessage
    only_decodes: bool
    drafted: abc.Sequence[tuple[Sequence, int]] = ()

    @property
    def ends_message(self) -> bool:
        """Whether it is the last step of its message without a result."""
        return self.message.num_left == 1

    def tokens_of(self, result: ModelOutput) -> list[int]:
        """The sampled tokens of this step. Raises ProtocolError if `result` is of another step or the counts differ."""
        step, generation = self.output.step, self.output.generation
        if (result.generation, result.step) != (generation, step):
            raise ProtocolError(
                f"expected the output of step {step} of generation {generation}, "
                f"got step {result.step} of generation {result.generation}"
            )
        tokens = unpack_tokens(result.tokens)
        counts = [1] * len(self.sampling) if result.counts is None else result.counts
        if len(counts) != len(self.sampling) or sum(counts) != len(tokens):
            raise ProtocolError(
                f"step {step} samples {len(self.sampling)} sequences, got {len(tokens)} tokens for {len(counts)}"
            )
        return tokens

    def results_of(
        self, result: ModelOutput, tokens: list[int]
    ) -> Iterator[tuple[Sequence, list[int], list[TokenLogprobs | None] | None, str | None]]:
        """For each sequence in order: its part of `tokens`, the logprobs of these, and its error."""
        counts = result.counts or [1] * len(tokens)

        def pieces(items: list[Item]) -> list[list[Item]]:
            """Split `items` by sequence."""
            return [items[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]

        failed = dict(result.failed or ())
        return zip(
            self.sampling,
            pieces(tokens) if result.counts else [[token] for token in tokens],
            pieces(result.logprobs) if result.logprobs is not None else repeat(None),
            [failed.get(sequence.handle) for sequence in self.sampling] if failed else repeat(None),
            strict=False,
        )


class InFlight:
    """Queue of the steps without a result, oldest first; the last ones may not have been sent yet."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self._unsent = StepMessage()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_unsent(self) -> int:
        return self._unsent.num_left

    @property
    def oldest(self) -> StepInFlight:
        """The step whose result is next. Raises IndexError if no step is in flight."""
        return self._steps[0]

    @property
    def newest(self) -> StepInFlight:
        """The step that was scheduled last. Raises IndexError if no step is in flight."""
        return self._steps[-1]

    @property
    def awaited(self) -> list[Sequence]:
        """The sequences that get a token from the oldest step."""
        return self._steps[0].sampling if self._steps else []

    @property
    def step_awaited(self) -> int:
        """The number of the oldest step; 0 if there is none."""
        return self._steps[0].output.step if self._steps else 0

    def add(
        self,
        output: SchedulerOutput,
        sampling: list[Sequence],
        num_tokens: int,
        *,
        only_decodes: bool,
        drafted: abc.Sequence[tuple[Sequence, int]] = (),
    ) -> None:
        """Append a scheduled step of `num_tokens`; the next message carries it."""
        message = self._unsent
        message.is_plain &= 0 < num_tokens - sum(most for _, most in drafted) <= len(sampling)
        message.num_steps += 1
        message.num_left += 1
        message.num_tokens += num_tokens
        if not only_decodes:
            message.num_prefill_tokens += num_prefill_tokens(output)
        self._steps.append(StepInFlight(output, sampling, message, only_decodes, drafted))

    def send(self, now_s: float) -> list[SchedulerOutput]:
        """Return the steps that have not been sent yet and mark them as sent; the caller sends them as one message."""
        outputs = [step.output for step in self._steps if step.message is self._unsent]
        self._unsent.sent_s = now_s
        self._unsent = StepMessage()
        return outputs

    @property
    def outputs(self) -> list[SchedulerOutput]:
        """The SchedulerOutputs of all steps in flight."""
        return [step.output for step in self._steps]

    def confirm(self) -> StepInFlight:
        """Remove and return the oldest step, whose result is here. Raises IndexError if no step is in flight."""
        step = self._steps.popleft()
        step.message.num_left -= 1
        return step

    def drop(self) -> None:
        """Forget all steps, sent or not: no result will come any more."""
        self._steps.clear()
        self._unsent = StepMessage()


def num_prefill_tokens(output: SchedulerOutput) -> int:
    """Number of tokens of a step, not counting decode tokens and their drafts."""
    return sum(
        entry.num_tokens
        for entry in output.entries
        if isinstance(entry, NewRequest | Resume) or (isinstance(entry, Continue) and entry.num_tokens > 1)
    )


class MessageLength:
    """Number of decode `steps` to send in one message, learned from their duration."""

    def __init__(self) -> None:
        self.steps = 1
        self._since_s: float | None = None
        self._count = 0

    def ended(self, now_s: float, *, steady: bool) -> None:
        """Learn from a step that ended at `now_s`. `steady`: it only decoded, and the next step was already sent."""
        if not steady:
            self._since_s = None
            self.steps = 1
        elif self._since_s is None:
            self._since_s, self._count = now_s, 0
        else:
            self._count += 1
            if self._count >= MEASURED_STEPS:
                step_s = (now_s - self._since_s) / self._count
                self.steps = max(1, min(MAX_STEPS, int(MESSAGE_S / step_s))) if step_s > 0 else 1
                self._since_s, self._count = now_s, 0
