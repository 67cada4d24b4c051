"""The sampler against exact distributions, its hash against plain integers, and a draw against everything around it."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from vllm_lite.kernels import cpu
from vllm_lite.protocol.step import NOT_FINITE
from vllm_lite.worker.sampling.logit_rules import LogitEdits
from vllm_lite.worker.sampling.sampler import (
    ALL_BANNED,
    NO_LOGPROBS,
    ROW_PARAMS,
    SampleInputs,
    Sampler,
    draw_records,
    gumbel_noise,
    masses,
    row_keys,
    scramble,
    token_hash,
)

CPU = torch.device("cpu")
NUM_DRAWS = 20_000


@pytest.fixture(autouse=True, params=["plain", "native"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in plain torch, and with the compiled library where there is one."""
    if request.param == "plain":
        monkeypatch.setattr(cpu, "available", lambda: False)
    elif not cpu.available():
        pytest.skip("no compiled library")


def make_inputs(num_rows: int, banned: list[tuple[int, int]] | None = None, **columns: Any) -> SampleInputs:
    params = np.zeros(num_rows, ROW_PARAMS)
    columns = {"temperature": 1.0, "top_p": 1.0, "logprobs": NO_LOGPROBS} | columns
    positions = np.broadcast_to(np.asarray(columns.pop("position", 5), np.int64), num_rows).copy()
    for name, values in columns.items():
        params[name] = values
    pairs = None if banned is None else tuple(np.array(ids, np.int64) for ids in zip(*banned, strict=True))
    return SampleInputs(params, positions, LogitEdits(banned=pairs))  # type: ignore[arg-type]


def sample(logits: torch.Tensor, inputs: SampleInputs) -> list[int]:
    tokens: list[int] = Sampler(logits.shape[1], CPU).sample(logits.clone(), inputs).tokens.tolist()
    return tokens


def many_seeds(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**64, count, np.uint64)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


# ---- the hash


def reference_hash(seed: int, sample: int, position: int, token: int) -> int:
    """The definition in the module's docstring, in Python's integers."""

    def rotl(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    state = (seed & 0xFFFFFFFF) ^ 0x9E3779B9
    for key in (seed >> 32, sample, position, token):
        scrambled = rotl(key * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotl(state ^ scrambled, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


HASHES = [  # they pin the function for every other implementation of it
    ((0, 0, 0, 0), 0x9CE5A98A),
    ((1, 0, 0, 0), 0x2A88FE73),
    ((0, 1, 0, 0), 0xF3EDDCEA),
    ((0, 0, 1, 0), 0x2B27FBD9),
    ((0, 0, 0, 1), 0x4BB58667),
    ((2**32, 0, 0, 0), 0xEE1A409F),
    ((2**64 - 1, 2**32 - 1, 2**32 - 1, 151935), 0x0DCF5E63),
    ((0x0123456789ABCDEF, 3, 1024, 4095), 0x73F0CEC7),
]


def sampler_hash(seed: int, sample: int, position: int, vocab_size: int) -> list[int]:
    keys = row_keys(np.array([seed], np.uint64), np.array([sample], np.uint32), np.array([position], np.uint32))
    tokens = torch.from_numpy(scramble(np.arange(vocab_size, dtype=np.uint32)).view(np.int32))
    out, scratch = torch.empty(2, 1, vocab_size, dtype=torch.int32)
    token_hash(torch.from_numpy(keys.view(np.int32))[:, None], tokens, out, scratch)
    hashes: list[int] = out[0].numpy().view(np.uint32).tolist()
    return hashes


@pytest.mark.parametrize(("arguments", "expected"), HASHES)
def test_hash_vectors(arguments: tuple[int, int, int, int], expected: int) -> None:
    seed, sample, position, token = arguments
    assert reference_hash(*arguments) == expected
    assert sampler_hash(seed, sample, position, token + 1)[token] == expected


def test_hash_of_a_whole_vocabulary() -> None:
    for seed, sample, position in ((7, 0, 0), (2**63 + 12345, 1, 77)):
        assert sampler_hash(seed, sample, position, 3000) == [
            reference_hash(seed, sample, position, token) for token in range(3000)
        ]


def test_noise_is_precise_where_it_is_large_and_finite_everywhere() -> None:
    tokens = torch.from_numpy(scramble(np.arange(1 << 16, dtype=np.uint32)).view(np.int32))
    keys = torch.arange(64, dtype=torch.int32)[:, None]
    noise = gumbel_noise(keys, tokens)
    out, scratch = torch.empty(2, *noise.shape, dtype=torch.int32)
    token_hash(keys, tokens, out, scratch)
    v = (out.bitwise_and(0x7FFFFFFF).float() + 0.5) * float.fromhex("0x1.fffffep-32")
    assert 0 < v.min() <= v.max() < 1
    exact = -torch.log(-torch.log1p(-v.double()))
    assert (noise - exact).abs().max() < 2e-6
    assert noise.max() > 14, "4 million draws reach far into the tail"


@pytest.mark.parametrize("bits", [0, 2**31 - 1])
def test_u_is_strictly_between_0_and_1(bits: int) -> None:
    v = (torch.tensor(bits, dtype=torch.int32).float() + 0.5) * float.fromhex("0x1.fffffep-32")
    assert 0 < v < 1
    assert torch.isfinite(-torch.log(-torch.log1p(-v)))


def test_every_seed_child_and_position_has_a_stream_of_its_own() -> None:
    cases: list[dict[str, Any]] = [{"seed": seed} for seed in (0, 1, 2, 3, 2**32, 2**63, 2**64 - 1)]
    cases += [{"sample": sample} for sample in range(1, 6)] + [{"position": position} for position in range(6, 30)]
    cases += [
        {"sample": 2, "position": 3},
        {"sample": 3, "position": 2},
        {"seed": 2, "sample": 3},
        {"seed": 3, "sample": 2},
    ]
    logits, repeats = torch.zeros(1, 1000), range(4)
    streams = set()
    for case in cases:
        seeds = [np.uint64(case.get("seed", 0) ^ i << 40) for i in repeats]
        streams.add(tuple(sample(logits, make_inputs(1, **(case | {"seed": seed})))[0] for seed in seeds))
    assert len(streams) == len(cases)


# ---- distributions, exactly


def filtered(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The probabilities that the filters leave, by sorting."""
    weights = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[:top_k] if top_k else order
    mass, needed = 0.0, top_p * sum(weights[i] for i in kept)
    nucleus = []
    for i in kept:
        if mass >= needed:
            break
        nucleus.append(i)
        mass += weights[i]
    nucleus = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


LOGITS = [0.3, -1.1, 2.0, 1.2, -3.0, 0.9, -0.2, 1.6]
FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (3.0, 0, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.3),
    (1.5, 5, 0.7, 0.0),
    (0.8, 6, 1.0, 0.2),
    (2.0, 0, 0.9, 0.35),
    (1.3, 6, 0.85, 0.3),
]


def chi_squared(tokens: list[int], expected: list[float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom. A token of probability 0 must not occur."""
    counts = np.bincount(tokens, minlength=len(expected))
    probabilities = np.array(expected)
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that the filters rule out"
    possible = probabilities > 0
    wanted = probabilities[possible] * len(tokens)
    return float(((counts[possible] - wanted) ** 2 / wanted).sum()), int(possible.sum()) - 1


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_draws_follow_the_filtered_softmax(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    expected = filtered(LOGITS, temperature, top_k, top_p, min_p)
    logits = torch.tensor([LOGITS]).expand(NUM_DRAWS, -1)
    filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    columns: dict[str, Any]
    for columns in ({"seed": many_seeds(NUM_DRAWS)}, {"seed": 1, "position": np.arange(NUM_DRAWS)}):
        tokens = sample(logits, make_inputs(NUM_DRAWS, **filters, **columns))
        statistic, freedom = chi_squared(tokens, expected)
        assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4  # beyond the 99.9 % point for each freedom up to 7


def test_children_of_one_seed_follow_the_softmax() -> None:
    logits = torch.tensor([LOGITS]).expand(NUM_DRAWS, -1)
    tokens = sample(logits, make_inputs(NUM_DRAWS, seed=3, sample=np.arange(NUM_DRAWS)))
    statistic, freedom = chi_squared(tokens, filtered(LOGITS, 1.0, 0, 1.0, 0.0))
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_neighbouring_positions_are_independent() -> None:
    tokens = sample(torch.zeros(NUM_DRAWS, 4), make_inputs(NUM_DRAWS, seed=9, position=np.arange(NUM_DRAWS)))
    pairs = [4 * first + second for first, second in pairwise(tokens)]
    statistic, freedom = chi_squared(pairs, [1 / 16] * 16)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


# ---- the batch around a row


def mixed_inputs(num_rows: int) -> SampleInputs:
    rows = np.arange(num_rows)
    return make_inputs(
        num_rows,
        temperature=np.array([0.0, 0.7, 1.0, 1.5])[rows % 4],
        top_k=np.array([0, 0, 5, 40, 1])[rows % 5],
        top_p=np.array([1.0, 0.9, 0.5])[rows % 3],
        min_p=np.array([0.0, 0.0, 0.1, 0.0, 0.0, 0.02, 0.0])[rows % 7],
        seed=many_seeds(num_rows),
        sample=rows % 2,
        position=rows * 11,
    )


def take(inputs: SampleInputs, rows: np.ndarray) -> SampleInputs:
    return SampleInputs(inputs.params[rows], inputs.positions[rows])


def test_a_row_does_not_depend_on_its_batch() -> None:
    num_rows = 96
    logits, inputs = random_logits(num_rows, 1003), mixed_inputs(num_rows)
    together = np.array(sample(logits, inputs))
    order = np.random.default_rng(1).permutation(num_rows)
    assert sample(logits[torch.from_numpy(order)], take(inputs, order)) == together[order].tolist()
    for rows in [*order[:40, None], order[:2], order[:7], order[:33]]:
        assert sample(logits[torch.from_numpy(rows)], take(inputs, rows)) == together[rows].tolist()


def test_noise_is_equal_bit_for_bit_in_every_batch() -> None:
    tokens = torch.from_numpy(scramble(np.arange(4099, dtype=np.uint32)).view(np.int32))
    keys = torch.randint(-(2**31), 2**31, (70, 1), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    together = gumbel_noise(keys, tokens)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 47), slice(69, 70)):
        assert torch.equal(gumbel_noise(keys[rows], tokens), together[rows])


def test_greedy_takes_the_first_largest_and_needs_no_seed() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert sample(logits, make_inputs(2, temperature=0.0, seed=[1, 2])) == [1, 0]


# ---- edges


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 1.1e-5},
        {"top_k": 2, "top_p": 1e-3, "min_p": 0.99},
    ],
)
def test_filters_that_leave_one_token(filters: dict[str, Any]) -> None:
    logits = random_logits(200, 50)
    assert sample(logits, make_inputs(200, seed=many_seeds(200), **filters)) == logits.argmax(1).tolist()


def test_filters_wider_than_the_vocabulary_change_nothing() -> None:
    logits, seeds = random_logits(200, 50), many_seeds(200)
    free = sample(logits, make_inputs(200, seed=seeds))
    for top_k in (50, 51, 2**31 - 1):
        assert sample(logits, make_inputs(200, seed=seeds, top_k=top_k)) == free
    assert sample(logits, make_inputs(200, seed=seeds, min_p=1e-30)) == free


def limits(logits: torch.Tensor, **columns: Any) -> list[float]:
    """Distance from the best token up to which the filters keep tokens, for each row."""
    inputs, vocab_size = make_inputs(len(logits), **columns), logits.shape[1]
    draws = draw_records(inputs.params, inputs.positions, vocab_size)
    found: list[float] = Sampler(vocab_size, CPU).pick(logits, draws).limits.tolist()
    return found


def test_top_p_of_one_keeps_even_tokens_without_mass() -> None:
    """A row that is searched for its top_k must not lose tokens to a top_p that is off."""
    logits = torch.tensor([[0.0, -2000.0, -3000.0]])
    assert limits(logits, top_k=2) == [2000.0]
    assert limits(logits) == limits(logits, top_k=3) == [math.inf]


def test_limits_of_the_filters() -> None:
    logits = torch.tensor([[8.0, 6.0, 6.0, 4.0, 2.0]])
    assert limits(logits, temperature=0.5, top_k=2) == [4.0]
    assert limits(logits, temperature=2.0, top_k=4) == [2.0]
    assert limits(logits, min_p=math.exp(-3)) == [pytest.approx(3.0)]
    # The masses are 1, 0.135, 0.135, 0.018 and 0.002: 0.775 of all, 0.88, 0.985, 0.998.
    assert [limits(logits, top_p=p)[0] for p in (0.77, 0.78, 0.98, 0.99, 0.999)] == [0.0, 2.0, 2.0, 4.0, 6.0]
    # Of the best two, the second has 0.119. A third equal to it stays in but does not count: with it the first would
    # have only 0.787.
    assert limits(logits, top_k=2, top_p=0.88) == [0.0]
    assert limits(logits, top_k=2, top_p=0.89) == [2.0]


def test_the_mass_that_top_p_wants_is_rounded_up() -> None:
    """One unit of mass decides: of the masses 2^40 and 65537, the first is 0.996 units less than (1 - 2^-24) of
    both."""
    distances = torch.linspace(16.6, 16.7, 100_000)
    distance = float(distances[masses(distances) == 65537][0])
    assert limits(torch.tensor([[0.0, -distance]]), top_p=1 - 2**-24) == [distance]
    distance = float(distances[masses(distances) == 65536][0])
    assert limits(torch.tensor([[0.0, -distance]]), top_p=1 - 2**-24) == [0.0]


# Values that every other implementation of the function must reproduce.
DISTANCES = [0.0, 1e-7, 0.3, 1.0, 2.7182817, 10.0, 27.7, 27.8, math.inf]
MASSES = [2**40, 1099511496704, 814538293248, 404487733248, 72554618880, 49917752, 1, 0, 0]


def test_masses() -> None:
    assert masses(torch.tensor(DISTANCES)).tolist() == MASSES
    distances = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 28
    exact = torch.exp(-distances.double()) * 2**40
    assert ((masses(distances) - exact).abs() <= 1.2e-6 * exact + 1).all()


def test_equals_of_the_last_token_kept_stay_in() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(2000, -1)
    filters: dict[str, Any]
    for filters in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": math.exp(-1)}):
        assert set(sample(logits, make_inputs(2000, seed=many_seeds(2000), **filters))) == {0, 1, 2, 3}


def test_a_vocabulary_of_one() -> None:
    inputs = make_inputs(2, temperature=[0.0, 1.0], top_k=1, top_p=0.5, min_p=0.5, logprobs=3)
    result = Sampler(1, CPU).sample(torch.zeros(2, 1), inputs)
    assert result.tokens.tolist() == [0, 0]
    assert result.logprobs is not None
    assert [report and report.top for report in result.logprobs] == [((0, 0.0),), ((0, 0.0),)]


def test_extreme_temperatures_and_logits_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e-38, 0.0, -1e-38]])
    for temperature in (1e-5, 1.0, 100.0):
        result = Sampler(3, CPU).sample(logits.clone(), make_inputs(2, temperature=temperature, top_p=0.9))
        assert not result.failed
        assert result.tokens[0] == 0


def test_banned_tokens_are_not_sampled() -> None:
    logits = random_logits(4, 6)
    best = logits.argmax(1).tolist()
    banned = [(row, token) for row in (1, 3) for token in range(6) if token != 5 - row]
    for temperature in (0.0, 1.0):
        tokens = sample(logits, make_inputs(4, banned, temperature=temperature, top_k=[0, 3, 0, 3]))
        assert (tokens[1], tokens[3]) == (4, 2)
        if temperature == 0.0:
            assert (tokens[0], tokens[2]) == (best[0], best[2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(temperature: float, bad: float) -> None:
    logits = random_logits(5, 300)
    filters: dict[str, Any] = {
        "top_k": [0, 9, 9, 0, 0],
        "top_p": [1.0, 1.0, 0.5, 1.0, 0.5],
        "min_p": [0.0, 0.1, 0.0, 0.0, 0.1],
    }
    inputs = make_inputs(5, temperature=temperature, logprobs=1, **filters)
    expected = Sampler(300, CPU).sample(logits.clone(), inputs)
    logits[1, 7] = bad
    logits[4] = bad
    result = Sampler(300, CPU).sample(logits, inputs)
    assert result.failed == {1: NOT_FINITE, 4: NOT_FINITE}
    assert result.tokens[[0, 2, 3]].tolist() == expected.tokens[[0, 2, 3]].tolist()
    assert ((result.tokens >= 0) & (result.tokens < 300)).all()
    assert result.logprobs is not None
    assert expected.logprobs is not None
    assert result.logprobs[1] is None
    assert [result.logprobs[i] for i in (0, 2, 3)] == [expected.logprobs[i] for i in (0, 2, 3)]


def test_a_row_with_every_token_banned_fails() -> None:
    banned = [(row, token) for row in (1, 2) for token in (0, 1)]
    result = Sampler(2, CPU).sample(torch.zeros(3, 2), make_inputs(3, banned, temperature=[1.0, 0.0, 1.0], top_p=0.9))
    assert result.failed == {1: ALL_BANNED, 2: ALL_BANNED}


def test_minus_infinity_is_a_legal_logit() -> None:
    logits = torch.full((1, 9), -math.inf)
    logits[0, 4] = -3.0
    filters: dict[str, Any]
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}):
        result = Sampler(9, CPU).sample(logits.clone(), make_inputs(1, **filters))
        assert (result.tokens.tolist(), result.failed) == ([4], {})


# ---- logprobs


def test_logprobs_match_the_raw_logits() -> None:
    logits = random_logits(5, 700)
    inputs = make_inputs(
        5, [(4, int(logits[4].argmax()))], temperature=[0.0, 1.0, 2.0, 1.0, 0.0], top_k=[0, 0, 9, 0, 0], seed=4,
        logprobs=[3, 0, 5, NO_LOGPROBS, 2],
    )  # fmt: skip
    result = Sampler(700, CPU).sample(logits.clone(), inputs)
    expected = logits.log_softmax(1)
    assert result.logprobs is not None
    assert result.logprobs[3] is None
    for row, num_top in ((0, 3), (1, 0), (2, 5), (4, 2)):
        report, token = result.logprobs[row], int(result.tokens[row])
        assert report is not None
        assert report.logprob == pytest.approx(expected[row, token].item(), abs=1e-6)
        assert report.rank == (expected[row] > expected[row, token]).sum() + 1
        values, ids = expected[row].topk(num_top)
        assert [token for token, _ in report.top] == ids.tolist()
        assert [logprob for _, logprob in report.top] == pytest.approx(values.tolist(), abs=1e-6)
    first, last = result.logprobs[0], result.logprobs[4]
    assert first is not None
    assert last is not None
    assert (first.rank, last.rank) == (1, 2), "a ban changes the token, not the report of what the model thought"


def test_logprobs_of_tokens_that_are_named() -> None:
    """In the given order, beside rows that report the most likely tokens, and in steps without other results."""
    logits = random_logits(4, 300)
    inputs = make_inputs(4, logprobs=[2, NO_LOGPROBS, 3, 1], is_named=[False, False, True, True])
    inputs = replace(inputs, named={2: (7, 299, 0), 3: (5,)})
    result = Sampler(300, CPU).sample(logits.clone(), inputs)
    assert result.logprobs is not None
    expected = logits.log_softmax(1)
    for row, ids in ((2, (7, 299, 0)), (3, (5,))):
        report = result.logprobs[row]
        assert report is not None
        assert [token for token, _ in report.top] == list(ids)
        assert [value for _, value in report.top] == pytest.approx(expected[row, list(ids)].tolist(), abs=1e-6)
        assert report.logprob == pytest.approx(float(expected[row, result.tokens[row]]), abs=1e-6)
    first = result.logprobs[0]
    assert first is not None
    assert [token for token, _ in first.top] == expected[0].topk(2).indices.tolist()


def test_no_logprobs_unless_asked() -> None:
    assert Sampler(9, CPU).sample(torch.zeros(2, 9), make_inputs(2)).logprobs is None


def test_nothing_to_sample() -> None:
    result = Sampler(9, CPU).sample(torch.zeros(0, 9), make_inputs(0))
    assert (result.tokens.tolist(), result.failed, result.logprobs) == ([], {}, None)
