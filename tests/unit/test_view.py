"""Views of the engine: rows and bytes equal the scheduler's, they are bounded, and viewing changes nothing."""

from array import array

import pytest

from tests.recorded import Recorded
from tests.scheduler_rig import Rig
from vllm_lite.engine.observe import conversations
from vllm_lite.engine.observe.describe import describe
from vllm_lite.engine.observe.view import block_bytes, block_content, view
from vllm_lite.protocol.view import (
    IS_CACHED,
    MAX_CONVERSATIONS,
    MAX_REFERENCES,
    MAX_ROWS,
    MAX_SEEN,
    MAX_TABLE,
    BlockContent,
    EngineView,
    StepWork,
)


def look(rig: Rig, first_block: int = 0) -> EngineView:
    return view(rig.scheduler, first_block, 2.5)


def test_rows_agree_with_descriptions() -> None:
    rig = Rig(num_blocks=9, max_num_batched_tokens=64)
    rig.add("a", list(range(20)), max_tokens=9)
    rig.step()
    rig.add("b", list(range(20, 40)), max_tokens=3)
    rig.add("c", list(range(20, 36)), max_tokens=3)
    rig.step()
    rows = {row.request_id: row for row in look(rig).rows}
    assert list(rows) == ["a", "b", "c"], "what runs, and then the queue"
    described = describe(rig.scheduler, rig.scheduler.requests.values(), 2.5)
    for state in described:
        row, sample = rows[state.request_id], state.samples[0]
        assert (row.reason, row.place) == (state.admission.reason, sample.place)
        assert (row.status, row.num_computed, row.num_output) == (sample.status, sample.num_computed, sample.num_output)
        assert (row.num_prompt, row.num_cached, row.age_s) == (state.num_prompt, state.num_cached, state.age_s)
        assert (row.num_blocks, row.num_host_blocks) == (sample.num_blocks, sample.num_host_blocks)
    assert (rows["b"].reason, rows["c"].reason) == ("waits_for_blocks", "waits_for_turn")


def test_a_table_has_the_blocks_and_a_block_its_references() -> None:
    rig = Rig(num_blocks=20)
    prompt = list(range(9))
    rig.add("a", prompt, max_tokens=8)
    rig.step()
    rig.add("b", prompt, max_tokens=8)
    rig.step()
    seen = look(rig)
    tables = [array("I", row.table).tolist() for row in seen.rows]
    requests = rig.scheduler.requests
    assert tables == [requests[name].sequences[0].tables[0].ids for name in "ab"]
    assert tables[0][:2] == tables[1][:2], "two full blocks are shared"
    assert [seen.blocks[block] for block in tables[0]] == [2 | IS_CACHED, 2 | IS_CACHED, 1]
    assert seen.blocks[tables[1][2]] == 1
    assert seen.num_requests == 2
    assert (seen.num_blocks, seen.block_size) == (20, 4)
    rig.drain()
    free = look(rig)
    assert (free.rows, free.num_requests, free.step_tokens) == ([], 0, 0)
    assert free.blocks[tables[0][0]] == IS_CACHED, "free, and a later prompt finds it"


def test_a_request_of_several_samples_has_one_row() -> None:
    rig = Rig(num_blocks=40)
    rig.add("a", [1, 2, 3, 4, 5], max_tokens=8, n=3)
    rig.step()
    rig.step()
    (row,) = look(rig).rows
    assert (row.num_samples, row.num_output) == (3, sum(s.num_output for s in rig.scheduler.requests["a"].sequences))


def test_a_view_is_bounded() -> None:
    rig = Rig(num_blocks=MAX_SEEN + 10, max_num_seqs=2, max_num_batched_tokens=4 * MAX_TABLE + 40, max_model_len=4096)
    rig.add("long", list(range(4 * MAX_TABLE + 9)), max_tokens=2)
    for number in range(MAX_ROWS + 5):
        rig.add(f"r{number}", [number, 1], max_tokens=2)
    rig.step()
    seen = look(rig)
    assert (len(seen.rows), seen.num_requests) == (MAX_ROWS, MAX_ROWS + 6)
    assert (len(seen.blocks), len(seen.rows[0].table)) == (MAX_SEEN, 4 * MAX_TABLE)
    assert seen.rows[0].num_blocks > MAX_TABLE
    rest = look(rig, MAX_SEEN)
    assert (rest.first_block, len(rest.blocks)) == (MAX_SEEN, 10)
    assert look(rig, MAX_SEEN + 10).blocks == b""


def test_looking_changes_nothing() -> None:
    looked, other = Rig(num_blocks=9), Rig(num_blocks=9)
    for rig in (looked, other):
        for name in "abc":
            rig.add(name, list(range(ord(name), ord(name) + 12)), max_tokens=6)
    for _ in range(40):
        looked.step()
        look(looked)
        other.step()
    assert look(looked) == look(other)
    assert looked.decisions == other.decisions
    assert [looked.output(name) for name in "abc"] == [other.output(name) for name in "abc"]


def test_many_references_are_the_most_that_fit() -> None:
    rig = Rig(num_blocks=4)
    (block,) = rig.scheduler.kv.pool.get_new_blocks(1)
    rig.scheduler.kv.pool.touch([block] * 500)
    assert block_bytes(rig.scheduler.kv, block, 1)[0] == MAX_REFERENCES


def test_blocks_of_the_host_follow_those_of_the_device() -> None:
    rig = Rig(num_blocks=12, num_host_blocks=20, max_num_batched_tokens=64, preemption="swap")
    for name in "abc":
        rig.add(name, list(range(ord(name) - 90, ord(name) - 77)), max_tokens=20)
    is_seen = False
    while rig.scheduler.requests:
        rig.step()
        seen = look(rig)
        assert (seen.num_blocks, seen.num_host_blocks, len(seen.blocks)) == (12, 20, 32)
        assert look(rig, 9).blocks == seen.blocks[9:]
        assert look(rig, 30).blocks == seen.blocks[30:]
        assert look(rig, 32).blocks == b""
        assert block_bytes(rig.scheduler.kv, 10, 5) == seen.blocks[10:15]
        for row in seen.rows:
            table = array("I", row.table).tolist()
            on_host = [block for block in table if block >= 12]
            assert (len(on_host), len(table) - len(on_host)) == (row.num_host_blocks, row.num_blocks)
            assert all(seen.blocks[block] & MAX_REFERENCES for block in table)
            is_seen |= bool(on_host)
    assert is_seen, "something was swapped"


def test_a_block_has_its_tokens_and_its_copies() -> None:
    rig = Rig(num_blocks=8, num_host_blocks=20, max_num_batched_tokens=64)
    scheduler = rig.scheduler
    prompt = list(range(9))
    rig.add("a", prompt, max_tokens=2)
    rig.step()
    table = array("I", look(rig).rows[0].table).tolist()
    hashes = scheduler.requests["a"].sequences[0].block_hashes
    assert block_content(scheduler, table[1]) == BlockContent(table[1], 1, hashes[1], 0, ("device",))
    assert block_content(scheduler, table[2]) == BlockContent(table[2], 1)
    assert block_content(scheduler, 0) == BlockContent(0, 0)
    assert block_content(scheduler, 28) == BlockContent(28), "there is none"
    rig.drain()
    rig.add("b", list(range(20, 47)), max_tokens=1)  # evicts a's, which are demoted
    rig.drain()
    contents = [block_content(scheduler, block) for block in range(8, 28)]
    assert {each.hash for each in contents if each.tiers == ("host",)} >= set(hashes[:2])


def sums(rig: Rig) -> tuple[int, int]:
    rows = look(rig).conversations
    return sum(row.num_prompt for row in rows), sum(row.num_cached for row in rows)


def test_prompts_that_continue_from_others_are_one_conversation() -> None:
    rig = Rig(num_blocks=60, max_num_batched_tokens=64)
    first = list(range(9))
    for name, prompt in (
        ("a1", first),
        ("b1", [30, *first]),
        ("a2", [*first, 9, 10, 11, 12, 13]),
        ("short", [1, 2]),
        ("a3", [*first, 9, 10, 11, 12, 13, 14, 15, 16]),
        ("b2", [30, *first]),
    ):
        rig.add(name, prompt, max_tokens=2)
        rig.drain()
    rows = look(rig).conversations
    assert [(row.request_id, row.num_requests, row.num_prompt, row.num_cached) for row in rows] == [
        ("b2", 2, 20, 8),
        ("a3", 3, 40, 20),
    ]
    assert rows[0].number == 2
    counters = rig.scheduler.counters
    assert sums(rig) == (counters.prompt_tokens - 2, counters.cached_tokens), "all but the prompt without a block"


def test_a_request_that_is_resumed_counts_once() -> None:
    rig = Rig(num_blocks=9, max_num_batched_tokens=64)
    for name in "abc":
        rig.add(name, list(range(ord(name), ord(name) + 12)), max_tokens=12)
    rig.drain()
    assert rig.scheduler.counters.preemptions > 0
    assert [row.num_requests for row in look(rig).conversations] == [1, 1, 1]
    assert sums(rig) == (36, rig.scheduler.counters.cached_tokens)


def test_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_KNOWN", MAX_CONVERSATIONS + 3)
    rig = Rig(num_blocks=200)
    for number in range(MAX_CONVERSATIONS + 9):
        rig.add(f"r{number}", [number % 50, number // 50, 1, 2, 3], max_tokens=1)
        rig.drain()
    rows = look(rig).conversations
    assert [row.request_id for row in rows] == [f"r{number}" for number in range(MAX_CONVERSATIONS + 8, 8, -1)]
    rig.add("again", [0, 0, 1, 2, 3], max_tokens=1)  # r0's is forgotten, though its block is still found
    rig.drain()
    newest = look(rig).conversations[0]
    assert (newest.num_requests, newest.num_cached, newest.number) == (1, 4, MAX_CONVERSATIONS + 10)


def test_a_step_has_its_moves() -> None:
    rig = Rig(num_blocks=12, num_host_blocks=20, max_num_batched_tokens=64, preemption="swap")
    for name in "ab":
        rig.add(name, list(range(ord(name) - 90, ord(name) - 77)), max_tokens=14, n=2)
    counters = rig.scheduler.counters
    moved = [0, 0, 0]
    while (output := rig.scheduler.schedule()) is not None:
        rig.worker.submit(output)
        work = look(rig).work
        moved = [
            a + b for a, b in zip(moved, (work.num_copies, work.num_swapped_out, work.num_swapped_in), strict=True)
        ]
        while (result := rig.worker.poll()) is not None:
            rig.scheduler.update(result)
        assert look(rig).work == StepWork(), "no step is in flight"
    out, back = counters.swapped_out_blocks, counters.swapped_in_blocks
    assert moved == [counters.copied_blocks, out + counters.demoted_blocks, back + counters.promoted_blocks]
    assert min(counters.copied_blocks, out, back) > 0


def test_drafts_of_the_latest_result_are_right_or_wrong() -> None:
    recorded = Recorded(None, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    recorded.add("one", [1, 2, 3], max_tokens=40, ignore_eos=True)
    drafted, right = 0, 0
    while recorded.scheduler.requests:
        recorded.loop()
        work = view(recorded.scheduler, 0, 1.0).work
        drafted, right = drafted + work.num_drafted, right + work.num_right
    counters = recorded.scheduler.counters
    assert (drafted, right) == (counters.draft_tokens, counters.accepted_tokens)
    assert 0 < right < drafted
