"""The corpus of structured_check.py: schemas and regular expressions, each with an independent judge of outputs.

`tests/fixtures/structured/` has them as JSON lines, {"name", "schema" | "regex", "refused"?}. Cases marked as refused
have constraints that no grammar can express, and must be refused by name.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import regex
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from vllm_lite import SamplingParams
from vllm_lite.protocol.structured import Thinking

CORPUS = Path(__file__).resolve().parents[1] / "fixtures" / "structured"
BEGIN, END = 2, 3
"""Marks of thinking that the demo model's vocabulary has as single tokens; it never writes them by itself."""
SPELLED_END = "</so>"
"""A mark that is several ordinary tokens."""
BIAS = 9.0
"""Bias of closing tokens. The demo model tells stories: without help it would rarely end a text in JSON, so few outputs
would be complete."""
THINKING_KINDS = 4


class Case(NamedTuple):
    """One constraint on an output."""

    name: str
    wanted: dict[str, Any]
    """The constraint as a user writes it: {"json": schema} or {"regex": pattern}."""
    judge: Callable[[str], str | None]
    """Returns the fault of a complete output; None if it is right."""
    refused: bool = False


def load_cases() -> list[Case]:
    """Load the corpus, including the cases to refuse."""
    return [*_read("schemas.jsonl", "schema"), *_read("regexes.jsonl", "regex")]


def _read(file: str, key: str) -> Iterator[Case]:
    for line in (CORPUS / file).read_text().splitlines():
        row = json.loads(line)
        refused = row.get("refused", False)
        if key == "schema":
            yield Case(row["name"], {"json": row[key]}, _schema_judge(row[key]), refused)
        else:
            yield Case(row["name"], {"regex": row[key]}, _regex_judge(row[key]), refused)


def _schema_judge(schema: Any) -> Callable[[str], str | None]:
    kind = validator_for(schema, default=Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)

    def judge(text: str) -> str | None:
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"no JSON: {error}"
        return next((error.message for error in validator.iter_errors(value)), None)

    return judge


def _regex_judge(pattern: str) -> Callable[[str], str | None]:
    def judge(text: str) -> str | None:
        return None if regex.fullmatch(pattern, text) else f"does not match {pattern}"

    return judge


def closing_bias(vocabulary: dict[str, int], ends: list[int]) -> dict[int, float]:
    """Bias that makes closing tokens and the model's end tokens more likely. `vocabulary`: tokens in the spelling of
    tokenizer.json, in which these characters are unchanged.
    """
    closers = [token_id for text, token_id in vocabulary.items() if text in {'"', "}", "]", '"}', '",', "],", "},"}]
    return dict.fromkeys([*closers, *ends], BIAS)


def thinking_of(place: int, spelled: tuple[int, ...]) -> Thinking:
    """Thinking of one of four kinds: open or not, with marks of one token or of several, bounded or not."""
    kind = place % THINKING_KINDS
    if kind == 0:
        return Thinking(end=(END,), is_open=True)
    if kind == 1:
        return Thinking(end=spelled, is_open=True, budget=10)
    if kind == 2:
        return Thinking(end=(END,), begin=(BEGIN,), budget=6)
    return Thinking(end=spelled, begin=(BEGIN,), is_open=True, budget=0)


def behind_thinking(tokens: list[int], thinking: Thinking) -> list[int] | None:
    """The tokens of the answer; None if the thinking did not end.

    Raises ValueError if it was longer than its budget.
    """
    first = 0
    if not thinking.is_open:
        if tuple(tokens[: len(thinking.begin)]) != thinking.begin:
            return tokens
        first = len(thinking.begin)
    end = thinking.end
    for at in range(first, len(tokens) - len(end) + 1):
        if tuple(tokens[at : at + len(end)]) == end:
            if thinking.budget is not None and at - first > thinking.budget:
                raise ValueError(f"thought for {at - first} tokens, with a budget of {thinking.budget}")
            return tokens[at + len(end) :]
    return None


def params_of(place: int, case: Case, *, greedy: bool, max_tokens: int, bias: dict[int, float]) -> SamplingParams:
    """Sampling parameters of a case: its form, and a seed of its own."""
    return SamplingParams(
        structured_outputs=case.wanted,  # type: ignore[arg-type] # a dict says the same as the struct
        temperature=0.0 if greedy else 1.0,
        seed=place,
        max_tokens=max_tokens,
        logit_bias=bias,
    )
