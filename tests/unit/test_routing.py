"""PrefixRouter: where most of a prompt is cached, within bounds; properties over made-up requests."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.client.engines.routing import EVICTION, EXCESS, SLACK, PrefixRouter

ENGINES = ("a", "b", "c")
LOADS = st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 200), min_size=1)
PROMPTS = st.lists(st.integers(0, 3), max_size=6).map(lambda path: [tuple(path[: n + 1]) for n in range(len(path))])
"""Chains of hashes, each of which identifies its whole prefix."""


def router(num_blocks: int = 64) -> PrefixRouter[str]:
    made = PrefixRouter[str]()
    for engine in ENGINES:
        made.add(engine, num_blocks)
    return made


def test_the_most_cached_wins_as_long_as_it_has_not_much_more_to_do() -> None:
    made = router()
    made.stored("a", [1, 2])
    made.stored("b", [1, 2, 3, 4])
    idle = {"a": 0, "b": 0, "c": 0}
    assert made.choose([1, 2, 3, 4], idle) == ("b", 4)
    assert made.choose([1, 2, 3, 4], idle | {"b": SLACK // 2 - 1}) == ("b", 4)
    assert made.choose([1, 2, 3, 4], idle | {"b": SLACK // 2 + 1}) == ("a", 2)  # which has half of it
    assert made.choose([1, 2, 3, 4], idle | {"b": SLACK, "a": SLACK // 2 + 1}) == ("c", 0)
    assert made.choose([9], {"a": 1, "b": 2, "c": 0}) == ("c", 0)  # no engine has this block
    assert made.choose([1, 2, 3, 4], {"a": 100, "b": 110, "c": 100}) == ("b", 4)  # a tenth more is not much
    made.dropped("b", [2])
    assert made.choose([1, 2, 3, 4], idle) == ("a", 2)  # 3 is of no use without 2
    made.cleared("a")
    made.remove("b")
    assert made.choose([1, 2], {"a": 1, "c": 0}) == ("c", 0)


def test_announced_blocks_count_until_the_engine_drops_them() -> None:
    """Announced blocks count until the engine drops them, whatever is sent there. Blocks that were only sent are
    forgotten when there are too many."""
    made = router(4)
    made.announced("a", [1, 2])
    made.stored("a", [1, 2, 3, 4])
    assert made.num_cached("a", [1, 2, 3, 4]) == 4
    made.stored("a", [10, 11, 12, 13])
    assert (made.num_cached("a", [1, 2, 3]), made.num_cached("a", [10, 11, 12, 13])) == (2, 4)
    made.announced("a", [10])
    made.dropped("a", [2, 11])
    assert (made.num_cached("a", [1, 2]), made.num_cached("a", [10, 11])) == (1, 1)
    made.check_integrity()
    made.cleared("a")
    assert made.num_cached("a", [1]) == made.num_cached("a", [12]) == 0
    made.announced("nobody", [1])
    made.dropped("nobody", [1])
    made.check_integrity()


def test_a_beginning_that_all_share_does_not_draw_all_to_a_full_engine() -> None:
    made = router(8)
    made.stored("a", list(range(8)))
    assert made.choose([0, 1, 2, 30], {"a": 0, "b": 0}) == ("a", 3)  # one block is evicted for it
    assert made.choose([0, 1, 20, 30], {"a": 0, "b": 0}) == ("b", 0)  # two would be
    made.add("a", 16)
    assert made.choose([0, 1, 20, 30], {"a": 0, "b": 0}) == ("a", 2)


@given(st.lists(st.tuples(st.sampled_from(ENGINES), PROMPTS), max_size=20), PROMPTS, LOADS, st.none() | st.text())
def test_the_choice_is_bounded_and_no_other_has_more_for_less(
    history: list[tuple[str, list[object]]], prompt: list[object], loads: dict[str, int], affinity: str | None
) -> None:
    made = router(8)
    for engine, hashes in history:
        made.stored(engine, hashes)
        made.check_integrity()
    chosen, num_cached = made.choose(prompt, loads, affinity)
    least = min(loads.values())
    bound = max(SLACK, least * EXCESS)
    most = bound if affinity is not None else bound * (1 + EVICTION)  # if all engines but it are full
    assert loads[chosen] - least <= most
    assert num_cached == made.num_cached(chosen, prompt)
    spare = made.num_cached(chosen, prompt) + 8 - len(made.cached[chosen])
    for other in loads.keys() - {chosen} if affinity is None and spare < len(prompt) else ():
        assert not (loads[other] < loads[chosen] and made.num_cached(other, prompt) == len(prompt))
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


def test_retain_drops_all_other_blocks_of_an_engine() -> None:
    made = router()
    made.stored("a", ["1", "2", "3"])
    made.retain("a", {"1", "2", "other"})
    assert (made.num_cached("a", ["1", "2", "3"]), made.num_cached("a", ["other"])) == (2, 0)
    made.retain("unknown", {"1"})
    made.check_integrity()
