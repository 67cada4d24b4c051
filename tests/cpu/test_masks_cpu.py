"""The native application of bitmasks to logits against its plain twin, on each instruction set."""

import shutil

import numpy as np
import pytest
import torch

from tests.kernels.masks_cases import draw_logits, draw_masked
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import sampler as native
from vllm_lite.kernels.sampling import MaskedRows
from vllm_lite.worker.sampling.masks import TokenMasks

pytestmark = pytest.mark.skipif(
    not cpu.available() and not shutil.which("c++"), reason="no native library, and no compiler to build it with"
)
SHAPES = [(1, 1), (1, 31), (2, 32), (5, 33), (3, 384), (7, 1003), (300, 97), (4, 40_001), (2, 151_936)]
"""The last two are cut into parts, of one row and of several."""


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> object:
    before = cpu.num_threads()
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(before)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize(("num_rows", "vocab"), SHAPES)
def test_native_masks_equal_the_torch_reference(
    num_rows: int, vocab: int, gap: int, each_vector_isa: str, num_threads: int
) -> None:
    for num_masked in {1, (num_rows + 1) // 2, num_rows}:
        whole = draw_logits(num_rows, vocab, gap, seed=num_masked)
        plain = whole.clone()
        masked = draw_masked(num_rows, vocab, num_masked, seed=num_rows)
        TokenMasks(*masked).apply_plainly(plain[:, :vocab])
        native.rule_out(whole[:, :vocab], masked)
        np.testing.assert_array_equal(whole.numpy(), plain.numpy())


def test_logits_of_allowed_tokens_keep_their_bits(each_vector_isa: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (3, 100), np.uint32)
    logits = torch.from_numpy(bits.copy().view(np.float32))
    native.rule_out(logits, MaskedRows(np.arange(3), np.full((3, 4), 0xFFFFFFFF, np.uint32)))
    np.testing.assert_array_equal(logits.numpy().view(np.uint32), bits)


def test_wrong_arguments_are_refused() -> None:
    logits, (samples, bitmasks) = torch.zeros(4, 40), draw_masked(4, 40, 3)
    for wrong in (logits.double(), logits.t()):
        with pytest.raises(ValueError, match="logits must be"):
            native.rule_out(wrong, MaskedRows(samples, bitmasks))
    with pytest.raises(ValueError, match="bitmasks must be"):
        native.rule_out(logits, MaskedRows(samples, bitmasks[:, :1]))
    with pytest.raises(ValueError, match=r"samples must lie in \[0, 4\)"):
        native.rule_out(logits, MaskedRows(samples + 2, bitmasks))


def test_token_masks_use_the_native_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, masked = draw_logits(4, 50), draw_masked(4, 50, 3)
    wanted = logits.clone()
    token_masks = TokenMasks(*masked)
    token_masks.apply_plainly(wanted)
    monkeypatch.setattr(token_masks, "apply_plainly", None)
    token_masks.apply(logits)
    np.testing.assert_array_equal(logits.numpy(), wanted.numpy())
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(native, "rule_out", None)
    logits = draw_logits(4, 50)
    token_masks.apply(logits)
    np.testing.assert_array_equal(logits.numpy(), wanted.numpy())
