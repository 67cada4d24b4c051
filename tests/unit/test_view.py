"""Views of the engine: the rows and the bytes are those of the scheduler, bounded, and looking changes nothing."""

from array import array

from tests.scheduler_rig import Rig
from vllm_lite.engine.observe.describe import describe
from vllm_lite.engine.observe.view import block_bytes, view
from vllm_lite.protocol.view import IS_CACHED, MAX_REFERENCES, MAX_ROWS, MAX_SEEN, MAX_TABLE, EngineView


def look(rig: Rig, first_block: int = 0) -> EngineView:
    return view(rig.scheduler, first_block, 2.5)


def test_rows_say_what_descriptions_say() -> None:
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
    assert block_bytes(rig.scheduler.kv.pool, block)[0] == MAX_REFERENCES
