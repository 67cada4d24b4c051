"""Sharing of a step by streams, prompts, new arrivals and drafts, and the cost of the queue."""

import random
from itertools import groupby
from typing import Any

import pytest

from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling import admission
from vllm_lite.engine.scheduling.admission import MAX_BLOCKED, MAX_PASSED
from vllm_lite.engine.scheduling.policy import Deadline, Fair, Priority
from vllm_lite.engine.scheduling.waiting_queue import MIN_PRUNE, FairQueue
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams


def prompt(number: int, length: int) -> list[int]:
    """Prompts of different numbers share no block."""
    return [number % 50, number // 50 % 50, *(index * 7 % 50 for index in range(length - 2))]


def steps_until_first_token(rig: Rig, name: str, most: int = 500) -> int:
    return next(count for count in range(1, most) if rig.step() is not None and rig.output(name))


# ---- streams beside prompts


@pytest.mark.parametrize("policy", [None, Priority(), Deadline(), Fair()])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_stream_stops_for_a_long_prompt_however_urgent(policy: object, depth: int) -> None:
    rig = Rig(400, policy=policy, depth=depth, max_num_batched_tokens=16)
    for number in range(4):
        rig.add(f"s{number}", prompt(number, 3), max_tokens=200, priority=5, deadline_ms=10**9, deadline_s=1e9)
    for _ in range(6):
        rig.step()
    rig.add("long", prompt(9, 600), max_tokens=2, priority=-5, deadline_ms=10**6, deadline_s=1e6)
    before = [len(rig.output(f"s{number}")) for number in range(4)]
    took = steps_until_first_token(rig, "long")
    gained = [len(rig.output(f"s{number}")) - had for number, had in enumerate(before)]
    assert min(gained) >= took - depth
    assert took <= 600 / (16 - 4) + 3


def test_a_beam_search_and_a_fork_continue_beside_a_long_prompt() -> None:
    rig = Rig(700, max_num_batched_tokens=64, max_num_seqs=16)
    parent = rig.add("parent", prompt(1, 5), max_tokens=300)
    rig.step()
    rig.add("long", prompt(2, 2000), max_tokens=2)
    rig.step()
    rig.add("beams", prompt(3, 5), max_tokens=10, use_beam_search=True, n=3)
    have = rig.output("parent")[:1]
    message = Generate("fork", pack_tokens(prompt(1, 5)), SamplingParams(max_tokens=300), 1, pack_tokens(have))
    rig.outputs["fork", 0] = list(have)
    rig.scheduler.branching.fork_request(parent, Request(message, b"client", 305, frozenset()))
    for _ in range(14):
        rig.step()
    assert not rig.output("long")
    assert ("beams", 0) in rig.reasons
    assert len(rig.output("fork")) >= 12


@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_prompt_does_not_wait_for_a_long_one(depth: int) -> None:
    rig = Rig(2000, max_num_batched_tokens=64, depth=depth)
    rig.add("long", prompt(1, 6000), max_tokens=2)
    rig.step()
    rig.add("short", prompt(2, 40), max_tokens=2)
    assert steps_until_first_token(rig, "short") <= 4
    assert not rig.output("long")


def test_a_short_prompt_after_long_ones_ends_first_and_all_progress() -> None:
    rig = Rig(3000, max_num_batched_tokens=64)
    for number in range(3):
        rig.add(f"long{number}", prompt(number, 700), max_tokens=2)
    rig.step()
    rig.step()
    rig.add("short", prompt(7, 70), max_tokens=2)
    assert steps_until_first_token(rig, "short") <= 5
    while not rig.output("long0"):
        before = rig.scheduler.running[0].num_computed
        assert rig.scheduler.running[0].request.request_id == "long0"
        rig.step()
        assert rig.scheduler.running[0].num_computed >= min(before + 32, 700), "the first has half of every step"
    rig.drain()


def test_long_prompts_come_in_two_at_a_time() -> None:
    """More at once would make all of them late, and hold blocks meanwhile."""
    rig = Rig(3000, max_num_batched_tokens=64, max_num_seqs=8)
    for number in range(5):
        rig.add(f"long{number}", prompt(number, 600), max_tokens=1)
    for _ in range(8):
        rig.step()
    assert [sequence.request.request_id for sequence in rig.scheduler.running] == ["long0", "long1"]
    rig.drain()
    assert [name for name, _ in rig.reasons][:2] == ["long0", "long1"]


def test_a_prompt_alone_has_the_whole_step() -> None:
    rig = Rig(2000, max_num_batched_tokens=64)
    rig.add("long", prompt(1, 640), max_tokens=1)
    rig.drain()
    assert rig.worker.num_scheduled == [64] * 10


def test_short_prompts_that_keep_coming_do_not_stop_a_long_one() -> None:
    rig = Rig(2000, max_num_batched_tokens=64)
    rig.add("long", prompt(1, 1500), max_tokens=1)
    rig.step()
    for number in range(100):
        if rig.output("long"):
            break
        for each in range(3):
            rig.add(f"short{number}.{each}", prompt(3 * number + each + 2, 30), max_tokens=1)
        rig.step()
    assert rig.output("long"), "half of each step is 32 of 64 tokens"
    assert number <= 1500 / 32


# ---- drafts


def streams_with_drafts(num: int, drafts: int, budget: int) -> Rig:
    rig = Rig(4000, max_num_batched_tokens=budget, max_num_seqs=num + 4, num_drafts=drafts, caching=False)
    for number in range(num):
        rig.add(f"s{number}", prompt(number, 4), max_tokens=400)
    while any(not rig.output(f"s{number}") for number in range(num)):
        rig.step()
    return rig


def test_drafts_take_nothing_from_streams_or_prompts() -> None:
    rig = streams_with_drafts(60, 8, 512)
    before = [len(rig.output(f"s{number}")) for number in range(60)]
    rig.add("prompt", prompt(99, 300), max_tokens=2)
    rig.step()
    assert len(rig.output("prompt")) == 1
    assert all(len(rig.output(f"s{number}")) > had for number, had in enumerate(before))


def test_drafts_are_shared_in_equal_parts() -> None:
    rig = streams_with_drafts(60, 16, 512)
    for _ in range(30):
        rig.step()
    lengths = [len(rig.output(f"s{number}")) for number in range(60)]
    assert rig.worker.num_accepted > 0
    assert min(lengths) > 31, "the slowest of them has had accepted drafts too"


def test_a_step_without_room_for_drafts_still_decodes() -> None:
    rig = streams_with_drafts(16, 4, 16)
    before = [len(rig.output(f"s{number}")) for number in range(16)]
    rig.step()
    assert [len(rig.output(f"s{number}")) for number in range(16)] == [had + 1 for had in before]


# ---- a sequence that does not fit


def blocked_head(**settings: Any) -> tuple[Rig, Request]:
    """A rig whose pool is mostly taken by a stream, and a waiting request that needs more than is left."""
    rig = Rig(40, max_num_batched_tokens=256, max_num_seqs=16, caching=False, **settings)
    rig.add("stream", prompt(1, 80), max_tokens=60)
    rig.step()
    head = rig.add("head", prompt(2, 120), max_tokens=2)
    rig.step()
    assert rig.scheduler.running[-1].request.request_id == "stream"
    return rig, head


def test_a_request_that_does_not_fit_is_passed_by_others_that_do() -> None:
    rig, _ = blocked_head()
    rig.add("small", prompt(3, 5), max_tokens=2)
    assert steps_until_first_token(rig, "small") == 1
    rig.drain()
    assert rig.output("head") == expected(prompt(2, 120), 2)


def test_the_number_of_requests_that_pass_it_is_limited() -> None:
    rig, head = blocked_head()
    for number in range(3 * MAX_PASSED):
        rig.add(f"small{number}", prompt(number + 3, 5), max_tokens=1)
    while "stream" in rig.scheduler.requests:
        rig.step()
    assert head.sequences[0].num_passed == MAX_PASSED
    assert sum(name.startswith("small") for name, _ in rig.reasons) == MAX_PASSED
    rig.drain()
    assert len(rig.reasons) == 3 * MAX_PASSED + 2


def test_no_request_of_a_lower_priority_passes() -> None:
    rig, _ = blocked_head(policy=Priority())
    rig.add("equal", prompt(3, 5), max_tokens=2)
    rig.add("lower", prompt(4, 5), max_tokens=2, priority=1)
    for _ in range(3):
        rig.step()
    assert rig.output("equal")
    assert not rig.output("lower")


def count_lookups(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lookups: list[str] = []
    find = KVCacheManager.find_cached

    def counting(kv: KVCacheManager, sequence: Any) -> Any:
        lookups.append(sequence.request.request_id)
        return find(kv, sequence)

    monkeypatch.setattr(KVCacheManager, "find_cached", counting)
    return lookups


def test_a_blocked_request_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(60, max_num_batched_tokens=256)
    rig.add("first", prompt(1, 160), max_tokens=1)
    rig.drain()
    rig.add("stream", prompt(2, 80), max_tokens=60)
    rig.step()
    lookups = count_lookups(rig, monkeypatch)
    rig.add("head", prompt(1, 200), max_tokens=2)
    for _ in range(30):
        rig.step()
    assert lookups == ["head"]
    rig.drain()
    assert rig.output("head") == expected(prompt(1, 200), 2)


def test_a_blocked_request_is_looked_up_again_when_more_of_it_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two equal prompts fits as soon as the first has computed the blocks that both need."""
    rig = Rig(50, max_num_batched_tokens=16)
    rig.add("one", prompt(1, 120), max_tokens=30)
    rig.step()
    lookups = count_lookups(rig, monkeypatch)
    two = rig.add("two", prompt(1, 120), max_tokens=2)
    while not rig.output("two"):
        rig.step()
    assert not rig.reasons, "it did not have to wait for the end of the first"
    assert len(lookups) > 1
    assert two.num_cached_at_start is not None
    assert two.num_cached_at_start > 0


def test_a_blocked_request_gains_from_a_prefix_in_use() -> None:
    """Blocks of its prefix that another request uses cost it nothing any more, although fewer blocks are free."""
    rig = Rig(60, max_num_batched_tokens=256)
    rig.add("first", prompt(1, 160), max_tokens=1)
    rig.drain()
    rig.add("stream", prompt(2, 40), max_tokens=6)
    rig.step()
    rig.add("head", prompt(1, 160) + prompt(3, 60), max_tokens=2)
    rig.step()
    rig.add("sharer", prompt(1, 160) + prompt(4, 4), max_tokens=40)
    while not rig.output("head"):
        assert ("sharer", 0) not in rig.reasons, "the end of the stream had freed enough"
        rig.step()
    assert ("stream", 0) in rig.reasons


def test_a_long_prompt_that_waits_for_its_share_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(3000, max_num_batched_tokens=64)
    rig.add("first", prompt(3, 400), max_tokens=1)
    rig.drain()
    for number in range(2):
        rig.add(f"long{number}", prompt(number, 700), max_tokens=1)
    rig.step()
    rig.step()
    lookups = count_lookups(rig, monkeypatch)
    rig.add("third", prompt(3, 400) + prompt(4, 800), max_tokens=1)
    for _ in range(8):
        rig.step()
    assert lookups == ["third"]
    rig.drain()


def test_no_step_looks_at_the_whole_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = blocked_head()
    lookups = count_lookups(rig, monkeypatch)
    for number in range(10 * MAX_BLOCKED):
        rig.add(f"big{number}", prompt(number + 3, 110), max_tokens=2)
    rig.step()
    assert 1 < len(set(lookups)) <= MAX_BLOCKED + 1


def test_no_step_hashes_more_than_so_much_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_LOOKED_UP_TOKENS", 250)
    rig, _ = blocked_head()
    lookups = count_lookups(rig, monkeypatch)
    for number in range(MAX_BLOCKED):
        rig.add(f"big{number}", prompt(number + 3, 110), max_tokens=2)
    rig.step()
    assert lookups == ["big0", "big1", "big2"]
    rig.step()
    assert lookups == [f"big{number}" for number in range(6)], "the next step goes on behind those"


def test_beams_that_cannot_be_there_together_are_refused_with_the_numbers() -> None:
    rig = Rig(40)
    rig.add("small", prompt(1, 8), max_tokens=8, use_beam_search=True, n=4)
    with pytest.raises(RequestError, match=r"6 beams of up to 140 tokens, 8 of them shared, takes up to 200 KV blocks"):
        rig.add("large", prompt(2, 8), max_tokens=132, use_beam_search=True, n=6)
    rig.drain()
    assert set(rig.reasons) == {("small", index) for index in range(4)}


def test_no_sequence_is_admitted_while_another_is_preempted() -> None:
    """Freed blocks are for those that run; a sequence that took them would be preempted next."""
    rig = Rig(num_blocks=9, caching=False, max_num_seqs=3)
    rig.add("a", prompt(1, 6), max_tokens=20)
    rig.add("b", prompt(2, 6), max_tokens=20)
    preempted = 0
    for number in range(12):
        rig.add(f"small{number}", prompt(3 + number, 2), max_tokens=1)
        produced = rig.step()
        if rig.scheduler.counters.preemptions > preempted:
            preempted = rig.scheduler.counters.preemptions
            assert {item.request.request_id for item in produced} == {"a"}
    assert preempted
    rig.drain()


def test_the_first_prompts_blocks_are_reserved_before_shorter_ones_run() -> None:
    """With a window, prompts take blocks chunk by chunk. Served last, the first would lack some and be preempted for
    the second, and the second for it in the next step, for ever."""
    rig = Rig(11, 2, caching=False, windows=[8], max_num_batched_tokens=9, max_num_seqs=4)
    for number, length in enumerate((19, 12, 52, 9)):
        rig.add(f"r{number}", prompt(number, length), max_tokens=2)
    rig.drain()
    assert not rig.scheduler.counters.preemptions
    for number, length in enumerate((19, 12, 52, 9)):
        assert rig.output(f"r{number}") == expected(prompt(number, length), 2)


# ---- the queue


@pytest.mark.parametrize("policy", [None, Priority, Deadline, Fair])
def test_a_step_asks_for_a_few_keys_however_many_wait(policy: type | None) -> None:
    """Requests that wait are sorted when they come, and not again in every step."""
    made = policy() if policy else None
    rig = Rig(60, policy=made, max_num_seqs=2)
    rng = random.Random(1)
    for number in range(500):
        rig.add(
            f"r{number}",
            [number % 50] * 3,
            max_tokens=4,
            priority=rng.randint(-9, 9),
            user=f"u{rng.randint(0, 30)}",
            deadline_ms=10**9,
            deadline_s=1e9 + rng.randint(0, 99),
        )
    asked = 0
    queue = rig.scheduler.waiting
    iterate = type(queue).__iter__

    class Counting(type(queue)):  # type: ignore[misc]
        def __iter__(self) -> Any:
            nonlocal asked
            for sequence in iterate(self):
                asked += 1
                yield sequence

    queue.__class__ = Counting
    for _ in range(20):  # without the checks of rig.step(), which look at all
        step = rig.scheduler.schedule()
        assert step is not None
        rig.scheduler.update(rig.worker.execute(step))
    assert 0 < asked <= 20 * 3
    queue.__class__ = Counting.__base__
    order = [sequence.request for sequence in queue]
    if policy is Priority:
        keys = [(request.params.priority, request.arrival) for request in order]
        assert keys == sorted(keys)
    if policy is Deadline:
        assert [request.deadline_s for request in order] == sorted(request.deadline_s or 0 for request in order)
    for request in order:
        rig.abort(request.request_id)
    rig.drain()


def test_a_preempted_sequence_is_admitted_before_later_arrivals() -> None:
    rig = Rig(num_blocks=9, caching=False, max_num_seqs=2)
    rig.add("a", prompt(1, 6), max_tokens=20)
    rig.add("b", prompt(2, 6), max_tokens=20)
    rig.add("c", prompt(3, 6), max_tokens=2)
    while not rig.scheduler.counters.preemptions:
        rig.step()
    assert next(iter(rig.scheduler.waiting)).request.request_id == "b"
    rig.drain()


def test_a_faulty_key_is_replaced_and_no_request_is_lost() -> None:
    class Odd:
        def key(self, sequence: Any) -> Any:
            return (1,) if sequence.request.request_id < "c" else "not a tuple"

    rig = Rig(policy=Odd(), max_num_seqs=1)
    for name in "abcd":
        rig.add(name, [1, 2, 3], max_tokens=2)
    rig.drain()
    assert [code for code, _ in rig.decisions].count("policy_fault") == 1
    assert [name for name, _ in rig.reasons] == ["a", "b", "c", "d"]


def fair_rig(slots: int) -> Rig:
    return Rig(200, policy=Fair(), max_num_seqs=slots, caching=False, max_num_batched_tokens=256)


def test_one_step_admits_from_all_tenants() -> None:
    rig = fair_rig(4)
    for tenant in "ab":
        for number in range(4):
            rig.add(f"{tenant}{number}", prompt(number, 4), max_tokens=9, user=tenant)
    rig.step()
    assert sorted(sequence.request.params.user or "" for sequence in rig.scheduler.running) == ["a", "a", "b", "b"]
    rig.drain()


def test_a_new_tenant_has_no_savings() -> None:
    rig = fair_rig(1)
    for number in range(30):
        rig.add(f"a{number}", prompt(number, 8), max_tokens=2, user="a")
    while len(rig.reasons) < 15:
        rig.step()
    for number in range(15):
        rig.add(f"b{number}", prompt(50 + number, 8), max_tokens=2, user="b")
    rig.drain()
    tenants = [name[0] for name, _ in rig.reasons][16:]
    assert max(len(list(run)) for _, run in groupby(tenants[:28])) == 1, "they take turns from the start"


def test_a_tenant_that_returns_has_no_debts() -> None:
    rig = fair_rig(1)
    rig.add("a0", prompt(1, 40), max_tokens=20, user="a")
    rig.add("b0", prompt(2, 4), max_tokens=4, user="b")
    while len(rig.reasons) < 2:
        rig.step()
    for number in range(1, 3):
        rig.add(f"b{number}", prompt(2 + number, 4), max_tokens=4, user="b")
        rig.add(f"a{number}", prompt(5 + number, 4), max_tokens=4, user="a")
    rig.drain()
    assert [name for name, _ in rig.reasons][2:] == ["b1", "a1", "b2", "a2"]


def test_a_tenant_keeps_its_debts_while_something_of_it_runs() -> None:
    rig = fair_rig(2)
    rig.add("a0", prompt(1, 200), max_tokens=100, user="a")
    for number in range(12):
        rig.add(f"b{number}", prompt(2 + number, 2), max_tokens=2, user="b")
    for _ in range(5):
        rig.step()
    rig.add("a1", prompt(60, 2), max_tokens=2, user="a")
    rig.drain()
    names = [name for name, _ in rig.reasons]
    assert names.index("a1") == 12, "behind all that b asked for, which is less than what a had at first"


def test_a_new_tenant_starts_level_with_the_last_steps_tenants() -> None:
    rig = fair_rig(1)
    for number in range(2):
        rig.add(f"a{number}", prompt(number, 100), max_tokens=2, user="a")
    step = rig.scheduler.schedule()  # without the checks of rig.step(), which look at the queue
    assert step is not None
    for item in rig.scheduler.update(rig.worker.execute(step)):
        rig.record(item)
    queue = rig.scheduler.waiting
    assert isinstance(queue, FairQueue)
    rig.add("b", prompt(5, 4), max_tokens=2, user="b")
    assert queue.served("b") == queue.served("a") == 100
    rig.drain()


def test_nothing_is_kept_of_tenants_that_are_gone() -> None:
    rig = fair_rig(2)
    for number in range(600):
        rig.add(f"r{number}", [number % 50], max_tokens=1, user=f"u{number}")
    rig.drain()
    queue = rig.scheduler.waiting
    assert isinstance(queue, FairQueue)
    rig.add("last", [1], max_tokens=1, user="last")
    rig.drain()
    held: list[Any] = [queue._queues, queue._served, queue._order, queue._place_of, queue._running, queue._charged]
    assert all(len(each) <= 2 * MIN_PRUNE for each in held), [len(each) for each in held]
