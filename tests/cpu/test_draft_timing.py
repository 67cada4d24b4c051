"""A worker that drafts as much as saves time measures steps with drafts and without at its start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.driver import Driver, make_prompt, new_request
from tests.families.mixtures import VARIANTS as MIXTURES
from tests.lora_adapters import make_adapter
from tests.mtp_heads import add_head
from vllm_lite.protocol.control import ReadAdapter
from vllm_lite.protocol.step import Continue
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.drafting import timing
from vllm_lite.worker.drafting.timing import time_steps, timings_of
from vllm_lite.worker.sampling.drafter import Drafter

MOST = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model_with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = next(each for each in MIXTURES if each.model == "Glm4MoeForCausalLM")
    return add_head(variant.make(tmp_path_factory.mktemp("model") / "glm"))


def start(folder: Path, **speculation: Any) -> Driver:
    return Driver(folder, max_model_len=256, speculative_config={"num_speculative_tokens": MOST} | speculation)


def shapes(driver: Driver) -> list[tuple[int, int]]:
    assert all(each.took_s > 0 for each in driver.started.timings)
    assert not driver.pool.any(), "trying steps wrote KV"
    return [(each.num_rows, each.most_drafts) for each in driver.started.timings]


ALONE = [(1, 0), (2, 1), (3, 2), (4, 3), (6, 5), (8, 7)]
TRIED = [*ALONE, (1 + MOST, MOST), (8, 0), (16, 1)]


@pytest.mark.parametrize("method", ["ngram", "suffix", "self", "draft_model", "mtp"])
def test_every_method_is_timed(method: str, model: Path, model_with_head: Path) -> None:
    is_mtp = method == "mtp"
    own = {"model": str(model)} if method == "draft_model" else {}
    driver = start(model_with_head if is_mtp else model, method=method, **own)
    assert shapes(driver) == TRIED
    drafter: Any = driver.worker.drafter
    passes: list[int] = []
    chain = getattr(drafter.with_model, "chain", None)
    assert (chain is None) == (method in ("ngram", "suffix"))
    if chain is not None:
        rehearse = chain.rehearse

        def counted(step: StepInputs) -> None:
            passes.append(len(step.rows))
            rehearse(step)

        chain.rehearse = counted
    assert len(timings_of(driver.worker.runner, drafter.rehearse, driver.worker.config)) == len(TRIED)
    if chain is not None:
        assert passes == [1, 8] * (len(passes) // 2), "a pass by itself of one sequence and of several"
        assert len(passes) >= 6


def test_steps_recorded_then_serve_adapters(tmp_path: Path) -> None:
    """The timed steps are the first recorded ones. Their programs must read the adapters of later rows, not those of
    the warm-up step."""
    model = make_checkpoint(tmp_path / "model")
    adapter = str(make_adapter(model, tmp_path / "adapter"))
    got = []
    for tries in (False, True):
        driver = Driver(model, max_model_len=256, enable_lora=True)
        worker: Any = driver.worker
        if tries:
            worker.adapters._adapters.rows.gather(torch.zeros(1, dtype=torch.int64))
            assert time_steps(worker.runner, Drafter().rehearse, MOST)
            assert worker.runner.forward.num_replays
        assert worker.load_adapter(ReadAdapter(1, "adapter", adapter)).error is None
        for number in (0, 1):
            driver.run(new_request(number, make_prompt(20), [1 + 2 * number, 2 + 2 * number], adapter=number))
        for number in (0, 1):
            for _ in range(8):
                driver.run(Continue(number, 1, []))
        got.append(driver.got)
    assert got[0] == got[1]
    assert got[0][0] != got[0][1], "the adapter changes what the model says"


def test_the_least_of_each_counts_and_a_draft_for_each_that_is_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, now_s, rounds = Driver(model, max_model_len=256).worker.runner, [0.0], [0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    logits = runner.forward.logits

    def verify(step: StepInputs) -> torch.Tensor:
        rounds[0] += step.num_tokens == 1
        now_s[0] += step.num_tokens * (9.0 if rounds[0] < 3 else 1.0)  # the first rounds are slow
        return logits(step)

    def draft(step: StepInputs) -> None:
        now_s[0] += 0.25 * len(step.rows)

    monkeypatch.setattr(runner.forward, "logits", verify)
    timings = time_steps(runner, draft, 5)
    assert [(each.num_rows, each.most_drafts, each.took_s) for each in timings] == [
        *((1, 0, 1.0), (2, 1, 2.25), (3, 2, 3.5), (4, 3, 4.75), (6, 5, 7.25)),
        *((8, 0, 8.0), (16, 1, 18.0)),
    ]


def test_lengths_that_are_fixed_are_not_timed(model: Path) -> None:
    driver = Driver(
        model, speculative_config={"method": "ngram", "num_speculative_tokens": MOST}, disable_adaptive_drafts=True
    )
    assert driver.started.timings == ()
    assert Driver(model).started.timings == ()


def test_steps_that_do_not_fit_are_not_tried(model: Path) -> None:
    small: dict[str, Any] = {"max_num_batched_tokens": 3, "max_num_seqs": 2}
    driver = Driver(model, speculative_config={"method": "ngram", "num_speculative_tokens": MOST}, **small)
    assert shapes(driver) == [(1, 0), (2, 1), (3, 2), (2, 0)]


def test_steps_longer_than_a_sequence_may_be_are_not_tried(model: Path) -> None:
    driver = Driver(model, speculative_config={"method": "ngram", "num_speculative_tokens": 40}, max_model_len=5)
    assert shapes(driver) == [(1, 0), (2, 1), (3, 2), (4, 3), (8, 0), (16, 1)]


def test_rows_have_tokens_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones choose the same experts, so that further rows seem to cost nothing."""
    runner, seen = Driver(model, max_model_len=256).worker.runner, list[list[int]]()
    logits = runner.forward.logits

    def watched(step: StepInputs) -> torch.Tensor:
        seen.append(step.input_ids.tolist())
        return logits(step)

    monkeypatch.setattr(runner.forward, "logits", watched)
    time_steps(runner, lambda step: seen.append(step.input_ids.tolist()), MOST)
    assert {len(ids) for ids in seen} == {1, 2, 3, 4, 6, 8, 10, 16}
    assert all(len(set(ids)) == len(ids) for ids in seen)
    assert all(0 <= token < runner.model.spec.vocab_size for ids in seen for token in ids)
