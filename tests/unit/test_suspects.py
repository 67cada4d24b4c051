"""Search for the request that kills the workers: the number of deaths it takes, and that a bystander is never
blamed."""

import random
from collections import defaultdict
from math import inf

import pytest

from vllm_lite.engine.workers.suspects import (
    MAX_PROBATION,
    MAX_SINGLES,
    MAX_STRAYS,
    MIN_CONVICT,
    PROBATION,
    STRAY_S,
    Suspects,
)


class Engine:
    """Requests that get one token each in every step. A poisoned one kills in the step in which it would get its
    `kills_at`-th token since the workers began."""

    def __init__(self, num: int, kills_at: dict[str, int], *, step_s: float = 0.01, length: int = 500) -> None:
        self.suspects = Suspects[str]()
        self.progress = {f"r{index}": 10 * index for index in range(num)}
        self.ends = defaultdict(lambda: 10**9, {name: progress + length for name, progress in self.progress.items()})
        self.kills_at = kills_at
        self.convicted: list[str] = []
        self.num_deaths = 0
        self.now_s = 0.0
        self.step_s = step_s
        self.gained: dict[str, int] = {}

    def step(self) -> None:
        """Make one step of the sequences that may run: either the workers die, or each of these gets a token."""
        self.now_s += self.step_s
        batch = self.suspects.proceed(self.progress.get) or list(self.progress)
        if any(self.gained.get(name, 0) + 1 >= self.kills_at.get(name, inf) for name in batch):
            self.die(batch)
            return
        for name in batch:
            self.gained[name] = self.gained.get(name, 0) + 1
            self.progress[name] += 1
            if self.progress[name] == self.ends[name]:
                del self.progress[name]

    def die(self, batch: list[str]) -> None:
        self.num_deaths += 1
        self.gained = {}
        convicted = self.suspects.died({name: self.progress[name] for name in batch}, self.now_s)
        if convicted is not None:
            self.convicted.append(convicted)
            del self.progress[convicted]
        self.suspects.forget(self.progress)

    def run(self, max_deaths: int = 40) -> None:
        while self.progress and self.num_deaths < max_deaths:
            self.step()


@pytest.mark.parametrize("kills_at", [1, 2, PROBATION])
@pytest.mark.parametrize("num", [1, 2, 3, MAX_SINGLES, MAX_SINGLES + 1, 64, 256])
def test_one_among_many_is_found_in_four_deaths(num: int, kills_at: int) -> None:
    for poisoned in {0, num // 2, num - 1}:
        engine = Engine(num, {f"r{poisoned}": kills_at})
        engine.run()
        assert engine.convicted == [f"r{poisoned}"]
        assert engine.num_deaths == (MIN_CONVICT if num > 1 else MIN_CONVICT - 1)
        assert not engine.progress


def test_one_after_the_other_is_found_as_fast() -> None:
    engine = Engine(64, {"r5": 1}, length=2000)
    for number in range(4):
        for _ in range(300):
            engine.step()
        engine.progress[f"late{number}"] = 7
        engine.kills_at[f"late{number}"] = 2
    for _ in range(300):
        engine.step()
    assert engine.convicted == ["r5", *(f"late{number}" for number in range(4))]
    assert engine.num_deaths == 5 * MIN_CONVICT


def test_several_are_found_each() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        names = rng.sample([f"r{index}" for index in range(64)], rng.randint(2, 4))
        engine = Engine(64, {name: rng.randint(1, PROBATION) for name in names})
        engine.run()
        assert set(engine.convicted) == set(names)
        assert engine.num_deaths <= 2 * len(names) + 2, "two together, then two for each"


def test_a_request_that_kills_later_is_found_later() -> None:
    for kills_at in range(PROBATION + 1, MAX_PROBATION + 1):
        engine = Engine(64, {"r7": kills_at})
        engine.run()
        assert engine.convicted == ["r7"]
        assert engine.num_deaths <= 6


def test_deaths_from_outside_convict_no_request() -> None:
    """Workers are killed from outside, at random, as often as a chaos test does it: a mean of 2 s between two deaths,
    for 12 hours together, with up to 40 requests that take 10 to 30 ms a token."""
    num_deaths, convicted = 0, []
    for seed in range(6):
        rng = random.Random(seed)
        engine = Engine(rng.randint(1, 40), {}, step_s=rng.uniform(0.01, 0.03), length=10**9)
        next_s = 0.0
        while engine.now_s < 7200:
            next_s = max(engine.now_s, next_s) + rng.expovariate(1 / 2.0)
            while engine.now_s < next_s:
                batch = engine.suspects.proceed(engine.progress.get)
                if not batch:  # nothing is tried: the rest passes at once
                    steps = int((next_s - engine.now_s) / engine.step_s) + 1
                    engine.now_s += steps * engine.step_s
                    engine.progress = {name: value + steps for name, value in engine.progress.items()}
                else:
                    engine.step()
            engine.die(engine.suspects.proceed(engine.progress.get) or list(engine.progress))
        num_deaths += engine.num_deaths
        convicted += engine.convicted
    assert num_deaths > 20_000
    assert len(convicted) <= 1, "one of 20,000 deaths"


def test_stray_deaths_ask_for_more_and_are_forgotten() -> None:
    def deaths_of(pause_s: float) -> int:
        engine = Engine(64, {"r3": 1}, length=2000)
        quiet, engine.kills_at = engine.kills_at, {}
        for _ in range(5):  # kills from outside, far apart
            engine.die(list(engine.progress))
            for _ in range(100):
                engine.step()
        engine.now_s += pause_s
        engine.kills_at, engine.num_deaths = quiet, 0
        engine.run()
        assert engine.convicted == ["r3"]
        return engine.num_deaths

    assert deaths_of(0.0) == MIN_CONVICT + MAX_STRAYS
    assert deaths_of(2 * STRAY_S) == MIN_CONVICT


def test_workers_that_die_without_a_step_say_nothing() -> None:
    engine = Engine(1, {})
    for _ in range(10):
        assert engine.suspects.died({}, engine.now_s) is None
    assert not engine.suspects.groups
    assert not engine.suspects.records


def test_an_ended_request_may_have_caused_the_death() -> None:
    """A batch of two, one of which was aborted since, is none of one."""
    suspects = Suspects[str]()
    for _ in range(10):
        assert suspects.died({"a": 5}, 0.0, num_ended=1) is None
        assert suspects.groups[0] == ["a"] if suspects.records["a"].num_deaths > 1 else not suspects.groups
    assert suspects.died({"a": 5}, 0.0) == "a"


def test_a_group_that_dies_is_split_and_the_others_are_tried_after_it() -> None:
    suspects = Suspects[str]()
    batch = {f"r{index}": 0 for index in range(64)}
    suspects.died(batch, 0.0)
    assert not suspects.groups
    suspects.died(batch, 1.0)
    assert [len(group) for group in suspects.groups] == [8] * 8
    suspects.died({"r1": 0, "r2": 0}, 2.0)  # the others of the group were not in that step
    assert [*suspects.groups][:3] == [["r1"], ["r2"], ["r0", "r3", "r4", "r5", "r6", "r7"]]
    assert suspects.proceed(lambda name: PROBATION if name == "r1" else 0) == ["r2"]
    assert suspects.num_deaths("r1") == 0, "it has come past its trial"
    assert suspects.proceed(lambda name: None if name in ("r2", "r0") else 0)[1] == "r3", "who has ended is passed over"
    suspects.forget({"r4", "r63"})
    assert suspects.proceed(lambda _: 0) == ["r4"]
    assert suspects.proceed(lambda _: 2 * PROBATION) == []
