"""Results of one request as they arrive: Samples, a reader's Cursor over each, and the logprobs of the prompt."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec

from vllm_lite.client.outputs import CompletionOutput, Logprob
from vllm_lite.client.text.detokenizer import Detokenizer, Mark
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.api import Finished, PromptLogprobs, TokenLogprobs, Tokens
from vllm_lite.protocol.stats import FinishReason

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[int, TokenLogprobs]).decode


class PackedLogprobs(Sequence[dict[int, Logprob]]):
    """Logprobs of consecutive tokens. They stay packed, as objects would take ten times the memory: each item is made
    anew when it is read. Safe in any thread."""

    __slots__ = ("_is_ranked", "_tokenizer", "packed")

    def __init__(self, tokenizer: Tokenizer | None, *, is_ranked: bool = True, packed: Iterable[bytes] = ()) -> None:
        """See candidates()."""
        self._tokenizer, self._is_ranked, self.packed = tokenizer, is_ranked, list(packed)

    def extend(self, token_ids: Iterable[int], entries: Iterable[TokenLogprobs]) -> None:
        self.packed += map(_pack, zip(token_ids, entries, strict=False))

    def inherit(self, parent: "PackedLogprobs") -> None:
        self.packed += parent.packed

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, place: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, place: slice) -> "PackedLogprobs": ...
    def __getitem__(self, place: int | slice) -> "dict[int, Logprob] | PackedLogprobs":
        if isinstance(place, slice):
            return PackedLogprobs(self._tokenizer, is_ranked=self._is_ranked, packed=self.packed[place])
        return candidates(self._tokenizer, *_unpack(self.packed[place]), is_ranked=self._is_ranked)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedLogprobs | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list's

    def __repr__(self) -> str:
        return repr(list(self))


class Sample:
    """One continuation: collects tokens, their text and logprobs.

    It ends with the engine's Finished, or before that at a stop string; later events are ignored.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        tokenizer: Tokenizer | None,
        *,
        logprobs: bool,
        include_stop: bool,
        is_named: bool = False,
    ) -> None:
        """`tokenizer` decodes the candidates of `logprobs`: the likeliest tokens, or with `is_named` those that the
        request names. `include_stop`: the text includes a stop token's."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cumulative_logprob: float | None = 0.0 if logprobs else None
        self.logprobs = PackedLogprobs(tokenizer, is_ranked=not is_named) if logprobs else None
        self._shown: list[dict[int, Logprob]] = []  # the first of them, as output() has given them
        self.stop_reason: int | str | None = None
        self.text = ""
        self.ends: list[int] = []
        """With `logprobs`, the number of characters of text after each token."""
        self._detokenizer = detokenizer
        self._include_stop = include_stop

    def apply(self, event: Tokens | Finished) -> None:
        """Apply the next event, which is not an error."""
        if self.finish_reason is not None:
            return
        self._take(event.token_ids, event.logprobs, is_stop=isinstance(event, Finished) and event.reason == "stop")
        if isinstance(event, Finished):
            if event.cumulative_logprob is not None:
                self.cumulative_logprob = event.cumulative_logprob
            self.text += "" if self._detokenizer is None else self._detokenizer.flush()
        if self._detokenizer is not None and self._detokenizer.stopped is not None:
            self.finish("stop", self._detokenizer.stopped)
        elif isinstance(event, Finished):
            self.finish(event.reason, event.stop_token)

    def finish(self, reason: FinishReason, stop: int | str | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop

    def inherit(self, parent: "Sample") -> None:
        """Begin with the contents of `parent`, whose text is not searched for this sample's stop strings."""
        self._take(parent.token_ids, None, is_stop=False)
        if self.logprobs is not None:
            if parent.logprobs is not None:
                self.logprobs.inherit(parent.logprobs)
            self.cumulative_logprob = parent.cumulative_logprob or 0.0

    @property
    def marks(self) -> Sequence[Mark]:
        """Positions of added tokens in the text, including those whose text has not been decoded yet."""
        return () if self._detokenizer is None else self._detokenizer.marks

    @property
    def num_chars(self) -> int:
        """Number of characters that may be shown; before the end no incomplete added token."""
        count = len(self.text)
        if self.finish_reason is None:
            for mark in reversed(self.marks):
                if mark.start < count < mark.end:
                    return mark.start
                if mark.end <= count:
                    break
        return count

    def marks_between(self, start: tuple[int, int], end: tuple[int, int]) -> list[Mark]:
        """The marks between `start` and `end`, both (tokens, characters), relative to `start`.

        A mark is before a position if its whole token is, so that a reader who continues there misses none and gets
        none twice.
        """

        def num_before(place: tuple[int, int]) -> int:
            by_tokens = bisect_right(marks, place[0] - 1, key=lambda mark: mark.num_before)
            return min(by_tokens, bisect_right(marks, place[1], key=lambda mark: mark.end))

        marks, (tokens, chars) = self.marks, start
        found = marks[num_before(start) : num_before(end)]
        return [Mark(num - tokens, at - chars, to - chars, token_id) for num, at, to, token_id in found]

    def part(self, index: int, num_tokens: int, num_chars: int) -> CompletionOutput:
        """An output of the first tokens and characters, without logprobs."""
        marks = self.marks_between((0, 0), (num_tokens, num_chars))
        return CompletionOutput(index, self.text[:num_chars], self.token_ids[:num_tokens], marks=marks)

    def output(self, index: int, *, logprobs: bool) -> CompletionOutput:
        """A snapshot of the present state, which later events do not change."""
        if logprobs and self.logprobs is not None:
            self._shown += self.logprobs[len(self._shown) :]
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self._shown.copy() if logprobs and self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            marks=self.marks_between((0, 0), (len(self.token_ids), len(self.text))),
        )

    def _take(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] | None, *, is_stop: bool) -> None:
        """Append new tokens, up to a stop string. `is_stop`: the last one is a stop token."""
        taken = len(token_ids)
        if self._detokenizer is not None:
            shown = token_ids[:-1] if is_stop and not self._include_stop else token_ids
            if self.logprobs is None:
                self.text += self._detokenizer.feed(shown)
            else:
                self._feed_singly(shown)
            if self._detokenizer.stopped is not None:
                taken = self._detokenizer.num_tokens - len(self.token_ids)
        self.token_ids += token_ids[:taken]
        if self.logprobs is not None and logprobs is not None:
            entries = logprobs[:taken]
            self.logprobs.extend(token_ids, entries)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(entry.logprob for entry in entries)

    def _feed_singly(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.text += "" if self._detokenizer is None else self._detokenizer.feed((token_id,))
            self.ends.append(self.num_chars)


class Cursor:
    """A reader's position in a sample. Each delta() begins where the previous one ended."""

    __slots__ = ("_ended", "_index", "_num_chars", "_num_tokens", "_sample")

    def __init__(
        self, index: int, sample: Sample, num_tokens: int = 0, num_chars: int = 0, *, has_ended: bool = False
    ) -> None:
        """`index` is that of the sample in its request; the other arguments are what the reader already has."""
        self._index = index
        self._sample = sample
        self._num_chars = num_chars
        self._num_tokens = num_tokens
        self._ended = has_ended

    def delta(self) -> CompletionOutput | None:
        """The new part of the sample: text, tokens, their logprobs, and its end; None if nothing is new.

        `cumulative_logprob` is of all tokens; `logprobs` are PackedLogprobs, of which next_output() makes a list. An
        error ends the whole request and is reported there, not as a finish reason here.
        """
        sample, start, num_chars = self._sample, self._num_tokens, self._num_chars
        reason = None if sample.finish_reason == "error" else sample.finish_reason
        if self._ended or (reason is None and len(sample.token_ids) == start):
            return None
        self._num_tokens, self._num_chars = len(sample.token_ids), sample.num_chars
        self._ended = sample.finish_reason is not None
        return CompletionOutput(
            index=self._index,
            text=sample.text[num_chars : self._num_chars],
            token_ids=sample.token_ids[start:],
            cumulative_logprob=sample.cumulative_logprob,
            logprobs=None if sample.logprobs is None else sample.logprobs[start:],  # type: ignore[arg-type]
            finish_reason=reason,
            stop_reason=sample.stop_reason,
            marks=sample.marks_between((start, num_chars), (self._num_tokens, self._num_chars)),
            ends=[end - num_chars for end in sample.ends[start : self._num_tokens]],
        )


class PromptScores:
    """Logprobs of a prompt. They stay packed, since a long prompt has many, and the thread that receives them serves
    other requests, too. Iteration yields `entries`, made one by one."""

    def __init__(self, tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._scores = PackedLogprobs(tokenizer)
        self._entries: list[dict[int, Logprob] | None] = [None]

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        yield None
        yield from self._scores

    @property
    def entries(self) -> list[dict[int, Logprob] | None]:
        """`entries[i]` maps token ids to candidates for prompt token i; None for the first one. Safe in any thread."""
        entries = self._entries
        if len(entries) <= len(self._scores):
            entries = self._entries = [*entries, *self._scores[len(entries) - 1 :]]
        return entries

    @property
    def complete(self) -> bool:
        return len(self._scores) + 1 == len(self._token_ids)

    def take(self, scores: PromptLogprobs) -> None:
        """Append the next logprobs, ignoring repeated ones of a request that was sent again."""
        place = len(self._scores) + 1
        self._scores.extend(self._token_ids[place:], scores.entries[max(0, place - scores.start) :])


def candidates(
    tokenizer: Tokenizer | None, token_id: int, entry: TokenLogprobs, *, is_ranked: bool = True
) -> dict[int, Logprob]:
    """Candidates of one position: first the token at that position, then the others, most likely first. Without
    `is_ranked` they may be any tokens, and have rank 0."""
    found = {token_id: Logprob(entry.logprob, entry.rank)}
    for rank, (other, logprob) in enumerate(entry.top, 1):
        found.setdefault(other, Logprob(logprob, rank if is_ranked else 0))
    if tokenizer is not None:
        for candidate, shown in found.items():
            shown.decoded_token = tokenizer.spelled(candidate)
    return found
