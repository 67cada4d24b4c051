"""Preempted sequences whose blocks are written to disk: they resume from there if the host tier has no room."""

from typing import Any

import pytest

from tests.disk_rig import PROMPT, DiskRig
from tests.scheduler_rig import expected
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.protocol.transfers import StoreBlocks
from vllm_lite.trace.records import WAYS, Code
from vllm_lite.trace.story import sentence

OTHER = [40 + index % 5 for index in range(29)]


def crowded(**options: Any) -> DiskRig:
    """A pool for one and a half of two sequences, so that one is preempted."""
    return DiskRig(num_blocks=21, max_num_batched_tokens=64, **options)


def ways(rig: DiskRig) -> list[Any]:
    return [numbers["by"] for code, numbers in rig.decisions if code == "preempted"]


@pytest.mark.parametrize("num_host_blocks", [0, 3])
def test_blocks_without_room_on_the_host_are_loaded_from_disk(num_host_blocks: int) -> None:
    rig = crowded(preemption="swap", num_host_blocks=num_host_blocks)
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        rig.add(name, prompt, 44)
    rig.drain()
    assert ways(rig)[0] == "disk"
    assert rig.output("a") == expected(PROMPT, 44)
    assert rig.output("b") == expected(OTHER, 44)
    assert rig.tier.num_loaded_tokens >= 28 - 4 * num_host_blocks
    assert any(code == "loaded" for code, _ in rig.decisions)


def test_with_room_on_the_host_sequences_are_swapped_there() -> None:
    rig = crowded(preemption="swap", num_host_blocks=40)
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        rig.add(name, prompt, 24)
    rig.drain()
    assert set(ways(rig)) == {"swap"}


def test_the_answer_so_far_is_written_before_chains_that_have_ended() -> None:
    rig = crowded()
    rig.holds = True
    rig.add("ended", [7] * 12, 1)
    while rig.scheduler.requests:
        rig.step()
    first, *_ = rig.pending
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        rig.add(name, prompt, 24)
    while not ways(rig):
        rig.step()
    (victim,) = [each for each in rig.scheduler.waiting if each.num_output]
    keys = {block_hash + b"\0" for block_hash in victim.block_hashes}
    rig.end(first)
    rig.send()
    assert set(rig.pending[-1].keys) <= keys
    rig.drain()
    assert rig.output("a") == expected(PROMPT, 24)


def test_urgent_writes_wait_until_their_pins_leave_enough_free_blocks() -> None:
    rig = DiskRig(num_blocks=65)
    pool, writes = rig.kv.pool, rig.tier.writes
    ids = pool.get_new_blocks(64)
    hashes = [bytes([number]) * 32 for number in range(4)]
    for block_id, block_hash in zip(ids, hashes, strict=False):
        pool.cache_block(block_id, block_hash + b"\0")
    pool.free(reversed(ids[:4]))
    writes.add(hashes, is_urgent=True)
    assert not writes.messages
    pool.free(ids[4:7])
    writes.go_on()
    assert not writes.messages
    pool.free(ids[7:8])
    writes.go_on()
    assert [message.ids for message in writes.messages if isinstance(message, StoreBlocks)] == [ids[:4]]
    assert pool.num_free == 4


@pytest.mark.parametrize(("load", "way"), [(10_000.0, "disk"), (1.0, "swap")])
def test_auto_uses_the_disk_if_it_loads_sooner(load: float, way: str) -> None:
    rig = crowded(preemption="auto", num_host_blocks=40)
    rig.scheduler.measured(Rates(100.0, 100.0, load_blocks_per_s=load))
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        rig.add(name, prompt, 24)
    rig.drain()
    assert ways(rig)[0] == way


@pytest.mark.parametrize(
    ("load", "stored", "swaps"), [(0.0, 100, True), (1000.0, 0, True), (1000.0, 100, False), (1.0, 100, True)]
)
def test_auto_weighs_the_disk_by_the_rate_of_loads(load: float, stored: int, swaps: bool) -> None:
    """100 tokens in 10 blocks: 1 s to compute, 0.4 s to the host and back, and from disk as the rate says."""
    assert Rates(100.0, 50.0, load_blocks_per_s=load).prefer_swap(100, 10, stored) is swaps


def test_why_names_the_disk() -> None:
    decision = [int(Code.PREEMPTED), 1, 0, 2, WAYS.index("disk")]
    assert sentence(decision, {2: "b"}).startswith("was preempted to make room for b: to be loaded from disk as far as")


def test_prompts_of_running_sequences_are_written_though_no_block_is_free() -> None:
    rig = DiskRig(num_blocks=9, max_num_batched_tokens=64)
    rig.holds = True
    rig.add("a", PROMPT, 3)
    rig.step()
    assert rig.kv.pool.num_free == 0
    assert any(isinstance(each, StoreBlocks) for each in rig.pending)
    rig.drain()
