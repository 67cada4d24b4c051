"""Structured outputs in a whole engine with a model that knows no JSON: a part of the cases of
tests/acceptance/structured_check.py. jsonschema and a regex engine check the outputs."""

from typing import Any

import pytest

from tests.acceptance.structured_cases import load_cases
from tests.acceptance.structured_check import chosen
from tests.acceptance.structured_rows import Matrix, make_rows
from tests.e2e.reference import DEADLINE_S

MAX_TOKENS = 60
ROWS = (
    "plain",
    "jump-forward",
    "one step at a time, n-gram",
    "preempted, swapped, n-gram",
    "preempted, recomputed",
    "n = 2, n-gram",
    "thinking",
    "thinking, n-gram",
    "thinking, preempted, n-gram",
    "two ranks, n-gram",
)


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    """20 schemas and 10 regular expressions, and the results of the first row of each kind."""
    cases = [case for case in load_cases() if not case.refused]
    schemas, regexes = ([case for case in cases if key in case.wanted] for key in ("json", "regex"))
    few = [*chosen(schemas, 20), *chosen(regexes, 10)]
    return Matrix(few, max_tokens=MAX_TOKENS, single_process=True, ready_timeout_s=DEADLINE_S)


@pytest.mark.parametrize("name", ROWS)
def test_every_output_has_its_form_and_rows_agree(matrix: Matrix, name: str) -> None:
    (row,) = [row for row in make_rows(matrix.longest) if row.name == name]
    result = matrix.run(row)
    assert result.faults == []
    num_outputs = 2 * len(matrix.cases) * row.num_samples * row.rounds
    assert result.finished + result.cut == num_outputs
    assert result.finished > num_outputs / 4, "too few are whole to show anything"


def test_an_output_without_its_form_is_seen(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same row without grammars has to find faults, or it would find none ever."""
    asked = Matrix.params

    def without(self: Matrix, *args: Any) -> Any:
        return asked(self, *args).clone(structured_outputs=None)

    monkeypatch.setattr(Matrix, "params", without)
    result = matrix.run(make_rows(matrix.longest)[0])
    assert result.invalid > result.finished
