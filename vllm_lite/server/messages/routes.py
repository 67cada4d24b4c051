"""The routes of Anthropic's API."""

import os
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.server.calls.response import CallResponse
from vllm_lite.server.generation import Asked, Generation
from vllm_lite.server.http.application import posts
from vllm_lite.server.http.dialects import REQUEST_ID
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.messages.answers import MessageWriter
from vllm_lite.server.messages.bodies import CountTokensBody, MessagesBody
from vllm_lite.server.messages.chats import chat_of, name_of
from vllm_lite.server.openai import forms
from vllm_lite.server.openai.bodies import ChatBody
from vllm_lite.server.vllm import rendered


class MessagesRoutes:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._model = generation.model
        self._live = generation.live

    def routes(self) -> list[Route]:
        path = "/v1/messages"
        return posts({path: self.create, f"{path}/count_tokens": self.count_tokens, f"{path}/render": self.render})

    async def create(self, request: Request) -> Response:
        asked = await self._asked(request)
        chat = asked.body
        call_id = f"msg_{os.urandom(12).hex()}"
        call, headers = await self._generation.chat(asked, call_id)
        request_id = request.scope[REQUEST_ID]
        writer = MessageWriter(call, self._live.writers.message(call, call.choices[0]), request_id)
        headers = {**headers, "request-id": request_id}
        return CallResponse(call, writer, self._live.calls.run, stream=bool(chat.stream), headers=headers)

    async def render(self, request: Request) -> Response:
        """Answer, like vLLM's other /render routes, with the prompt as a body of /inference/v1/generate."""
        asked = await self._asked(request)
        rendered.check(asked.body)
        made = await self._generation.chat(asked, rendered.call_id("chatcmpl", request, asked.body))
        return as_json(rendered.requests(made.call, asked.body, asked.model)[0], made.headers)

    async def _asked(self, request: Request) -> Asked[ChatBody]:
        """Read the body and convert it to a ChatBody."""
        asked = await self._generation.read(request, MessagesBody)
        chat = chat_of(asked.body, self._model.max_model_len)
        if not self._generation.knows_thinking:  # clients send a budget to every model; one without thinking ignores it
            chat = msgspec.structs.replace(chat, thinking_token_budget=None)
        return Asked(request, chat, asked.headers, asked.model, partial(name_of, asked.body))

    async def count_tokens(self, request: Request) -> Response:
        asked = await self._generation.read(request, CountTokensBody)
        chat = chat_of(asked.body, self._model.max_model_len)
        forms.tools_of(chat)  # raises for invalid tools
        found = await self._generation.prompts.of_chat(chat, None, request, sees=True)
        headers = found.warned(asked.headers, partial(name_of, asked.body))
        headers = {**headers, "request-id": request.scope[REQUEST_ID]}
        return as_json({"input_tokens": len(found.token_ids)}, headers)
