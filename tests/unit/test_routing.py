"""PrefixRouter: where most of a prompt is cached, within bounds; properties over made-up requests."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.client.routing import EXCESS, SLACK, PrefixRouter

ENGINES = ("a", "b", "c")
LOADS = st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 200), min_size=1)
PROMPTS = st.lists(st.integers(0, 3), max_size=6).map(lambda path: [tuple(path[: n + 1]) for n in range(len(path))])
"""Chains of hashes: each stands for all before it."""


def router(num_blocks: int = 64) -> PrefixRouter[str]:
    made = PrefixRouter[str]()
    for engine in ENGINES:
        made.add(engine, num_blocks)
    return made


def test_the_longest_cached_prefix_wins_and_nothing_known_goes_to_the_least_loaded() -> None:
    made = router()
    made.stored("a", [1, 2])
    made.stored("b", [1, 2, 3])
    loads = {"a": 0, "b": SLACK, "c": 1}
    assert made.choose([1, 2, 3, 4], loads) == ("b", 3)
    assert made.choose([1, 2], loads) == ("a", 2)  # as many as b has, and less to do
    assert made.choose([9], loads) == ("a", 0)
    assert made.choose([1, 2, 3, 4], {"a": 0, "b": SLACK + 1, "c": 1}) == ("a", 2)  # b has too much to do
    made.dropped("b", [2])
    assert made.choose([1, 2, 3, 4], loads) == ("a", 2)  # 3 is of no use without 2
    made.cleared("a")
    made.remove("b")
    assert made.choose([1, 2], {"a": 1, "c": 0}) == ("c", 0)


@given(st.lists(st.tuples(st.sampled_from(ENGINES), PROMPTS), max_size=20), PROMPTS, LOADS, st.none() | st.text())
def test_the_choice_is_bounded_and_nobody_within_the_bounds_has_more(
    history: list[tuple[str, list[object]]], prompt: list[object], loads: dict[str, int], affinity: str | None
) -> None:
    made = router(8)
    for engine, hashes in history:
        made.stored(engine, hashes)
        made.check_integrity()
    chosen, num_cached = made.choose(prompt, loads, affinity)
    least = min(loads.values())
    assert loads[chosen] <= max(least + SLACK, least * (1 + EXCESS))
    assert num_cached == made.num_cached(chosen, prompt)
    for other in loads.keys() - {chosen} if affinity is None else ():
        if loads[other] <= least + SLACK:
            assert (num_cached, -loads[chosen]) >= (made.num_cached(other, prompt), -loads[other])
    assert made.choose(prompt, dict(reversed(loads.items())), affinity) == (chosen, num_cached)


def test_routers_that_know_nothing_of_each_other_send_a_session_to_the_same_engine() -> None:
    one, other = router(), router()
    one.stored("b", [1])
    idle = dict.fromkeys(ENGINES, 0)
    homes = {str(name): one.choose([1], idle, str(name)).engine for name in range(60)}
    assert homes == {name: other.choose([], idle, name).engine for name in homes}
    shares = [list(homes.values()).count(engine) for engine in ENGINES]
    assert min(shares) > 8, shares
    without_a = {name: one.choose([1], {"b": 0, "c": 0}, name).engine for name in homes}
    assert all(without_a[name] == engine for name, engine in homes.items() if engine != "a")  # only a's sessions move


def test_an_engine_is_thought_to_have_no_more_than_it_holds_and_keeps_beginnings() -> None:
    made = router(4)
    made.stored("a", [1, 2, 3])
    made.stored("a", [7, 8])
    assert made.num_cached("a", [1, 2, 3]) == 2
    assert made.num_cached("a", [7, 8]) == 2
    made.add("a", 2)
    made.check_integrity()
    assert made.num_cached("a", [7, 8]) == 2
