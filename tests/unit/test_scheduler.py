"""The scheduler against a worker that checks every slot it reads (tests/simulated_worker.py)."""

import pytest

from tests.scheduler_rig import VOCAB, Rig, expected
from tests.simulated_worker import next_token
from vllm_lite.errors import ProtocolError, RequestError
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.step import NOT_FINITE, Continue, Finish, ModelOutput, NewRequest, Preempt, Resume


def test_whole_prompt_then_one_token_per_step() -> None:
    rig = Rig()
    rig.add("a", [1, 2, 3, 4, 5], max_tokens=3)
    step = rig.scheduler.schedule()
    assert step is not None
    (entry,) = step.entries
    assert isinstance(entry, NewRequest)
    assert (entry.num_computed, entry.num_tokens, entry.block_ids) == (0, 5, [[1, 2]])
    token = next_token([1, 2, 3, 4, 5], VOCAB)
    rig.scheduler.update(ModelOutput(0, 1, pack_tokens([token])))
    step = rig.scheduler.schedule()
    assert step is not None
    assert step.entries == [Continue(0, 1, [])]


def test_a_new_block_travels_as_a_diff() -> None:
    rig = Rig()
    rig.add("a", [1, 2, 3, 4], max_tokens=3)
    rig.step()
    step = rig.scheduler.schedule()
    assert step is not None
    assert step.entries == [Continue(0, 1, [[2]])]


def test_long_prompt_is_chunked_by_the_budget() -> None:
    rig = Rig(max_num_batched_tokens=7)
    rig.add("a", list(range(20)))
    rig.drain()
    assert rig.worker.num_scheduled[:4] == [7, 7, 6, 1]


def test_without_chunking_a_prompt_waits_for_a_step_it_fits_into() -> None:
    rig = Rig(max_num_batched_tokens=20, chunked_prefill=False)
    rig.add("a", list(range(15)))
    rig.add("b", list(range(20, 30)))
    rig.drain()
    assert rig.worker.num_scheduled[:2] == [15, 11]


def test_chunks_of_a_long_prompt_are_shared_before_it_is_whole() -> None:
    rig = Rig(num_blocks=30, max_num_batched_tokens=8)
    rig.add("a", list(range(24)), max_tokens=2)
    rig.step()
    rig.step()
    request = rig.add("b", [*range(16), 40], max_tokens=2)
    rig.step()
    rig.step()
    assert request.num_cached_at_start == 16


def test_running_sequences_are_scheduled_before_waiting_ones() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.add("a", [1, 2, 3, 4], max_tokens=3)
    rig.step()
    rig.add("b", list(range(10, 20)))
    rig.step()
    assert len(rig.output("a")) == 2
    assert rig.worker.num_scheduled == [4, 4]


def test_slots_of_the_batch_are_limited() -> None:
    rig = Rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name, [1, 2, 3], max_tokens=4)
    rig.step()
    assert [sequence.request.request_id for sequence in rig.scheduler.running] == ["a", "b"]
    rig.drain()


def test_equal_prompts_in_one_step_share_their_blocks() -> None:
    rig = Rig(max_num_batched_tokens=64)
    for name in "abc":
        rig.add(name, list(range(9)), max_tokens=2)
    rig.step()
    assert rig.worker.num_scheduled == [9 + 1 + 1]
    assert rig.kv.pool.num_used == 2 + 3
    rig.drain()


def test_whole_prompt_hit_recomputes_one_token() -> None:
    rig = Rig(max_num_batched_tokens=64)
    rig.add("a", list(range(8)), max_tokens=1)
    rig.drain()
    written = rig.worker.num_written
    request = rig.add("b", list(range(8)), max_tokens=1)
    rig.drain()
    assert rig.worker.num_scheduled[-1] == 1
    assert rig.worker.num_written == written
    assert request.num_cached_at_start == 7
    assert rig.output("b") == rig.output("a")


def test_generated_tokens_are_cached_too() -> None:
    rig = Rig(num_blocks=30, max_num_batched_tokens=64)
    rig.add("a", [1, 2, 3], max_tokens=10)
    rig.drain()
    request = rig.add("b", [1, 2, 3, *rig.output("a")], max_tokens=1)
    rig.drain()
    assert request.num_cached_at_start == 12  # the last token's KV was never computed


def test_the_last_to_come_is_preempted_and_ends_with_the_same_tokens() -> None:
    rig = Rig(num_blocks=7, caching=False)
    rig.add("a", [1, 2, 3, 4, 5, 6], max_tokens=12)
    rig.add("b", [11, 12, 13, 14, 15, 16], max_tokens=12)
    kinds: set[type] = set()
    apply = rig.worker._apply

    def spy(entry: object) -> tuple[int, int, int] | None:
        kinds.add(type(entry))
        return apply(entry)

    rig.worker._apply = spy  # type: ignore[method-assign]
    rig.drain()
    assert {Preempt, Resume, Finish} & kinds >= {Preempt, Resume}
    assert rig.scheduler.counters.preemptions > 0
    assert rig.output("a") == expected([1, 2, 3, 4, 5, 6], 12)
    assert rig.output("b") == expected([11, 12, 13, 14, 15, 16], 12)


def test_stop_token_ends_before_the_length() -> None:
    prompt = [3, 1, 4]
    answer = expected(prompt, 10)
    rig = Rig()
    rig.add("a", prompt, max_tokens=10, stop=frozenset([answer[4]]))
    rig.drain()
    assert rig.output("a") == answer[: answer.index(answer[4]) + 1]
    assert rig.reasons["a", 0] == "stop"


def test_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(num_blocks=5)
    with pytest.raises(RequestError, match=r"the prompt has 16 tokens; .* holds 16 \(4 blocks of 4"):
        rig.add("a", list(range(16)))
    rig.add("b", list(range(15)))
    rig.drain()
    assert len(rig.output("b")) == 1


def test_abort_frees_at_once_whatever_the_state() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("running", [1, 2, 3], max_tokens=9)
    rig.add("waiting", [1, 2, 3], max_tokens=9)
    rig.step()
    step = rig.scheduler.schedule()
    assert step is not None
    rig.abort("running")
    rig.abort("waiting")
    assert rig.kv.pool.num_used == 0
    rig.worker.submit(step)
    output = rig.worker.poll()
    assert output is not None
    assert rig.scheduler.update(output) == []
    rig.scheduler.check_integrity()


def test_handles_are_reused_after_the_finish_is_sent() -> None:
    rig = Rig()
    for index in range(5):
        rig.add(f"r{index}", [1, 2, index], max_tokens=2)
        rig.drain()
    assert set(rig.worker.sequences) == {0}


@pytest.mark.parametrize(("why", "num_cached"), [(NOT_FINITE, 2), ("its output does not follow its grammar", 4)])
def test_failed_sequence_ends_alone_and_its_blocks_are_forgotten_if_they_may_be_wrong(
    why: str, num_cached: int
) -> None:
    rig = Rig(max_num_batched_tokens=64)
    rig.add("good", list(range(8)), max_tokens=3)
    rig.add("bad", list(range(20, 29)), max_tokens=3)
    step = rig.scheduler.schedule()
    assert step is not None
    good = next_token(list(range(8)), VOCAB)
    produced = rig.scheduler.update(ModelOutput(0, 1, pack_tokens([good, 0]), failed=[(1, why)]))
    assert [(item.request.request_id, item.reason) for item in produced] == [("good", None), ("bad", "error")]
    assert (produced[1].error, rig.kv.pool.num_cached) == (why, num_cached)
    assert rig.scheduler.counters.corrupted_requests == (why == NOT_FINITE)
    rig.scheduler.check_integrity()


@pytest.mark.parametrize(
    "output", [ModelOutput(1, 1, pack_tokens([1])), ModelOutput(0, 2, pack_tokens([1])), ModelOutput(0, 1, b"")]
)
def test_output_of_another_step_is_refused(output: ModelOutput) -> None:
    rig = Rig()
    rig.add("a", [1])
    rig.scheduler.schedule()
    with pytest.raises(ProtocolError):
        rig.scheduler.update(output)
