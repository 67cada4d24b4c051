"""The native draw against the sampler's torch path; its hash and noise against their definition there."""

import logging
import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library
from vllm_lite.kernels.cpu import sampler as native
from vllm_lite.worker.sampler import NO_LOGPROBS, ROW_PARAMS, SampleInputs, Sampler

pytestmark = pytest.mark.skipif(
    not cpu.available() and not shutil.which("c++"), reason="no native library, and no compiler to build it with"
)
ROWS_OF_NOISE = [(0, 0, 0), (1, 0, 5), (2**32, 1, 5), (2**64 - 1, 2**32 - 1, 2**31), (0xDEADBEEF12345678, 3, 77)]


def defined_hash(seed: int, child: int, position: int, token: int) -> int:
    """The hash as the sampler's docstring has it, in plain integers."""

    def rotl(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    h = seed & 0xFFFFFFFF ^ 0x9E3779B9
    for key in (seed >> 32, child, position, token):
        scrambled = rotl(key * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotl(h ^ scrambled, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def exact_noise(hashes: NDArray[Any]) -> NDArray[Any]:
    v = ((hashes & 0x7FFFFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(float.fromhex("0x1.fffffep-32"))
    return -np.log(-np.log1p(-v.astype(np.float64)))


def seeds(count: int) -> NDArray[Any]:
    return np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def make_draws(num_draws: int, temperature: float = 1.0) -> NDArray[Any]:
    draws = np.zeros(num_draws, native.DRAW)
    draws["row"] = np.arange(num_draws)
    draws["seed"] = seeds(num_draws)
    draws["child"] = np.arange(num_draws) % 3
    draws["position"] = 100 + np.arange(num_draws)
    draws["temperature"] = temperature
    return draws


def exact_scores(logits: torch.Tensor, draw: np.void) -> NDArray[np.float64]:
    row = logits[int(draw["row"])].double().numpy()
    hashes = np.array(
        [
            defined_hash(int(draw["seed"]), int(draw["child"]), int(draw["position"]), token)
            for token in range(len(row))
        ],
        np.uint32,
    )
    scores: NDArray[np.float64] = (row - float(draw["offset"])) / float(draw["temperature"]) + exact_noise(hashes)
    return scores


def assert_largest(tokens: torch.Tensor, logits: torch.Tensor, draws: NDArray[Any]) -> None:
    for token, draw in zip(tokens.tolist(), draws, strict=True):
        scores = exact_scores(logits, draw)
        assert 0 <= token < len(scores)
        assert scores[token] > scores.max() - 1e-4


@pytest.mark.parametrize(("seed", "child", "position"), ROWS_OF_NOISE)
def test_hash_is_equal_bit_for_bit(seed: int, child: int, position: int) -> None:
    hashes, _ = native.noise(seed, child, position, 2000)
    assert hashes.tolist() == [defined_hash(seed, child, position, token) for token in range(2000)]


@pytest.mark.parametrize(("seed", "child", "position"), ROWS_OF_NOISE)
def test_noise_is_precise(seed: int, child: int, position: int) -> None:
    hashes, noise = native.noise(seed, child, position, 1_000_000)
    exact = exact_noise(hashes)
    assert exact.max() > 12  # the million holds values of v next to 0, whose noise decides most draws
    assert np.abs(noise - exact).max() < 2e-6


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 1023, 1024, 1025, 4099])
def test_draw_takes_the_largest_score(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    draws = make_draws(4, temperature=0.7)
    assert_largest(native.draw(logits, draws), logits, draws)


def test_the_offset_keeps_the_noise_at_low_temperatures() -> None:
    """Without it equal logits become 5e6 and swallow the noise, whose unit in the last place would be a half."""
    logits = torch.full((8, 3000), 100.0)
    draws = make_draws(8, temperature=2e-5)
    draws["offset"] = 100.0
    assert_largest(native.draw(logits, draws), logits, draws)


def test_draw_does_not_depend_on_row_batch_or_stride() -> None:
    wide = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    logits = wide[:, 7:4106]
    draws = make_draws(6)
    together = native.draw(logits, draws).tolist()
    assert native.draw(logits.contiguous(), draws).tolist() == together
    assert native.draw(logits, draws[::-1].copy()).tolist() == together[::-1]
    for i in range(6):
        alone = draws[i : i + 1].copy()
        alone["row"] = 0
        assert native.draw(logits[i : i + 1], alone).tolist() == [together[i]]


def test_draw_follows_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    draws = make_draws(40_000)
    draws["row"] = 0
    counts = torch.bincount(native.draw(probabilities.log()[None], draws), minlength=4)
    expected = probabilities * len(draws)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-squared, 3 degrees of freedom, 99.9 %


def test_ruled_out_tokens_are_never_drawn() -> None:
    logits = torch.full((2, 3000), -math.inf)
    logits[0, 2999] = -50.0
    assert native.draw(logits, make_draws(2)).tolist() == [2999, 0]


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(2))
    expected = native.draw(logits, make_draws(3)).tolist()
    logits[1] = math.nan
    tokens = native.draw(logits, make_draws(3)).tolist()
    assert tokens[0] == expected[0]
    assert tokens[2] == expected[2]
    assert 0 <= tokens[1] < 2000


def test_no_draws() -> None:
    assert native.draw(torch.zeros(0, 5), make_draws(0)).tolist() == []


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_outside_the_logits_is_refused(row: int) -> None:
    draws = make_draws(1)
    draws["row"] = row
    with pytest.raises(ValueError, match=r"rows must lie in \[0, 2\)"):
        native.draw(torch.zeros(2, 5), draws)


@pytest.mark.parametrize(
    "logits", [torch.zeros(2, 5, dtype=torch.float64), torch.zeros(5), torch.zeros(5, 2).t()], ids=["dtype", "1d", "t"]
)
def test_logits_of_another_layout_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="logits must be float32 rows"):
        native.draw(logits, make_draws(1))


def test_draws_of_another_layout_are_refused() -> None:
    others: list[NDArray[Any]] = [make_draws(4)[::2], np.zeros(2, np.float32)]
    for draws in others:
        with pytest.raises(ValueError, match="DRAW"):
            native.draw(torch.zeros(4, 5), draws)


@pytest.mark.parametrize(("name", "value", "says"), [("LIBRARY", "libmissing.so", "libmissing.so"), ("ABI", 99, "99")])
def test_a_missing_or_foreign_library_is_said_once(
    name: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, name, value)
    monkeypatch.setattr(logging.getLogger("vllm_lite"), "propagate", True)
    library.library.cache_clear()
    library.function.cache_clear()
    try:
        assert not cpu.available()
        assert not cpu.available()
        with pytest.raises(RuntimeError, match="available"):
            native.draw(torch.zeros(1, 5), make_draws(1))
    finally:
        library.library.cache_clear()
        library.function.cache_clear()
    assert len(caplog.records) == 1
    assert "plain torch" in caplog.text
    assert says in caplog.text


def sample_inputs(num_rows: int) -> SampleInputs:
    params = np.zeros(num_rows, ROW_PARAMS)
    i = np.arange(num_rows)
    params["temperature"] = np.where(i % 5 == 4, 0, 0.2 + i % 7 / 5)  # every fifth row is greedy
    params["top_p"] = np.where(i % 4 == 1, 0.9, 1)
    params["top_k"] = np.where(i % 6 == 2, 20, 0)
    params["min_p"] = np.where(i % 8 == 3, 0.05, 0)
    params["seed"] = seeds(num_rows)
    params["child"] = i % 3
    params["logprobs"] = NO_LOGPROBS
    return SampleInputs(params, i.astype(np.int64) * 10)


def test_sampler_gives_the_same_tokens_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(64, 8000, generator=torch.Generator().manual_seed(3)) * 3
    sampler, inputs = Sampler(8000, torch.device("cpu")), sample_inputs(64)
    calls: list[int] = []
    real_draw = native.draw

    def counted_draw(logits: torch.Tensor, draws: NDArray[Any]) -> torch.Tensor:
        calls.append(len(draws))
        return real_draw(logits, draws)

    monkeypatch.setattr(native, "draw", counted_draw)
    drawn = sampler.sample(logits.clone(), inputs).tokens
    assert calls, "the sampler did not use the native draw"
    monkeypatch.setattr(cpu, "available", lambda: False)
    calls.clear()
    plain = sampler.sample(logits.clone(), inputs).tokens
    assert not calls
    for row in np.flatnonzero(drawn != plain):
        draw = make_draws(1)[0]
        for name in ("seed", "child", "temperature"):
            draw[name] = inputs.params[name][row]
        draw["row"], draw["position"] = row, inputs.positions[row]
        scores = exact_scores(logits, draw)
        assert abs(scores[drawn[row]] - scores[plain[row]]) < 1e-4
