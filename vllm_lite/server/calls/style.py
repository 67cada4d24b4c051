"""AnswerStyle: how the answer of one call is written. The engine keeps it with each stream, for any API server."""

from typing import Literal, Self

import msgspec

from vllm_lite.server.openai.bodies import ChatFields, CompletionBody, ForkBody, GenerateBody, StreamOptions
from vllm_lite.server.openai.parsing import Parsing


class AnswerStyle(msgspec.Struct, frozen=True):
    """Style of a call's answer, as its body asks. A fork is answered in the style of its parent request.

    kind            prefix of the ids of such calls
    model           the name of the model
    echo            text written before the answers of each prompt; () for none
    only_scores     only the prompt is shown, and nothing that was generated
    token_ids       whether answers show token ids; `prompt_ids` and `prompt_logprobs`: whether they show the prompt's
    usage           whether a stream ends with the usage; `usage_always`: every chunk has it
    resumable       whether a stream's events have ids, from which another connection can continue it
    names_ids       whether logprobs have `token_id:N` in the place of a token's text
    spells          whether an answer of token ids has their text beside them, and logprobs have texts in place of ids
    parsing         how calls and reasoning are separated from content; None where all is content
    """

    kind: Literal["cmpl", "chatcmpl", "gen", "embd", "decision"]
    model: str
    echo: tuple[str, ...] = ()
    only_scores: bool = False
    prompt_logprobs: bool = False
    prompt_ids: bool = False
    token_ids: bool = True
    usage: bool = False
    usage_always: bool = False
    resumable: bool = False
    names_ids: bool = False
    spells: bool = False
    parsing: Parsing | None = None

    @classmethod
    def of(cls, body: ChatFields | CompletionBody | GenerateBody, model: str) -> Self:
        if isinstance(body, GenerateBody):
            scores, ids = body.sampling_params.prompt_logprobs is not None, bool(body.return_token_ids)
            spells = body.output_mode == "text"
            return cls("gen", model, prompt_logprobs=scores, prompt_ids=ids, spells=spells).streamed_as(body)
        kind: Literal["cmpl", "chatcmpl"] = "chatcmpl" if isinstance(body, ChatFields) else "cmpl"
        only_scores, ids = isinstance(body, CompletionBody) and body.only_scores, bool(body.return_token_ids)
        style = cls(kind, model, (), only_scores, body.prompt_logprobs is not None, ids, ids)
        return style.streamed_as(body)

    def forked(self, body: ForkBody) -> Self:
        """Return the style of a fork, which may ask for token ids itself, and for what a stream has beside them."""
        style = self.streamed_as(body)
        if self.kind == "gen" or body.return_token_ids is None:
            return style
        return msgspec.structs.replace(style, prompt_ids=body.return_token_ids, token_ids=body.return_token_ids)

    def streamed_as(self, body: ForkBody | GenerateBody) -> Self:
        """Return the style with what `body` wants a stream to have."""
        options = body.stream_options or StreamOptions()
        usage, always = bool(options.include_usage), bool(options.continuous_usage_stats)
        return msgspec.structs.replace(self, usage=usage, usage_always=usage and always, resumable=bool(body.resumable))

    def with_usage(self) -> Self:
        """Return the style with the usage in every chunk, as --enable-force-include-usage has it."""
        return msgspec.structs.replace(self, usage=True, usage_always=True)
