"""The disk tier in the scheduler: blocks of ended requests are written, found by other requests and later engines, and
loaded while the request waits. Whatever fails or is late is computed."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.disk_rig import PROMPT, DiskRig, loading, restarted
from tests.scheduler_rig import expected
from vllm_lite.engine.blocks.write_through import MAX_CHAINS
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.protocol.transfers import STATE

# ---- written, and found again


def test_prompt_and_answer_are_found_after_a_restart() -> None:
    rig = DiskRig()
    assert rig.serve("a", PROMPT) == 0
    assert len(rig.contents) == (len(PROMPT) + 4) // 4
    again = restarted(rig)
    assert again.serve("a", PROMPT) == 28
    assert again.serve("next turn", [*PROMPT, *expected(PROMPT, 5), 7, 8, 9]) == 32
    assert ("loaded", {"tokens": 28}) in again.decisions
    assert again.tier.num_loaded_tokens == 28


def test_the_prompt_is_written_before_the_answer_ends() -> None:
    rig = DiskRig()
    rig.add("a", PROMPT, 9)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.requests
    assert len(rig.contents) == 7


def test_nothing_is_written_twice() -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT)
    count = rig.tier.writes.next_ticket()
    rig.serve("a again", PROMPT)
    assert rig.tier.writes.next_ticket() == count + 1


@pytest.mark.parametrize("params", [{"prompt_logprobs": 0}, {"cache_salt": "other"}])
def test_prompts_with_scores_are_not_written_and_salts_are_apart(params: dict[str, Any]) -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT, **params)
    assert bool(rig.contents) is ("cache_salt" in params)
    assert restarted(rig).serve("b", PROMPT) == 0
    assert restarted(rig).serve("c", PROMPT, **params) == (28 if "cache_salt" in params else 0)


def test_a_part_on_the_device_is_not_loaded() -> None:
    rig = DiskRig(num_blocks=40)
    rig.serve("a", PROMPT)
    again = restarted(rig, num_blocks=40)
    again.serve("short", PROMPT[:13])
    assert len(again.loads[0].keys) == 3
    again.serve("long", PROMPT)
    assert [len(load.keys) for load in again.loads] == [3, 4]


def test_hits_in_a_window_load_the_window_alone() -> None:
    rig = DiskRig(windows=(None, 8))
    rig.serve("a", PROMPT)
    again = restarted(rig, windows=(None, 8))
    assert again.serve("a", PROMPT) == 28
    groups = [key[-1] for key in again.loads[0].keys]
    assert (groups.count(0), groups.count(1)) == (7, 2)


def test_states_are_written_at_the_ends_and_loaded_with_the_kv_before_them() -> None:
    options: dict[str, Any] = {"num_state_slots": 8}
    rig = DiskRig(**options)
    rig.serve("a", PROMPT, 8)
    assert any(key.endswith(STATE) for key in rig.contents)
    again = restarted(rig, **options)
    follow_up = [*PROMPT, *expected(PROMPT, 8), 7, 8, 9]
    assert again.serve("next turn", follow_up) == 36
    assert sum(key.endswith(STATE) for key in again.loads[0].keys) == 1
    without = restarted(rig, **options)
    without.scheduler.stored_keys([], [key for key in rig.contents if key.endswith(STATE)])
    assert without.serve("next turn", follow_up) == 0
    assert not without.loads


# ---- while it is loaded


def test_others_run_while_a_prefix_is_loaded() -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT)
    again = restarted(rig, num_blocks=40)
    again.add("runs", [40] * 5, 12)
    again.step()
    again.holds = True
    again.add("waits", PROMPT)
    for count in range(1, 4):
        again.step()
        assert len(again.output("runs")) == count + 1
    assert not again.output("waits")
    assert ("waits_for_load", {"need": 8, "free": again.kv.pool.num_free, "watermark": 0}) in again.decisions
    again.drain()
    assert again.output("waits") == expected(PROMPT, 5)
    assert len(again.loads) == 1


def test_two_that_begin_alike_are_loaded_once() -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT)
    again = restarted(rig, num_blocks=40)
    again.holds = True
    for name in ("b", "c"):
        again.add(name, PROMPT)
    for _ in range(3):
        again.step()
    assert len(again.loads) == 1
    again.drain()
    assert again.output("b") == again.output("c") == expected(PROMPT, 5)


def test_a_load_that_fails_is_computed_and_not_tried_again() -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT)
    again = restarted(rig)
    lost = min(rig.contents)
    again.fails = lambda key: key == lost
    cached = again.serve("a", PROMPT)
    assert cached < 28
    assert len(again.loads) == 1
    assert again.tier.num_failed == 1


def test_a_load_that_is_late_is_not_waited_for_and_its_places_stay_taken() -> None:
    again = loading()
    (load,) = again.loads
    again.scheduler.transfer_late(load.ticket)
    again.step()
    assert again.scheduler.running
    assert all(not again.kv.pool.is_free(block_id) for block_id in load.ids)
    again.drain()
    assert again.output("a") == expected(PROMPT, 5)
    assert again.scheduler.requests == {}


def test_blocks_loaded_for_an_aborted_sequence_serve_others() -> None:
    again = loading()
    again.abort("a")
    again.scheduler.check_integrity()
    again.drain()
    assert again.serve("b", PROMPT) == 28
    assert len(again.loads) == 1


@pytest.mark.parametrize(("prefill", "load", "loads"), [(1000.0, 1000.0, 1), (1000.0, 10.0, 0), (0.0, 10.0, 1)])
def test_blocks_that_are_computed_sooner_are_not_loaded(prefill: float, load: float, loads: int) -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT)
    again = restarted(rig)
    again.scheduler.measured(Rates(prefill, load_blocks_per_s=load))
    again.serve("a", PROMPT)
    assert len(again.loads) == loads


def test_without_room_nothing_is_loaded() -> None:
    rig = DiskRig()
    rig.serve("a", PROMPT)
    again = restarted(rig, num_blocks=12)
    again.add("runs", [40] * 20, 12)
    again.step()
    again.add("waits", PROMPT)
    again.step()
    assert not again.loads
    again.drain()
    assert again.output("waits") == expected(PROMPT, 5)


# ---- while it is written


def test_blocks_are_pinned_while_they_are_written_and_bounded() -> None:
    rig = DiskRig(num_blocks=65)
    rig.holds = True
    for number in range(4):
        rig.add(f"{number}", [number + 1] * 32, 1)
    while rig.scheduler.requests:
        rig.step()
    pinned = [block_id for message in rig.pending for block_id in message.ids]
    assert 0 < len(pinned) <= rig.tier.writes.max_blocks == 8
    assert rig.kv.pool.num_used == len(pinned)
    rig.drain()
    assert len(rig.contents) == 4 * 8


def test_blocks_reused_before_their_write_are_not_written_nor_their_successors() -> None:
    rig = DiskRig(num_blocks=34)
    rig.holds = True
    rig.add("a", [1] * 64, 1)
    while rig.scheduler.requests:
        rig.step()
    rig.add("b", [2] * 100, 1)
    while rig.scheduler.requests:
        rig.step()
    rig.drain()
    again = restarted(rig, num_blocks=60)
    assert 0 < again.serve("a", [1] * 64, 1) < 60
    assert rig.tier.writes.num_dropped


def test_chains_beyond_the_bound_are_dropped() -> None:
    rig = DiskRig(num_blocks=40, max_num_batched_tokens=64)
    rig.holds = True
    for number in range(MAX_CHAINS + 6):
        rig.add(f"{number}", [number % 50, number // 50, 1, 2, 3], 1)
        while rig.scheduler.requests:
            rig.step()
    assert rig.tier.writes.num_waiting <= MAX_CHAINS
    assert rig.tier.writes.num_dropped
    rig.drain()


def test_a_write_that_fails_is_not_found() -> None:
    rig = DiskRig()
    rig.fails = lambda _: True
    rig.serve("a", PROMPT)
    assert not rig.tier.index
    rig.fails = lambda _: False
    rig.serve("a again", PROMPT)
    assert len(rig.tier.index) == 8


# ---- whatever happens


@pytest.mark.parametrize("num_state_slots", [0, 5])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), windows=st.sampled_from([(None,), (None, 8)]))
def test_whatever_happens_the_tokens_are_right(
    num_state_slots: int, seed: int, windows: tuple[int | None, ...]
) -> None:
    draw = random.Random(seed)
    options: dict[str, Any] = {"windows": windows, "num_state_slots": num_state_slots, "depth": draw.choice([1, 2])}
    if num_state_slots:
        options["depth"] = 1
    before = DiskRig(40, **options)
    for number in range(draw.randrange(3)):
        before.serve(f"{number}", [number] * draw.choice([4, 8, 13]) + PROMPT)
    options |= {"contents": before.contents, "preload": draw.choice([0.0, 0.5, 1.0])}
    rig = DiskRig(draw.choice([24, 40]), num_host_blocks=draw.choice([0, 16]), preemption="swap", **options)
    rig.holds = True
    rig.fails = lambda _: draw.random() < 0.05
    prompts: dict[str, list[int]] = {}
    for number in range(60):
        if draw.random() < 0.3 and len(rig.scheduler.requests) < 5:
            name = f"r{number}"
            prompts[name] = [draw.randrange(2)] * draw.choice([4, 8, 13]) + PROMPT[: draw.randrange(1, 24)]
            rig.add(name, prompts[name], draw.randint(1, 9))
        if rig.pending and draw.random() < 0.5:
            rig.end(draw.choice(rig.pending))
        if draw.random() < 0.03:
            rig.scheduler.reset_prefix_cache(stored=draw.random() < 0.5)
        if draw.random() < 0.03 and rig.loads:
            rig.scheduler.transfer_late(rig.loads[-1].ticket)
        if draw.random() < 0.03 and rig.scheduler.requests:
            rig.abort(draw.choice(list(rig.scheduler.requests)))
        if draw.random() < 0.02:
            rig.pending = []
            rig.lose_workers()
            rig.replace_workers()
            rig.scheduler.stored_keys(list(rig.contents), [])
        rig.step()
    rig.drain()
    for name, prompt in prompts.items():
        if rig.reasons.get((name, 0)) == "length":
            assert rig.output(name) == expected(prompt, len(rig.output(name)))
