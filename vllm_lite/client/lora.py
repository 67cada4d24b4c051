"""LoRARequest: a request's adapter, in the Python API; the engine loads an adapter when it is first named."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from vllm_lite.client.engines.any_session import AnySession
from vllm_lite.errors import RequestError
from vllm_lite.protocol.adapters import MAX_NAME_CHARS, AdapterAnswer

LOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name. `lora_path`: its PEFT folder on the engine's host; optional for an adapter already
    loaded. `lora_int_id` is accepted for compatibility with vLLM; names distinguish adapters."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str | Path = ""


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one for each."""


def begin_load(session: AnySession, request: LoRARequest | None) -> "Future[AdapterAnswer] | None":
    """Let the engine load an adapter that it does not know; None if there is nothing to wait for. Raises RequestError
    if it is not known and has no path, or the engine serves no adapters."""
    if request is None:
        return None
    if not isinstance(request, LoRARequest):
        raise RequestError(f"lora_request must be a LoRARequest, got {type(request).__name__}")
    if not session.welcome.max_loras:
        raise RequestError("this engine serves no adapters; start it with enable_lora")
    if not (isinstance(request.lora_name, str) and 0 < len(request.lora_name) <= MAX_NAME_CHARS):
        shown = f"{request.lora_name!r:.80}"
        raise RequestError(f"lora_name must be a text of 1 to {MAX_NAME_CHARS} characters, got {shown}")
    path, known = str(request.lora_path), session.adapters.get(request.lora_name)
    if known is not None and path in ("", known.path):
        return None
    if not path:
        raise RequestError(f"adapter {request.lora_name!r} is not loaded; give its lora_path")
    return session.load_adapter(request.lora_name, path)


def check_loaded(answer: AdapterAnswer) -> None:
    """Raise RequestError if the engine could not load an adapter."""
    if answer.error is not None:
        raise RequestError(answer.error)
