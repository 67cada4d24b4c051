"""Messages between HTTP replicas and the engine's replicas, beside the protocol of clients and engines."""

from typing import Any, NamedTuple

import msgspec

from vllm_lite.config import ResolvedConfig
from vllm_lite.protocol.adapters import AdapterInfo
from vllm_lite.protocol.api import Welcome

HASH_BYTES = 8
"""How much of a block's hash routers compare: two of a million blocks are mixed up once in ten million clusters."""


HTTP_DEPLOYMENT = "HttpReplica"
"""What Serve calls the HTTP replicas."""
UNKNOWN = -1
"""The number of a replica that did not answer."""


class Introduction(msgspec.Struct, frozen=True):
    """A replica's introduction of itself. `number` is its rank among the replicas, which its successor takes over."""

    number: int
    config: ResolvedConfig
    welcome: Welcome
    adapters: list[AdapterInfo]
    recovering: str | None = None
    """Why it computes nothing at present."""


class Answer(msgspec.Struct, frozen=True):
    """A replica's answer to a question of a client; `payload` is a message from the engine, "" if there is none."""

    number: int
    payload: bytes = b""
    error: str = ""


class Summary(msgspec.Struct, frozen=True):
    """A summary of a replica's prefix cache: the first HASH_BYTES of the hash of each block, the newest first. If
    `is_complete` there are no others."""

    num_blocks: int
    hashes: bytes = b""
    is_complete: bool = False

    def blocks(self) -> list[bytes]:
        return [self.hashes[at : at + HASH_BYTES] for at in range(0, len(self.hashes), HASH_BYTES)]

    def to_stats(self) -> dict[str, Any]:
        """As Serve carries it from replicas to routers."""
        return msgspec.structs.asdict(self)

    @classmethod
    def from_stats(cls, stats: dict[str, Any]) -> "Summary | None":
        """None before the replica's first report."""
        return cls(**stats) if stats else None


class Route(NamedTuple):
    """Facts for the routing of a request: the hashes of its prompt's full blocks, cut to HASH_BYTES, and whose session
    it belongs to."""

    blocks: tuple[bytes, ...] = ()
    affinity: str | None = None


class Routed:
    """A request on its way through Serve's router. The replica gets its payload; the rest stays where the router is."""

    def __init__(self, payload: bytes, route: Route) -> None:
        self.payload = payload
        self.route = route

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (self.payload,)


introductions = msgspec.msgpack.Decoder(Introduction)
answers = msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.Encoder().encode
