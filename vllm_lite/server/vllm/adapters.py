"""/v1/load_lora_adapter and /v1/unload_lora_adapter: load and unload adapters at run time, for admins."""

from collections.abc import Callable
from concurrent.futures import Future

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from vllm_lite.client.engines.any_session import AnySession
from vllm_lite.client.lora import LOAD_TIMEOUT_S
from vllm_lite.protocol.adapters import AdapterAnswer
from vllm_lite.runtime.nested_settings import wrong_adapter_name
from vllm_lite.server.generation import Generation
from vllm_lite.server.http.application import posts
from vllm_lite.server.http.auth import require_admin
from vllm_lite.server.openai.bodies import LoadAdapterBody, UnloadAdapterBody
from vllm_lite.server.openai.errors import ApiError, InvalidUserInput


class AdapterRoutes:
    """Forwards to the engine, whose list of adapters all API servers share."""

    def __init__(self, generation: Generation) -> None:
        self._model = generation.model
        self._live = generation.live

    def routes(self) -> list[Route]:
        return posts({"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload})

    async def load(self, request: Request) -> Response:
        require_admin(request)
        body, headers = await self._live.reader.read(request, LoadAdapterBody)
        name, path = body.lora_name, body.lora_path
        if not name or not path:
            raise InvalidUserInput(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if wrong := wrong_adapter_name(name):
            raise InvalidUserInput(400, wrong, "lora_name")
        if name in self._model.names:
            raise InvalidUserInput(400, f"the model itself is called {name!r}; choose another lora_name", "lora_name")
        if name in self._model.adapters and not body.load_inplace:
            raise InvalidUserInput(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                "lora_name",
            )
        if (await self._live.calls.stats()).sleep_level is not None:  # loading would wait until the engine is woken
            raise ApiError(503, "the engine sleeps; wake it up first (/wake_up), nothing was loaded")
        answer = await self._ask(lambda session: session.load_adapter(name, path, in_place=body.load_inplace))
        if answer.error is not None:
            raise ApiError(404 if answer.is_missing else 400, answer.error, "lora_path")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.", headers=headers)

    async def unload(self, request: Request) -> Response:
        require_admin(request)
        body, headers = await self._live.reader.read(request, UnloadAdapterBody)
        name = body.lora_name
        if not name:
            raise InvalidUserInput(400, "'lora_name' needs to be provided to unload a LoRA adapter.")
        answer = await self._ask(lambda session: session.unload_adapter(name))
        if answer.error is not None:
            text = f"The lora adapter '{name}' cannot be found." if answer.is_missing else answer.error
            raise ApiError(404 if answer.is_missing else 400, text, "lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.", headers=headers)

    async def _ask(self, question: Callable[[AnySession], Future[AdapterAnswer]]) -> AdapterAnswer:
        return await self._live.calls.ask(question, LOAD_TIMEOUT_S)
