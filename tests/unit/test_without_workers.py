"""While there are no workers, requests arrive and end and nothing is scheduled; the next workers get every sequence
anew."""

import pytest

from tests.recorded import Recorded
from tests.scheduler_rig import Rig, expected
from tests.unit.test_core import make_core
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import ForkRequest, Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import NewRequest, Resume

PROMPT = list(range(1, 11))


def test_requests_come_and_go_while_there_are_no_workers() -> None:
    recorded = Recorded(None)
    core = recorded.core
    recorded.add("ends", PROMPT, 9, ignore_eos=True)
    recorded.add("late", PROMPT, 9, deadline_ms=500)
    recorded.add("stays", PROMPT, 9, ignore_eos=True)
    for _ in range(3):
        recorded.loop()
    stays = recorded.scheduler.requests["stays"].sequences[0]
    recorded.lose_workers()
    assert not core.begin(), "nothing is scheduled"
    recorded.add("new", [7, 8], 4, ignore_eos=True)
    new = recorded.scheduler.requests["new"].sequences[0]
    assert core.abort("ends")
    recorded.clock.now_s += 1.0
    assert [item.request.request_id for item in core.expire()] == ["late"]
    core.reset_prefix_cache()
    with pytest.raises(RequestError, match="is not running"):
        core.fork(b"client", ForkRequest("nobody", "child", 0, SamplingParams()))
    assert not core.begin()
    states = core.describe(("stays", "new")).requests
    assert [state.admission.reason for state in states] == 2 * ["waits_for_workers"]
    assert [state.samples[0].place for state in states] == [0, 1]
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_cached_blocks) == (0, 2, 0, 0)
    assert not recorded.scheduler.queues.entries, "nobody would hear of it"
    recorded.replace_workers()
    recorded.drain()
    assert stays.tokens.tolist() == PROMPT + expected(PROMPT, 9)
    assert new.tokens.tolist() == [7, 8, *expected([7, 8], 4)]
    assert core.describe(("stays",)).requests == []


def test_workers_die_twice_before_anything_is_computed() -> None:
    recorded = Recorded(None)
    recorded.add("a", PROMPT, 9, ignore_eos=True)
    recorded.loop()
    (sequence,) = recorded.scheduler.requests["a"].sequences
    for _ in range(3):
        recorded.lose_workers()
        recorded.replace_workers()
    recorded.lose_workers()
    recorded.lose_workers()
    recorded.replace_workers()
    assert recorded.scheduler.rates.swap_blocks_per_s == 60.0, "as measured by the new ones"
    recorded.drain()
    assert sequence.tokens.tolist() == PROMPT + expected(PROMPT, 9)


def test_workers_die_when_no_request_is_there() -> None:
    recorded = Recorded(None)
    recorded.add("a", PROMPT, 3)
    recorded.drain()
    recorded.lose_workers()
    assert not recorded.core.begin()
    recorded.replace_workers()
    recorded.add("b", PROMPT, 3)
    recorded.drain()
    assert recorded.ended == {"a": "length", "b": "length"}


def test_a_message_that_was_being_made_is_not_sent() -> None:
    """Steps may wait for others to travel with; the next message begins with a step of the new generation."""
    recorded = Recorded(None)
    recorded.add("a", PROMPT, 9, ignore_eos=True)
    recorded.loop()
    recorded.core.message_length.steps = 4
    while not recorded.core.in_flight.num_unsent:
        assert recorded.core.begin()
    recorded.lose_workers()
    assert not recorded.core.in_flight
    assert not recorded.core.in_flight.num_unsent
    assert recorded.core.message_length.steps == 1
    recorded.replace_workers()
    recorded.drain()
    assert recorded.ended == {"a": "length"}


def test_a_generation_that_has_been_cannot_take_over() -> None:
    recorded = Recorded(None)
    recorded.lose_workers()
    with pytest.raises(ValueError, match="generation 3 cannot follow 3"):
        recorded.core.resume(recorded.worker, 3, 1.0)  # type: ignore[arg-type]


def test_the_pause_is_a_gap_between_two_tokens() -> None:
    """A reader has waited that long, so the histogram shows it."""
    recorded = Recorded(None)
    recorded.add("a", PROMPT, 9, ignore_eos=True)
    for _ in range(3):
        recorded.loop()
    gaps = recorded.core.stats().requests.token_gap_s  # type: ignore[union-attr]
    before = gaps.sum
    recorded.lose_workers()
    recorded.clock.now_s += 7.0
    recorded.replace_workers()
    recorded.drain()
    recorded.core.stats()
    assert 7.0 < gaps.sum - before < 7.5
    assert sum(gaps.counts) == 8


def test_a_request_is_sent_again_while_there_are_no_workers() -> None:
    recorded = Recorded(None)
    recorded.add("a", PROMPT, 9, ignore_eos=True)
    for _ in range(4):
        recorded.loop()
    (sequence,) = recorded.scheduler.requests["a"].sequences
    recorded.lose_workers()
    again = Generate("a", pack_tokens(PROMPT), SamplingParams(max_tokens=9, ignore_eos=True), have=0)
    assert recorded.core.add(b"other", again).resend == sequence.tokens[len(PROMPT) :].tolist()
    recorded.replace_workers()
    recorded.drain()
    assert sequence.tokens.tolist() == PROMPT + expected(PROMPT, 9)


def test_lost_workers_publish_one_event_that_clears_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(20)
    cleared: list[str] = []
    monkeypatch.setattr(core.kv.pool, "observers", [Counting(cleared)])
    core.add(b"client", Generate("r", pack_tokens(PROMPT), SamplingParams(max_tokens=9, ignore_eos=True)))
    core.begin()
    core.lose_workers("worker 0 died")
    assert cleared == ["cleared"]


class Counting:
    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def allocated(self, ids: object) -> None: ...

    def touched(self, ids: object) -> None: ...

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        self._seen.append("evicted")

    def cleared(self) -> None:
        self._seen.append("cleared")


def test_resume_is_an_entry_of_the_same_generation_only() -> None:
    """A sequence that is preempted after the death is known to the new workers, and resumed as usual."""
    rig = Rig(num_blocks=9)
    rig.add("a", PROMPT, 15)
    rig.add("b", PROMPT[::-1], 15)
    rig.step()
    rig.restart_workers()
    kinds = []
    while rig.scheduler.requests:
        output = rig.scheduler.schedule()
        assert output is not None
        kinds += [type(entry) for entry in output.entries if isinstance(entry, NewRequest | Resume)]
        rig.worker.submit(output)
        for item in rig.scheduler.update(rig.worker.poll()):  # type: ignore[arg-type]
            rig.record(item)
    assert kinds[:2] == 2 * [NewRequest]
    assert Resume in kinds
    assert rig.output("b") == expected(PROMPT[::-1], 15)
