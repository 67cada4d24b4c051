"""A slice of `python -m tests.acceptance.draft_products`: each way to draft gives the tokens and logprobs of none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.draft_products import (
    FIXED,
    NGRAM,
    WAYS,
    Answer,
    Asked,
    Models,
    answers,
    compare,
    decided_again,
    engine,
    killed_answers,
    make_models,
    num_verifying,
    part_of,
    plain_settings,
)
from tests.families.hybrid import VARIANTS as HYBRIDS
from vllm_lite.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")
COUNT = 40
SLICE = (
    "forced alone",
    "ngram",
    "suffix, swapped",
    "self",
    "self, recomputed",
    "self, one step in flight",
    "hybrid, self",
    "hybrid, self, swapped",
    "draft model",
    "draft model, swapped",
    "eagle3, swapped",
    "mtp, swapped",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return part_of(0, COUNT, seed=7)


@pytest.fixture(scope="module")
def expected(models: Models, asked: list[Asked]) -> Iterator[list[Answer]]:
    with engine(models, **plain_settings("self")) as llm:
        yield answers(llm, asked)


@pytest.fixture(scope="module")
def expected_of_hybrid(models: Models, asked: list[Asked]) -> Iterator[list[Answer]]:
    with engine(models.of("mtp"), **plain_settings("mtp")) as llm:
        yield answers(llm, asked)


@pytest.mark.parametrize("way", SLICE)
def test_drafts_change_no_bit(
    way: str, models: Models, asked: list[Asked], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    own, trace = models.of(way), tmp_path / "trace"
    expected = request.getfixturevalue("expected" if own is models else "expected_of_hybrid")
    with engine(own, record=str(trace), **WAYS[way]) as llm:
        got, stats = answers(llm, asked), llm.stats()
    assert not compare(asked, got, expected)
    assert not decided_again(trace)
    assert num_verifying(trace)
    assert 0 < stats.accepted_tokens <= stats.draft_tokens
    assert (stats.preemptions > 0) == ("swapped" in way or "recomputed" in way)
    counts = stats.drafts_by.values()
    assert sum(each.tokens for each in counts) == stats.draft_tokens
    assert (
        sum(sum(each.accepted_at) for each in counts) == sum(each.accepted for each in counts) == stats.accepted_tokens
    )
    forced = stats.drafts_by["forced"]
    assert 0 < forced.accepted == forced.tokens, "what a grammar forces is right"
    assert all(each.tokens for each in counts)


def test_drafts_change_no_bit_on_two_ranks(models: Models, asked: list[Asked]) -> None:
    way, few = "self, two ranks", asked[:20]
    with engine(models, **plain_settings(way)) as llm:
        expected = answers(llm, few)
    with engine(models, **WAYS[way]) as llm:
        assert not compare(few, answers(llm, few), expected)
        assert llm.stats().accepted_tokens


def test_drafts_change_no_bit_where_workers_die(models: Models, asked: list[Asked], expected: list[Answer]) -> None:
    got, num_deaths = killed_answers(models, asked, 1, **WAYS["killed"])
    assert not compare(asked, got, expected)
    assert num_deaths == 1


def test_drafts_change_no_bit_of_recurrent_states(tmp_path: Path, asked: list[Asked]) -> None:
    few = [one._replace(adapter="") for one in asked[:24]]
    hybrid = Models(HYBRIDS[0].make(tmp_path / "hybrid"), ())
    with engine(hybrid, **plain_settings("suffix, swapped")) as llm:
        expected = answers(llm, few)
    with engine(hybrid, **NGRAM, **FIXED) as llm:
        assert not compare(few, answers(llm, few), expected)
        assert 0 < llm.stats().accepted_tokens < llm.stats().draft_tokens
