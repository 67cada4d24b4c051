"""Messages between HTTP replicas and the engine's replicas, beside those of clients and engines."""

from typing import Any, NamedTuple

import msgspec

from vllm_lite.config import ResolvedConfig
from vllm_lite.protocol.adapters import AdapterInfo
from vllm_lite.protocol.api import Welcome

HASH_BYTES = 8
"""Bytes of a block's hash that routers compare: among a million blocks, two collide in one of ten million clusters."""


HTTP_DEPLOYMENT = "HttpReplica"
"""Serve's name of the HTTP replicas."""
UNKNOWN = -1
"""The number of a replica that did not answer."""


class Introduction(msgspec.Struct, frozen=True):
    """A replica's introduction. `number` is its rank among the replicas, which a successor takes over."""

    number: int
    config: ResolvedConfig
    welcome: Welcome
    adapters: list[AdapterInfo]
    recovering: str | None = None
    """The reason why it computes nothing at present; None if it works."""


class Answer(msgspec.Struct, frozen=True):
    """A replica's answer to a client's message; `payload` is a message from the engine, "" if there is none."""

    number: int
    payload: bytes = b""
    error: str = ""


class Summary(msgspec.Struct, frozen=True):
    """Summary of a replica's prefix cache: the first HASH_BYTES of each block's hash, the newest first; all blocks if
    `is_complete`."""

    num_blocks: int
    hashes: bytes = b""
    is_complete: bool = False

    def blocks(self) -> list[bytes]:
        return [self.hashes[at : at + HASH_BYTES] for at in range(0, len(self.hashes), HASH_BYTES)]

    def to_stats(self) -> dict[str, Any]:
        """The summary in the form that Serve passes from replicas to routers."""
        return msgspec.structs.asdict(self)

    @classmethod
    def from_stats(cls, stats: dict[str, Any]) -> "Summary | None":
        """None before the replica's first report."""
        return cls(**stats) if stats else None


class Route(NamedTuple):
    """Data for the routing of a request: the hashes of its prompt's full blocks, cut to HASH_BYTES, and the key of its
    session."""

    blocks: tuple[bytes, ...] = ()
    affinity: str | None = None


class Routed:
    """A request in Serve's router. Only the payload is sent to the replica; the route stays with the router."""

    def __init__(self, payload: bytes, route: Route) -> None:
        self.payload = payload
        self.route = route

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (self.payload,)


introductions = msgspec.msgpack.Decoder(Introduction)
answers = msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.Encoder().encode
