"""Drafts in `vllm-lite simulate`: made and right as often as in the recording, and as dear."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.test_simulate import HEADER, OPTIONS, TIMES, load_at, made_up
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.tools.simulate import cost, fit
from vllm_lite.tools.simulate.drafts import MAX_HISTORIES, DraftDraws, DraftStep, kept
from vllm_lite.tools.simulate.recording import Recording
from vllm_lite.tools.simulate.variants import RunOptions, simulate

ODDS = 0.7
"""That a draft is right where those before it were."""


def histories(count: int, rng: random.Random, most: int = 4) -> list[list[DraftStep]]:
    """Each step drafts as many as it may, two times in three."""

    def step() -> DraftStep:
        if rng.random() < 1 / 3:
            return DraftStep(0, 0)
        return DraftStep(most, next((right for right in range(most) if rng.random() > ODDS), most), is_cut=True)

    return [[step() for _ in range(30)] for _ in range(count)]


def drafting(method: str = "ngram", *, adaptive: bool = True, **changes: Any) -> cost.StepTimes:
    options = OPTIONS | {"draft_method": method, "num_drafts": 4, "adaptive_drafts": adaptive}
    changes = {
        "drafts": histories(40, random.Random(6)),
        "times": TIMES | {"verify": 5e-4, "draft": 1e-4, "lookup": 5e-5},
    } | changes
    return made_up(header=msgspec.structs.replace(HEADER, options=options), **changes)


@pytest.mark.parametrize(("method", "adaptive"), [("ngram", True), ("draft_model", False)])
def test_drafts_of_a_recording_come_back(method: str, adaptive: bool, tmp_path: Path) -> None:
    real, path = drafting(method, adaptive=adaptive), str(tmp_path / "trace")
    done = simulate(real, {}, load_at(5.0, 150), RunOptions(1, record=path))
    assert Replay(path).run().divergence is None
    recording = Recording(path).read()
    fitted = fit.fit([recording], "drafts")
    assert fitted.error < 1e-3
    assert len(recording.drafts) > 100
    made = [step for steps in recording.drafts.values() for step in steps if step.made]
    right, wrong = sum(step.right for step in made), sum(step.right < step.made for step in made)
    assert right / (right + wrong) == pytest.approx(ODDS, abs=0.05)
    load = load_at(4.0, 150, seed=7)
    expected, again = (simulate(each, {}, load, RunOptions(2)).figures for each in (real, fitted))
    for name in ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "steps"):
        assert again[name] == pytest.approx(expected[name], rel=0.1), name
    plain = simulate(made_up(), {}, load_at(5.0, 150)).figures
    assert done.figures["mean_tpot_ms"] < 0.8 * plain["mean_tpot_ms"]


def test_no_more_is_drafted_than_may_be_and_all_requests_end_in_time() -> None:
    draws = DraftDraws(histories(1, random.Random(1)), random.Random(1))
    for most in (1, 2, 3, 4) * 20:
        made, right = draws.draw(1, most)
        assert right <= made
        assert made in (0, most)
    assert DraftDraws([[DraftStep(2, 2)]], random.Random(1)).draw(1, 4) == (2, 2), "it found no more"
    assert DraftDraws([], random.Random(1)).draw(1, 4) == (0, 0)
    load = load_at(8.0, 60)
    done = simulate(drafting(drafts=[[DraftStep(4, 4)]]), {}, load)
    assert [outcome.output_len for outcome in done.outcomes] == [request.output_len for request in load]


def test_as_many_histories_are_kept_as_may_be() -> None:
    assert len(kept([[DraftStep(1, 0)] * 500] * 3000)) <= MAX_HISTORIES
    assert {len(each) for each in kept([[DraftStep(1, 0)] * 500, []])} == {128}


def test_drafts_that_were_not_allowed_are_right_with_the_odds_of_those_that_were() -> None:
    draws = DraftDraws([[DraftStep(1, 1, is_cut=True)] * 70 + [DraftStep(1, 0, is_cut=True)] * 30], random.Random(5))
    drawn = [draws.draw(1, 4) for _ in range(2000)]
    assert {made for made, _ in drawn} == {4}
    expected = sum(ODDS**count for count in range(1, 5))
    assert sum(right for _, right in drawn) / 2000 == pytest.approx(expected, rel=0.05)
