"""The kernel of bitmasks through the emulator, and the errors of its Python side."""

import numpy as np
import pytest
import torch

from tests.kernels import masks_cases as cases
from tests.kernels.emulator import EmulatorLauncher
from vllm_lite.kernels.cuda import masks
from vllm_lite.kernels.sampling import MaskedRows
from vllm_lite.worker.sampling.masks import TokenMasks

CPU = torch.device("cpu")


def test_wrong_arguments_are_refused() -> None:
    logits, (samples, bitmasks) = torch.zeros(4, 40), cases.draw_masked(4, 40, 3)
    masks.bring(logits, MaskedRows(samples, bitmasks))
    for wrong in (logits.half(), logits.t(), logits[0]):
        with pytest.raises(ValueError, match="logits must be"):
            masks.bring(wrong, MaskedRows(samples, bitmasks))
    for masked in (bitmasks[:2], bitmasks[:, :1], bitmasks.view(np.int32), bitmasks[:, ::-1]):
        with pytest.raises(ValueError, match="bitmasks must be"):
            masks.bring(logits, MaskedRows(samples, masked))  # type: ignore[arg-type]
    for at in (np.array([0, 1, 4]), np.array([0, -1, 2])):
        with pytest.raises(ValueError, match=r"samples must lie in \[0, 4\)"):
            masks.bring(logits, MaskedRows(at, bitmasks))
    with pytest.raises(ValueError, match="samples must be"):
        masks.bring(logits, MaskedRows(samples.astype(np.int32), bitmasks))


def test_a_gpu_worker_uses_it(monkeypatch: pytest.MonkeyPatch, emulated: EmulatorLauncher) -> None:
    logits, masked = cases.draw_logits(9, 77), cases.draw_masked(9, 77, 8)
    wanted = logits.clone()
    token_masks = TokenMasks(*masked)
    token_masks.apply_plainly(wanted)
    monkeypatch.setattr("vllm_lite.worker.sampling.masks.launcher_for", lambda _: emulated)
    monkeypatch.setattr("vllm_lite.kernels.cpu.sampler.rule_out", None)  # so would it
    monkeypatch.setattr(token_masks, "apply_plainly", None)  # would fail if it were called
    for _ in range(2):  # the second time with masks that are on the device already
        once = logits.clone()
        token_masks.apply(once)
        np.testing.assert_array_equal(once.numpy(), wanted.numpy())
