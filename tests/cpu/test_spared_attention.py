"""Steps in which the last layer attends for the wanted rows alone, beside the same steps in which it does for all."""

from pathlib import Path

import pytest
import torch

from tests.cpu.test_model_runner_drafts import Parrot
from tests.driver import Driver, make_prompt, new_request
from tests.plays import Play, Recorder, without_step
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.kernels.cpu.library import available
from vllm_lite.protocol.step import Continue, Draft, Entry
from vllm_lite.worker import forward

NEVER = 1 << 62


class Pair:
    """Two workers, of which the first one spares whatever it can."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32") -> None:
        self.monkeypatch = monkeypatch
        self.drivers = [Driver(model, device="cpu", dtype=dtype, enforce_eager=True) for _ in range(2)]
        self.recorders = [Recorder(driver) for driver in self.drivers]
        self.num_prepared = 0
        backend = self.drivers[0].worker.runner.eager.backend
        inner = backend.prepare

        def prepare(batch: StepBatch) -> None:
            self.num_prepared += 1
            inner(batch)

        backend.prepare = prepare  # type: ignore[method-assign]

    def run(self, *entries: Entry) -> int:
        """Run a step. Returns the number of times that the first one planned attention."""
        self.num_prepared = 0
        outputs = []
        for driver, least in zip(self.drivers, (1, NEVER), strict=True):
            self.monkeypatch.setattr(forward, "LEAST_PAIRS", least)
            outputs.append(without_step(driver.run(*entries)))
        assert outputs[0] == outputs[1]
        first, second = (recorder.logits for recorder in self.recorders)
        assert len(first) == len(second)
        if first:
            assert torch.equal(first[-1], second[-1])
        assert torch.equal(self.drivers[0].pool, self.drivers[1].pool)
        return self.num_prepared


@pytest.mark.skipif(not available(), reason="there are no native kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_steps_have_the_same_bits(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    pair, play = Pair(tiny_checkpoint, monkeypatch, dtype), Play(3, 1)
    assert sum(pair.run(*play.step()) == 2 for _ in range(40)) > 5


@pytest.mark.skipif(not available(), reason="there are no native kernels")
def test_drafts_are_wanted_beside_the_end_of_a_prompt(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tiny_checkpoint, monkeypatch)
    prompt = make_prompt(30, seed=11)
    for driver in pair.drivers:
        driver.drafts.drafter = Parrot([*prompt, *[7] * 20])
    assert pair.run(new_request(0, prompt, [1, 2, 3, 4])) == 2
    late = new_request(1, make_prompt(40, seed=2), [5, 6, 7, 8], num_tokens=20)
    assert pair.run(late, Draft(0, 3, [])) == 2
    assert pair.run(Draft(0, 3, []), Continue(1, 20, [])) == 2


@pytest.mark.skipif(not available(), reason="there are no native kernels")
def test_nothing_is_planned_again_where_little_would_be_spared(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode is wanted anyhow, however much it attends to."""
    pair = Pair(tiny_checkpoint, monkeypatch)
    pair.run(new_request(0, make_prompt(90, seed=11), [1, 2, 3, 4, 5, 6]))
    driver, _ = pair.drivers
    monkeypatch.setattr(forward, "LEAST_PAIRS", 4)
    for prompt, expected in (([5], 1), ([5, 6], 1), ([5, 6, 7], 2)):
        pair.num_prepared = 0
        driver.run(Continue(0, 1, []), new_request(len(prompt), prompt, [6 + len(prompt)]))
        assert pair.num_prepared == expected
