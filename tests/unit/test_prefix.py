"""Explanations of a prompt: what is cached, why the rest is not, and that asking changes nothing."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import VOCAB, Recorded, media_of, snapshot
from tests.scheduler_rig import Rig
from vllm_lite.engine.adapters import Adapter
from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.observe import conversations, prefix
from vllm_lite.engine.observe.prefix import explain, num_common
from vllm_lite.engine.request import Request
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.view import PrefixSeen

PROMPT = list(range(20, 33))
"""Three full blocks of four tokens, and a token."""


def asked(
    rig: Rig, prompt: list[int], marks: tuple[int, ...] = (), adapter: Adapter | None = None, **params: Any
) -> PrefixSeen:
    """The explanation; checks that nothing has changed, and what a request would get."""
    pools = [rig.kv.pool, *([rig.host.pool] if rig.host else [])]

    def state() -> object:
        orders = [[block.block_id for block in pool.peek(pool.num_free)] for pool in pools]
        counters = {name: getattr(rig.scheduler.counters, name) for name in rig.scheduler.counters.__struct_fields__}
        return [snapshot(pool) for pool in pools], orders, repr(counters), [pool.num_revived for pool in pools]

    before = state()
    message = Generate("?", pack_tokens(prompt), SamplingParams(**params), marks=marks)
    slices = explain(rig.scheduler, Request(message, b"", 10**6, frozenset(), adapter))
    while True:
        try:
            next(slices)
        except StopIteration as done:
            seen: PrefixSeen = done.value
            break
    rig.scheduler.check_integrity()
    assert state() == before
    if not (rig.blocks.tails._new or (rig.states and rig.states.store.unpublished)):
        sequence = Request(message, b"", 10**6, frozenset(), adapter).sequences[0]
        sequence.hash_root = rig.kv.hasher.root(sequence.request.extra_keys)
        assert seen.num_cached == min(rig.kv.find_cached(sequence).num_tokens, len(prompt) - 1)
    return seen


def run(rig: Rig, name: str, prompt: list[int], **more: Any) -> None:
    rig.add(name, prompt, max_tokens=1, **more)
    rig.drain()


def test_all_of_a_prompt_that_ran_is_cached_but_its_last_tokens() -> None:
    rig = Rig()
    run(rig, "a", PROMPT)
    seen = asked(rig, PROMPT)
    assert (seen.num_prompt, seen.num_cached, seen.num_hit_blocks, seen.tiers) == (13, 12, 3, b"\1\1\1")
    assert seen.miss == "all_cached"
    seen = asked(rig, PROMPT[:12])
    assert (seen.num_cached, seen.num_hit_blocks, seen.miss) == (11, 3, "all_cached"), "the last token is computed"


def test_the_token_that_differs_is_found() -> None:
    rig = Rig(num_blocks=40)
    run(rig, "a", PROMPT)
    run(rig, "b", [1, *PROMPT])
    other = [*PROMPT[:9], 49, *PROMPT[10:]]
    seen = asked(rig, other)
    assert (seen.num_cached, seen.num_hit_blocks, seen.tiers, seen.miss) == (8, 2, b"\1\1\0", "differs")
    assert seen.nearest is not None
    assert (seen.nearest.request_id, seen.nearest.num_common, seen.nearest.start) == ("a", 9, 0)
    assert array("I", seen.nearest.context).tolist()[:13] == PROMPT
    request = rig.add("c", other)
    rig.step()
    assert request.num_cached_at_start == seen.num_cached


def test_a_prompt_that_goes_on_is_longer_and_a_strange_one_unknown() -> None:
    rig = Rig()
    assert asked(rig, PROMPT).miss == "unknown"
    run(rig, "a", PROMPT)
    output = rig.output("a")
    longer = [*PROMPT, *output, 48, 47, 46, 45]
    seen = asked(rig, longer)
    assert (seen.miss, seen.num_cached) == ("longer", 12)
    assert seen.nearest is not None
    assert seen.nearest.num_common == 14, "with its output"
    assert asked(rig, [1, 2, 3, 4]).miss == "differs", "at the first token"


def test_salts_and_adapters_have_blocks_of_their_own() -> None:
    rig = Rig(num_blocks=40)
    run(rig, "a", PROMPT, cache_salt="x")
    assert asked(rig, PROMPT, cache_salt="x").num_hit_blocks == 3
    for seen in (asked(rig, PROMPT), asked(rig, PROMPT, cache_salt="y"), asked(rig, PROMPT, adapter=adapter())):
        assert (seen.num_cached, seen.miss, seen.nearest) == (0, "other_keys", None)
    run(rig, "b", PROMPT)
    assert asked(rig, PROMPT).num_hit_blocks == 3


def adapter() -> Adapter:
    return Adapter(1, "french", "/adapters/french")


def test_evicted_blocks_and_an_emptied_cache() -> None:
    rig = Rig(num_blocks=8)
    run(rig, "a", PROMPT)
    run(rig, "b", list(range(1, 18)))  # takes the free blocks and the end of the first prompt
    seen = asked(rig, PROMPT)
    assert (seen.num_hit_blocks < 3, seen.miss) == (True, "evicted")
    rig.scheduler.reset_prefix_cache()
    assert asked(rig, PROMPT).miss == "cache_was_emptied"


def test_a_live_prompt_is_being_computed() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.add("a", PROMPT)
    rig.step()
    seen = asked(rig, PROMPT)
    assert (seen.num_hit_blocks, seen.miss) == (1, "being_computed")


def test_the_host_tier_is_told_apart() -> None:
    rig = Rig(num_blocks=8, num_host_blocks=20, max_num_batched_tokens=64)
    run(rig, "a", PROMPT)
    run(rig, "b", list(range(47, 20, -1)))
    seen = asked(rig, PROMPT)
    assert (seen.num_hit_blocks, seen.tiers, seen.miss) == (3, b"\2\2\2", "all_cached")


def test_windows_and_states_need_more_than_kv() -> None:
    rig = Rig(num_blocks=40, windows=(None, 4))
    run(rig, "a", PROMPT)
    seen = asked(rig, PROMPT)
    assert (seen.num_hit_blocks, seen.tiers, seen.miss) == (3, b"\1\1\1", "all_cached")
    rig = Rig(num_blocks=40, num_state_slots=6)
    run(rig, "a", PROMPT, marks=(4,))
    request = rig.add("b", [*PROMPT[:10], 49, 48], marks=(4,))
    seen = asked(rig, [*PROMPT[:10], 49, 48], marks=(4,))
    assert (seen.num_hit_blocks, seen.tiers, seen.miss) == (1, b"\1\1\0", "not_continuable")
    rig.step()
    assert request.num_cached_at_start == seen.num_cached == 4
    rig.drain()
    seen = asked(rig, PROMPT, marks=(4,))
    request = rig.add("c", PROMPT, marks=(4,))
    rig.step()
    assert request.num_cached_at_start == seen.num_cached == 12, "the state before the last token"


def test_a_prompt_continues_inside_a_block_at_a_mark() -> None:
    rig = Rig()
    run(rig, "a", PROMPT, marks=(6,))
    other = [*PROMPT[:6], 49, 48, 47]
    seen = asked(rig, other, marks=(6,))
    assert (seen.num_cached, seen.num_hit_blocks, seen.miss) == (6, 1, "differs")
    assert asked(rig, other).num_cached == 4, "without the mark"


def test_without_caching_and_for_scores_nothing_is_read() -> None:
    assert asked(Rig(caching=False), PROMPT).miss == "caching_is_off"
    rig = Rig()
    run(rig, "a", PROMPT)
    seen = asked(rig, PROMPT, prompt_logprobs=1)
    assert (seen.num_cached, seen.miss) == (0, "prompt_is_scored")


def test_remembered_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_REMEMBERED", 5)
    rig = Rig(num_blocks=400)
    remembered: Callable[[], int] = lambda: len(list(rig.scheduler.meter.conversations.remembered()))  # noqa: E731
    for number in range(9):
        run(rig, f"r{number}", [number, *PROMPT])
    assert remembered() == 5
    monkeypatch.setattr(conversations, "MAX_TOKENS", 40)
    run(rig, "more", [40, *PROMPT])
    assert remembered() == 2
    run(rig, "long", [41, *range(1, 46), *range(1, 16)])
    assert remembered() == 1


@pytest.mark.parametrize("place", [0, 1, 1023, 1024, 1500, 2048])
def test_a_common_prefix_ends_at_the_first_other_token(place: int) -> None:
    first = array("I", range(3000))
    second = array("I", first)
    second[place] ^= 1 << 20
    assert num_common(first, second) == place
    assert num_common(first, first[:place]) == place


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"windows": (None, 6)},
        {"windows": (9,)},
        {"num_state_slots": 5},
        {"windows": (None, 5), "num_host_blocks": 30},
    ],
)
def test_a_request_gets_as_many_tokens_as_was_said(sizes: dict[str, Any]) -> None:
    rng = random.Random(5)
    rig = Rig(num_blocks=30, **sizes)
    gained = set()
    for number in range(60):
        prompt = [rng.choice((1, 2)) for _ in range(2)] + PROMPT[: rng.randrange(14)] + [rng.randrange(50)] * 3
        seen = asked(rig, prompt)
        request = rig.add(f"r{number}", prompt, max_tokens=rng.randrange(1, 9))
        rig.step()
        assert request.num_cached_at_start == seen.num_cached
        gained.add(seen.num_cached)
        rig.drain()
    assert len(gained) > 2, gained


KINDS: tuple[dict[str, Any], ...] = (
    {"num_blocks": 20, "windows": (None, 6), "num_host_blocks": 30},
    {"num_blocks": 24, "num_state_slots": 6, "num_host_states": 3},
    {"num_blocks": 20, "has_media": True},
)


@pytest.mark.parametrize("sizes", KINDS)
def test_questions_change_no_decision_and_no_trace(
    sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1.0)
    seen: list[PrefixSeen] = []

    def recorded(name: str, *, asks: bool) -> bytes:
        engine, rng, prompts = Recorded(tmp_path / name, **sizes), random.Random(3), random.Random(4)
        slices = random.Random(5)
        for number in range(40):
            length = prompts.randrange(1, 40)
            prompt = [prompts.randrange(3) for _ in range(2)] + [each % VOCAB for each in range(length)]
            engine.add(f"r{number}", prompt, max_tokens=rng.randrange(1, 9))
            for _ in range(rng.randrange(1, 6)):
                engine.loop()
                if asks:
                    media = media_of(f"r{number}", len(prompt)) if "has_media" in sizes else ((), ())
                    message = Generate("?", pack_tokens(prompt), SamplingParams(), media=media[0], contents=media[1])
                    engine.core.prefix_questions.ask(message, seen.append)
                    while engine.core.prefix_questions.is_on and slices.random() < 0.98:
                        engine.core.prefix_questions.advance()
        engine.core.close()
        return (tmp_path / name).read_bytes()

    assert recorded("asked", asks=True) == recorded("quiet", asks=False)
    assert len({each.miss for each in seen}) > 1
    assert not any(each.error for each in seen)


def test_questions_are_answered_in_their_order_and_refused_like_requests() -> None:
    engine = Recorded(None)
    seen: list[PrefixSeen] = []
    questions = engine.core.prefix_questions
    none: dict[str, Any] = {}
    for prompt, more in (
        (PROMPT, none),
        ([VOCAB + 9], none),
        ([], none),
        (PROMPT, {"adapter": "x"}),
        (PROMPT[:2], none),
    ):
        questions.ask(Generate("?", pack_tokens(prompt), SamplingParams(), **more), seen.append)
    for _ in range(40):
        questions.advance()
    assert not questions.is_on
    assert [each.num_prompt for each in seen] == [13, 0, 0, 0, 2]
    errors = [each.error or "" for each in seen]
    assert [text in error for text, error in zip(("", "below", "empty", "no adapter", ""), errors, strict=True)] == [
        True
    ] * 5
    assert (errors[0], errors[4], engine.scheduler.counters.rejected_requests) == ("", "", 0)


def test_a_fault_of_an_explanation_is_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on: its requests have nothing to do with the question. The next question is answered."""
    engine, seen = Recorded(None), list[PrefixSeen]()
    questions = engine.core.prefix_questions
    question = Generate("?", pack_tokens(PROMPT), SamplingParams())
    with monkeypatch.context() as patched:
        patched.setattr(prefix, "_reason", lambda *_: dict[str, str]()["none"])
        questions.ask(question, seen.append)
        while questions.is_on:
            questions.advance()
    assert "could not be explained: KeyError: 'none'" in (seen[0].error or "")
    questions.ask(question, seen.append)
    while questions.is_on:
        questions.advance()
    assert (seen[1].error, seen[1].num_prompt) == (None, len(PROMPT))


def test_few_questions_wait_and_others_are_refused_in_their_turn() -> None:
    """A client tells answers apart by their order."""
    engine, seen = Recorded(None), list[PrefixSeen]()
    questions = engine.core.prefix_questions
    for number in range(prefix.MAX_ASKED + 2):
        questions.ask(Generate("?", pack_tokens(PROMPT + [9] * (number % 40)), SamplingParams()), seen.append)
    assert seen == []
    while questions.is_on:
        questions.advance()
    taken, refused = seen[: prefix.MAX_ASKED], seen[prefix.MAX_ASKED :]
    assert [answer.num_prompt for answer in taken] == [len(PROMPT) + number % 40 for number in range(64)]
    assert {answer.error for answer in taken} == {None}
    assert [answer.error for answer in refused] == ["64 questions about prompts waited already; ask again later"] * 2


def test_blocks_on_disk_follow_those_in_memory() -> None:
    rig = Rig(num_blocks=40, disk=True)
    rig.add("a", PROMPT, max_tokens=1)
    while rig.scheduler.requests:  # and without waiting for its blocks to be written
        rig.step()
    hasher = rig.kv.hasher
    hashes: list[bytes] = []
    longer = [*PROMPT[:12], *range(1, 10)]
    hasher.extend(hashes, hasher.root(), memoryview(pack_tokens(longer)), len(longer))
    rig.kv.part(DiskTier).index.gain([each + rig.blocks.groups[0].key for each in hashes[1:4]])
    seen = asked(rig, longer)
    assert (seen.num_cached, seen.num_on_disk, seen.num_hit_blocks) == (12, 4, 4)
    assert (seen.tiers, seen.miss) == (b"\1\1\1\3\0", "unknown")
    rig.kv.part(DiskTier).index.gain([hashes[4] + rig.blocks.groups[0].key])
    seen = asked(rig, longer[:20])
    assert (seen.num_cached, seen.num_on_disk, seen.num_hit_blocks, seen.miss) == (12, 7, 5, "all_cached")
