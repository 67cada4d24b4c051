"""ParsedChatWriter: writes answers of chats with calls and reasoning separated from content."""

from typing import TYPE_CHECKING, Any

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.events import CallDelta, Event, ReasoningDelta, TextDelta
from vllm_lite.server.openai.chunks import AnswerWriter, ChatWriter, writer
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.parsing import CallIds, MessageParser, Parsing

if TYPE_CHECKING:
    from vllm_lite.server.calls.call import Call, Choice


class Writers:
    """Makes the writers of calls. `formats` are the model's, None for one without a tokenizer."""

    def __init__(self, spelling: Spelling, formats: Formats | None = None) -> None:
        self.spelling = spelling
        self._formats = formats

    def of(self, call: "Call", *, one_chunk: bool = False) -> AnswerWriter:
        """Make the writer for the call's style. `one_chunk`: each delta makes at most one chunk, for a caller that
        counts them."""
        style = call.style.parsing
        if style is None or self._formats is None:
            return writer(call, self.spelling)
        parsers = [_parser(self._formats, style, call, choice) for choice in call.choices]
        made = ParsedChatWriter(call, self.spelling, [each for each in parsers if each is not None], one_chunk)
        if self._formats.reasoning is not None and not style.include_reasoning:
            made.hide_tokens()
        return made

    def message(self, call: "Call", choice: "Choice") -> MessageParser:
        """Make a parser for one choice of a chat, for writers of other APIs. It must be fed all of the choice's
        deltas."""
        style = call.style.parsing
        parser = None if style is None or self._formats is None else _parser(self._formats, style, call, choice)
        return MessageParser.of_content() if parser is None else parser


def _parser(formats: Formats, style: Parsing, call: "Call", choice: "Choice") -> MessageParser | None:
    prompt = choice.stream.prompt.token_ids
    parser = formats.parser(prompt, style.tools, is_forced=style.is_forced)
    if parser is None:
        return None
    seed = f"{call.id}/{call.created}/{choice.index}"
    ids = CallIds(formats.calls, seed, style.num_calls_before)
    return MessageParser(parser, style, ids, formats.thinking(prompt, is_forced=style.is_forced))


class ParsedChatWriter(ChatWriter):
    """Writes `content`, `reasoning` and `tool_calls` of chats. Each choice has a parser, which is fed all of its text.

    The fields of a delta are unordered, so each run of one field is a chunk of its own.
    """

    def __init__(self, call: "Call", spelling: Spelling, parsers: list[MessageParser], one_chunk: bool) -> None:
        super().__init__(call, spelling)
        self._parsers = parsers
        self._one_chunk = one_chunk
        self._shows_tokens = True

    def hide_tokens(self) -> None:
        """Omit token ids and logprobs, which would reveal hidden reasoning."""
        self._shows_tokens = False
        self._style = msgspec.structs.replace(self._style, token_ids=False)

    def _content_logprobs(self, delta: CompletionOutput) -> dict[str, Any] | None:
        return super()._content_logprobs(delta) if self._shows_tokens else None

    def skip(self, choice: "Choice", shown: CompletionOutput) -> None:
        super().skip(choice, shown)
        self._parsers[choice.index].feed(shown)

    def chunk(self, choice: "Choice", delta: CompletionOutput) -> bytes:
        """As for other chats, but the parser holds back text until its kind is certain."""
        parser = self._parsers[choice.index]
        deltas = self._deltas(parser.feed(delta), parser)
        delta = self._shown(delta)
        delta.finish_reason = parser.finish_reason(delta.finish_reason)  # type: ignore[assignment]  # not the engine's
        has_scores = delta.logprobs is not None and self._shows_tokens
        has_tokens = bool(delta.token_ids) and (has_scores or self._style.token_ids)
        if not (deltas or delta.finish_reason is not None or has_tokens):
            return b""
        scores, last = self._content_logprobs(delta), max(len(deltas) - 1, 0)
        lines = []
        for place, fields in enumerate(deltas or [{}]):
            new = {"delta": fields, "logprobs": scores if place == 0 else None}
            tail = self._tail(delta, is_first=place == 0, is_last=place == last)
            lines.append(self._line(b'{"index":%d,' % choice.index + msgspec.json.encode(new)[1:-1] + tail))
        return b"".join(lines)

    def _deltas(self, events: list[Event], parser: MessageParser) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            fields: dict[str, Any]
            if isinstance(event, CallDelta):
                fields = {"tool_calls": [_call(event, parser)]}
            elif isinstance(event, TextDelta):
                fields = {"content": event.text}
            else:
                fields = {"reasoning": event.text, "reasoning_content": event.text}
            if not deltas or not (self._one_chunk or fields.keys() == deltas[-1].keys()):
                deltas.append(fields)
            else:
                before = deltas[-1]
                before |= {key: before[key] + value if key in before else value for key, value in fields.items()}
        return deltas

    def _whole_fields(self, choice: "Choice", delta: CompletionOutput) -> dict[str, Any]:
        parser = self._parsers[choice.index]
        content, reasoning, calls = [self._echo], list[str](), list[dict[str, Any]]()
        for event in parser.feed(delta):
            if isinstance(event, TextDelta):
                content.append(event.text)
            elif isinstance(event, ReasoningDelta):
                reasoning.append(event.text)
            elif event.name is not None:
                calls.append(_call(event, parser))
            else:
                calls[-1]["function"]["arguments"] += event.arguments
        delta.finish_reason = parser.finish_reason(delta.finish_reason)  # type: ignore[assignment]  # not the engine's
        text, thought = "".join(content), "".join(reasoning) or None
        for call in calls:
            del call["index"]
        message = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
            "reasoning": thought,
            "reasoning_content": thought,
            **({"tool_calls": calls} if calls else {}),
        }
        return {"message": message, "logprobs": self._content_logprobs(delta)}

    def _usage(self, cached: int | None) -> dict[str, Any]:
        usage = super()._usage(cached)
        if cached is None:
            return usage
        num_reasoning = sum(parser.num_reasoning for parser in self._parsers)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": num_reasoning}}


def _call(call: CallDelta, parser: MessageParser) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": parser.id_of(call), "type": "function", "function": function}
