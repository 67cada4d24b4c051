"""Descriptions of live requests: exact numbers in every state, and looking changes nothing."""

import pytest

from tests.recorded import Recorded, state_of
from tests.scheduler_rig import Rig
from vllm_lite.engine.blocks.part import PrefixHit
from vllm_lite.engine.observe.describe import describe
from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import AdmissionState, RequestState, SampleState


def look(rig: Rig, *names: str) -> list[RequestState]:
    requests = rig.scheduler.requests
    return describe(rig.scheduler, [requests[name] for name in dict.fromkeys(names) if name in requests], 2.5)


def one(rig: Rig, name: str) -> RequestState:
    (state,) = look(rig, name)
    return state


def test_describes_a_running_request() -> None:
    rig = Rig(num_blocks=20)
    rig.add("a", [1, 2, 3, 4, 5], max_tokens=8, priority=3, deadline_s=4.0)
    rig.step()
    assert one(rig, "a") == RequestState(
        "a",
        AdmissionState("OK", None, 2, 17, 0, 19),
        [SampleState(0, "running", None, 5, 1, 2, 0)],
        0,
        5,
        0,
        0,
        3,
        2.5,
        1.5,
    )


def test_blocks_that_others_hold_are_not_needed() -> None:
    rig = Rig(num_blocks=9, max_num_batched_tokens=64)
    rig.add("a", list(range(20)), max_tokens=9)
    rig.step()
    rig.add("b", [*range(8), *range(40, 49)], max_tokens=3)
    assert one(rig, "b").admission == AdmissionState("LATER", "waits_for_blocks", 5, 3, 0, 8)  # not looked up yet
    rig.step()
    assert one(rig, "b").admission == AdmissionState("LATER", "waits_for_blocks", 3, 2, 0, 8)  # two of its five are a's


def test_later_names_the_numbers() -> None:
    rig = Rig(num_blocks=9, max_num_batched_tokens=64)
    rig.add("a", list(range(20)), max_tokens=9)
    rig.step()
    rig.add("b", list(range(20, 40)), max_tokens=3)
    rig.add("c", list(range(20, 36)), max_tokens=3)
    rig.step()
    b, c = look(rig, "b", "c")
    assert b.admission == AdmissionState("LATER", "waits_for_blocks", 5, 2, 0, 8)
    assert b.samples == [SampleState(0, "waiting", 0, 0, 0, 0, 0)]
    assert c.admission == AdmissionState("LATER", "waits_for_turn", 4, 2, 0, 8)
    assert c.samples == [SampleState(0, "waiting", 1, 0, 0, 0, 0)]
    rig.drain()
    assert look(rig, "a", "b", "c") == []


def test_describes_a_request_that_waits_for_a_row() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("a", [1, 2], max_tokens=9)
    rig.add("b", [3, 4], max_tokens=2)
    rig.step()
    assert one(rig, "b").admission == AdmissionState("OK", "waits_for_row", 1, 18, 0, 19)


def test_describes_requests_that_wait_for_their_turn_and_for_budget() -> None:
    rig = Rig(num_blocks=40, max_num_batched_tokens=4, depth=2)
    rig.add("a", list(range(30)), max_tokens=2)
    rig.add("b", list(range(20, 50)), max_tokens=2)
    rig.add("c", list(range(10, 49)), max_tokens=2)
    assert one(rig, "c").admission.reason == "waits_for_turn"
    rig.step()
    assert one(rig, "c").admission.reason == "waits_for_budget", "it lacks more than each of the prompts under way"


@pytest.mark.parametrize("host", [0, 30])
def test_a_preempted_request(host: int) -> None:
    rig = Rig(num_blocks=9, num_host_blocks=host, preemption="swap" if host else "recompute")
    rig.add("a", [1, 2, 3, 4, 5], max_tokens=20)
    rig.add("b", [5, 6, 7, 8, 9], max_tokens=20)
    rig.step()
    while not (waiting := [item for item in look(rig, "a", "b") if item.samples[0].status != "running"]):
        rig.step()
    (state,) = waiting
    (sample,) = state.samples
    assert state.request_id == "b"
    assert state.num_preemptions == 1
    assert sample.status == ("swapped" if host else "preempted")
    assert (sample.num_blocks, sample.place) == (0, 0)
    assert (sample.num_host_blocks > 0, sample.num_computed > 0) == (host > 0, host > 0)
    assert state.admission.verdict == "LATER"
    assert state.admission.reason == "waits_for_blocks"
    assert state.admission.free < state.admission.required == -(-(5 + sample.num_output) // 4)
    rig.drain()


def test_describes_samples_of_one_prompt() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.add("a", [1, 2, 3, 4, 5], max_tokens=4, n=3)
    rig.step()
    assert (len(one(rig, "a").samples), one(rig, "a").num_unforked) == (1, 2)
    rig.step()
    rig.step()
    state = one(rig, "a")
    assert [sample.index for sample in state.samples] == [0, 1, 2]
    assert state.num_unforked == 0
    assert all(sample.num_blocks == 2 for sample in state.samples)


def test_looking_changes_nothing() -> None:
    recorded = Recorded(None, 10)
    recorded.add("a", list(range(20)), max_tokens=12, ignore_eos=True)
    recorded.add("b", list(range(20, 40)), max_tokens=8, ignore_eos=True)
    recorded.loop()
    before = state_of(recorded.scheduler)
    (a, b) = recorded.core.describe(("a", "unknown", "b", "a")).requests
    assert state_of(recorded.scheduler) == before
    assert (a.request_id, b.request_id) == ("a", "b")
    assert a.age_s == b.age_s > 0


def test_never_is_said_at_once_with_numbers() -> None:
    rig = Rig(num_blocks=9)
    with pytest.raises(RequestError, match=r"the prompt has 40 tokens; .* holds 32 \(8 blocks of 4, 0 kept free\)"):
        rig.add("a", list(range(40)))
    assert look(rig, "a") == []


def test_the_cost_of_a_look_does_not_grow_with_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describing requests looks up the cache once, for the head of the queue, however many ids are given and however
    often."""
    rig = Rig(num_blocks=200, max_num_seqs=1)
    rig.add("running", [1, 2, 3], max_tokens=20)
    rig.step()
    for number in range(20):
        rig.add(f"w{number}", [number] * 20)
        rig.kv.find_cached(list(rig.scheduler.waiting)[-1])  # as of one that was preempted: its blocks have been hashed
    found = rig.kv.find_cached
    lookups = []

    def counted(sequence: Sequence) -> PrefixHit:
        lookups.append(sequence)
        return found(sequence)

    monkeypatch.setattr(rig.kv, "find_cached", counted)
    names = ["running", *(f"w{number}" for number in range(20))]
    states = look(rig, *names * 40)
    assert [state.request_id for state in states] == names
    assert lookups == list(rig.scheduler.waiting)[:1]
