"""Ending some samples of a request while others continue: in the engine, and in the trace."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recorded import Recorded
from tests.scheduler_rig import expected
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.request import Produced
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.story import story

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


class Bench(Recorded):
    """A recorded core that collects each sample's tokens, and its end."""

    def __init__(self, trace: Path, **settings: object) -> None:
        super().__init__(trace, num_blocks=40, **settings)  # type: ignore[arg-type]
        self.trace = str(trace)
        self.got: dict[int, list[int]] = {}
        self.ends: list[int] = []

    def step(self) -> list[Produced]:
        self.core.begin()
        output = self.worker.poll()
        produced = [] if output is None else self.core.finish(output)
        for item in produced:
            self.got.setdefault(item.sample, []).extend(item.token_ids)
            self.ends += [item.sample] * (item.reason is not None)
        self.scheduler.check_integrity()
        return produced

    def run(self) -> None:
        for _ in range(200):
            self.step()
            if not self.scheduler.requests:
                self.drain()
                break
        assert not self.scheduler.requests
        assert self.core.kv.pool.num_used == 0
        self.core.close()
        replay = Replay(self.trace).run()
        assert replay.divergence is None, replay.divergence


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "trace", async_scheduling=False)
    yield made
    made.core.close()


def continuation(sample: int, count: int = 12) -> list[int]:
    return expected(PROMPT, count, sample=sample)


def test_named_samples_stop_computing_and_the_others_continue(bench: Bench) -> None:
    bench.add("r", PROMPT, max_tokens=12, n=4, ignore_eos=True)
    for _ in range(4):
        bench.step()
    used = bench.core.kv.pool.num_used
    assert bench.core.abort("r", (1, 3)) == [(1, 4), (3, 4)]
    assert bench.core.abort("r", (1, 3)) == [], "they have had their end"
    assert bench.core.kv.pool.num_used < used
    bench.step()
    assert bench.scheduler.num_scheduled_tokens == 2
    bench.run()
    assert {sample: bench.got[sample] for sample in (0, 2)} == {sample: continuation(sample) for sample in (0, 2)}
    assert (len(bench.got[1]), len(bench.got[3]), sorted(bench.ends)) == (4, 4, [0, 2])
    assert bench.scheduler.counters.ended_by == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert any(
        line.endswith("Sample 1 and sample 3 ended at its client's wish.")
        for line in story("r", TraceReader(bench.trace))
    )


def test_samples_that_are_still_to_come_do_not_come(bench: Bench) -> None:
    bench.add("r", PROMPT * 3, max_tokens=3, n=4, ignore_eos=True)
    bench.step()
    assert bench.core.abort("r", (2,)) == [(2, 0)]
    assert bench.scheduler.requests["r"].open_samples() == [(0, 0), (1, 0), (3, 0)]
    bench.run()
    assert (sorted(bench.got), sorted(bench.ends)) == ([0, 1, 3], [0, 1, 3])
    assert bench.got[3] == expected(PROMPT * 3, 3, sample=3)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_the_next_sample_computes_the_prompt_if_the_first_is_not_wanted(bench: Bench, num_steps: int) -> None:
    """The next sample also finds the blocks that the first has computed."""
    bench.add("r", PROMPT * 3, max_tokens=3, n=3, ignore_eos=True)
    bench.add("other", PROMPT[::-1] * 2, max_tokens=3)
    for _ in range(num_steps):
        bench.step()
    assert bench.core.abort("r", (0,)) == [(0, 0)]
    bench.step()
    assert bench.scheduler.requests["r"].sequences[0].num_cached == 16 * num_steps
    bench.run()
    assert bench.got[1][-3:] == expected(PROMPT * 3, 3, sample=1)
    assert bench.got[2] == expected(PROMPT * 3, 3, sample=2)


@pytest.mark.parametrize("named", [(), (0, 1, 2), (1, 2)])
def test_with_its_last_sample_the_request_ends(bench: Bench, named: tuple[int, ...]) -> None:
    bench.add("r", PROMPT, max_tokens=12, n=3, ignore_eos=True)
    bench.step()
    if len(named) == 2:
        assert bench.core.abort("r", (0,)) == [(0, 1)]
    ended = bench.core.abort("r", named, stopped=True)
    assert len(ended) == (3 if len(named) != 2 else 2)
    assert not bench.scheduler.requests
    assert bench.scheduler.counters.ended_by["stop"] == 1
    bench.run()


def test_beams_end_together(bench: Bench) -> None:
    bench.add("r", PROMPT, max_tokens=4, n=3, use_beam_search=True)
    bench.step()
    assert bench.core.abort("r", (1,)) == []
    bench.run()
    assert sorted(bench.ends) == [0, 1, 2]


def test_a_step_in_flight_does_not_bring_it_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace", async_scheduling=True)
    bench.add("r", PROMPT, max_tokens=12, n=3, ignore_eos=True)
    bench.step()
    bench.core.begin()
    assert bench.core.in_flight
    assert [sample for sample, _ in bench.core.abort("r", (0, 2))] == [0, 2]
    bench.run()
    assert set(bench.ends) == {1}
    assert bench.got[1] == continuation(1)
