"""A worker whose drafts follow from their gain tries steps with drafts and without when it starts."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.driver import Driver
from tests.families.mixtures import VARIANTS as MIXTURES
from tests.mtp_heads import add_head
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.drafting.timing import timings_of

MOST = 3


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


TRIED = [(1, 0), (2, 1), (1 + MOST, MOST), (8, 0), (16, 1)]


@pytest.mark.parametrize("method", ["ngram", "suffix", "self", "draft_model", "mtp"])
def test_every_method_is_timed(method: str, model: Path, model_with_head: Path) -> None:
    is_mtp = method == "mtp"
    own = {"model": str(model)} if method == "draft_model" else {}
    driver = start(model_with_head if is_mtp else model, method=method, **own)
    assert shapes(driver) == TRIED
    drafter: Any = driver.worker.drafter
    passes: list[int] = []
    chain = getattr(drafter._with_model, "_chain", None)
    assert (chain is None) == (method in ("ngram", "suffix"))
    if chain is not None:
        rehearse = chain.rehearse

        def counted(step: StepInputs) -> None:
            passes.append(len(step.rows))
            rehearse(step)

        chain.rehearse = counted
    assert len(timings_of(driver.worker.runner, drafter.rehearse, driver.worker.config)) == len(TRIED)
    if chain is not None:
        tries = len(passes) // (1 + MOST + 1)
        assert passes == [1] * tries * (1 + MOST) + [8] * tries, "a pass for each draft of each step"


def test_lengths_that_are_fixed_are_not_timed(model: Path) -> None:
    driver = Driver(
        model, speculative_config={"method": "ngram", "num_speculative_tokens": MOST}, disable_adaptive_drafts=True
    )
    assert driver.started.timings == ()
    assert Driver(model).started.timings == ()


def test_steps_that_do_not_fit_are_not_tried(model: Path) -> None:
    small: dict[str, Any] = {"max_num_batched_tokens": 3, "max_num_seqs": 2}
    driver = Driver(model, speculative_config={"method": "ngram", "num_speculative_tokens": MOST}, **small)
    assert shapes(driver) == [(1, 0), (2, 1), (2, 0)]
