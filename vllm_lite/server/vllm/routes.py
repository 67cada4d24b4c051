"""vLLM's routes: several chats at once, /render, /invocations, /abort_requests."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.server.generation import Generation
from vllm_lite.server.http.application import posts
from vllm_lite.server.http.body import top_level
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.bodies import AbortBody, ChatBody, ChatsBody, CompletionBody
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.vllm import rendered
from vllm_lite.server.vllm.information import Information

_KINDS = ("", "gen-", "cmpl-", "chatcmpl-")
"""Prefixes that a call's id has before the name that its client has chosen."""
Invoked = Callable[[Request, bytes, Collection[str]], Awaitable[Response | None]]


class VllmRoutes:
    def __init__(self, generation: Generation, information: Information, pooled: Invoked) -> None:
        """`pooled` answers invocations for vectors or scores."""
        self._pooled = pooled
        self._generation = generation
        self._live = generation.live
        self._information = information

    def routes(self) -> list[Route]:
        of_bodies = {
            "/v1/chat/completions/batch": self.chats,
            "/v1/chat/completions/render": self.render_chat,
            "/v1/completions/render": self.render_completion,
            "/invocations": self.invocations,
            "/abort_requests": self.abort,
            "/inference/v1/abort_requests": self.abort,
        }
        return posts(of_bodies) + self._information.routes()

    async def chats(self, request: Request) -> Response:
        asked = await self._generation.read(request, ChatsBody)
        return self._generation.respond(await self._generation.chats(asked), asked)

    async def render_chat(self, request: Request) -> Response:
        asked = await self._generation.read(request, ChatBody)
        body = asked.body
        rendered.check(body)
        made = await self._generation.chat(asked, rendered.call_id("chatcmpl", request, body))
        found = rendered.requests(made.call, body, asked.model)[0]
        if body.return_token_offsets:
            text = (await self._generation.prompts.render(body, None, request)).text
            (found["token_offsets"],) = await self._generation.prompts.offsets([text], [found["token_ids"]], request)
        return as_json(found, made.headers)

    async def render_completion(self, request: Request) -> Response:
        asked = await self._generation.read(request, CompletionBody)
        made = await self._generation.completion(asked, rendered.call_id("cmpl", request, asked.body))
        found = rendered.requests(made.call, asked.body, asked.model)
        if asked.body.return_token_offsets:
            prompts = [stream.prompt for stream in made.call.streams]
            places = await self._generation.prompts.offsets(
                [each.text for each in prompts], [each.token_ids for each in prompts], request
            )
            for each, place in zip(found, places, strict=True):
                each["token_offsets"] = place
        data = await asyncio.to_thread(_listed, found) if len(found) > 1 else _listed(found)
        return Response(data, headers=made.headers, media_type="application/json")

    async def invocations(self, request: Request) -> Response:
        """Answer a body by its fields: as a chat, a completion, or for vectors or scores."""
        data, fields = await top_level(await self._live.reader.receive(request))
        if "messages" in fields and self._generation.generates:
            chat = await self._generation.asked(request, data, ChatBody)
            return self._generation.respond(await self._generation.chat(chat), chat)
        if "prompt" not in fields:
            answer = await self._pooled(request, data, fields)
            if answer is None:
                text = "give messages for a chat, a prompt for a completion, or input, query or text_1 for vectors"
                raise ApiError(400, f"{text} and scores, if the model has them")
            return answer
        completion = await self._generation.asked(request, data, CompletionBody)
        return self._generation.respond(await self._generation.completion(completion), completion)

    async def abort(self, request: Request) -> Response:
        """Abort requests by their ids, or by the names that clients gave them. Unknown ids are ignored."""
        body, headers = await self._live.reader.read(request, AbortBody)
        await self._live.end_first([[kind + name for kind in _KINDS] for name in body.request_ids], request)
        return Response(headers=headers)


def _listed(found: Sequence[Any]) -> bytes:
    """Encode a JSON list item by item, so that other threads run in between."""
    return b"[" + b",".join([msgspec.json.encode(each) for each in found]) + b"]"
