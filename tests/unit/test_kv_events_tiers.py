"""KV events of the host and disk tiers: a consumer that reads `medium` knows the contents of each."""

import random
from typing import Any

import msgspec
import pytest

from tests.disk_rig import PROMPT, DiskRig, restarted
from tests.recorded import Recorded
from vllm_lite.client.engines.cached_blocks import _read
from vllm_lite.engine.blocks.events import KVEvents
from vllm_lite.engine.blocks.groups import make_groups
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.protocol.transfers import STATE
from vllm_lite.ray.reported_blocks import ReportedBlocks
from vllm_lite.runtime.nested_settings import KVEventsConfig


class Consumer:
    """Applies events to a set of (medium, hash, group)."""

    def __init__(self) -> None:
        self.held: set[tuple[str, bytes, int]] = set()

    def take(self, payload: bytes) -> None:
        for kind, *values in msgspec.msgpack.decode(payload)[1]:
            if kind == "AllBlocksCleared":
                self.held.clear()
            elif kind == "BlockStored":
                hashes, parent, tokens, size, _, medium, _, _, group, *_ = values
                if medium != "GPU":
                    assert (parent, tokens, size) == (None, [], 0)
                new = {(medium, each, group) for each in hashes}
                assert not new & self.held, "stored twice"
                self.held |= new
            else:
                hashes, medium, group = values
                gone = {(medium, each, group) for each in hashes}
                assert gone <= self.held, "it was not there"
                self.held -= gone

    def at(self, medium: str) -> set[bytes]:
        return {block_hash + bytes([group]) for name, block_hash, group in self.held if name == medium}


def watch(rig: DiskRig, *, tiers: bool = True) -> tuple[KVEvents, list[bytes]]:
    batches: list[bytes] = []
    config = KVEventsConfig(tiers=tiers)
    return KVEvents(config, rig.kv.part(KVBlocks), batches.append, disk=rig.tier.index), batches


def blocks_of(keys: set[bytes]) -> set[bytes]:
    return {key for key in keys if not key.endswith(STATE)}


@pytest.mark.parametrize("num_state_slots", [0, 6])
def test_a_consumer_follows_blocks_on_disk(num_state_slots: int) -> None:
    rig = DiskRig(num_state_slots=num_state_slots)
    consumer = Consumer()
    events, batches = watch(rig)

    def flush() -> None:
        events.flush(1.0)
        while batches:
            consumer.take(batches.pop(0))
        assert consumer.at("DISK") == blocks_of(rig.tier.index)

    rig.serve("a", PROMPT, 8)
    flush()
    assert len(consumer.at("DISK")) == 9
    rig.scheduler.reset_prefix_cache()  # which clears all for a consumer; what is on disk is told again
    flush()
    assert consumer.at("DISK")
    assert not consumer.at("GPU")
    key = next(iter(blocks_of(rig.tier.index)))
    rig.scheduler.stored_keys([], [key])
    flush()
    rig.serve("b", [7] * 20, 3)
    flush()
    rig.scheduler.reset_prefix_cache(stored=True)
    flush()
    assert not consumer.held


def test_items_that_a_load_finds_missing_are_reported() -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT)
    again = restarted(rig)
    consumer, lost = Consumer(), min(again.contents)
    consumer.held = {("DISK", key[:-1], key[-1]) for key in again.contents}
    events, batches = watch(again)
    again.fails = lambda key: key == lost
    again.serve("a", PROMPT)
    events.flush(1.0)
    told = [event for payload in batches for event in msgspec.msgpack.decode(payload)[1]]
    assert ["BlockRemoved", [lost[:-1]], "DISK", 0] in told
    for payload in batches:
        consumer.take(payload)
    assert consumer.at("DISK") == again.tier.index


def test_a_consumer_follows_blocks_on_the_host() -> None:
    batches: list[bytes] = []
    recorded = Recorded(None, 18, (None, 6), 12, preemption_mode="swap")
    blocks = recorded.core.kv.part(KVBlocks)
    events = KVEvents(KVEventsConfig(tiers=True), blocks, batches.append)
    consumer, loop, most = Consumer(), recorded.loop, 0

    def watched(fail: bool = False) -> bool:
        nonlocal most
        went_on = loop(fail)
        events.flush(1.0)
        while batches:
            consumer.take(batches.pop(0))
        assert isinstance(blocks.host, HostTier)
        assert consumer.at("CPU") == set(blocks.host.pool.cached)
        most = max(most, len(consumer.at("CPU")))
        return went_on

    recorded.loop = watched  # type: ignore[method-assign]
    recorded.random_work(random.Random(7), 120)
    recorded.drain()
    assert most


def test_a_second_copy_on_the_host_is_not_reported() -> None:
    blocks = KVBlocks(BlockPool(8), make_groups((None,), 4), 4, host=(host := HostTier(3, 8)))
    batches: list[bytes] = []
    events, consumer, key = KVEvents(KVEventsConfig(tiers=True), blocks, batches.append), Consumer(), b"k" * 32 + b"\0"
    for count in (1, 1, 0):
        host.unpin(host.reserve([key] if count else [b"a" * 32 + b"\0", b"b" * 32 + b"\0"]))
        events.flush(1.0)
        for payload in batches:
            consumer.take(payload)
        batches.clear()
        assert key in consumer.at("CPU")
    host.unpin(host.reserve([None, None, None]))
    events.flush(1.0)
    consumer.take(batches[0])
    assert not consumer.held


def test_by_default_only_the_device_is_reported() -> None:
    rig = DiskRig(num_host_blocks=4)
    events, batches = watch(rig, tiers=False)
    rig.serve("a", PROMPT, 8)
    rig.serve("b", [9] * 60, 8)
    events.flush(1.0)
    media = {
        event[6] for payload in batches for event in msgspec.msgpack.decode(payload)[1] if event[0] == "BlockStored"
    }
    assert media == {"GPU"}


def test_our_own_routers_count_blocks_of_the_device_only() -> None:
    stored: list[Any] = ["BlockStored", [b"x" * 32], None, [], 0, None, "DISK", None, None, 0, None, None]
    assert not _read(stored)[2]
    assert not _read(["BlockRemoved", [b"x" * 32], "CPU", 0])[2]
    assert not _read({"type": "BlockStored", "block_hashes": [b"x" * 32], "medium": "DISK", "group_idx": 0})[2]
    assert _read([*stored[:6], "GPU", *stored[7:]])[2]
    reported = ReportedBlocks(10)
    reported.apply(0, msgspec.msgpack.encode([1.0, [stored], 0]))
    assert not reported.summary().hashes
    reported.apply(1, msgspec.msgpack.encode([1.0, [[*stored[:6], "GPU", *stored[7:]]], 0]))
    assert reported.summary().hashes
