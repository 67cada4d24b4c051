"""CachedBlocks: a router knows what is in the caches of engines that publish events over real sockets."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.deadlines import scaled
from tests.recorded import Recorded
from vllm_lite.client.engines.cached_blocks import CachedBlocks, endpoints, socket_beside
from vllm_lite.client.engines.routing import PrefixRouter
from vllm_lite.config import EngineConfig
from vllm_lite.engine.blocks.events import KVEventStream
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.runtime.nested_settings import KVEventsConfig

DEADLINE_S = scaled(20.0)


class Rig:
    """Two engines, a router, and the events by which the router knows their caches."""

    def __init__(self, folder: Path, event_format: str) -> None:
        self.cores = [Recorded(None, 18), Recorded(None, 18)]
        sources = [f"ipc://{folder}/{n}" for n in range(2)]
        configs = [KVEventsConfig(endpoint=source, event_format=event_format) for source in sources]  # type: ignore[arg-type]
        self.streams = [
            KVEventStream(config, core.core.kv.part(KVBlocks)) for config, core in zip(configs, self.cores, strict=True)
        ]
        self.router, self.lock = PrefixRouter[int](), threading.RLock()
        for engine in range(2):
            self.router.add(engine, 18)
        self.blocks = CachedBlocks(sources, "", self.router, self.lock)
        self.numbers = itertools.count()
        for engine in range(2):  # until they have found each other, events are lost
            self.until(partial(self.knows_something, engine), partial(self.publish, engine))
            self.clear(engine)

    def publish(self, engine: int, length: int = 9) -> None:
        """Have an engine cache a new prompt."""
        core, number = self.cores[engine], next(self.numbers)
        core.add(f"{number}", [(number * 7 + place * place) % 50 for place in range(length)], max_tokens=1)
        core.drain()
        self.streams[engine].serve(time.time())

    def clear(self, engine: int) -> None:
        self.cores[engine].core.kv.pool.reset_cache()
        self.streams[engine].serve(time.time())
        self.until(lambda: not self.knows_something(engine))

    def knows_something(self, engine: int) -> bool:
        return bool(self.router.cached[engine])

    def until(self, holds: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            with self.lock:
                if holds():
                    return
            assert time.monotonic() < deadline_s
            meanwhile()
            time.sleep(0.01)

    def cached(self, engine: int) -> set[bytes]:
        return {key[:-1] for key in self.cores[engine].core.kv.pool.cached}

    def close(self) -> None:
        self.blocks.close()
        for stream in self.streams:
            stream.close()


@pytest.fixture(params=["array", "map"])
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, request.param)
    try:
        yield made
    finally:
        made.close()


def test_a_router_follows_blocks_that_engines_store_drop_and_clear(rig: Rig) -> None:
    for number in range(12):  # more than fits
        rig.publish(number % 2, 17)
    assert rig.cached(0).isdisjoint(rig.cached(1))
    rig.until(lambda: [rig.router.cached[engine] for engine in (0, 1)] == [rig.cached(0), rig.cached(1)])
    rig.clear(0)
    assert rig.router.cached[1] == rig.cached(1) != set()


def test_after_a_gap_only_later_events_are_known(rig: Rig) -> None:
    rig.publish(0)
    before = rig.cached(0)
    rig.until(lambda: rig.router.cached[0] == before)
    rig.streams[0].publisher.next_number += 1
    rig.publish(0)
    rig.until(lambda: rig.router.cached[0] == rig.cached(0) - before)
    assert rig.router.cached[0]


def test_where_engines_publish() -> None:
    addresses = ["ipc:///tmp/vl-a/engine", "ipc:///tmp/vl-b/engine"]

    def found(**events: str) -> list[str]:
        made = KVEventsConfig(enable_kv_cache_events=True, **events)  # type: ignore[arg-type]
        return endpoints(EngineConfig(kv_events_config=made), addresses)  # type: ignore[arg-type]

    assert endpoints(EngineConfig(), addresses) == []  # type: ignore[arg-type]
    assert found(endpoint=socket_beside(addresses[0])) == ["ipc:///tmp/vl-a/kv-events", "ipc:///tmp/vl-b/kv-events"]
    assert found() == ["ipc:///tmp/vl-a/kv-events", "ipc:///tmp/vl-b/kv-events"]
    assert found(endpoint="ipc:///tmp/mine.0") == ["ipc:///tmp/mine.0", "ipc:///tmp/mine.1"]
    assert found(endpoint="tcp://127.0.0.1:5557") == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    assert found(hash_format="int") == []
