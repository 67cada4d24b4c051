"""The native pass from logits to tokens against its plain twin and exact arithmetic, on each instruction set."""

import ctypes
import logging
import math
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.cpu.test_sampler import random_logits, reference_hash
from tests.examples import examples
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library
from vllm_lite.kernels.cpu import sampler as native
from vllm_lite.kernels.sampling import DRAW, Picked
from vllm_lite.worker.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(
    not cpu.available() and not shutil.which("c++"), reason="no native library, and no compiler to build it with"
)
CPU = torch.device("cpu")
ROWS_OF_NOISE = [(0, 0, 0), (1, 0, 5), (2**32, 1, 5), (2**64 - 1, 2**32 - 1, 2**31), (0xDEADBEEF12345678, 3, 77)]


def exact_noise(hashes: NDArray[Any]) -> NDArray[Any]:
    v = ((hashes & 0x7FFFFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(float.fromhex("0x1.fffffep-32"))
    noise: NDArray[Any] = -np.log(-np.log1p(-v.astype(np.float64)))
    return noise


def make_draws(num_rows: int, vocab_size: int, **columns: Any) -> NDArray[Any]:
    draws = np.zeros(num_rows, DRAW)
    draws["seed"] = np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    draws["sample"] = np.arange(num_rows) % 3
    draws["position"] = 100 + np.arange(num_rows)
    for name, values in (
        {"temperature": 1.0, "top_k": vocab_size, "top_p": 1.0, "max_distance": np.inf} | columns
    ).items():
        draws[name] = values
    return draws


def mixed_draws(num_rows: int, vocab_size: int) -> NDArray[Any]:
    """Greedy, plain and filtered rows side by side."""
    i = np.arange(num_rows)
    return make_draws(
        num_rows,
        vocab_size,
        temperature=np.where(i % 5 == 4, 0, 0.2 + i % 7 / 5),
        top_p=np.where(i % 3 == 1, 0.9, 1),
        top_k=np.where(i % 4 == 2, min(20, vocab_size), vocab_size),
        max_distance=np.where(i % 7 == 3, 3.0, np.inf),
    )


def exact_scores(row: torch.Tensor, draw: np.void) -> NDArray[np.float64]:
    logits, key = row.double().numpy(), (int(draw["seed"]), int(draw["sample"]), int(draw["position"]))
    hashes = np.array([reference_hash(*key, token) for token in range(len(logits))], np.uint32)
    scores: NDArray[np.float64] = (logits - logits.max()) / float(draw["temperature"]) + exact_noise(hashes)
    return scores


def assert_largest(tokens: NDArray[np.int64], logits: torch.Tensor, draws: NDArray[Any]) -> None:
    for token, row, draw in zip(tokens.tolist(), logits, draws, strict=True):
        scores = exact_scores(row, draw)
        assert 0 <= token < len(scores)
        assert scores[token] > scores.max() - 1e-4


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    if not cpu.available():
        yield
        return
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


# ---- the hash and the noise


def noise_of_row(
    seed: int, sample: int, position: int, vocab_size: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:  # both [vocab]
    """The hash and the noise of every token of one row, which `pick` computes on its way."""
    hashes, values = np.empty(vocab_size, np.uint32), np.empty(vocab_size, np.float32)
    types = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, library.int32, library.pointer, library.pointer)
    noise = library.function("vllm_lite_noise", types)
    noise(seed, sample, position, vocab_size, hashes.ctypes.data, values.ctypes.data)
    return hashes, values


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize(("seed", "sample", "position"), ROWS_OF_NOISE)
def test_hash_is_equal_bit_for_bit(seed: int, sample: int, position: int) -> None:
    hashes, _ = noise_of_row(seed, sample, position, 500)
    assert hashes.tolist() == [reference_hash(seed, sample, position, token) for token in range(500)]


@pytest.mark.parametrize(("seed", "sample", "position"), ROWS_OF_NOISE)
def test_noise_is_precise(seed: int, sample: int, position: int) -> None:
    hashes, noise = noise_of_row(seed, sample, position, 1_000_000)
    exact = exact_noise(hashes)
    assert exact.max() > 12  # the million includes values of v near 0, whose noise decides most draws
    assert np.abs(noise - exact).max() < 2e-6


@pytest.mark.usefixtures("each_vector_isa")
def test_noise_has_the_same_bits_everywhere() -> None:
    assert int(noise_of_row(7, 1, 3, 100_000)[1].view(np.uint32).sum(dtype=np.uint64)) == 185123506029127


# ---- the draw


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 1023, 1024, 1025, 4099])
def test_the_largest_score_is_drawn(vocab_size: int) -> None:
    logits, draws = random_logits(4, vocab_size), make_draws(4, vocab_size, temperature=0.7)
    assert_largest(native.pick(logits, draws).tokens, logits, draws)


def test_equal_logits_leave_the_choice_to_the_noise_at_any_temperature() -> None:
    """If not their distances but they themselves were divided, 5e6 would swallow the noise."""
    logits, draws = torch.full((8, 3000), 100.0), make_draws(8, 3000, temperature=2e-5)
    assert_largest(native.pick(logits, draws).tokens, logits, draws)


def test_draws_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    draws = make_draws(40_000, 4)
    tokens = native.pick(probabilities.log().expand(len(draws), 4), draws).tokens
    expected = probabilities.numpy() * len(draws)
    assert ((np.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, 99.9 %


@pytest.mark.parametrize("num_threads", [1, 3, 8])
@pytest.mark.parametrize("vocab_size", [4099, 70_001])
def test_a_row_depends_on_nothing_around_it(vocab_size: int, num_threads: int) -> None:
    """Not on batch, order, stride or threads; a large vocabulary is cut up where rows are fewer than threads."""
    num_rows = 12
    wide = random_logits(num_rows, vocab_size + 20, seed=1)
    logits, draws = wide[:, 7 : 7 + vocab_size], mixed_draws(num_rows, vocab_size)
    cpu.set_num_threads(1)
    expected = native.pick(logits, draws)
    cpu.set_num_threads(num_threads)
    everything = np.arange(num_rows)
    for rows in (everything, everything[::-1].copy(), np.array([4, 1]), *everything[:, None]):
        found = native.pick(logits[torch.from_numpy(rows)], draws[rows])
        for name in Picked._fields:
            assert np.array_equal(getattr(found, name), getattr(expected, name)[rows])


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("num_threads", [1, 4])
def test_native_samples_equal_the_torch_reference(num_threads: int) -> None:
    """Limits bit for bit; draws but for two scores that differ by less than the noise's error."""
    cpu.set_num_threads(num_threads)
    for num_rows, vocab_size in ((40, 1500), (3, 50_000)):
        logits, draws = random_logits(num_rows, vocab_size, seed=3), mixed_draws(num_rows, vocab_size)
        found, plain = native.pick(logits, draws), Sampler(vocab_size, CPU).pick_plainly(logits, draws)
        assert np.array_equal(found.limits, plain.limits)
        assert np.array_equal(found.best, plain.best)
        for row in np.flatnonzero(found.tokens != plain.tokens):
            scores = exact_scores(logits[row], draws[row])
            assert abs(scores[found.tokens[row]] - scores[plain.tokens[row]]) < 1e-5


def test_the_sampler_uses_the_native_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, draws = random_logits(2, 50), make_draws(2, 50)
    sampler = Sampler(50, CPU)
    monkeypatch.setattr(sampler, "pick_plainly", None)
    assert np.array_equal(sampler.pick(logits, draws).tokens, native.pick(logits, draws).tokens)


# ---- the filters


def exact_limit(distances: NDArray[np.float64], top_k: int, top_p: float, max_distance: float) -> float:
    """By sorting, in float64; top_p of at least 1 is off."""
    ordered = np.sort(distances)
    limit = float(ordered[top_k - 1]) if top_k < len(ordered) else math.inf
    if top_p < 1:
        mass = np.exp(-ordered[:top_k]).cumsum()
        limit = float(ordered[min(int((mass < top_p * mass[-1]).sum()), top_k - 1)])
    return min(limit, max_distance)


def adversarial_row(kind: str, vocab_size: int, rng: np.random.Generator) -> NDArray[np.float32]:
    row = rng.normal(0, rng.choice([0.01, 1.0, 3.0, 20.0]), vocab_size)
    if kind == "ties":
        row = np.round(row * 2) / 2
    elif kind == "equal":
        row[:] = row[0]
    elif kind == "one":
        row[rng.random(vocab_size) < 0.999] = -np.inf
        row[rng.integers(vocab_size)] = 5.0
    elif kind == "huge":
        row *= 1e36
    elif kind == "tiny":
        row *= 1e-30
    elif kind == "sorted":
        row = np.sort(row)
    return row.astype(np.float32)


@settings(max_examples=examples(200))
@given(
    kind=st.sampled_from(["normal", "ties", "equal", "one", "huge", "tiny", "sorted"]),
    vocab_size=st.sampled_from([1, 2, 16, 17, 255, 256, 257, 1000, 5000]),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 7.0]),
    top_k=st.sampled_from([0.0, 1e-9, 0.01, 0.3, 0.999, 1.0]),  # share of the vocabulary
    top_p=st.sampled_from([1e-9, 0.01, 0.5, 0.9, 0.999, 1 - 2**-24, 1.0]),
    max_distance=st.sampled_from([0.0, 0.75, 20.0, math.inf]),
    num_threads=st.sampled_from([1, 2]),
)
def test_limits_are_those_of_a_sort(
    kind: str, vocab_size: int, seed: int, temperature: float, top_k: float, top_p: float, max_distance: float,
    num_threads: int,
) -> None:  # fmt: skip
    cpu.set_num_threads(num_threads)
    rng = np.random.default_rng(seed)
    row = adversarial_row(kind, vocab_size, rng)
    k = max(1, int(top_k * vocab_size)) if top_k else vocab_size
    draws = make_draws(1, vocab_size, temperature=temperature, top_k=k, top_p=top_p, max_distance=max_distance)
    found = native.pick(torch.from_numpy(row)[None], draws)
    limit = float(found.limits[0])
    with np.errstate(over="ignore"):
        distances = (np.abs(row.max() - row) / np.float32(temperature)).astype(np.float64)
    # If the exact sum misses top_p by less than the masses' error, the adjacent limits are right, too.
    p = float(np.float32(top_p))
    least = exact_limit(distances, k, p * (1 - 2e-6) if p < 1 else p, max_distance)
    most = exact_limit(distances, k, min(p * (1 + 2e-6), 1 - 1e-9) if p < 1 else p, max_distance)
    assert least <= limit <= most
    assert limit in distances or limit == max_distance
    assert distances[found.tokens[0]] <= limit


# ---- rows that are not finite, and arguments that are not right


def test_ruled_out_tokens_are_never_drawn() -> None:
    logits = torch.full((2, 3000), -math.inf)
    logits[0, 2999] = -50.0
    found = native.pick(logits, make_draws(2, 3000))
    assert found.tokens.tolist() == [2999, 0]
    assert found.best.tolist() == [-50.0, -math.inf]


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("vocab_size", [1, 300, 40_000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
def test_a_row_that_is_not_finite_harms_no_other(bad: float, vocab_size: int) -> None:
    cpu.set_num_threads(4)
    for column in {0, vocab_size // 2, vocab_size - 1}:
        for filters in ({}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.0}):
            logits, draws = random_logits(3, vocab_size, seed=2), make_draws(3, vocab_size, **filters)
            expected = native.pick(logits, draws)
            logits[1, column] = bad
            found = native.pick(logits, draws)
            assert found.tokens[[0, 2]].tolist() == expected.tokens[[0, 2]].tolist()
            assert 0 <= found.tokens[1] < vocab_size
            assert not np.isfinite(found.best[1])
            assert np.isnan(found.best[1]) == math.isnan(bad)


def test_the_best_of_places_that_come_again_needs_no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that verify drafts alternate with those that do not, and each kind has its place."""
    logits, best_of, prepared = torch.randn(8, 300), native.BestOf(), list[int]()
    prepare = native._prepared
    monkeypatch.setattr(native, "_prepared", lambda *args: (prepared.append(1), prepare(*args))[1])  # type: ignore[func-returns-value]
    for count in (1, 5, 1, 5, 1):
        logits.copy_(torch.randn(8, 300))
        for columns in (native.ALL_COLUMNS, slice(100, 200)):
            expected = logits[:count, columns].argmax(1).tolist()
            assert best_of(logits[:count], columns).tokens.tolist() == expected
    assert len(prepared) == 4
    for _ in range(2 * native.MOST_PLACES):
        rows = torch.randn(2, 300)
        assert best_of(rows).tokens.tolist() == rows.argmax(1).tolist()
    assert len(best_of._prepared) <= native.MOST_PLACES


def test_no_rows() -> None:
    assert native.pick(torch.zeros(0, 5), make_draws(0, 5)).tokens.tolist() == []


@pytest.mark.parametrize(
    "logits", [torch.zeros(2, 5, dtype=torch.float64), torch.zeros(5), torch.zeros(5, 2).t()], ids=["dtype", "1d", "t"]
)
def test_logits_of_another_layout_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="logits must be float32 rows"):
        native.pick(logits, make_draws(2, 5))


def test_draws_of_another_layout_are_refused() -> None:
    others: list[NDArray[Any]] = [make_draws(8, 5)[::2], np.zeros(4, np.float32), make_draws(3, 5)]
    for draws in others:
        with pytest.raises(ValueError, match="DRAW"):
            native.pick(torch.zeros(4, 5), draws)


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
            native.pick(torch.zeros(1, 5), make_draws(1, 5))
    finally:
        library.library.cache_clear()
        library.function.cache_clear()
    assert len(caplog.records) == 1
    assert "plain torch" in caplog.text
    assert says in caplog.text
