"""The routes of Ollama's API. Routes that manage a library of models are absent: one model is served."""

import os
import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite import __version__
from vllm_lite.server.calls.response import CallResponse
from vllm_lite.server.generation import Asked, Generation, Made
from vllm_lite.server.http.application import gets, posts
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.ollama import chats
from vllm_lite.server.ollama.answers import LINES, NS, Kind, OllamaWriter, created_at, said
from vllm_lite.server.ollama.bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaModelBody,
    OllamaPromptBody,
)
from vllm_lite.server.ollama.information import OllamaModel
from vllm_lite.server.openai.bodies import warning
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.pooling import answers
from vllm_lite.server.pooling.bodies import PoolingFields
from vllm_lite.server.pooling.runs import PoolingRuns

B = TypeVar("B", bound=OllamaBody)


class OllamaRoutes:
    def __init__(self, generation: Generation, model: OllamaModel, pooling: PoolingRuns) -> None:
        self._generation = generation
        self._live = generation.live
        self._model = model
        self._pooling = pooling
        self._max_model_len = generation.model.max_model_len

    def routes(self) -> list[Route]:
        of_prompts = {"/api/chat": self.chat, "/api/generate": self.generate}
        of_texts = {"/api/embed": self.embed, "/api/embeddings": self.embed_one}
        of_model = {"/api/show": self.show, "/api/pull": self.pull}
        about = {"/api/tags": self.tags, "/api/ps": self.running, "/api/version": self.version}
        return posts({**of_prompts, **of_texts, **of_model}) + gets(about)

    async def chat(self, request: Request) -> Response:
        asked = await self._asked(request, OllamaChatBody)
        if not asked.body.messages:
            return self._loaded(asked, "chat")
        chat = chats.chat_of(asked.body, self._max_model_len)
        made = await self._generation.chat(asked._replace(body=chat), _new_id())  # type: ignore[arg-type]
        return self._respond(made, asked, "chat")

    async def generate(self, request: Request) -> Response:
        asked = await self._asked(request, OllamaGenerateBody)
        body = asked.body
        if not (body.prompt or body.suffix or body.images):
            return self._loaded(asked, "generate")
        if body.raw or body.suffix or not self._generation.prompts.has_template:
            if body.images:
                raise ApiError(400, "images need the chat template: no raw, no suffix, and a model that has one")
            completion = chats.completion_of(body, self._max_model_len)
            made = await self._generation.completion(asked._replace(body=completion))  # type: ignore[arg-type]
        else:
            chat = chats.prompted(body, self._max_model_len)
            made = await self._generation.chat(asked._replace(body=chat), _new_id())  # type: ignore[arg-type]
        return self._respond(made, asked, "generate")

    async def tags(self, _: Request) -> Response:
        return as_json({"models": self._model.entries()})

    async def running(self, _: Request) -> Response:
        return as_json({"models": self._model.running()})

    async def version(self, _: Request) -> Response:
        return as_json({"version": __version__})

    async def show(self, request: Request) -> Response:
        body, headers = await self._live.reader.read(request, OllamaModelBody, needs_type=False)
        self._model.name(body.model or body.name)
        return as_json(self._model.shown(), headers)

    async def pull(self, request: Request) -> Response:
        """Answer that the served model is there: clients pull a model before they use it."""
        body, headers = await self._live.reader.read(request, OllamaModelBody, needs_type=False)
        self._model.name(body.model or body.name)
        kind = "application/json" if body.stream is False else LINES
        return Response(b'{"status":"success"}\n', headers={**headers, "content-type": kind})

    async def embed(self, request: Request) -> Response:
        asked = await self._asked(request, OllamaEmbedBody)
        body, began_s = asked.body, time.monotonic()
        texts = [body.input] if isinstance(body.input, str) else list(body.input or ())
        fields: dict[str, Any] = {"model": asked.model, "load_duration": 0}
        if not texts:
            none = {"embeddings": [], "total_duration": 0, "prompt_eval_count": 0}
            return as_json(fields | none, asked.headers)
        kept = None if body.truncate is False else -1
        params = PoolingFields(truncate_prompt_tokens=kept).params(dimensions=body.dimensions)
        call = await self._pooling.pooled(asked, "embd", texts, params, "embed")
        fields["total_duration"] = round((time.monotonic() - began_s) * NS)
        fields["prompt_eval_count"] = call.num_prompt_tokens
        return answers.answer(call, asked.headers, fields, answers.vector, "embeddings")

    async def embed_one(self, request: Request) -> Response:
        """Answer /api/embeddings, the older route for a single text."""
        asked = await self._asked(request, OllamaPromptBody)
        if not asked.body.prompt:
            return as_json({"embedding": []}, asked.headers)
        params = PoolingFields(truncate_prompt_tokens=-1).params()
        call = await self._pooling.pooled(asked, "embd", [asked.body.prompt], params, "embed")
        return as_json({"embedding": call.streams[0].numbers()}, asked.headers)

    async def _asked(self, request: Request, kind: type[B]) -> Asked[B]:
        body, headers = await self._live.reader.read(request, kind, needs_type=False)
        name = self._model.name(body.model)
        self._live.calls.check()
        if names := chats.ignored(body):
            more = warning(names)
            headers = {"Warning": ", ".join([*headers.values(), *more.values()])}
        return Asked(request, body, headers, name)

    def _respond(self, made: Made, asked: Asked[Any], kind: Kind) -> Response:
        call, live = made.call, self._live
        is_stream = asked.body.stream is not False
        writer = OllamaWriter(call, live.writers.message(call, call.choices[0]), live.writers.spelling, kind)
        headers = {**made.headers, **({"content-type": LINES} if is_stream else {})}
        return CallResponse(call, writer, live.calls.run, stream=is_stream, headers=headers)

    def _loaded(self, asked: Asked[Any], kind: Kind) -> Response:
        """Answer a request without a prompt, which means to load or unload the model."""
        reason = "unload" if asked.body.keep_alive in (0, "0", "0s") else "load"
        fields = {"model": asked.model, "created_at": created_at(), **said(kind, {}), "done": True}
        line = msgspec.json.encode({**fields, "done_reason": reason}) + b"\n"
        media = "application/json" if asked.body.stream is False else LINES
        return Response(line, headers={**asked.headers, "content-type": media})


def _new_id() -> str:
    return f"chat-{os.urandom(12).hex()}"
