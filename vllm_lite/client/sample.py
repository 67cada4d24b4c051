"""One sample of a request: tokens in, its text and logprobs out. A request has one for each continuation."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_lite.client.outputs import CompletionOutput, Logprob
from vllm_lite.client.text.detokenizer import Detokenizer
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.api import Finished, FinishReason, TokenLogprobs, Tokens


class _Told(NamedTuple):
    """How much has been shown."""

    chars: int = 0
    tokens: int = 0
    ended: bool = False


class Sample:
    """Ends when the engine says so or, before that, at a stop string; what comes then is ignored."""

    def __init__(
        self, detokenizer: Detokenizer | None, tokenizer: Tokenizer | None, *, logprobs: bool, include_stop: bool
    ) -> None:
        """`tokenizer` spells the candidates of `logprobs`; with `include_stop` the text of a stop token is shown."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cumulative_logprob: float | None = 0.0 if logprobs else None
        self.logprobs: list[dict[int, Logprob]] | None = [] if logprobs else None
        self.stop_reason: int | str | None = None
        self.text = ""
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._told = _Told()

    def apply(self, event: Tokens | Finished) -> None:
        """Take the next event, which is no error."""
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
        """Begin with all that `parent` has. Its text was searched for stop strings already, and not for these."""
        self._take(parent.token_ids, None, is_stop=False)
        if self.logprobs is not None:
            self.logprobs += parent.logprobs or []
            self.cumulative_logprob = parent.cumulative_logprob or 0.0

    def output(self, index: int, *, logprobs: bool) -> CompletionOutput:
        """A snapshot, which later events do not change."""
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs.copy() if logprobs and self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def delta(self, index: int, *, logprobs: bool) -> CompletionOutput | None:
        """What output() shows and no delta() before has shown; None if that is nothing."""
        told, ended = self._told, self.finish_reason is not None
        if told.ended or (not ended and len(self.token_ids) == told.tokens):
            return None
        shown = self.output(index, logprobs=logprobs)
        self._told = _Told(len(shown.text), len(shown.token_ids), ended)
        shown.text = shown.text[told.chars :]
        del shown.token_ids[: told.tokens]
        if shown.logprobs is not None:
            del shown.logprobs[: told.tokens]
        return shown

    def _take(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] | None, *, is_stop: bool) -> None:
        """New tokens, up to a stop string. `is_stop`: the last one is a stop token."""
        taken = len(token_ids)
        if self._detokenizer is not None:
            hidden = is_stop and not self._include_stop
            self.text += self._detokenizer.feed(token_ids[:-1] if hidden else token_ids)
            if self._detokenizer.stopped is not None:
                taken = self._detokenizer.num_tokens - len(self.token_ids)
        self.token_ids += token_ids[:taken]
        if self.logprobs is not None and logprobs is not None:
            entries = logprobs[:taken]
            self.logprobs += [candidates(self._tokenizer, *item) for item in zip(token_ids, entries, strict=False)]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(entry.logprob for entry in entries)


def candidates(tokenizer: Tokenizer | None, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
    """Of one place: the token that is there, then the most likely others, most likely first."""
    found = {token_id: _logprob(tokenizer, token_id, entry.logprob, entry.rank)}
    for rank, (other, logprob) in enumerate(entry.top, 1):
        if other != token_id:
            found[other] = _logprob(tokenizer, other, logprob, rank)
    return found


def _logprob(tokenizer: Tokenizer | None, token_id: int, logprob: float, rank: int) -> Logprob:
    text = None if tokenizer is None else tokenizer.spelled(token_id)
    return Logprob(logprob, rank, text)
