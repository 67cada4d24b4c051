"""/props and /slots, which clients of llama.cpp's server read before they ask for tokens."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite import __version__
from vllm_lite.server.generation import Generation
from vllm_lite.server.http.application import gets
from vllm_lite.server.live_requests import as_json


class LlamaCppInformation:
    def __init__(self, generation: Generation, num_slots: int, template: str | None) -> None:
        """`template`: the chat template to show, if any."""
        self._model = generation.model
        self._sees = generation.prompts.takes_images
        self._calls = generation.live.calls
        self._num_slots = num_slots
        self._template = template or ""

    def routes(self) -> list[Route]:
        return gets({"/props": self.props, "/slots": self.slots})

    async def props(self, _: Request) -> Response:
        model = self._model
        params = {name: value for name, value in model.defaults.items() if value is not None}
        return as_json(
            {
                "default_generation_settings": {"id": 0, "n_ctx": model.max_model_len, "params": params},
                "total_slots": self._num_slots,
                "model_alias": model.names[0],
                "model_path": model.root or model.names[0],
                "chat_template": self._template,
                "modalities": {"vision": self._sees, "audio": False},
                "build_info": f"vllm_lite {__version__}",
            }
        )

    async def slots(self, _: Request) -> Response:
        """State of all slots: as many are busy as sequences run on this server."""
        num_busy, n_ctx = self._calls.dispatcher.num_sequences, self._model.max_model_len
        return as_json([{"id": i, "n_ctx": n_ctx, "is_processing": i < num_busy} for i in range(self._num_slots)])
