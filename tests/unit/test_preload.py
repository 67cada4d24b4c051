"""KV that a start finds on disk is loaded before any request arrives: the latest first, into unused blocks, while there
is no sequence."""

from typing import Any

from tests.disk_rig import PROMPT, DiskRig, restarted
from tests.scheduler_rig import expected
from vllm_lite.engine.blocks.preload import CHUNK
from vllm_lite.protocol.transfers import LoadBlocks


def written(num_chats: int = 1, **options: Any) -> DiskRig:
    """A rig that has served chats of seven blocks each, which begin with different tokens."""
    rig = DiskRig(num_blocks=100, **options)
    for number in range(num_chats):
        rig.serve(f"{number}", [number, *PROMPT])
    return rig


def filled(rig: DiskRig, **options: Any) -> DiskRig:
    """Another engine over the same disk, after it has loaded ahead and before any request."""
    again = restarted(rig, **{"num_blocks": 100, "preload": 0.5, **options})
    again.send()
    again.end_all()
    assert again.kv.pool.num_used == 0
    again.scheduler.check_integrity()
    return again


def test_a_chat_is_in_memory_before_its_next_turn() -> None:
    rig = filled(written())
    assert [len(load.keys) for load in rig.loads] == [8]
    turn = [0, *PROMPT, *expected([0, *PROMPT], 5), 7, 8]
    assert rig.serve("next turn", turn) == 32
    assert len(rig.loads) == 1, "nothing more was loaded"
    assert rig.tier.num_loaded_tokens == 0, "it was a hit in memory"


def test_the_latest_come_first_and_no_more_than_a_share() -> None:
    rig = written(num_chats=10)
    keys = list(rig.contents)
    again = filled(rig)
    loaded = [key for load in again.loads for key in load.keys]
    assert loaded == keys[:49], "half of 99 blocks"
    assert [len(load.keys) for load in again.loads] == [CHUNK, 49 - CHUNK]
    assert not filled(rig, preload=0.0).loads


def test_a_request_during_the_preload_is_first_and_shares_pending_loads() -> None:
    rig = written(num_chats=8)
    again = restarted(rig, num_blocks=100, preload=0.9)
    again.holds = True
    again.send()
    assert len(again.pending) == 1
    request = again.add("a", [0, *PROMPT, 1, 2, 3], 9)
    again.step()
    assert again.loads[1:] == [], "its blocks are on their way already"
    again.end(again.pending[0])
    again.send()
    assert again.pending == [], "while somebody is there nothing is loaded that nobody asked for"
    again.add("b", [7, *PROMPT, 1, 2, 3], 9)
    again.drain()
    assert request.num_cached_at_start == 28
    assert [len(load.keys) for load in again.loads] == [32, 7, 25], "behind them it goes on with what is not there yet"


def test_nothing_is_pushed_out_and_nothing_loaded_that_is_new() -> None:
    rig = written(num_chats=4)
    again = DiskRig(num_blocks=100, preload=0.9)
    again.serve("busy", [49, *PROMPT])
    again.contents.update(rig.contents)
    again.scheduler.stored_keys(list(rig.contents), [])
    again.send()
    assert not [each for each in again.pending if isinstance(each, LoadBlocks)], "another engine has written it"


def test_nothing_is_pushed_out_of_memory() -> None:
    rig = restarted(written(num_chats=5), num_blocks=50, preload=1.0, max_num_seqs=16)
    rig.holds = True
    rig.send()
    rig.add("long", [49, *PROMPT])
    for number in range(8):  # with it they use the other 17 blocks, and half of them are full of nothing in the end
        rig.add(f"short {number}", [number], 2)
    rig.step()
    rig.drain()
    assert [len(load.keys) for load in rig.loads] == [CHUNK], "the next to be used are full of chats"
    assert rig.kv.pool.num_cached == CHUNK + 8


def test_new_chats_count_for_the_share() -> None:
    rig = restarted(written(num_chats=8), num_blocks=100, preload=0.5)
    rig.holds = True
    rig.send()
    rig.add("new", [49, *PROMPT])
    rig.step()
    rig.drain()
    assert [len(load.keys) for load in rig.loads] == [CHUNK], "17 more would be beyond half of 99"


def test_blocks_that_were_reset_or_lost_are_not_loaded() -> None:
    rig = restarted(written(num_chats=8), num_blocks=100, preload=0.9)
    rig.send()
    rig.scheduler.reset_prefix_cache()
    rig.end_all()
    assert (len(rig.loads), rig.kv.pool.num_cached) == (1, 0)
    rig = restarted(written(num_chats=8), num_blocks=100, preload=0.9)
    rig.fails = lambda key: key == next(iter(rig.contents))
    rig.send()
    rig.end_all()
    assert rig.kv.pool.num_cached == 63
    assert rig.tier.num_failed == 1


def test_new_workers_preload_again_if_no_request_waits() -> None:
    rig = filled(written(num_chats=8), preload=0.9)
    rig.serve("a", [0, *PROMPT])
    for is_idle in (True, False):
        if not is_idle:
            rig.add("b", [0, *PROMPT])
        rig.holds, rig.loads = True, []
        rig.lose_workers()
        assert rig.tier.take_messages() == []
        rig.pending.clear()
        rig.replace_workers()
        rig.scheduler.stored_keys(list(rig.contents), [])
        rig.send()
        assert [len(load.keys) for load in rig.loads] == ([CHUNK] if is_idle else [])
        rig.drain()
        assert rig.kv.pool.num_cached >= (64 if is_idle else 7)
        assert is_idle or len(rig.loads) == 1, "who waited has loaded what it needs, and nothing is loaded behind it"
