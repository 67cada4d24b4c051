"""The sampler's kernel through the emulator, and the errors of its Python side."""

import numpy as np
import pytest
import torch

from tests.kernels import sampler_cases as cases
from tests.kernels.emulator import EmulatorLauncher, check_orders
from vllm_lite.kernels.cuda import sampler
from vllm_lite.worker.sampling.sampler import Sampler

CPU = torch.device("cpu")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("parts", [1, 3])
def test_the_order_of_threads_does_not_show(parts: int) -> None:
    logits, draws = cases.normal(6, 1000, 3.0), cases.make_draws(6, 1000)
    draws["top_k"], draws["top_p"] = (1000, 40, 1000) * 2, (1.0, 0.9, 0.7) * 2
    logits[5] = 0
    check_orders(lambda launcher: sampler.pick_on_device(launcher, logits, draws, parts))


def test_the_sampler_of_a_gpu_worker_uses_it(monkeypatch: pytest.MonkeyPatch, emulated: EmulatorLauncher) -> None:
    plain = Sampler(1000, CPU)
    on_gpu = Sampler(1000, CPU)
    monkeypatch.setattr(on_gpu, "device", torch.device("cuda"))
    monkeypatch.setattr(on_gpu, "_launcher", emulated)
    logits, draws = cases.normal(4, 1000, 3.0), cases.make_draws(4, 1000)
    monkeypatch.setattr(on_gpu, "pick_plainly", None)  # would fail if it were called
    assert on_gpu.pick(logits, draws).tokens.tolist() == plain.pick_plainly(logits, draws).tokens.tolist()


@pytest.mark.parametrize("columns", [slice(64, 1000), slice(7, 512), slice(0, 1)])
def test_some_columns_of_each_row(columns: slice, emulated: EmulatorLauncher) -> None:
    """Sample from the columns that a rank has made, whether or not they start where vectors are aligned."""
    logits, draws = cases.normal(5, 1000, 3.0), cases.make_draws(5, 1000)
    draws["temperature"] = 0
    picked = sampler.pick(emulated, logits[:, columns], draws)
    assert picked.tokens.tolist() == logits[:, columns].argmax(1).tolist()
    np.testing.assert_array_equal(picked.best, logits[:, columns].amax(1).numpy())


def test_wrong_arguments_are_refused(emulated: EmulatorLauncher) -> None:
    logits, draws = torch.zeros(2, 8), cases.make_draws(2, 8)
    for wrong in (logits.half(), logits.t(), logits[0], torch.empty(2, 0)):
        with pytest.raises(ValueError, match="logits must be float32"):
            sampler.pick(emulated, wrong, draws)
    for few in (draws[:1], draws["seed"], np.concatenate((draws, draws))[::2]):
        with pytest.raises(ValueError, match="array of 2 DRAW records"):
            sampler.pick(emulated, logits, few)
