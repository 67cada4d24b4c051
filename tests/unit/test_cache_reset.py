"""Reset of the prefix cache: nothing computed before is found again, and running requests are not affected."""

import random
from pathlib import Path

import pytest

from tests.recorded import Recorded, agrees, snapshot
from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.protocol.api import PrefixCacheReset
from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.story import story
from vllm_lite.trace.writer import TraceWriter

PROMPT = list(range(12))


def cached_ids(rig: Rig) -> list[int]:
    return [block_id for block_id, _, block_hash in snapshot(rig.kv.pool) if block_hash]


def cached_tokens(rig: Rig, name: str, prompt: list[int]) -> int:
    request = rig.add(name, prompt, max_tokens=2)
    rig.drain()
    return request.num_cached_at_start or 0


def test_unreferenced_blocks_are_forgotten() -> None:
    rig = Rig()
    rig.add("a", PROMPT, max_tokens=3)
    rig.drain()
    assert cached_ids(rig) == [1, 2, 3]
    assert rig.scheduler.reset_prefix_cache() == PrefixCacheReset(3, 0, 0)
    assert cached_ids(rig) == []
    assert cached_tokens(rig, "b", PROMPT) == 0
    assert cached_tokens(rig, "c", PROMPT) == 11


def test_referenced_blocks_are_not_found_and_stay_with_their_sequence() -> None:
    rig = Rig(num_blocks=30)
    rig.add("a", PROMPT, max_tokens=20)
    rig.step()
    rig.step()
    assert rig.scheduler.reset_prefix_cache() == PrefixCacheReset(3, 0, 1)
    rig.scheduler.check_integrity()
    later = rig.add("b", PROMPT, max_tokens=4)
    rig.step()
    assert later.num_cached_at_start == 0
    assert later.sequences[0].tables[0].ids == [5, 6, 7]  # a has 1 to 4
    rig.drain()
    assert rig.output("a") == expected(PROMPT, 20)
    assert rig.output("b") == expected(PROMPT, 4)
    assert cached_tokens(rig, "c", [*PROMPT, *rig.output("a")]) == 12  # b's, which were computed afterwards


def test_a_window_does_not_find_blocks_computed_after_the_reset() -> None:
    """Only the last blocks of a window are looked up: they rest on KV from before."""
    rig = Rig(num_blocks=40, windows=(5,))
    rig.add("a", PROMPT, max_tokens=30)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.drain()
    assert cached_tokens(rig, "b", [*PROMPT, *expected(PROMPT, 28)]) == 0


@pytest.mark.parametrize("when", ["before", "behind"])
def test_swapped_blocks_do_not_return_to_the_cache(when: str) -> None:
    rig = Rig(num_blocks=12, num_host_blocks=30, preemption="swap")
    prompts = {"a": [1, 2, 3, 4, 5], "b": PROMPT}
    for name, prompt in prompts.items():
        rig.add(name, prompt, max_tokens=24)
    rig.step()
    if when == "before":
        assert rig.scheduler.reset_prefix_cache().num_live == 2
    while not rig.scheduler.counters.swaps:
        rig.step()
    if when == "behind":
        done = rig.scheduler.reset_prefix_cache()
        assert done.num_live == 2
        assert done.num_host_blocks > 0
    rig.drain()
    for name, prompt in prompts.items():
        assert rig.output(name) == expected(prompt, 24)
    assert cached_tokens(rig, "c", PROMPT) == 0


def test_demoted_blocks_are_forgotten_on_the_host() -> None:
    rig = Rig(num_blocks=6, num_host_blocks=10)
    rig.add("a", PROMPT, max_tokens=2)
    rig.drain()
    rig.add("b", list(range(20, 36)), max_tokens=2)
    rig.drain()
    assert rig.kv.counters.demoted_blocks > 0
    assert rig.scheduler.reset_prefix_cache().num_host_blocks > 0
    assert cached_tokens(rig, "c", PROMPT) == 0


def test_forks_and_samples_continue_sharing() -> None:
    rig = Rig(num_blocks=40)
    rig.add("a", PROMPT, max_tokens=8, n=2)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.drain()
    for index in range(2):
        assert rig.output("a", index) == expected(PROMPT, 8, sample=index)


def test_without_a_cache_nothing_happens() -> None:
    rig = Rig(caching=False)
    rig.add("a", PROMPT)
    rig.step()
    assert rig.scheduler.reset_prefix_cache() == PrefixCacheReset(0, 0, 1)
    rig.drain()


def test_a_trace_records_the_reset(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    recorded = Recorded(trace, 14, num_host_blocks=20, preemption_mode="swap", max_num_seqs=4)
    recorded.random_work(random.Random(5), 20)
    recorded.add("watched", PROMPT, max_tokens=9, ignore_eos=True)
    recorded.loop()
    recorded.core.reset_prefix_cache()
    recorded.random_work(random.Random(6), 20)
    recorded.drain()
    agrees(trace, recorded)
    assert any(isinstance(record, records.CacheReset) and record.hashes for record in TraceReader(str(trace)))
    assert any("was forgotten" in line for line in story("watched", TraceReader(str(trace))))


def test_replay_without_it_would_find_other_blocks(tmp_path: Path) -> None:
    """The record decides: a trace from which it is taken diverges where the old blocks would have been found."""
    trace = tmp_path / "trace"
    recorded = Recorded(trace)
    for name in "ab":
        recorded.add(name, PROMPT, max_tokens=2, ignore_eos=True)
        recorded.drain()
        recorded.core.reset_prefix_cache()
    recorded.core.close()
    assert Replay(str(trace)).run().divergence is None
    marks = [record for record in TraceReader(str(trace)) if isinstance(record, records.CacheReset)]
    reader, path = TraceReader(str(trace)), tmp_path / "changed"
    writer = TraceWriter(str(path))
    writer.write(reader.header)
    for record in reader:
        if record != marks[0]:
            writer.write(record)
    writer.close()
    assert Replay(str(path)).run().divergence is not None
