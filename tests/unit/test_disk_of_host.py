"""Blocks that have moved to the host before they were written, or could not be written: they go to disk from there."""

from typing import Any

import pytest

from tests.disk_rig import PROMPT, DiskRig, restarted
from vllm_lite.protocol.transfers import StoreBlocks

OTHER = [40 + index % 5 for index in range(41)]
NUM_BLOCKS = 14


def rig_with_host(num_host_blocks: int = 40) -> DiskRig:
    """A rig whose device pool has room for one of the two prompts."""
    return DiskRig(NUM_BLOCKS, num_host_blocks=num_host_blocks, max_num_batched_tokens=64)


def ask(rig: DiskRig, name: str, prompt: list[int], **params: Any) -> list[bytes]:
    """Serve a request alone without waiting for the disk. Returns the keys of its full blocks."""
    rig.add(name, prompt, 1, **params)
    (sequence,) = rig.scheduler.waiting
    while rig.scheduler.requests:
        rig.step()
    return [block_hash + b"\0" for block_hash in sequence.block_hashes[: len(prompt) // 4]]


def on_host(rig: DiskRig, keys: list[bytes]) -> set[bytes]:
    assert rig.host is not None
    return {key for key in keys if rig.host.find(key) is not None}


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_blocks_on_the_host_are_written_from_there(num_host_blocks: int) -> None:
    rig = rig_with_host(num_host_blocks)
    rig.holds = True
    keys = ask(rig, "a", PROMPT)
    writing = {key for message in rig.pending for key in message.keys}
    assert 0 < len(writing) < len(keys)
    sent: list[StoreBlocks] = list(rig.pending)
    ask(rig, "b", OTHER)
    late = [key for key in keys if key not in writing and rig.kv.pool.get_cached_block(key) is None]
    assert late
    assert on_host(rig, keys) >= set(late) if num_host_blocks else True
    while rig.pending:
        message = rig.pending[0]
        assert isinstance(message, StoreBlocks)
        sent.append(message)
        rig.end(message)
        rig.send()
    places = {key: block_id for message in sent for key, block_id in zip(message.keys, message.ids, strict=True)}
    if num_host_blocks:
        assert all(places[key] >= NUM_BLOCKS for key in late), "they were read on the host"
        assert set(keys) <= rig.contents.keys()
        again = restarted(rig, num_blocks=30)
        assert again.serve("a", PROMPT, 1) == 28
    else:
        assert not set(late) & rig.contents.keys(), "nobody has them any more"
    rig.drain()


def test_blocks_that_failed_to_be_written_are_written_from_the_host() -> None:
    rig = rig_with_host()
    rig.fails = lambda _: True
    keys = ask(rig, "a", PROMPT)
    rig.drain()
    assert not rig.contents
    rig.fails = lambda _: False
    other = ask(rig, "b", OTHER)
    rig.drain()
    moved = on_host(rig, keys)
    assert moved
    assert rig.contents.keys() & set(keys) == moved, "what moved, and nothing else of the first prompt"
    assert set(other) <= rig.contents.keys()
    assert rig.tier.index >= moved


def test_chains_beyond_the_bound_are_written_when_they_move_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_lite.engine.blocks.write_through.MAX_CHAINS", 0)
    rig = rig_with_host()
    keys = ask(rig, "a", PROMPT)
    rig.drain()
    assert not rig.contents
    assert rig.tier.writes.num_dropped
    monkeypatch.setattr("vllm_lite.engine.blocks.write_through.MAX_CHAINS", 9)
    ask(rig, "b", OTHER)
    rig.drain()
    assert rig.contents.keys() & set(keys) == on_host(rig, keys) != set()


def test_blocks_excluded_from_the_disk_are_not_written_from_the_host() -> None:
    rig = rig_with_host()
    keys = ask(rig, "a", PROMPT, prompt_logprobs=1)
    ask(rig, "b", OTHER)
    rig.drain()
    assert on_host(rig, keys)
    assert not rig.contents.keys() & set(keys)


def test_after_a_reset_nothing_is_written_late() -> None:
    rig = rig_with_host()
    rig.fails = lambda _: True
    keys = ask(rig, "a", PROMPT)
    rig.drain()
    rig.fails = lambda _: False
    rig.scheduler.reset_prefix_cache(stored=True)
    ask(rig, "a with scores", PROMPT, prompt_logprobs=1)
    ask(rig, "b", OTHER)
    rig.drain()
    assert not rig.contents.keys() & set(keys)


@pytest.mark.parametrize(("num_host_blocks", "num_pinned"), [(12, 2), (2, 1)])
def test_blocks_of_the_host_are_pinned_while_they_are_written_half_of_the_free_ones_at_most(
    num_host_blocks: int, num_pinned: int
) -> None:
    rig = rig_with_host(num_host_blocks)
    rig.fails = lambda _: True
    keys = ask(rig, "a", PROMPT)
    rig.drain()
    rig.fails, rig.holds = lambda _: False, True
    ask(rig, "b", OTHER)
    rig.add("c", OTHER[::-1], 1)
    rig.step()
    pinned = {block_id for message in rig.pending for block_id in message.ids if block_id >= NUM_BLOCKS}
    assert len(pinned) == num_pinned
    assert rig.host is not None
    assert rig.host.num_used == num_pinned
    rig.drain()
    assert rig.host.num_used == 0
    assert rig.contents.keys() & set(keys)
