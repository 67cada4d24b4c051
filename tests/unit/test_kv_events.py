"""KV events as a consumer written for vLLM sees them: plain msgpack over a SUB socket, and replay over a REQ socket."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.deadlines import scaled
from tests.recorded import Recorded
from vllm_lite.config import EngineConfig
from vllm_lite.engine.blocks.events import REJOIN_S, KVEvents, KVEventStream
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.errors import ConfigError, EngineError
from vllm_lite.runtime.nested_settings import KVEventsConfig

END = b"\xff" * 8
PATIENCE_MS = round(scaled(20_000))


class Consumer:
    """Applies every event to a set of (hash, group), as a router does."""

    def __init__(self) -> None:
        self.cached: set[tuple[Any, int]] = set()
        self.parents: dict[Any, Any] = {}
        self.tokens: dict[Any, list[int]] = {}

    def take(self, payload: bytes) -> None:
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(stamp, float)
        assert rank == 0
        for event in events:
            getattr(self, event[0])(*event[1:])

    def BlockStored(  # the names on the wire
        self, hashes: list[Any], parent: Any, token_ids: list[int], block_size: int, lora_id: None, *later: Any
    ) -> None:
        medium, lora_name, extra_keys, group, kind, window = later
        assert (lora_id, medium, lora_name, extra_keys) == (None, "GPU", None, None)
        assert kind == ("full_attention" if window is None else "sliding_window")
        assert len(token_ids) == block_size * len(hashes)
        for index, block_hash in enumerate(hashes):
            assert (block_hash, group) not in self.cached, "stored twice"
            self.cached.add((block_hash, group))
            self.parents[block_hash] = parent
            self.tokens[block_hash] = token_ids[index * block_size : (index + 1) * block_size]
            parent = block_hash

    def BlockRemoved(self, hashes: list[Any], medium: str, group: int) -> None:
        assert medium == "GPU"
        for block_hash in hashes:
            self.cached.remove((block_hash, group))

    def AllBlocksCleared(self) -> None:
        self.cached.clear()

    def prefix_of(self, block_hash: Any) -> list[int]:
        """All tokens up to and with a block, as its chain of parents tells."""
        tokens: list[int] = []
        while block_hash is not None:
            tokens = self.tokens[block_hash] + tokens
            block_hash = self.parents[block_hash]
        return tokens


def cached_in(recorded: Recorded) -> set[tuple[Any, int]]:
    return {(key[:-1], key[-1]) for key in recorded.core.kv.pool.cached}


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_a_consumer_follows_cached_blocks(windows: tuple[int | None, ...], num_host_blocks: int) -> None:
    """Compared after every pass of a run with evictions, duplicates, swaps, promotions, failures and a reset."""
    batches: list[bytes] = []
    recorded = Recorded(None, 18, windows, num_host_blocks, preemption_mode="swap")
    events = KVEvents(KVEventsConfig(), recorded.core.kv.part(KVBlocks), batches.append)
    consumer, rng = Consumer(), random.Random(7)
    loop = recorded.loop

    def watched(fail: bool = False) -> bool:
        went_on = loop(fail)
        events.flush(1.0)
        for payload in batches:
            consumer.take(payload)
        batches.clear()
        assert consumer.cached == cached_in(recorded)
        return went_on

    recorded.loop = watched  # type: ignore[method-assign]
    recorded.random_work(rng, 120)
    recorded.drain()
    assert len(consumer.parents) > len(consumer.cached) > 0
    assert recorded.core.kv.pool.reset_cache()
    watched()
    assert consumer.cached == set()


def test_blocks_of_one_prompt_are_one_event_with_its_tokens() -> None:
    batches: list[bytes] = []
    recorded = Recorded(None, 40, max_num_batched_tokens=64)
    events = KVEvents(KVEventsConfig(), recorded.core.kv.part(KVBlocks), batches.append)
    prompt = list(range(14))
    recorded.add("a", prompt, max_tokens=1)
    recorded.loop()
    events.flush(2.5)
    events.flush(2.6)  # nothing is new, so nothing is told
    ((stamp, (event,), _),) = (msgspec.msgpack.decode(payload) for payload in batches)
    assert stamp == 2.5
    assert (event[0], len(event[1]), event[2], event[3], event[4]) == ("BlockStored", 3, None, prompt[:12], 4)
    consumer = Consumer()
    consumer.take(batches[0])
    assert consumer.prefix_of(event[1][2]) == prompt[:12]
    recorded.add("b", [*prompt[:12], 40, 41, 42, 43, 44], max_tokens=1)
    recorded.loop()
    events.flush(3.0)
    consumer.take(batches[1])
    (event,) = msgspec.msgpack.decode(batches[1])[1]
    assert consumer.prefix_of(event[1][0]) == [*prompt[:12], 40, 41, 42, 43]


def test_old_consumers_can_read_it() -> None:
    """The structs that a subscriber was given with vLLM before it named more fields."""

    class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[int | bytes]
        parent_block_hash: int | bytes | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None

    class BlockRemoved(Event):
        block_hashes: list[int | bytes]

    class AllBlocksCleared(Event):
        pass

    class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]

    batches: list[bytes] = []
    recorded = Recorded(None, 8)
    events = KVEvents(KVEventsConfig(hash_format="int"), recorded.core.kv.part(KVBlocks), batches.append)
    recorded.random_work(random.Random(1))
    events.flush(1.0)
    batch = msgspec.msgpack.decode(batches[0], type=Batch)
    kinds = {type(event) for event in batch.events}
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}
    named = [event.block_hashes for event in batch.events if not isinstance(event, AllBlocksCleared)]
    assert all(isinstance(item, int) and item < 2**64 for hashes in named for item in hashes)


def test_events_as_maps_name_their_fields() -> None:
    batches: list[bytes] = []
    recorded = Recorded(None, 40)
    events = KVEvents(KVEventsConfig(event_format="map"), recorded.core.kv.part(KVBlocks), batches.append)
    recorded.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    recorded.drain()
    recorded.core.kv.pool.reset_cache()
    events.flush(1.0)
    _, (stored, cleared), rank = msgspec.msgpack.decode(batches[0])
    assert (stored["type"], stored["token_ids"], stored["medium"]) == ("BlockStored", [1, 2, 3, 4], "GPU")
    assert stored["group_idx"] == 0
    assert (cleared, rank) == ({"type": "AllBlocksCleared"}, 0)


def test_maps_tell_cache_salts() -> None:
    batches: list[bytes] = []
    recorded = Recorded(None, 40)
    events = KVEvents(KVEventsConfig(event_format="map"), recorded.core.kv.part(KVBlocks), batches.append)
    for number, salt in enumerate(("mine", None)):
        recorded.add(f"{number}", [1, 2, 3, 4, 5], max_tokens=1, cache_salt=salt)
        recorded.drain()
        events.flush(1.0)
    salted, plain = (msgspec.msgpack.decode(batch)[1][0] for batch in batches)
    assert salted["cache_salt"] == "mine"
    assert "cache_salt" not in plain
    assert salted["block_hashes"] != plain["block_hashes"]


def test_a_replacing_engine_first_reports_an_empty_cache(tmp_path: Path) -> None:
    """The new engine waits until the subscribers of the old one have connected to it."""
    endpoint = f"ipc://{tmp_path}/events"
    recorded = Recorded(None, 40)
    stream = KVEventStream(KVEventsConfig(endpoint=endpoint), recorded.core.kv.part(KVBlocks), rejoins_s=10.0)
    published: list[bytes] = []
    stream._events._publish = published.append
    try:
        recorded.add("a", [1, 2, 3, 4, 5], max_tokens=1)
        recorded.drain()
        stream.serve(10.0 + REJOIN_S / 2)
        assert published == []
        stream.serve(10.0 + REJOIN_S)
    finally:
        stream.close()
    assert [event[0] for event in msgspec.msgpack.decode(published[0])[1]] == ["AllBlocksCleared", "BlockStored"]


def test_nothing_is_watched_unless_asked_for() -> None:
    recorded = Recorded(None)
    blocks = recorded.core.kv.part(KVBlocks)
    assert blocks.on_store is None
    assert blocks.pool.observers == [blocks.tails]


# ---- over sockets


def socket(kind: int) -> "zmq.Socket[bytes]":
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    return made


class Wire:
    """A recorded core with its event stream, a subscriber and a client of the replay socket."""

    def __init__(self, folder: Path, buffer_steps: int) -> None:
        endpoints = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=endpoints[0],
            replay_endpoint=endpoints[1],
            buffer_steps=buffer_steps,
            topic="kv",
        )
        self.recorded = Recorded(None, 14)
        self.stream = KVEventStream(self.config, self.recorded.core.kv.part(KVBlocks))
        self.subscriber, self.client = socket(zmq.SUB), socket(zmq.DEALER)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.subscriber.connect(endpoints[0])
        self.client.connect(endpoints[1])

    def subscribe(self) -> None:
        """Publish until the subscription has arrived, then discard the received messages."""
        for _ in range(500):
            self.recorded.core.kv.pool.reset_cache()
            self.stream.serve(1.0)
            if self.subscriber.poll(10):
                while self.subscriber.poll(0):
                    self.subscriber.recv_multipart()
                return
        raise AssertionError("the subscription does not arrive")

    def heard(self, count: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        for _ in range(count):
            assert self.subscriber.poll(PATIENCE_MS), "a batch is missing"
            topic, number, payload = self.subscriber.recv_multipart()
            assert (topic, len(number)) == (b"kv", 8)
            found.append((int.from_bytes(number, "big"), payload))
        return found

    def replayed(self, start: int) -> list[tuple[int, bytes]]:
        """Send one request, and return its replies up to the end marker."""
        self.client.send_multipart([b"", start.to_bytes(8, "big")])
        deadline_s = time.monotonic() + PATIENCE_MS / 1000
        while not self.client.poll(10):
            self.stream.serve(1.0)
            assert time.monotonic() < deadline_s, "no answer"
        found: list[tuple[int, bytes]] = []
        while True:
            assert self.client.poll(PATIENCE_MS)
            empty, number, payload = self.client.recv_multipart()
            assert empty == b""
            if not payload:
                assert number == END
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self.subscriber.close(0)
        self.client.close(0)
        self.stream.close()


@pytest.fixture(params=[10_000, 5])
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path, request.param)
    yield made
    made.close()


def test_a_subscriber_rebuilds_the_cache_and_replay_repeats_it(wire: Wire, tmp_path: Path) -> None:
    wire.subscribe()
    before = wire.stream.publisher.next_number
    rng = random.Random(4)
    for index in range(30):
        wire.recorded.add(f"r{index}", [rng.randint(1, 2) for _ in range(rng.randint(1, 20))], max_tokens=5)
        wire.recorded.loop()
        wire.stream.serve(float(index))
    wire.recorded.drain()
    wire.stream.serve(99.0)
    count = wire.stream.publisher.next_number - before
    batches = wire.heard(count)
    assert [number for number, _ in batches] == list(range(before, before + count))
    consumer = Consumer()
    for _, payload in batches:
        consumer.take(payload)
    assert consumer.cached == cached_in(wire.recorded)
    kept = batches[-min(count, wire.config.buffer_steps) :]
    assert wire.replayed(before) == kept
    assert wire.replayed(kept[2][0]) == kept[2:]
    assert wire.replayed(10**6) == []


def test_garbage_on_the_replay_socket_is_not_answered(wire: Wire) -> None:
    with socket(zmq.DEALER) as rude:
        rude.connect(wire.config.replay_endpoint or "")
        for frames in ([b"x"], [b"", b"short"], [b"", b"x" * 60], [b"a", b"b", b"c", b"d"]):
            rude.send_multipart(frames)
        time.sleep(0.05)
        wire.stream.serve(1.0)
        assert not rude.poll(50)
    assert wire.replayed(10**6) == []


def test_socket_files_are_private_and_removed(tmp_path: Path) -> None:
    wire = Wire(tmp_path, 5)
    assert [path.stat().st_mode & 0o077 for path in tmp_path.iterdir()] == [0, 0]
    wire.close()
    assert list(tmp_path.iterdir()) == []


def test_a_taken_endpoint_is_an_error(tmp_path: Path) -> None:
    with socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
        with pytest.raises(EngineError, match=f"KV events cannot be published on tcp://127.0.0.1:{port}"):
            KVEventStream(config, Recorded(None).core.kv.part(KVBlocks))


# ---- the setting


def test_the_setting_is_read_from_json() -> None:
    text = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557","topic":"kv-events"}'
    config = EngineConfig.load({"kv_events_config": text}, env={}).kv_events_config
    assert config is not None
    assert (config.enabled, config.topic, config.buffer_steps) == (True, "kv-events", 10_000)
    assert not KVEventsConfig().enabled


def test_without_an_endpoint_events_use_the_private_run_directory() -> None:
    config = KVEventsConfig(enable_kv_cache_events=True)
    assert not config.is_on_tcp
    assert config.of_engine(2).in_folder("/run/vl-2").endpoint == "ipc:///run/vl-2/kv-events"
    chosen = KVEventsConfig(endpoint="tcp://127.0.0.1:5557")
    assert chosen.is_on_tcp
    assert chosen.of_engine(2).in_folder("/run/vl-2").endpoint == "tcp://127.0.0.1:5559"
    assert KVEventsConfig(replay_endpoint="tcp://127.0.0.1:5558").is_on_tcp


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557"}', "give tcp://127.0.0.1:PORT or ipc:///PATH"),
        ('{"replay_endpoint":"tcp://192.168.1.1:5558"}', "stay on this machine"),
        ('{"unknown":1}', "unknown"),
        ("{", "not valid JSON"),
    ],
)
def test_endpoints_beyond_this_machine_are_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace("*", r"\*")):
        EngineConfig.load({"kv_events_config": text}, env={})
