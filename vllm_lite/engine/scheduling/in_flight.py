"""InFlight: the one record of the steps that have been scheduled and whose results have not been applied yet.

A step enters it in schedule() and leaves it in update(). In between it waits for its message: one or some steps travel
to the workers together, and their results come back together, in the order in which the steps were scheduled.

Engine and workers share the cores with the kernels, and a message each way costs as much of them as a tenth of a small
model's step. While nothing but short decode steps is to be done, several travel together, and so do their results.
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
"""Steps are put together up to this time: a stream is read in such pieces, an arrival waits for at most two of them."""
MAX_STEPS = 4
MEASURED_STEPS = 16
Item = TypeVar("Item")


class StepMessage:
    """`num_steps` steps that go to the workers together. `num_left` of them have no result yet. `is_plain`: they
    compute next tokens alone, and drafts behind these. `media_s`: the time that workers took of them for media."""

    __slots__ = ("is_plain", "media_s", "num_left", "num_prefill_tokens", "num_steps", "num_tokens", "sent_s")

    def __init__(self) -> None:
        self.is_plain, self.media_s = True, 0.0
        self.num_steps = self.num_left = self.num_tokens = self.num_prefill_tokens = 0
        self.sent_s = 0.0


class StepInFlight(NamedTuple):
    """A step without a result. `sampling` are the sequences that get a token from it, in the order of its entries;
    `drafted` are those of them that draft, with the most drafts of each."""

    output: SchedulerOutput
    sampling: list[Sequence]
    message: StepMessage
    only_decodes: bool
    drafted: abc.Sequence[tuple[Sequence, int]] = ()

    @property
    def ends_message(self) -> bool:
        """Whether all other steps of its message have their results."""
        return self.message.num_left == 1

    def tokens_of(self, result: ModelOutput) -> list[int]:
        """The sampled tokens of this step. Raises ProtocolError if `result` is that of another step, or too short."""
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
        """The workers' results for each sequence, in order: its part of `tokens`, their logprobs, and its error."""
        counts = result.counts or [1] * len(tokens)

        def pieces(items: list[Item]) -> list[list[Item]]:
            """The part of `items` that belongs to each sequence."""
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
    """The steps without a result, oldest first; those at the end may not have been sent yet."""

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
        """The step whose result comes next. Raises IndexError if no step is in flight."""
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
        """A step of `num_tokens` has been scheduled; the next message carries it."""
        message = self._unsent
        message.is_plain &= 0 < num_tokens - sum(most for _, most in drafted) <= len(sampling)
        message.num_steps += 1
        message.num_left += 1
        message.num_tokens += num_tokens
        if not only_decodes:
            message.num_prefill_tokens += num_prefill_tokens(output)
        self._steps.append(StepInFlight(output, sampling, message, only_decodes, drafted))

    def send(self, now_s: float) -> list[SchedulerOutput]:
        """The steps that have not been sent yet. The caller sends them now, as one message."""
        outputs = [step.output for step in self._steps if step.message is self._unsent]
        self._unsent.sent_s = now_s
        self._unsent = StepMessage()
        return outputs

    @property
    def outputs(self) -> list[SchedulerOutput]:
        """All of the steps, as the workers get them."""
        return [step.output for step in self._steps]

    def confirm(self) -> StepInFlight:
        """The oldest step has its result: take it out. Raises IndexError if no step is in flight."""
        step = self._steps.popleft()
        step.message.num_left -= 1
        return step

    def drop(self) -> None:
        """No result will come any more, and what has not been sent never will be: forget all steps."""
        self._steps.clear()
        self._unsent = StepMessage()


def num_prefill_tokens(output: SchedulerOutput) -> int:
    """Count the tokens of a step but for those that decode: one for each sequence, and the drafts behind it."""
    return sum(
        entry.num_tokens
        for entry in output.entries
        if isinstance(entry, NewRequest | Resume) or (isinstance(entry, Continue) and entry.num_tokens > 1)
    )


class MessageLength:
    """Number of `steps` to send in one message, learned from the time of decode steps."""

    def __init__(self) -> None:
        self.steps = 1
        self._since_s: float | None = None
        self._count = 0

    def ended(self, now_s: float, *, steady: bool) -> None:
        """A step has ended. `steady`: it was one of decoding only, and the next one is under way already."""
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
