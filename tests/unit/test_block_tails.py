"""A prompt that shares a prefix up to a mark in the middle of a block continues there, on a copy of the block's
tail."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler_rig import Rig, expected
from tests.unit.test_cache_parts import NotePart
from tests.unit.test_rates import Bench
from vllm_lite.engine.blocks.part import PrefixHit
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams

STATE = [1, 2, 3, 4, 5, 6]
"""A block of 4 tokens, and half a block."""


class AnywherePart(NotePart):
    """Has a note behind any tokens."""

    has_tails = True

    def admit(self, sequence: Sequence, hit: PrefixHit, found: int, num_tokens: int) -> bool:  # noqa: ARG002
        self.notes[sequence] = "in"
        return True


def copies(rig: Rig) -> int:
    return rig.kv.counters.copied_blocks


def cached(rig: Rig) -> list[int | str]:
    return [numbers["cached"] for code, numbers in rig.decisions if code == "admitted"]


def ask(rig: Rig, name: str, own: list[int], mark: int = len(STATE), **params: Any) -> None:
    rig.add(name, [*STATE, *own], 2, marks=(mark,), **params)


def answers(rig: Rig, questions: dict[str, list[int]]) -> None:
    for name, own in questions.items():
        assert rig.output(name) == expected([*STATE, *own], 2), name


def test_questions_begin_where_the_state_ends() -> None:
    rig = Rig()
    ask(rig, "first", [7, 8])
    rig.drain()
    questions = {"second": [9], "third": [7, 9, 9, 9, 9]}
    for name, own in questions.items():
        ask(rig, name, own)
    rig.drain()
    answers(rig, questions)
    assert cached(rig) == [0, 6, 6]
    assert copies(rig) == 2


def test_no_tail_is_copied_from_a_sequence_of_the_same_step() -> None:
    rig = Rig(max_num_batched_tokens=40)
    questions = {"first": [7, 8], "second": [9]}
    for name, own in questions.items():
        ask(rig, name, own)
    rig.drain()
    answers(rig, questions)
    assert cached(rig) == [0, 4]
    ask(rig, "third", [9, 9])
    rig.drain()
    assert cached(rig) == [0, 4, 6]


@pytest.mark.parametrize(
    ("state", "params", "found"),
    [
        ([1, 2, 3, 4, 5, 9], {}, 4),
        ([9, 2, 3, 4, 5, 6], {}, 0),
        (STATE, {"mark": 5}, 4),
        (STATE, {"cache_salt": "mine"}, 0),
        (STATE, {"prompt_logprobs": 1}, 0),
        (STATE, {}, 6),
    ],
)
def test_only_the_same_tokens_are_found(state: list[int], params: dict[str, Any], found: int) -> None:
    rig = Rig()
    ask(rig, "first", [7, 8])
    rig.drain()
    mark = params.pop("mark", len(state))
    rig.add("second", [*state, 9, 9], 2, marks=(mark,), **params)
    rig.drain()
    assert cached(rig)[-1] == found
    assert rig.output("second") == expected([*state, 9, 9], 2)


@pytest.mark.parametrize(("state", "found"), [(STATE, 6), ([1, 2, 3, 4, 5, 9], 4)])
def test_every_part_has_to_have_a_tail(state: list[int], found: int) -> None:
    """The second part of the cache can continue at any position, so the first one decides."""
    rig = Rig(more_parts=(AnywherePart(),))
    ask(rig, "first", [7, 8])
    rig.drain()
    rig.add("second", [*state, 9, 9], 2, marks=(6,))
    rig.drain()
    assert cached(rig)[-1] == found
    assert rig.output("second") == expected([*state, 9, 9], 2)


def test_describing_a_prompt_computes_no_key_of_a_tail() -> None:
    rig = Rig()
    (sequence,) = rig.add("first", [1, 2, 3], 1, marks=(2,)).sequences
    assert not rig.kv.is_hashed(sequence), "it fills no block, and has a key to compute"
    assert sequence.tail_keys is None
    rig.kv.find_cached(sequence)
    assert rig.kv.is_hashed(sequence)
    (plain,) = rig.add("without marks", [1, 2, 3], 1).sequences
    assert rig.kv.is_hashed(plain)


def test_a_longer_hit_needs_no_copy() -> None:
    rig = Rig()
    ask(rig, "first", [7, 8, 9])
    rig.drain()
    ask(rig, "again", [7, 8, 9])
    rig.drain()
    assert cached(rig) == [0, 8]
    assert not copies(rig)


def test_the_last_token_is_always_computed() -> None:
    rig = Rig()
    ask(rig, "first", [7, 8])
    rig.drain()
    rig.add("state", STATE, 2, marks=(5, 6))
    rig.drain()
    assert rig.output("state") == expected(STATE, 2)
    assert cached(rig) == [0, 4], "the mark at its end is behind what it may skip"


def test_a_block_that_others_write_to_is_not_found() -> None:
    rig = Rig(num_blocks=6)
    ask(rig, "first", [7, 8])
    rig.drain()
    rig.add("other", [30 + token for token in range(18)], 1)
    rig.drain()
    ask(rig, "second", [9])
    rig.drain()
    assert cached(rig)[-1] == 0
    answers(rig, {"second": [9]})


def test_the_block_itself_may_be_the_one_that_is_got() -> None:
    """All other blocks are held, so the second question gets the very block that it would copy."""
    rig = Rig(num_blocks=7, max_num_seqs=2)
    ask(rig, "first", [7])
    rig.drain()
    free = [block.block_id for block in rig.kv.pool.peek(6)]
    tail = next(iter(rig.blocks.tails._keys))
    held = rig.kv.pool.get_new_blocks(free.index(tail))
    rig.blocks.others_hold = lambda: [held]
    ask(rig, "second", [9])
    rig.step()
    assert cached(rig)[-1] == 6
    assert not copies(rig)
    rig.kv.pool.free(held)
    rig.blocks.others_hold = list
    rig.drain()
    answers(rig, {"second": [9]})


def test_forgotten_tails_are_not_found() -> None:
    rig = Rig()
    kv = rig.kv

    def made(name: str) -> Sequence:
        message = Generate(name, pack_tokens([*STATE, 7, 8]), SamplingParams(), marks=(3, 6))
        sequence = Request(message, b"client", 100, frozenset()).sequences[0]
        kv.register(sequence)
        return sequence

    for forget in ("one sequence", "all"):
        first, second = made("first"), made("second")
        kv.admit(first, kv.find_cached(first), 7)
        kv.cache_blocks(first, 7)
        kv.begin_step()
        assert kv.find_cached(second).num_tokens == 6
        if forget == "all":
            kv.reset_cache([first])
        kv.release(first, forget=forget != "all")
        assert kv.find_cached(second).num_tokens == 0, forget
        kv.check_integrity([])


def test_tails_begun_before_a_reset_are_not_found_after_it() -> None:
    """The first chunk of the prompt was computed before the reset, so the tail that the second chunk completes is stale
    as well."""
    rig = Rig(max_num_batched_tokens=5)
    ask(rig, "first", [7, 8, 9])
    rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.drain()
    rig.add("blocks", [*STATE[:4], 9, 9], 1)
    rig.drain()
    ask(rig, "second", [7])
    rig.drain()
    assert cached(rig) == [0, 0, 4]


def test_a_tail_is_published_when_it_is_computed() -> None:
    rig = Rig(max_num_batched_tokens=5)
    for name in ("first", "second"):
        rig.add(name, [*STATE, 7], 1, marks=(3, 6))
        rig.step()
    assert cached(rig) == [0, 4], "the first computes the end of the tail in the same step"
    rig.drain()
    assert rig.output("second") == expected([*STATE, 7], 1)


def test_a_tail_behind_blocks_of_the_host_is_computed_again() -> None:
    """The first block has left the window, and the device, while the one with the tail is still read."""
    rig = Rig(6, windows=(5,), num_host_blocks=12)
    rig.add("first", [*STATE, 7, 8], 30, marks=(6,))
    for _ in range(3):
        rig.step()
    rig.add("other", [30 + token for token in range(11)], 1)
    rig.step()
    rig.step()
    ask(rig, "second", [9])
    rig.drain()
    assert cached(rig) == [0, 0, 4]
    answers(rig, {"second": [9]})


def test_in_windows_and_with_a_host_tier() -> None:
    for options in ({"windows": (None, 6)}, {"windows": (5,)}, {"num_host_blocks": 12}):
        rig = Rig(**options)
        ask(rig, "first", [7, 8])
        rig.drain()
        ask(rig, "second", [9, 9, 9])
        rig.drain()
        assert cached(rig) == [0, 6], options
        answers(rig, {"second": [9, 9, 9]})


def test_a_block_that_a_mark_moves_out_of_the_window_is_given_back() -> None:
    """Eight tokens are found in blocks, of which position 8 reads the first one and position 9 does not."""
    rig, state = Rig(windows=(6,)), [*STATE, 7, 8, 9]
    for name, own in (("first", [1]), ("second", [2])):
        rig.add(name, [*state, *own], 4, marks=(len(state),))
        rig.drain()
        assert rig.output(name) == expected([*state, *own], 4)
    assert cached(rig) == [0, 9]


def test_marks_count_within_the_prompt_alone() -> None:
    message = Generate("it", pack_tokens(STATE), SamplingParams(), marks=(2**31 - 1, 6, 7, 3, 0, 6))
    assert Request(message, b"client", 100, frozenset()).marks == (3, 6)


def test_a_model_with_states_continues_at_the_ends_of_blocks() -> None:
    rig = Rig(num_state_slots=5)
    ask(rig, "first", [7, 8])
    rig.drain()
    ask(rig, "second", [9, 9, 9])
    rig.drain()
    assert cached(rig) == [0, 4]
    answers(rig, {"second": [9, 9, 9]})


@pytest.mark.parametrize(("num_before", "num_cached"), [(20, 16 + 23 + 23), (5, 8 + 8)])
def test_a_replay_finds_the_tails_that_were_found(tmp_path: Path, num_before: int, num_cached: int) -> None:
    """A trace has no tokens, and tails of one length behind the same blocks, or behind none, differ by theirs alone."""
    path = tmp_path / "trace"
    bench = Bench(200, record=str(path), block_size=16)
    for number, tail in enumerate(([1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6])):
        prompt = pack_tokens([7] * num_before + tail + [number])
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
        bench.core.add(b"client", Generate(f"request {number}", prompt, params, marks=(num_before + 3,)))
        bench.core.describe([f"request {number}"])
        bench.drain()
    assert bench.core.scheduler.counters.cached_tokens == num_cached
    bench.core.close()
    assert Replay(str(path)).run().divergence is None


def test_any_marks_in_a_small_pool() -> None:
    """The simulated worker checks the history behind each slot that it reads. Some sequences are preempted, by both
    modes."""
    draw = random.Random(3)
    found = 0
    for preemption in ("recompute", "swap"):
        rig = Rig(14, num_host_blocks=8, depth=2, preemption=preemption, max_num_batched_tokens=12)
        wanted = {}
        for number in range(150):
            begin = draw.choice([STATE, [*STATE, 7, 8, 9], [5, 5]])
            prompt = [*begin, *(draw.randrange(3) for _ in range(draw.randrange(1, 9)))]
            marks = tuple(sorted({len(begin), draw.randrange(len(prompt) + 1)}))
            rig.add(name := f"{preemption}{number}", prompt, 6, marks=marks)
            wanted[name] = expected(prompt, 6)
            while len(rig.scheduler.requests) > 5:
                rig.step()
        rig.drain()
        assert {name: rig.output(name) for name in wanted} == wanted
        found += sum(int(number) % 4 > 0 for number in cached(rig))
    assert found > 50
