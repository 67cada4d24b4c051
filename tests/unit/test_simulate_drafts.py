"""Drafts in `vllm-lite simulate`: made and right where they were in recorded answers, and as dear."""

import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.unit.test_simulate import HEADER, OPTIONS, TIMES, load_at, made_up
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.request import Produced
from vllm_lite.engine.scheduling.step_cost import StepCost
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.control import StepTiming
from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.simulate import cost, fit
from vllm_lite.tools.simulate.drafts import MAX_HISTORIES, DraftDraws, DraftStep, history, kept
from vllm_lite.tools.simulate.features import PLACE
from vllm_lite.tools.simulate.recording import Recording
from vllm_lite.tools.simulate.variants import RunOptions, simulate

ODDS = 0.7
"""Probability that a draft is right after right ones."""
LATE = "w-w-w" + "r" * 35
"""An answer whose drafts are wrong at first, and right later."""


def answer(rng: random.Random) -> str:
    """A random answer; the drafter finds nothing for one in five tokens."""
    return "".join("-" if rng.random() < 0.2 else "r" if rng.random() < ODDS else "w" for _ in range(60))


def drafting(method: str = "ngram", *, adaptive: bool = True, **changes: Any) -> cost.StepTimes:
    options = OPTIONS | {"draft_method": method, "num_drafts": 4, "adaptive_drafts": adaptive}
    rng = random.Random(6)
    changes = {
        "drafts": [answer(rng) for _ in range(40)],
        "times": TIMES | {"verify": 5e-4, "draft": 1e-4, "lookup": 5e-5},
    } | changes
    return made_up(header=msgspec.structs.replace(HEADER, options=options), **changes)


def draws(*of: str, in_order: bool = False) -> DraftDraws:
    found = DraftDraws(of, random.Random(5), in_order=in_order)
    found.begin(1, 10)
    return found


@pytest.mark.parametrize(("method", "adaptive"), [("draft_model", True), ("draft_model", False)])
def test_drafts_of_a_recording_come_back(method: str, adaptive: bool, tmp_path: Path) -> None:
    real, path = drafting(method, adaptive=adaptive), str(tmp_path / "trace")
    done = simulate(real, {}, load_at(5.0, 150), RunOptions(1, record=path))
    assert Replay(path).run().divergence is None
    recording = Recording(path).read()
    fitted = fit.fit([recording], "drafts")
    assert fitted.error < 1e-3
    assert len(fitted.drafts) == 150
    known = "".join(fitted.drafts)
    assert known.count("r") / (known.count("r") + known.count("w")) == pytest.approx(ODDS, abs=0.06)
    load = load_at(4.0, 150, seed=7)
    expected, again = (simulate(each, {}, load, RunOptions(2)).figures for each in (real, fitted))
    for name in ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "steps"):
        assert again[name] == pytest.approx(expected[name], rel=0.1), name
    plain = simulate(made_up(), {}, load_at(5.0, 150)).figures
    assert done.figures["mean_tpot_ms"] < 0.8 * plain["mean_tpot_ms"]


def test_drafts_are_right_where_they_were_in_the_answer(tmp_path: Path) -> None:
    """Answers have 20 tokens in the recording, and 8 in the load that is asked about: few get to what is right."""
    real, path = drafting("draft_model", drafts=[LATE]), str(tmp_path / "trace")
    simulate(real, {}, load_at(2.0, 100), RunOptions(1, record=path))
    fitted = fit.fit([Recording(path).read()], "late")
    short = [each._replace(output_len=8) for each in load_at(2.0, 100, seed=3)]
    for load in (short, load_at(2.0, 100, seed=3)):
        expected, again = (simulate(each, {}, load, RunOptions(2)).figures for each in (real, fitted))
        assert again["mean_tpot_ms"] == pytest.approx(expected["mean_tpot_ms"], rel=0.05)
        assert again["steps"] == pytest.approx(expected["steps"], rel=0.05)


def test_each_answer_has_its_own_drafts_if_all_is_as_recorded(tmp_path: Path) -> None:
    rng = random.Random(2)
    mixed = ["r" * 40 if rng.random() < 0.5 else "-" * 40 for _ in range(60)]
    path, load = str(tmp_path / "trace"), load_at(2.0, 60)
    expected = simulate(drafting("draft_model", drafts=mixed), {}, load, RunOptions(1, record=path))
    recording = Recording(path).read()
    fitted = fit.fit([recording], "mixed")
    own = simulate(fit.as_recorded(fitted, [recording]), {}, load)
    drawn = simulate(fitted, {}, load, RunOptions(3))

    def apart(outcomes: list[Outcome]) -> float:
        times = [[each.chunks_s[-1] - each.chunks_s[0] for each in run] for run in (expected.outcomes, outcomes)]
        return float(statistics.median(abs(one - other) / one for one, other in zip(*times, strict=True) if one))

    assert apart(own.outcomes) < 0.02
    assert apart(drawn.outcomes) > 0.1


def test_lengths_begin_with_the_times_that_workers_had_tried(tmp_path: Path) -> None:
    """If a row costs as much as a step, nothing is drafted from the first step on."""
    tried = [(1, 0, 1e-3), (2, 1, 2e-3), (3, 2, 3e-3), (4, 3, 4e-3), (5, 4, 5e-3), (8, 0, 8e-3), (16, 1, 16e-3)]
    dear, path = drafting(timings=tried, drafts=["r" * 40]), str(tmp_path / "trace")
    simulate(dear, {}, load_at(2.0, 100), RunOptions(1, record=path))
    recording = Recording(path).read()
    assert [each[:2] for each in recording.timings] == [each[:2] for each in tried]
    assert [each[2] for each in recording.timings] == pytest.approx([each[2] for each in tried], rel=0.02)
    first = recording.messages[:5]
    assert not any(message.features[PLACE["verify"]] for message in first)
    assert fit.fit([recording], "dear").timings == recording.timings
    again = StepCost([StepTiming(*each) for each in recording.timings])
    assert again.numbers == pytest.approx(StepCost([StepTiming(*each) for each in tried]).numbers, rel=0.02, abs=1e-5)
    for wrong in ((0, 0, 1e-3), (1, 0, 0.0), (1, -1, 1e-3)):
        file = tmp_path / "file"
        cost.write(drafting(timings=[wrong]), str(file))
        with pytest.raises(ConfigError, match="holds no fitted times"):
            cost.read(str(file))


def test_no_more_is_drafted_than_may_be_and_all_requests_end_in_time() -> None:
    found = draws(LATE)
    for most in (1, 2, 3, 4) * 20:
        for num_tokens in range(11, 120):
            made, right = found.draw(1, num_tokens, most)
            assert right <= made
            assert made in (0, most)
    assert draws("rr.").draw(1, 10, 4) == (2, 2), "it found no more"
    assert draws("r2rr").draw(1, 10, 4) == (3, 1), "it made no more"
    assert draws("rwrr").draw(1, 10, 4) == (4, 1)
    assert draws().draw(1, 10, 4) == (0, 0)
    assert draws("").draw(1, 10, 4) == (0, 0)
    load = load_at(8.0, 60)
    done = simulate(drafting(drafts=["r" * 9]), {}, load)
    assert [outcome.output_len for outcome in done.outcomes] == [request.output_len for request in load]


def test_a_longer_answer_continues_as_the_second_half_of_the_recorded_one() -> None:
    found = draws(LATE)
    assert [found.draw(1, 10 + at, 1)[1] for at in (0, 1, 2, 4, 5, 39, 40, 60, 61, 400)] == [0] * 4 + [1] * 6


def test_an_answer_that_is_longer_than_its_own_history_continues_as_a_longer_one() -> None:
    of = ["w" * 5, "w" * 5 + "r" * 10, "w" * 5 + "-" * 10, "w" * 3]
    made = []
    for seed in range(200):
        found = DraftDraws(of, random.Random(seed))
        found.begin(1, 10)
        assert found.draw(1, 12, 4) == (4, 0)
        made.append(found.draw(1, 16, 4))
        assert found.draw(1, 18, 4) == made[-1], "it stays with that one"
    assert set(made) == {(4, 4), (0, 0)}
    assert 70 < made.count((4, 4)) < 130


def test_requests_have_histories_in_turn_or_by_chance() -> None:
    of = ["r" * 5, "-" * 5, "w" * 5]

    def drawn(*, in_order: bool) -> list[tuple[int, int]]:
        found = DraftDraws(of, random.Random(1), in_order=in_order)
        made = list[tuple[int, int]]()
        for handle in range(300):
            found.begin(handle % 7, handle)
            made.append(found.draw(handle % 7, handle, 4))
        return made

    assert drawn(in_order=True) == [(4, 4), (0, 0), (4, 0)] * 100
    by_chance = drawn(in_order=False)
    assert all(80 < by_chance.count(each) < 120 for each in ((4, 4), (0, 0), (4, 0)))
    found = draws("rrrw" + "r" * 20, in_order=True)
    found.fork(5, 1)
    assert found.draw(5, 13, 4) == found.draw(1, 13, 4) == (4, 0)
    found.fork(6, 99)
    assert found.draw(6, 13, 4) == (0, 0)


def test_a_history_has_the_result_of_each_tokens_draft() -> None:
    steps = [DraftStep(1, 4, 0, True), DraftStep(2, 0, 0, False), DraftStep(3, 2, 2, False), DraftStep(6, 3, 1, False)]
    assert history(steps, range(12), "suffix") == "?w-rr.r2????"
    assert history([DraftStep(8, 4, 4, True)], range(10), "suffix") == "????????rr", "the last ones were not kept"
    assert history([DraftStep(9, 4, 1, True)], range(10), "suffix") == "?????????r"
    assert history([], [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], "ngram") == "----rrrrw-r"
    assert history([DraftStep(5, 4, 0, True)], [1, 2, 3, 1, 2, 3, 1], "ngram") == "----rwr", "a prompt has n-grams, too"


def test_tokens_from_before_a_trace_are_like_no_others() -> None:
    request: Any = SimpleNamespace(arrival=3)
    recording: Any = SimpleNamespace(_answers={})
    for item in (Produced(request, 0, 2, [5, 5]), Produced(request, 0, 4, [6]), Produced(request, 1, 0, [7])):
        Recording._keep(recording, item)
    assert recording._answers == {(3, 0): [-1, -2, 5, 5, 6], (3, 1): [7]}
    Recording._keep(recording, Produced(request, 0, 5, [], error="not finite"))
    assert recording._answers == {(3, 1): [7]}


def test_the_number_of_kept_histories_is_limited() -> None:
    assert len(kept(["rr"] * 3000)) <= MAX_HISTORIES
    assert kept(["r", "", "w"]) == ["r", "w"]
    assert {len(each) for each in kept([history([], [1] * 5000, "ngram")])} == {1024}


def test_drafts_that_were_not_allowed_are_right_with_the_odds_of_those_that_were() -> None:
    found = draws("r?" * 70 + "w?" * 30)
    drawn = [found.draw(1, 11 + 2 * (count % 100), 1) for count in range(2000)]
    assert {made for made, _ in drawn} == {1}
    assert sum(right for _, right in drawn) / 2000 == pytest.approx(ODDS, abs=0.03)


def test_another_process_has_the_same_bytes_also_with_drafts_and_two_engines(tmp_path: Path) -> None:
    cost.write(drafting(noise={"decodes": [0.5, 1.0, 2.0]}), str(tmp_path / "file"))
    words = [sys.executable, "-m", "vllm_lite", "simulate", str(tmp_path / "file"), "--json", "--num-prompts", "60"]
    words += ["--dataset-name", "prefix_repetition", "--request-rate", "20", "--vary", "data_parallel_size=1,2"]
    made = [
        subprocess.run(words, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1]
    assert made[0].count(b'"completed": 60') == 2
