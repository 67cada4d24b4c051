"""How a call is told, as a completion, as a chat or as token ids: at once, or in pieces of a stream.

What is the same in every piece of a stream is encoded once: a piece is a few joins and one encoded text.
"""

from typing import Any, Protocol

import msgspec

from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.server.calls.call import Call, Choice
from vllm_lite.server.openai import logprobs
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody, GenerateBody, StreamOptions
from vllm_lite.server.openai.logprobs import Offsets, Spelling

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class Shape(Protocol):
    """One of the three."""

    def opening(self) -> bytes:
        """The stream before anything has come."""

    def piece(self, choice: Choice, news: CompletionOutput) -> bytes:
        """What `choice` has new, as a piece of the stream; b"" if nothing is to be seen of it."""

    def closing(self) -> bytes:
        """The stream after all has ended."""

    def whole(self) -> bytes:
        """All in one."""


class _Shape:
    """What they have in common."""

    stream_object: str
    whole_object: str

    def __init__(self, call: Call, body: ChatBody | CompletionBody | GenerateBody, model: str, words: Spelling) -> None:
        self._call = call
        self._spelling = words
        self._model = model
        self._prompt_ids = not isinstance(body, GenerateBody) and bool(body.return_token_ids)
        self._token_ids = isinstance(body, GenerateBody) or self._prompt_ids
        options = body.stream_options or StreamOptions()
        self._usage = bool(options.include_usage)
        self._usage_always = self._usage and bool(options.continuous_usage_stats)
        wanted = body.sampling_params if isinstance(body, GenerateBody) else body
        self._prompt_logprobs = wanted.prompt_logprobs is not None
        self._told_tokens = 0
        self._head = b"data: " + _encode(self._identity(self.stream_object))[:-1] + b',"choices":['
        self._null_usage = b',"usage":null}\n\n' if self._usage else b"}\n\n"

    def _identity(self, kind: str) -> dict[str, Any]:
        return {"id": self._call.id, "object": kind, "created": self._call.created, "model": self._model}

    def closing(self) -> bytes:
        """With the usage, if it was asked for."""
        if not self._usage:
            return DONE
        return self._head + b'],"usage":' + _encode(self._count(self._call.num_cached_tokens)) + b"}\n\n" + DONE

    def _count(self, cached: int | None) -> dict[str, Any]:
        prompt, told = self._call.num_prompt_tokens, self._told_tokens
        details = None if cached is None else {"cached_tokens": cached}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": told,
            "total_tokens": prompt + told,
            "prompt_tokens_details": details,
        }

    def _chunk(self, choice: bytes) -> bytes:
        """One `data:` line with one choice."""
        if self._usage_always:
            return b"".join((self._head, choice, b'],"usage":', _encode(self._count(None)), b"}\n\n"))
        return b"".join((self._head, choice, b"]", self._null_usage))

    def _tail(self, news: CompletionOutput) -> bytes:
        """The end of a choice in a stream, behind its text and logprobs."""
        ids = b',"token_ids":' + _encode(news.token_ids) if self._token_ids else b""
        if news.finish_reason is None:
            return ids + b',"finish_reason":null}'
        reasons = (b',"finish_reason":', _encode(news.finish_reason), b',"stop_reason":', _encode(news.stop_reason))
        return b"".join((ids, *reasons, b"}"))

    def _is_visible(self, news: CompletionOutput) -> bool:
        has_tokens = bool(news.token_ids) and (news.logprobs is not None or self._token_ids)
        return bool(news.text) or news.finish_reason is not None or has_tokens

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """What was asked for of the prompt; null stands for what was not."""
        entries = logprobs.of_prompt(choice.stream) if self._prompt_logprobs else None
        token_ids = choice.stream.prompt.token_ids if self._prompt_ids else None
        return {"prompt_logprobs": logprobs.as_objects(entries), "prompt_token_ids": token_ids}

    def _answer(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = self._count(self._call.num_cached_tokens)
        identity = self._identity(self.whole_object)
        return _encode({**identity, "choices": choices, "usage": usage, "system_fingerprint": None, **more})

    def _end(self, news: CompletionOutput) -> dict[str, Any]:
        """The end of a choice in a whole answer."""
        self._told_tokens += len(news.token_ids)
        ids = {"token_ids": news.token_ids} if self._token_ids else {}
        return {"finish_reason": news.finish_reason, "stop_reason": news.stop_reason, **ids}


class ChatShape(_Shape):
    """/v1/chat/completions. `echo` stands before each answer: the message that it goes on from."""

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, call: Call, body: ChatBody, model: str, words: Spelling, *, echo: str = "") -> None:
        super().__init__(call, body, model, words)
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._echo = echo

    def opening(self) -> bytes:
        """The role of each choice; with it, if it is to be told again, what the answer goes on from."""
        delta = {"role": "assistant", "content": self._echo}
        rest = b',"delta":' + _encode(delta) + b',"logprobs":null,"finish_reason":null}'
        return b"".join(self._chunk(b'{"index":%d' % choice.index + rest) for choice in self._call.choices)

    def piece(self, choice: Choice, news: CompletionOutput) -> bytes:
        self._told_tokens += len(news.token_ids)
        if not self._is_visible(news):
            return b""
        text = b'{"index":%d,"delta":{"content":' % choice.index + _encode(news.text)
        return self._chunk(b"".join((text, b'},"logprobs":', _encode(self._logprobs(news)), self._tail(news))))

    def whole(self) -> bytes:
        return self._answer(
            [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": self._echo + news.text, "refusal": None},
                    "logprobs": self._logprobs(news),
                    **self._end(news),
                }
                for choice, news in self._call.news()
            ],
            **self._of_prompt(self._call.choices[0]),
        )

    def _logprobs(self, news: CompletionOutput) -> dict[str, Any] | None:
        if self._top is None or news.logprobs is None:
            return None
        return logprobs.of_chat(news.logprobs, self._top, self._spelling)


class CompletionShape(_Shape):
    """/v1/completions. `echo` is the text of each prompt, if it is to be told as well."""

    stream_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self, call: Call, body: CompletionBody, model: str, words: Spelling, *, echo: list[str] | None
    ) -> None:
        super().__init__(call, body, model, words)
        self._wants_logprobs = body.logprobs is not None
        self._only_scores = body.only_scores
        self._is_echoed = echo is not None
        prompts = echo or [""] * len(call.streams)
        n = len(call.choices) // len(call.streams)
        self._echo = [prompts[choice.index // n] for choice in call.choices]
        self._offsets = [Offsets(len(text)) for text in self._echo]

    def opening(self) -> bytes:
        rest = b',"logprobs":null,"finish_reason":null}'
        return b"".join(
            self._chunk(b'{"index":%d,"text":' % choice.index + _encode(text) + rest)
            for choice, text in zip(self._call.choices, self._echo, strict=True)
            if text
        )

    def piece(self, choice: Choice, news: CompletionOutput) -> bytes:
        news = self._told(news)
        self._told_tokens += len(news.token_ids)
        if not self._is_visible(news):
            return b""
        text = b'{"index":%d,"text":' % choice.index + _encode(news.text)
        return self._chunk(b"".join((text, b',"logprobs":', _encode(self._logprobs(choice, news)), self._tail(news))))

    def whole(self) -> bytes:
        return self._answer(
            [
                {
                    "index": choice.index,
                    "text": self._echo[choice.index] + news.text,
                    "logprobs": self._whole_logprobs(choice, news),
                    **self._end(news),
                    **self._of_prompt(choice),
                }
                for choice, news in ((choice, self._told(news)) for choice, news in self._call.news())
            ]
        )

    def _told(self, news: CompletionOutput) -> CompletionOutput:
        """`news` without what was generated, where only the prompt was asked for."""
        if not self._only_scores:
            return news
        reason = "length" if news.finish_reason == "stop" else news.finish_reason
        return CompletionOutput(news.index, "", [], None, news.logprobs and [], reason)

    def _logprobs(self, choice: Choice, news: CompletionOutput) -> dict[str, Any] | None:
        if not self._wants_logprobs or news.logprobs is None:
            return None
        return logprobs.of_completion(news.token_ids, news.logprobs, self._offsets[choice.index], self._spelling)

    def _whole_logprobs(self, choice: Choice, news: CompletionOutput) -> dict[str, Any] | None:
        """With those of the prompt, if that is told as well."""
        found = self._logprobs(choice, news)
        entries = logprobs.of_prompt(choice.stream) if self._is_echoed and found is not None else None
        if entries is None or found is None:
            return found
        offsets = Offsets(0)
        before = logprobs.of_completion(choice.stream.prompt.token_ids, entries, offsets, self._spelling)
        unseen = offsets.place - len(self._echo[choice.index])  # special tokens before a text take no place in it
        before["text_offset"] = [max(0, place - unseen) for place in before["text_offset"]]
        return {name: before[name] + found[name] for name in found}


class TokensShape(_Shape):
    """/inference/v1/generate."""

    stream_object = "generation.chunk"
    whole_object = "generation"

    def __init__(self, call: Call, body: GenerateBody, model: str, words: Spelling) -> None:
        super().__init__(call, body, model, words)
        self._top = body.sampling_params.logprobs

    def _identity(self, kind: str) -> dict[str, Any]:
        return {"request_id": self._call.id, **super()._identity(kind)}

    def opening(self) -> bytes:
        return b""

    def piece(self, choice: Choice, news: CompletionOutput) -> bytes:
        self._told_tokens += len(news.token_ids)
        head = b'{"index":%d,"logprobs":' % choice.index + _encode(self._logprobs(news))
        return self._chunk(head + self._tail(news))

    def whole(self) -> bytes:
        return self._answer(
            [
                {"index": choice.index, "logprobs": self._logprobs(news), **self._end(news)}
                for choice, news in self._call.news()
            ],
            **self._of_prompt(self._call.choices[0]),
        )

    def _logprobs(self, news: CompletionOutput) -> dict[str, Any] | None:
        if self._top is None or news.logprobs is None:
            return None
        return logprobs.of_chat(news.logprobs, self._top, self._spelling)
