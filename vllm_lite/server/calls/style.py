"""AnswerStyle: the format of one call's answer. The engine keeps it with each stream, for any API server."""

from typing import Literal, Self

import msgspec

from vllm_lite.server.openai.bodies import ChatFields, CompletionBody, ForkBody, GenerateBody, StreamOptions
from vllm_lite.server.openai.parsing import Parsing


class AnswerStyle(msgspec.Struct, frozen=True):
    """Format of a call's answer, as requested in its body. A fork is answered in the style of its parent request.

    kind            prefix of the call's id
    model           the name of the model
    echo            text written before the answers of each prompt; () for none
    only_scores     whether only the prompt is shown, and no generated token
    token_ids       whether answers have token ids; `prompt_ids` and `prompt_logprobs`: whether they have the prompt's
    usage           whether a stream ends with the usage; `usage_always`: every chunk has it
    resumable       whether a stream's events have ids, from which another connection can continue it
    names_ids       whether logprobs have `token_id:N` in place of a token's text
    spells          whether an answer of token ids also has their text, and its logprobs have texts in place of ids
    parsing         how calls and reasoning are separated from content; None if all is content
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
        """Return the style of a fork, whose body can ask for token ids and for a stream's extra fields itself."""
        style = self.streamed_as(body)
        if self.kind == "gen" or body.return_token_ids is None:
            return style
        return msgspec.structs.replace(style, prompt_ids=body.return_token_ids, token_ids=body.return_token_ids)

    def streamed_as(self, body: ForkBody | GenerateBody) -> Self:
        """Return the style with the stream options of `body`."""
        options = body.stream_options or StreamOptions()
        usage, always = bool(options.include_usage), bool(options.continuous_usage_stats)
        return msgspec.structs.replace(self, usage=usage, usage_always=usage and always, resumable=bool(body.resumable))

    def with_usage(self) -> Self:
        """Return the style with the usage in every chunk, for --enable-force-include-usage."""
        return msgspec.structs.replace(self, usage=True, usage_always=True)
