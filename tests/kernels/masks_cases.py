"""The kernel of bitmasks against numpy, as named functions of a launcher and a device; no pytest in here."""

import numpy as np
import torch
from numpy.typing import NDArray

from tests.kernels.cases import Case
from vllm_lite.kernels.cuda import masks
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.sampling import MaskedRows

INF = float("inf")


def draw_masked(num_rows: int, vocab: int, num_masked: int, seed: int = 0) -> MaskedRows:
    """Some rows in any order; their masks allow nothing, everything, or one token of two, of ten or of a thousand."""
    rng = np.random.default_rng([seed, vocab, num_masked])
    samples = rng.permutation(num_rows)[:num_masked].astype(np.int64)
    shares = np.array([0.0, 1.0, 0.5, 0.1, 0.001])[np.arange(num_masked) % 5]
    allowed = rng.random((num_masked, -(-vocab // 32) * 32)) < shares[:, None]  # bits beyond the vocabulary count not
    return MaskedRows(samples, np.packbits(allowed, axis=1, bitorder="little").view(np.uint32))


def draw_logits(num_rows: int, vocab: int, gap: int = 0, seed: int = 0) -> torch.Tensor:  # [num_rows, vocab]
    """Random logits whose rows have `gap` floats between them; some contain values of a faulty model."""
    logits = torch.randn(num_rows, vocab + gap, generator=torch.Generator().manual_seed(seed))
    faults = torch.tensor([float("nan"), INF, -INF, -0.0])
    for row in range(num_rows):
        logits[row, (torch.arange(4) * 7 + row) % vocab] = faults
    return logits


def expected(logits: torch.Tensor, masked: MaskedRows) -> NDArray[np.float32]:
    found = logits.numpy(force=True).copy()
    bits = np.unpackbits(masked.bitmasks.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]] == 1
    found[masked.samples] = np.where(bits, found[masked.samples], found[masked.samples] - np.float32(INF))
    return found


def rows(num_rows: int, vocab: int, num_masked: int, gap: int = 0) -> Case:
    def case(launcher: Launcher, device: torch.device) -> None:
        whole = draw_logits(num_rows, vocab, gap).to(device)
        logits, beside = whole[:, :vocab], whole[:, vocab:].clone()
        masked = draw_masked(num_rows, vocab, num_masked)
        with np.errstate(invalid="ignore"):
            wanted = expected(logits, masked)
        masks.rule_out(launcher, logits, masks.bring(logits, masked))
        np.testing.assert_array_equal(logits.numpy(force=True), wanted)
        assert torch.equal(whole[:, vocab:], beside), "what stands between rows is not a logit"

    return case


def a_mask_hides_no_fault(launcher: Launcher, device: torch.device) -> None:
    logits = torch.tensor([[float("nan"), INF, -INF, 1.0]], device=device)
    masked = MaskedRows(np.zeros(1, np.int64), np.zeros((1, 1), np.uint32))
    masks.rule_out(launcher, logits, masks.bring(logits, masked))
    assert logits.isnan().tolist() == [[True, True, False, False]]
    assert logits[0, 2:].tolist() == [-INF, -INF]


CASES: list[tuple[str, Case]] = [
    ("one_row", rows(1, 384, 1)),
    ("odd_vocabularies", rows(5, 1003, 5)),
    ("tail_of_a_vector", rows(3, 36, 3)),
    ("one_token", rows(2, 1, 2)),
    ("gaps", rows(7, 500, 6, gap=12)),
    ("odd_gaps", rows(7, 512, 6, gap=3)),
    ("many_rows", rows(300, 97, 260)),
    ("several_chunks", rows(6, 5000, 5)),
    ("wide", rows(2, 32_000, 2)),
    ("none_masked", rows(3, 64, 0)),
    ("a_mask_hides_no_fault", a_mask_hides_no_fault),
]
