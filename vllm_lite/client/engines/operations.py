"""Operations on an engine for clients: makes their messages from plain values, and exceptions from their answers."""

from typing import Any

import msgspec

from vllm_lite.choices import with_choices
from vllm_lite.errors import EngineError, RequestError
from vllm_lite.protocol import operations

OPERATION_TIMEOUT_S = 3600.0
"""Maximum seconds that a client waits for requests to end, and for weights to be loaded."""
_BY_NAME: dict[str, type[operations.Operation]] = {
    "pause": operations.PauseGeneration,
    "resume": operations.ResumeGeneration,
    "sleep": operations.Sleep,
    "wake_up": operations.WakeUp,
    "update_weights": operations.UpdateWeights,
    "start_profile": operations.StartProfile,
    "stop_profile": operations.StopProfile,
}


def operation_of(name: str, **values: Any) -> operations.Operation:
    """Make the message of an operation. Raises RequestError, naming a wrong value."""
    kind = _BY_NAME[name]
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    try:
        made: dict[str, Any] = {}
        for key, value in values.items():
            made[key] = msgspec.convert(value, fields[key].type, strict=False)
        return kind(**made)
    except msgspec.ValidationError as error:
        raise RequestError(f"{key}: {with_choices(error, fields[key].type)}") from error


def check_done(done: operations.OperationDone) -> None:
    """Raise RequestError if the operation was invalid, EngineError if it failed."""
    if done.error is not None:
        raise RequestError(done.error) if done.bad_input else EngineError(done.error)
