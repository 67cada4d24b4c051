"""LoRARequest: which adapter a request is computed with, for Python's callers; loaded when it is first named."""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from vllm_lite.client.engines.any_session import AnySession
from vllm_lite.errors import RequestError
from vllm_lite.protocol.adapters import AdapterAnswer

LOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name. `lora_path` is its folder, as PEFT writes it, on the engine's host; it may be left out
    for one that is loaded already. `lora_int_id` is taken for vLLM's sake: names tell adapters apart."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str | Path = ""


def begin_load(session: AnySession, request: LoRARequest | None) -> "Future[AdapterAnswer] | None":
    """Have the engine load an adapter that it does not know; None if there is nothing to wait for. Raises RequestError
    for what is no adapter of this engine and cannot become one."""
    if request is None:
        return None
    if not isinstance(request, LoRARequest):
        raise RequestError(f"lora_request must be a LoRARequest, got {type(request).__name__}")
    if not session.welcome.max_loras:
        raise RequestError("this engine serves no adapters; start it with enable_lora")
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
