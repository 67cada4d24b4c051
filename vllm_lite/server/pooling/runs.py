"""PoolingRuns: tokenizes the texts of a body in batches, and runs a bounded number of them in the engine at a time."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.requests import Request

from vllm_lite.client.pooling import PoolingFactory, PoolingStream
from vllm_lite.client.prompt import PromptLike
from vllm_lite.client.text.pairs import Pair
from vllm_lite.errors import RequestError, VllmLiteError
from vllm_lite.protocol.pooling import TOKEN_TASKS, PoolingParams, PoolingTask
from vllm_lite.server.calls.list_call import Window, running
from vllm_lite.server.generation import Asked, Generation
from vllm_lite.server.http.auth import owner_of
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage, Part
from vllm_lite.server.openai.errors import ApiError, refused
from vllm_lite.server.openai.prompts import several
from vllm_lite.server.pooling.bodies import MAX_NUMBER_BYTES, MAX_TEXTS, CohereEmbedBody, InputFields
from vllm_lite.server.pooling.call import PoolingCall

BATCH = 64
"""Number of texts that are tokenized together."""
INLINE_CHARS = 4096
"""Maximum characters of a text that is tokenized without a thread."""

COHERE_INPUT_TYPES = frozenset({"search_document", "search_query", "classification", "clustering"})

FIELDS = "dimensions", "stride", "truncate_prompt_tokens"
"""Errors of the client library that begin with one of these names are about that field of the body."""

Make = Callable[[int, int, Sequence[str]], list[PoolingStream]]
"""make(start, end, ids): makes the streams of texts `start` to `end`, with these ids."""


class PoolingRuns:
    """Runs the pooling calls of this server. Every method raises ApiError."""

    def __init__(
        self, generation: Generation, factory: PoolingFactory, window: Window, task_prompts: dict[str, str]
    ) -> None:
        """`task_prompts`: the model's prompts to put before a text, by the text's purpose."""
        self._task_prompts = task_prompts
        self.generation = generation
        self.factory = factory
        self._window = window

    async def prompts_of(self, asked: Asked[InputFields]) -> tuple[list[PromptLike], Asked[Any]]:
        """Return the prompts of a body, and the request, whose headers may have gained a warning."""
        body, request = asked.body, asked.request
        if (body.input is None) == (body.messages is None):
            raise ApiError(400, "give either input or messages", "input")
        if body.messages is not None:
            fields = ("messages", "add_special_tokens", "add_generation_prompt", "continue_final_message")
            given = {name: getattr(body, name) for name in (*fields, "chat_template_kwargs")}
            if body.add_generation_prompt is None:  # nothing is generated
                given["add_generation_prompt"] = False
            found = await self.generation.prompts.of_chat(ChatBody(**given), None, request)
            return [found.token_ids], asked._replace(headers=found.warned(asked.headers))
        prompts = several(body.input, "input", MAX_TEXTS)
        if body.add_special_tokens is False:
            prompts = [await self._plain(prompt, request) for prompt in prompts]
        return prompts, asked

    async def cohere_prompts(self, asked: Asked[CohereEmbedBody]) -> tuple[list[PromptLike], Asked[Any]]:
        """Return the prompts of Cohere's body, with the task prompt of its `input_type`: before each text, as in
        sentence-transformers, and as a system message before an input. And the request, whose headers may have gained
        warnings."""
        body, request = asked.body, asked.request
        if body.images:
            raise ApiError(400, "images are not supported: models are served as text models here", "images")
        if (body.texts is None) == (body.inputs is None):
            raise ApiError(400, "give either texts or inputs", "texts")
        prompt = self._task_prompt(body.input_type)
        if body.texts is not None:
            return [prompt + text for text in body.texts], asked
        system = [ChatMessage("system", prompt)] if prompt else []
        inputs: list[str | list[str | Part]] = [[*each.content] for each in body.inputs or ()]
        chats = [
            ChatBody(messages=[*system, ChatMessage("user", content)], add_generation_prompt=False)
            for content in inputs
        ]
        prompts, headers = list[PromptLike](), asked.headers
        for place, chat in enumerate(chats):
            found = await self.generation.prompts.of_chat(chat, None, request)
            headers = found.warned(
                headers, [*["the prompt of input_type"] * len(system), f"inputs[{place}]"].__getitem__
            )
            prompts.append(found.token_ids)
        return prompts, asked._replace(headers=headers)

    def _task_prompt(self, input_type: str | None) -> str:
        """The task prompt of this name, "" for none. Cohere's clients always send a name: if the model has no prompts,
        Cohere's names have no effect. Raises ApiError for an unknown name."""
        if input_type is None or (not self._task_prompts and input_type in COHERE_INPUT_TYPES):
            return ""
        prompt = self._task_prompts.get(input_type)
        if prompt is None:
            known = ", ".join(sorted(self._task_prompts)) or "none"
            text = f"Unsupported input_type {input_type[:64]!r}: the prompts that this model has are: {known}"
            raise ApiError(400, text, "input_type")
        return prompt

    async def pooled(
        self, asked: Asked[Any], kind: str, prompts: Sequence[PromptLike], params: PoolingParams, task: PoolingTask
    ) -> PoolingCall:
        """Run one task on each of `prompts`, to the end."""
        sizes = [len(prompt) if isinstance(prompt, str) else 0 for prompt in prompts]

        def make(start: int, end: int, ids: Sequence[str]) -> list[PoolingStream]:
            return self.factory.make(prompts[start:end], params, task, ids)

        with _refusing():
            self.factory.check_task(task, params)
        return await self._run(asked, kind, sizes, make)

    async def placed(
        self, asked: Asked[Any], kind: str, texts: Sequence[str], params: PoolingParams, stride: int | None
    ) -> PoolingCall:
        """Compute the logits of texts' tokens, with the tokens' offsets in the text."""

        def make(start: int, end: int, ids: Sequence[str]) -> list[PoolingStream]:
            return self.factory.make_placed(texts[start:end], params, stride, ids)

        return await self._run(asked, kind, [len(text) for text in texts], make)

    async def scored(
        self, asked: Asked[Any], kind: str, pairs: Sequence[Pair], params: PoolingParams, instruction: str | None
    ) -> PoolingCall:
        """Score pairs by the model's head."""

        def make(start: int, end: int, ids: Sequence[str]) -> list[PoolingStream]:
            return self.factory.make_pairs(pairs[start:end], params, ids, instruction)

        return await self._run(asked, kind, [sum(map(len, pair)) for pair in pairs], make)

    # ---- inside

    async def _plain(self, prompt: PromptLike, request: Request) -> PromptLike:
        if not isinstance(prompt, str):
            return prompt
        return await self.generation.prompts.of_text(prompt, False, None, request, "input")

    async def _run(self, asked: Asked[Any], kind: str, sizes: Sequence[int], make: Make) -> PoolingCall:
        """Run texts with the requested adapter. `sizes` are their lengths in characters."""
        request, adapter = asked.request, self.generation.model.adapter_of(asked.model)
        live = self.generation.live
        call_id = await live.new_id(kind, getattr(asked.body, "request_id", None), request)
        owner = owner_of(request, call_id)
        call = PoolingCall(call_id, self.generation.model.names[0], len(sizes), self._window, owner)
        with running(live.calls, call, request.receive):
            await self._feed(call, sizes, partial(_adapted, adapter, make))
            await call.join()
        return call

    async def _feed(self, call: PoolingCall, sizes: Sequence[int], make: Make) -> None:
        """Start texts as the window has room, until all are done."""
        dispatcher = self.generation.live.calls.dispatcher
        suffix = self.generation.live.calls.stream_ids
        next_text, made = 0, list[PoolingStream]()
        while not call.finished:
            call.check("input")
            while call.has_room() and (made or next_text < len(sizes)):
                if not made:
                    end = min(next_text + BATCH, len(sizes))
                    ids = [suffix(f"{call.name}-{index}", 1)[0] for index in range(next_text, end)]
                    with _refusing(next_text if len(sizes) > BATCH else 0):
                        made = await _made(make, next_text, end, ids, sum(sizes[next_text:end]))
                    call.expect(len(made) - (end - next_text))
                    made.reverse()
                    next_text = end
                    call.check("input")
                    continue
                call.add([made.pop()])
                self.check_size(call)
                dispatcher.add(call, len(call.streams) - 1)
            if not call.finished:
                await call.wait()
        call.check("input")

    def check_size(self, call: PoolingCall) -> None:
        """Raise ApiError if the texts so far get more numbers than the server keeps for one call."""
        stream, per_token = call.streams[-1], call.streams[-1].pooling.task in TOKEN_TASKS
        size = stream.pooling.dimensions or self.factory.limits.pooler.row_size(stream.pooling.task)
        count = call.num_prompt_tokens if per_token else len(call.streams)
        if 4 * size * count > MAX_NUMBER_BYTES:
            of = "tokens" if per_token else "texts"
            text = f"{size} numbers for each of {count} {of} and more are over the {MAX_NUMBER_BYTES} bytes"
            raise ApiError(400, f"{text} that a request gets; send fewer texts in one", "input")


async def _made(make: Make, start: int, end: int, ids: Sequence[str], num_chars: int) -> list[PoolingStream]:
    if num_chars <= INLINE_CHARS:
        return make(start, end, ids)
    return await asyncio.to_thread(make, start, end, ids)


def _adapted(adapter: str, make: Make, start: int, end: int, ids: Sequence[str]) -> list[PoolingStream]:
    streams = make(start, end, ids)
    for stream in streams:
        stream.adapter = adapter
    return streams


@contextmanager
def _refusing(first: int = 0) -> Iterator[None]:
    """Turn errors of the client library into ApiErrors; `first` is the number of the first text."""
    try:
        yield
    except VllmLiteError as error:
        where = f"among the texts from number {first} on: " if first else ""
        text = str(error)
        field = next((name for name in FIELDS if text.startswith(name)), "input")
        raise refused(type(error)(where + text) if where and type(error) is RequestError else error, field) from error
