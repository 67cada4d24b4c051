"""AnswerWriter: writes the chunks and the whole body of answers to completions, chats and token ids.

Fields that are equal in all chunks of a stream are encoded once: a chunk is a few joins and one encoded text. A field
that every chunk repeats belongs in AnswerWriter's `_head`, one that only the last chunk of a choice has in its `_tail`.
"""

from typing import Any

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.server.calls.call import Call, Choice
from vllm_lite.server.openai import logprobs
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.logprobs import ALL, Offsets, Spelling

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class AnswerWriter:
    """Writes one call's answer, streamed or whole. A subclass for each kind of answer adds its fields."""

    ping = b": ping\n\n"
    chunk_object: str
    whole_object: str

    def __init__(self, call: Call, spelling: Spelling) -> None:
        self._call = call
        self._style = style = call.style
        self._spelling = spelling.by_id if style.names_ids else spelling
        self._params = call.streams[0].params
        self._num_shown = 0
        """Number of output tokens written."""
        self._head = b"data: " + _encode(self._identity(self.chunk_object))[:-1] + b',"choices":['
        self._null_usage = b',"usage":null}\n\n' if style.usage else b"}\n\n"

    def skip(self, choice: Choice, shown: CompletionOutput) -> None:  # noqa: ARG002
        """Skip the first part of a choice, which has been written before."""
        self._num_shown += 0 if self._style.only_scores else len(shown.token_ids)

    def opening(self) -> list[bytes]:
        """Write the events before the first token: the prompt's ids, if requested."""
        return []

    def chunk(self, choice: Choice, delta: CompletionOutput) -> bytes:
        """Write a chunk with the new part of `choice`; b"" if none of it is visible."""
        delta = self._shown(delta)
        has_tokens = bool(delta.token_ids) and (delta.logprobs is not None or self._style.token_ids)
        if not (delta.text or delta.finish_reason is not None or has_tokens):
            return b""
        fields = _encode(self._new_fields(choice, delta))[1:-1]
        return self._line(b'{"index":%d,' % choice.index + fields + self._tail(delta))

    def closing(self) -> list[bytes]:
        """Write the last events of a stream: the usage if requested, and [DONE]."""
        if not self._style.usage:
            return [DONE]
        return [self._head + b'],"usage":' + _encode(self._usage(self._call.num_cached_tokens)) + b"}\n\n", DONE]

    def failure(self, error: ApiError) -> bytes:
        """Write the event that ends a stream with an error."""
        return b"data: " + error.body() + b"\n\n"

    def whole(self) -> bytes:
        """Write the whole body. Fields about the prompt are in the choices for completions, which may have several
        prompts."""
        is_completion = self._style.kind == "cmpl"
        choices = []
        for choice, new in self._call.reading.deltas():
            delta = self._shown(new)
            fields = self._whole_fields(choice, delta)
            end: dict[str, Any] = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            if self._style.token_ids:
                end["token_ids"] = delta.token_ids
            prompt = self._prompt_fields(choice) if is_completion else {}
            choices.append({"index": choice.index, **fields, **end, **prompt})
        return _encode(
            {
                **self._identity(self.whole_object),
                "choices": choices,
                "usage": self._usage(self._call.num_cached_tokens),
                "system_fingerprint": None,
                **({} if is_completion else self._prompt_fields(self._call.choices[0])),
            }
        )

    def _new_fields(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any]:  # noqa: ARG002
        """The fields of a choice in a chunk, between its index and the fields of all kinds."""
        return {"logprobs": self._content_logprobs(delta)}

    def _whole_fields(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any]:
        return self._new_fields(choice, delta)

    def _shown(self, delta: CompletionOutput) -> CompletionOutput:
        """The visible part of `delta`, without generated tokens if only the prompt was asked for."""
        if self._style.only_scores:
            reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
            delta = CompletionOutput(delta.index, "", [], None, delta.logprobs and [], reason)
        self._num_shown += len(delta.token_ids)
        return delta

    def _identity(self, kind: str) -> dict[str, Any]:
        return {"id": self._call.id, "object": kind, "created": self._call.created, "model": self._style.model}

    def _usage(self, cached: int | None) -> dict[str, Any]:
        prompt, shown = self._call.num_prompt_tokens, self._num_shown
        details: dict[str, Any] | None = None if cached is None else {"cached_tokens": cached}
        if details is not None and (of_images := self._call.num_image_tokens):
            details["multimodal_tokens"] = {"image": of_images}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": shown,
            "total_tokens": prompt + shown,
            "prompt_tokens_details": details,
        }

    def _line(self, choice: bytes, prompt_ids: bytes = b"") -> bytes:
        """Write one `data:` line with one choice; `prompt_ids` is an encoded field beside the choices."""
        if self._style.usage_always:
            usage = _encode(self._usage(None))
            return b"".join((self._head, choice, b"]", prompt_ids, b',"usage":', usage, b"}\n\n"))
        return b"".join((self._head, choice, b"]", prompt_ids, self._null_usage))

    def _prompt_ids(self, choice: Choice) -> bytes:
        """Encode the prompt's token ids, for a stream's first event; b"" if they were not requested."""
        return b',"prompt_token_ids":' + _encode(choice.stream.prompt.token_ids) if self._style.prompt_ids else b""

    def _tail(self, delta: CompletionOutput, *, is_first: bool = True, is_last: bool = True) -> bytes:
        """Write the last fields of a choice in a stream, after its text and logprobs. Of several chunks for one delta,
        the first has its tokens, and the last its finish reason."""
        ids = b',"token_ids":' + _encode(delta.token_ids if is_first else []) if self._style.token_ids else b""
        if delta.finish_reason is None or not is_last:
            return ids + b',"finish_reason":null}'
        reasons = (b',"finish_reason":', _encode(delta.finish_reason), b',"stop_reason":', _encode(delta.stop_reason))
        return b"".join((ids, *reasons, b"}"))

    def _prompt_fields(self, choice: Choice) -> dict[str, Any]:
        """Return the fields about the prompt; null if not requested."""
        entries = choice.stream.prompt_scores if self._style.prompt_logprobs else None
        token_ids = choice.stream.prompt.token_ids if self._style.prompt_ids else None
        return {"prompt_logprobs": logprobs.as_objects(entries), "prompt_token_ids": token_ids}

    def _content_logprobs(self, delta: CompletionOutput) -> dict[str, Any] | None:
        """Return the logprobs in the chat format, which all kinds but completions use."""
        if self._params.logprobs is None or delta.logprobs is None:
            return None
        top = ALL if self._params.logprob_token_ids else self._params.logprobs
        return logprobs.of_chat(delta.logprobs, top, self._spelling)


class ChatWriter(AnswerWriter):
    """Writes the answers of /v1/chat/completions. The echo is the message that the answer continues."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, call: Call, spelling: Spelling) -> None:
        super().__init__(call, spelling)
        self._echo = "".join(call.style.echo)

    def opening(self) -> list[bytes]:
        """Write the role of each choice, and the echo if there is one. The first event has the prompt's ids."""
        delta = {"role": "assistant", "content": self._echo}
        rest = b',"delta":' + _encode(delta) + b',"logprobs":null,"finish_reason":null}'
        first, *others = self._call.choices
        line = self._line(b'{"index":%d' % first.index + rest, self._prompt_ids(first))
        return [line, *(self._line(b'{"index":%d' % choice.index + rest) for choice in others)]

    def _new_fields(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any]:  # noqa: ARG002
        return {"delta": {"content": delta.text}, "logprobs": self._content_logprobs(delta)}

    def _whole_fields(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any]:  # noqa: ARG002
        message = {"role": "assistant", "content": self._echo + delta.text, "refusal": None}
        return {"message": message, "logprobs": self._content_logprobs(delta)}


class CompletionWriter(AnswerWriter):
    """Writes the answers of /v1/completions. The echo is the text of each prompt; forks have that of the request's only
    prompt."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, call: Call, spelling: Spelling) -> None:
        super().__init__(call, spelling)
        texts = call.style.echo or ("",)
        n = len(call.choices) // len(call.streams)
        self._echo = [texts[choice.index // n % len(texts)] for choice in call.choices]
        self._offsets = [Offsets(len(text)) for text in self._echo]

    def skip(self, choice: Choice, shown: CompletionOutput) -> None:
        super().skip(choice, shown)
        if self._params.logprobs is not None:
            for token_id in shown.token_ids:
                self._offsets[choice.index].next(self._spelling.of(token_id)[1])

    def opening(self) -> list[bytes]:
        """Write the echo of each choice and its prompt's ids, if requested."""
        ids = b',"token_ids":[]' if self._style.token_ids else b""
        lines = []
        for choice, text in zip(self._call.choices, self._echo, strict=True):
            if text or self._style.prompt_ids:
                rest = _encode(text) + b',"logprobs":null' + ids + self._prompt_ids(choice) + b',"finish_reason":null}'
                lines.append(self._line(b'{"index":%d,"text":' % choice.index + rest))
        return lines

    def _new_fields(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any]:
        return {"text": delta.text, "logprobs": self._logprobs(choice, delta)}

    def _whole_fields(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any]:
        text = self._echo[choice.index] + delta.text
        return {"text": text, "logprobs": self._whole_logprobs(choice, delta)}

    def _logprobs(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any] | None:
        if self._params.logprobs is None or delta.logprobs is None:
            return None
        return logprobs.of_completion(delta.token_ids, delta.logprobs, self._offsets[choice.index], self._spelling)

    def _whole_logprobs(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any] | None:
        """Return the logprobs of the whole answer, after those of the prompt if that is echoed."""
        found = self._logprobs(choice, delta)
        entries = choice.stream.prompt_scores if self._style.echo and found is not None else None
        if entries is None or found is None:
            return found
        offsets = Offsets(0)
        before = logprobs.of_completion(choice.stream.prompt.token_ids, entries, offsets, self._spelling)
        unseen = offsets.place - len(self._echo[choice.index])  # special tokens before a text add no characters to it
        before["text_offset"] = [max(0, place - unseen) for place in before["text_offset"]]
        return {name: before[name] + found[name] for name in found}


class TokensWriter(AnswerWriter):
    """Writes the answers of /inference/v1/generate."""

    chunk_object = "generation.chunk"
    whole_object = "generation"

    def opening(self) -> list[bytes]:
        """Write the prompt's ids, if requested, in an event with an empty first choice."""
        if not self._style.prompt_ids:
            return []
        first = self._call.choices[0]
        text = b'"text":"",' if self._style.spells else b""
        rest = b'"logprobs":null,"token_ids":[],"finish_reason":null}'
        return [self._line(b'{"index":%d,' % first.index + text + rest, self._prompt_ids(first))]

    def _identity(self, kind: str) -> dict[str, Any]:
        mode = "text" if self._style.spells else "tokens"
        return {"request_id": self._call.id, **super()._identity(kind), "output_mode": mode}

    def _new_fields(self, choice: Choice, delta: CompletionOutput) -> dict[str, Any]:  # noqa: ARG002
        if self._style.spells:
            return {"text": delta.text, "logprobs": self._content_logprobs(delta)}
        is_scored = self._params.logprobs is not None and delta.logprobs is not None
        return {"logprobs": logprobs.of_token_ids(delta.logprobs or ()) if is_scored else None}


_WRITERS: dict[str, type[AnswerWriter]] = {"cmpl": CompletionWriter, "chatcmpl": ChatWriter, "gen": TokensWriter}


def writer(call: Call, spelling: Spelling) -> AnswerWriter:
    """Make the writer for the call's style."""
    return _WRITERS[call.style.kind](call, spelling)
