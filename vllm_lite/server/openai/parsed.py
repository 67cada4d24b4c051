"""ParsedChatWriter: writes the answers of chats in which calls and reasoning are separated from content."""

from typing import TYPE_CHECKING, Any

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.server.openai.chunks import AnswerWriter, ChatWriter, writer
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.parsing import CallIds, MessageParser, Parsing, PlainMessage

if TYPE_CHECKING:
    from vllm_lite.server.calls.call import Call, Choice


class Writers:
    """Makes the writers of calls. `formats` are the model's, None for one without a tokenizer."""

    def __init__(self, spelling: Spelling, formats: Formats | None = None) -> None:
        self.spelling = spelling
        self._formats = formats

    def of(self, call: "Call") -> AnswerWriter:
        """Make the writer for the call's style."""
        style = call.style.parsing
        if style is None or self._formats is None:
            return writer(call, self.spelling)
        parsers = [_parser(self._formats, style, call, choice) for choice in call.choices]
        return ParsedChatWriter(call, self.spelling, [each for each in parsers if each is not None])

    def message(self, call: "Call", choice: "Choice") -> MessageParser | PlainMessage:
        """What takes one choice of a chat apart, for the writers of other dialects. It gets all of the choice's
        deltas."""
        style = call.style.parsing
        parser = None if style is None or self._formats is None else _parser(self._formats, style, call, choice)
        return PlainMessage() if parser is None else parser


def _parser(formats: Formats, style: Parsing, call: "Call", choice: "Choice") -> MessageParser | None:
    prompt = choice.stream.prompt.token_ids
    parser = formats.parser(prompt, style.tools, is_forced=style.is_forced)
    if parser is None:
        return None
    seed = f"{call.id}/{call.created}/{choice.index}"
    ids = CallIds(formats.calls, seed, style.num_calls_before)
    return MessageParser(parser, style, ids, formats.thinking(prompt, is_forced=style.is_forced))


class ParsedChatWriter(ChatWriter):
    """Writes `content`, `reasoning` and `tool_calls` of chats. Each choice has a parser, which gets all of its text."""

    def __init__(self, call: "Call", spelling: Spelling, parsers: list[MessageParser]) -> None:
        super().__init__(call, spelling)
        self._parsers = parsers

    def skip(self, choice: "Choice", shown: CompletionOutput) -> None:
        super().skip(choice, shown)
        self._parsers[choice.index].feed(shown)

    def chunk(self, choice: "Choice", delta: CompletionOutput) -> bytes:
        """The same as of other chats, but that most of a text may wait until it is certain what it is."""
        parser = self._parsers[choice.index]
        fields = parser.feed(delta)
        delta = self._shown(delta)
        delta.finish_reason = parser.finish_reason(delta.finish_reason)  # type: ignore[assignment]  # not the engine's
        has_tokens = bool(delta.token_ids) and (delta.logprobs is not None or self._style.token_ids)
        if not (fields or delta.finish_reason is not None or has_tokens):
            return b""
        new = {"delta": fields, "logprobs": self._content_logprobs(delta)}
        return self._line(b'{"index":%d,' % choice.index + msgspec.json.encode(new)[1:-1] + self._tail(delta))

    def _whole_fields(self, choice: "Choice", delta: CompletionOutput) -> dict[str, Any]:
        parser = self._parsers[choice.index]
        fields = parser.feed(delta)
        delta.finish_reason = parser.finish_reason(delta.finish_reason)  # type: ignore[assignment]  # not the engine's
        calls = [
            {name: value for name, value in call.items() if name != "index"} for call in fields.get("tool_calls", ())
        ]
        content, reasoning = self._echo + fields.get("content", ""), fields.get("reasoning")
        message = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
            "reasoning": reasoning,
            "reasoning_content": reasoning,
            **({"tool_calls": calls} if calls else {}),
        }
        return {"message": message, "logprobs": self._content_logprobs(delta)}

    def _usage(self, cached: int | None) -> dict[str, Any]:
        usage = super()._usage(cached)
        if cached is None:
            return usage
        num_reasoning = sum(parser.num_reasoning for parser in self._parsers)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": num_reasoning}}
