"""CachedBlocks: keeps a router's knowledge of the engines' prefix caches current, by their KV events."""

import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_lite import transport
from vllm_lite.client.engines.routing import PrefixRouter
from vllm_lite.config import ResolvedConfig
from vllm_lite.runtime import log
from vllm_lite.runtime.addresses import offset
from vllm_lite.runtime.nested_settings import KV_EVENTS_SOCKET
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport.subscriber import Subscriber

IDLE_S = 60.0
JOIN_S = 2.0

logger = log.get(__name__)


def socket_beside(address: str) -> str:
    """Default endpoint of KV events of the engine at `address`."""
    return f"{address.rpartition('/')[0]}/{KV_EVENTS_SOCKET}"


def endpoints(config: ResolvedConfig, addresses: Sequence[str]) -> list[str]:
    """Endpoints of KV events of the engines at `addresses`; `config` is the first one's. Empty if the events are turned
    off, or have truncated hashes, which are of no use here."""
    events = config.kv_events_config
    if events is None or not events.enabled or events.hash_format != "bytes":
        return []
    if events.endpoint is None or events.endpoint == socket_beside(addresses[0]):
        return [socket_beside(address) for address in addresses]
    first = events.endpoint.removesuffix(".0") if events.endpoint.startswith("ipc://") else events.endpoint
    return [offset(first, rank) for rank in range(len(addresses))]


class CachedBlocks:
    """Reads the engines' events in a thread, from the first one on."""

    def __init__(self, sources: Sequence[str], topic: str, router: PrefixRouter[int], lock: threading.RLock) -> None:
        """`sources` are the endpoints of the router's engines 0, 1, ...; the router is only used under `lock`."""
        self._subscribers = [Subscriber(source, topic) for source in sources]
        self._next = [0] * len(sources)
        """Number of each engine's next event batch."""
        self.router = router
        self._lock = lock
        self._closing = Wakeup()
        self._thread = threading.Thread(target=self._run, name="cached blocks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                transport.wait(IDLE_S, *self._subscribers, self._closing)
                for engine, subscriber in enumerate(self._subscribers):
                    while (batch := subscriber.recv(0.0)) is not None:
                        self._receive(engine, *batch)
        except Exception:
            logger.exception("the router continues without KV events")
            with self._lock:
                for engine in self.router.engines:
                    self.router.cleared(engine)
        finally:
            for subscriber in self._subscribers:
                subscriber.close()
            self._closing.close()

    def _receive(self, engine: int, number: int, payload: bytes) -> None:
        with self._lock:
            if number != self._next[engine]:  # batches are missing, with unknown removals
                self.router.cleared(engine)
            self._next[engine] = number + 1
            self._take(engine, payload)

    def _take(self, engine: int, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            kind, hashes, is_of_use = _read(event)
            if kind == "AllBlocksCleared":
                self.router.cleared(engine)
            elif is_of_use:
                (self.router.announced if kind == "BlockStored" else self.router.dropped)(engine, hashes)


def _read(event: Any) -> tuple[str, Sequence[bytes], bool]:
    """(kind, hashes, is_useful) of an event, which is a map or a list in the order of vLLM's structs. The router
    ignores blocks of an adapter, whose hashes only the engine itself can compute; of KV groups other than the first,
    since a hit has to be in all of them; and of host or disk tiers."""
    if isinstance(event, dict):
        is_of_use = event.get("group_idx") == 0 and event.get("lora_name") is None and event.get("medium") == "GPU"
        return event["type"], event.get("block_hashes", ()), is_of_use
    kind, *values = event
    hashes = values[0] if values else ()
    if kind == "BlockStored":
        return kind, hashes, values[8] == 0 and values[6] is None and values[5] == "GPU"
    return kind, hashes, kind == "BlockRemoved" and values[2] == 0 and values[1] == "GPU"
