"""Ranks that sample together against the Sampler that has all columns: tokens, failures and logprobs are the same."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.thread_group import ThreadCommunicator, ThreadGroup
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.kernels import cpu
from vllm_lite.protocol.step import NOT_FINITE
from vllm_lite.worker.sampling import ranked_sampler
from vllm_lite.worker.sampling.logit_rules import Bias, LogitEdits
from vllm_lite.worker.sampling.masks import NEVER, TokenMasks
from vllm_lite.worker.sampling.penalties import Penalties
from vllm_lite.worker.sampling.ranked_sampler import RankedSampler
from vllm_lite.worker.sampling.row_share import RowShare
from vllm_lite.worker.sampling.sampler import (
    ALL_BANNED,
    NO_LOGPROBS,
    ROW_PARAMS,
    Sampled,
    SampleInputs,
    Sampler,
    is_plain,
)

CPU = torch.device("cpu")


def cut(vocab_size: int, world: int, rng: np.random.Generator) -> list[slice]:
    """The columns of each rank, at least one."""
    borders = [0, *sorted(rng.choice(np.arange(1, vocab_size), world - 1, replace=False).tolist()), vocab_size]
    return [slice(*pair) for pair in pairwise(borders)]


@dataclass
class Rank:
    """The model of one rank, as its sampler sees it."""

    communicator: ThreadCommunicator
    columns: list[slice]

    @property
    def own_columns(self) -> slice:
        return self.columns[self.communicator.shard.rank]

    def sampler(self, vocab_size: int) -> RankedSampler:
        widths = tuple(columns.stop - columns.start for columns in self.columns)
        return RankedSampler(
            Sampler(vocab_size, CPU),
            self.communicator,
            self.own_columns,
            lambda logits: self.communicator.gather_columns(logits, widths),
        )

    def fill(self, whole: torch.Tensor) -> torch.Tensor:
        """Logits in which only this rank's columns are filled."""
        out = self.communicator.shared_rows(len(whole), whole.shape[1], torch.float32)
        out[:, self.own_columns] = whole[:, self.own_columns]
        return out


@dataclass
class Step:
    """One step's logits, and the requested results."""

    logits: torch.Tensor
    params: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]
    rules: dict[str, Any]
    named: dict[int, tuple[int, ...]] | None = None

    def inputs(self) -> SampleInputs:
        """Inputs made for one rank; rules keep the tensors that they have copied to the device."""
        edits = LogitEdits(**{name: make() for name, make in self.rules.items()}) if self.rules else None
        plain = edits is None and is_plain(self.params)
        return SampleInputs(self.params, self.positions, edits, plain=plain, named=self.named)

    def expected(self) -> Sampled:
        return Sampler(self.logits.shape[1], CPU).sample(self.logits.clone(), self.inputs())


def together(steps: list[Step], columns: list[slice], *, shares_memory: bool) -> tuple[list[list[Sampled]], list[Any]]:
    """Return each rank's samples of each step, and the communicators. No rank waits for another one between the
    steps."""
    group = ThreadGroup(len(columns), shares_memory=shares_memory)

    def sample(communicator: ThreadCommunicator) -> list[Sampled]:
        rank = Rank(communicator, columns)
        sampler = rank.sampler(columns[-1].stop)
        results = []
        for step in steps:
            result = sampler.sample(rank.fill(step.logits), step.inputs())
            results.append(Sampled(result.tokens.copy(), result.failed, result.logprobs))
        return results

    return group.run(sample), group.communicators


def check(steps: list[Step], columns: list[slice], *, shares_memory: bool) -> None:
    by_rank, _ = together(steps, columns, shares_memory=shares_memory)
    for number, step in enumerate(steps):
        expected = step.expected()
        fine = [row for row in range(len(expected.tokens)) if row not in expected.failed]
        for rank, results in enumerate(by_rank):
            got = results[number]
            assert got.failed == expected.failed, (number, rank)
            assert got.tokens[fine].tolist() == expected.tokens[fine].tolist(), (number, rank)
            assert got.tokens.tolist() == by_rank[0][number].tokens.tolist(), "failed rows, too: all ranks store them"
            assert ((got.tokens >= 0) & (got.tokens < columns[-1].stop)).all()
            # Compared as text, in which NaN equals NaN: raw logprobs of rows with excluded infinite logits have some.
            assert str(got.logprobs) == str(expected.logprobs if rank == 0 else None), (number, rank)


# ---- random steps


def random_step(rng: np.random.Generator, vocab_size: int, num_rows: int, kind: str) -> Step:
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)).astype(np.float32) * 3)
    if rng.random() < 0.5:
        logits = logits.round()  # ties, within ranks and across
    for bad in (np.nan, np.inf, NEVER):
        if rng.random() < 0.2:
            logits[rng.integers(num_rows), rng.integers(vocab_size)] = float(bad)
    if rng.random() < 0.1:
        logits[rng.integers(num_rows)] = NEVER
    params = np.zeros(num_rows, ROW_PARAMS)
    params["top_p"], params["logprobs"] = 1.0, NO_LOGPROBS
    if kind != "plain":
        params["temperature"] = rng.choice([0.0, 0.7, 1.5], num_rows)
        params["top_k"] = rng.choice([0, 1, 5, vocab_size], num_rows)
        params["top_p"] = rng.choice([1.0, 0.9, 0.1], num_rows)
        params["min_p"] = rng.choice([0.0, 0.1], num_rows)
        params["seed"] = rng.integers(0, 2**64, num_rows, np.uint64)
        params["sample"] = rng.integers(0, 3, num_rows)
    if kind in ("logprobs", "both"):
        params["logprobs"] = rng.choice([NO_LOGPROBS, 0, 3], num_rows)
        params["is_named"] = (params["logprobs"] == 3) & (rng.random(num_rows) < 0.5) & (vocab_size > 3)
    ids: tuple[int, ...] = (int(vocab_size) - 1, 0, 2)
    named: dict[int, tuple[int, ...]] = dict.fromkeys(np.flatnonzero(params["is_named"]).tolist(), ids)
    rules = random_rules(rng, vocab_size, num_rows) if kind in ("rules", "both") else {}
    return Step(logits, params, rng.integers(1, 1000, num_rows), rules, named or None)


def random_rules(rng: np.random.Generator, vocab_size: int, num_rows: int) -> dict[str, Any]:
    """Makers of some of the fields of LogitEdits."""

    def pairs() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        count = rng.integers(1, num_rows * vocab_size)
        flat = rng.choice(num_rows * vocab_size, count, replace=False)
        return flat // vocab_size, flat % vocab_size

    def floats(count: int) -> np.ndarray[Any, Any]:
        return rng.normal(size=count).astype(np.float32)

    bits = rng.integers(0, 2**32, (num_rows, -(-vocab_size // 32)), np.uint32)
    banned, biased, penalised = pairs(), pairs(), pairs()
    values, deduction = floats(len(biased[0])), floats(len(penalised[0]))
    repetition = 1 + np.abs(floats(len(penalised[0])))
    makers: dict[str, Any] = {
        "banned": lambda: banned,
        "allowed": lambda: TokenMasks(np.arange(num_rows), bits),
        "masks": lambda: TokenMasks(np.arange(num_rows // 2), ~bits[: num_rows // 2]),
        "bias": lambda: Bias(*biased, values),
        "penalties": lambda: Penalties(*penalised, repetition, deduction),
    }
    return {name: makers[name] for name in rng.choice(list(makers), rng.integers(1, 4), replace=False).tolist()}


KINDS = ("plain", "draws", "logprobs", "rules", "both")


def check_random(seed: int, world: int, *, shares_memory: bool) -> None:
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.integers(world, 300))
    steps = [random_step(rng, vocab_size, int(rng.integers(1, 9)), str(rng.choice(KINDS))) for _ in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranked_sampler, "FEW_LOGITS", int(rng.choice([0, 2 * vocab_size, 1 << 18])))
        check(steps, cut(vocab_size, world, rng), shares_memory=shares_memory)


@pytest.mark.parametrize("shares_memory", [True, False], ids=["one memory", "copies"])
@pytest.mark.parametrize("world", [2, 3, 4])
@settings(max_examples=25)
@example(seed=1)
@given(seed=st.integers(0, 2**32 - 1))
def test_all_ranks_sample_the_same_as_one_alone(world: int, shares_memory: bool, seed: int) -> None:
    check_random(seed, world, shares_memory=shares_memory)


@pytest.mark.parametrize("shares_memory", [True, False], ids=["one memory", "copies"])
def test_without_the_compiled_library(shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    for seed in range(4):
        check_random(seed, 3, shares_memory=shares_memory)


# ---- where ranks meet


def plain_step(logits: torch.Tensor, **columns: Any) -> Step:
    params = np.zeros(len(logits), ROW_PARAMS)
    for name, values in ({"top_p": 1.0, "logprobs": NO_LOGPROBS} | columns).items():
        params[name] = values
    return Step(logits, params, np.arange(len(logits)), {})


@pytest.fixture(params=[0, 1 << 18], ids=["many logits", "few logits"])
def few_or_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether all ranks may look at all logits alike."""
    monkeypatch.setattr(ranked_sampler, "FEW_LOGITS", request.param)
    return bool(request.param)


def one_by_one(vocab_size: int) -> list[slice]:
    return [slice(column, column + 1) for column in range(vocab_size)]


@pytest.mark.usefixtures("few_or_many")
def test_equals_of_several_ranks_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [2.0, 1.0, 2.0], [0.0, -0.0, 0.0], [-1.0, -0.0, 0.0]])
    by_rank, _ = together([plain_step(logits)], one_by_one(3), shares_memory=True)
    assert [results[0].tokens.tolist() for results in by_rank] == [[1, 0, 0, 1]] * 3


@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_one_rank_cannot_sample_fail_on_all(rank: int, temperature: float) -> None:
    logits = torch.zeros(5, 3)
    for row, bad in ((1, np.nan), (2, np.inf)):
        logits[row, rank] = float(bad)
    logits[3] = NEVER
    logits[4] = NEVER
    logits[4, rank] = 1.0
    step = plain_step(logits, temperature=temperature)
    by_rank, _ = together([step], one_by_one(3), shares_memory=True)
    for (result,) in by_rank:
        assert result.failed == {1: NOT_FINITE, 2: NOT_FINITE, 3: ALL_BANNED}
        assert result.tokens[4] == rank


def test_nothing_to_sample() -> None:
    by_rank, ranks = together([plain_step(torch.zeros(0, 4))], one_by_one(4), shares_memory=True)
    assert all(result.tokens.tolist() == [] and not result.failed for (result,) in by_rank)
    assert [rank.num_calls for rank in ranks] == [{}] * 4


# ---- what is exchanged


@pytest.mark.parametrize("shares_memory", [True, False], ids=["one memory", "copies"])
@pytest.mark.parametrize(
    ("kind", "in_one_memory", "with_copies"),
    [
        ("plain", {"barrier": 2}, {"all_gather": 1}),
        ("draws", {"barrier": 1, "all_gather": 1}, {"gather_columns": 1, "all_gather": 1}),
        ("logprobs", {"barrier": 1, "all_gather": 2}, {"gather_columns": 1, "all_gather": 2}),
        ("rules", {"barrier": 2, "all_gather": 1}, {"gather_columns": 1, "all_gather": 1}),
        ("both", {"barrier": 3, "all_gather": 2}, {"gather_columns": 1, "all_gather": 2}),
    ],
)
def test_ranks_meet_no_more_often_than_they_must(
    kind: str, in_one_memory: dict[str, int], with_copies: dict[str, int], shares_memory: bool
) -> None:
    rng = np.random.default_rng(5)
    step = random_step(rng, 100, 5, kind)
    _, ranks = together([step], cut(100, 3, rng), shares_memory=shares_memory)
    assert [rank.num_calls for rank in ranks] == [in_one_memory if shares_memory else with_copies] * 3


def test_many_logits_are_not_gathered_for_best_tokens(few_or_many: bool) -> None:
    _, ranks = together([plain_step(torch.zeros(3, 8))], one_by_one(8), shares_memory=True)
    assert [rank.num_calls for rank in ranks] == [{"barrier": 2} if few_or_many else {"all_gather": 1}] * 8


def test_rules_write_into_one_memory_once_between_two_meetings() -> None:
    applied: list[tuple[int, dict[str, int]]] = []
    group = ThreadGroup(2)

    class Recorded:
        def __init__(self, communicator: ThreadCommunicator) -> None:
            self.communicator = communicator

        def apply(self, logits: torch.Tensor) -> None:
            applied.append((self.communicator.shard.rank, dict(self.communicator.num_calls)))
            logits[:, 0] = 9.0

    def sample(communicator: ThreadCommunicator) -> list[int]:
        rank = Rank(communicator, [slice(0, 2), slice(2, 5)])
        step = plain_step(torch.zeros(3, 5))
        inputs = SampleInputs(step.params, step.positions, Recorded(communicator))  # type: ignore[arg-type]
        tokens: list[int] = rank.sampler(5).sample(rank.fill(step.logits), inputs).tokens.tolist()
        return tokens

    assert group.run(sample) == [[0, 0, 0]] * 2
    assert applied == [(0, {"barrier": 1})]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 9, 32])
def test_rows_are_shared_out(num_rows: int, world: int) -> None:
    shares = [RowShare.of(num_rows, Shard(rank, world)) for rank in range(world)]
    rows = [list(range(num_rows))[share.own] for share in shares]
    if num_rows < world:
        assert rows == [list(range(num_rows))] * world, "no rank waits for another one's only row"
    else:
        assert [row for own in rows for row in own] == list(range(num_rows))
    assert {share.size for share in shares} == {max(map(len, rows))}


def test_a_rank_that_ends_ends_the_wait_of_the_others() -> None:
    group = ThreadGroup(2)

    def sample(communicator: ThreadCommunicator) -> None:
        if communicator.shard.rank == 1:
            raise ValueError("no more")
        rank = Rank(communicator, [slice(0, 2), slice(2, 5)])
        step = plain_step(torch.zeros(3, 5))
        rank.sampler(5).sample(rank.fill(step.logits), step.inputs())

    with pytest.raises(ValueError, match="no more"):
        group.run(sample)
    assert [rank.lost_rank() for rank in group.communicators] == [1, None]
