"""The corpus that structured_check.py runs through engines: each case compiles, or is refused if it is marked so."""

import datetime as dt

import pytest
import regex

from tests.acceptance.structured_cases import behind_thinking, load_cases
from tests.acceptance.structured_check import check_compiling
from vllm_lite.protocol.structured import Thinking
from vllm_lite.structured.schemas.texts import EXACT

CASES = load_cases()


def test_the_corpus_is_large_and_its_names_are_distinct() -> None:
    kept = [case for case in CASES if not case.refused]
    assert sum("json" in case.wanted for case in kept) >= 200
    assert sum("regex" in case.wanted for case in kept) >= 50
    assert len({case.name for case in CASES}) == len(CASES) > len(kept)


def test_each_case_compiles_or_is_refused() -> None:
    assert check_compiling(CASES) == 0


def test_a_case_that_does_not_do_as_it_is_marked_is_seen() -> None:
    assert check_compiling([case._replace(refused=not case.refused) for case in CASES[:3]]) == 3


@pytest.mark.parametrize(
    ("text", "is_right"), [('{"name": "a", "age": 3}', True), ('{"name": "a"}', False), ("{", False)]
)
def test_the_judge_of_a_schema(text: str, is_right: bool) -> None:
    (case,) = [case for case in CASES if case.name == "person"]
    assert (case.judge(text) is None) == is_right


def test_the_judge_of_a_schema_knows_formats() -> None:
    (case,) = [case for case in CASES if case.name == "format_date"]
    assert case.judge('"2024-02-29"') is None
    assert case.judge('"2023-02-29"') is not None


@pytest.mark.parametrize("day", ["02-28", "02-29", "03-31", "12-01", "01-30"])
def test_dates_are_days_of_the_calendar(day: str) -> None:
    for year in range(10000):
        text = f"{year:04d}-{day}"
        try:
            dt.date.fromisoformat(text)
            exists = True
        except ValueError:
            exists = False
        assert bool(regex.match(EXACT["date"], text)) == exists, text
        assert bool(regex.match(EXACT["date-time"], f"{text}T00:00:59Z")) == exists, text
    assert not regex.match(EXACT["time"], "23:59:60Z")


@pytest.mark.parametrize(
    ("tokens", "thinking", "answer"),
    [
        ([5, 3, 7], Thinking(end=(3,), is_open=True), [7]),
        ([5, 7], Thinking(end=(3,), is_open=True), None),
        ([5, 8, 9, 7], Thinking(end=(8, 9), is_open=True, budget=1), [7]),
        ([7, 3], Thinking(end=(3,), begin=(2,)), [7, 3]),
        ([2, 3], Thinking(end=(3,), begin=(2,), budget=0), []),
    ],
)
def test_the_answer_follows_the_thinking(tokens: list[int], thinking: Thinking, answer: list[int] | None) -> None:
    assert behind_thinking(tokens, thinking) == answer


def test_thinking_beyond_its_budget_is_seen() -> None:
    with pytest.raises(ValueError, match="thought for 2 tokens, with a budget of 1"):
        behind_thinking([5, 6, 3], Thinking(end=(3,), is_open=True, budget=1))
