"""One codec per direction: it encodes any message of that direction, and decodes only the declared types."""

from array import array
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

from vllm_lite.errors import ProtocolError
from vllm_lite.protocol import api
from vllm_lite.protocol.control import (
    AdapterRead,
    BeginProfile,
    DropAdapter,
    EndProfile,
    Failed,
    Imported,
    Load,
    Profiled,
    ReadAdapter,
    Ready,
    Shutdown,
    Start,
    Started,
    WorkerHeartbeat,
    WorkerHello,
)
from vllm_lite.protocol.encoder import MAX_CONTENT_BYTES
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput, StepOutputs, Steps
from vllm_lite.protocol.transfers import Transfer, TransferAnswer

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_CLIENT_BYTES = MAX_MESSAGE_BYTES + MAX_CONTENT_BYTES
"""Limit of a client's message; a prompt may have media."""
MAX_WORKER_BYTES = 1024 * 1024 * 1024
"""Limit of a worker's message: per-token vectors of one prompt may take half of MAX_MESSAGE_BYTES, and a step may
complete many prompts."""

M = TypeVar("M")


class Codec(Generic[M]):
    """msgpack of one union of structs. Any decoding error becomes a ProtocolError."""

    def __init__(self, union: Any, name: str, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self.encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(union).decode

    def decode(self, payload: bytes | memoryview) -> M:
        if len(payload) > self.max_bytes:
            raise ProtocolError(f"a {self.name} message has {len(payload)} bytes; at most {self.max_bytes} are taken")
        try:
            message: M = self._decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a {self.name} message could not be decoded: {error}") from error
        return message


client_to_engine: Codec[api.FromClient] = Codec(api.FromClient, "client to engine", MAX_CLIENT_BYTES)
engine_to_client: Codec[api.ToClient] = Codec(api.ToClient, "engine to client")

ToWorker = (
    SchedulerOutput | Steps | Load | Start | ReadAdapter | DropAdapter | BeginProfile | EndProfile | Transfer | Shutdown
)
FromWorker = (
    ModelOutput
    | StepOutputs
    | WorkerHello
    | Imported
    | Ready
    | Started
    | AdapterRead
    | Profiled
    | WorkerHeartbeat
    | TransferAnswer
    | Failed
)
engine_to_worker: Codec[ToWorker] = Codec(ToWorker, "engine to worker")
worker_to_engine: Codec[FromWorker] = Codec(FromWorker, "worker to engine", MAX_WORKER_BYTES)


class _Generate(msgspec.Struct, array_like=True, tag="generate"):
    """The first fields of a Generate, up to the request id; decoding skips the rest."""

    request_id: api.RequestId


class _Fork(msgspec.Struct, array_like=True, tag="fork"):
    parent_id: api.RequestId
    request_id: api.RequestId


_named: msgspec.msgpack.Decoder[_Generate | _Fork] = msgspec.msgpack.Decoder(_Generate | _Fork)


def request_named_in(payload: bytes) -> str | None:
    """Id of the request that a malformed Generate or ForkRequest would have started, if it can be read.

    The sender waits for the end of that request.
    """
    try:
        return _named.decode(payload).request_id
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian u32 (x86-64's order). Raises OverflowError or TypeError for other values."""
    return array("I", token_ids).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Unpack token ids. Raises ProtocolError if the length of `data` is not a multiple of 4."""
    if len(data) % 4:
        raise ProtocolError(f"token bytes must be a multiple of 4 long, got {len(data)}")
    tokens = array("I")
    tokens.frombytes(data)
    return tokens.tolist()
