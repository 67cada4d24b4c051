"""Questions about a state: their checks, and their text in the prompt.

Each option of a question has a label, with which the model answers: a letter for an option of a choice, yes or no, the
number of a level. So the name of an option may have any number of tokens.
"""

import json
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from vllm_lite.errors import RequestError

MAX_QUESTIONS = 64
"""Maximum questions of one request, as in vLLM's route."""
MAX_OPTIONS = len(string.ascii_uppercase)
MAX_LEVELS = len(string.digits)
MAX_ID_CHARS = 256
MAX_SHOWN_CHARS = 100

Kind = Literal["choice", "noul", "score"]


class QuestionFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question of a request. `type` is choice, noul (yes or no) or score.

    `instructions`: the text of the question. `criteria`: for a choice, its options, each with a description or null;
    for a noul, descriptions of "true" and "false", or null; for a score, its levels, from the lowest.
    """

    type: str
    instructions: Any = ""
    criteria: Any = None


class Question(NamedTuple):
    """A question that has been checked."""

    id: str
    kind: Kind
    names: tuple[str, ...]
    """Names of the options in order: of a choice, yes and no, or the levels of a score."""
    labels: tuple[tuple[str, ...], ...]
    """Spellings of each option's label. The prompt names the first; the probabilities of the others are added to it."""
    text: str
    """Text of the question in the prompt, after the state."""


def read_questions(given: Any) -> list[Question]:
    """Check the questions, by their ids. Raises RequestError that names the first one that is wrong."""
    if not isinstance(given, Mapping) or not given:
        raise RequestError(f"questions must be an object with at least one question, got {_shown(given)}")
    if len(given) > MAX_QUESTIONS:
        raise RequestError(f"questions takes at most {MAX_QUESTIONS} questions, got {len(given)}")
    return [_read(name, fields) for name, fields in given.items()]


def read_state(state: Any) -> str:
    """Convert a state, a text or JSON, to text. Raises RequestError."""
    text = _text_of(state, "state")
    if text is None or not text.strip():
        raise RequestError(f"state must be a text or JSON to decide about, got {_shown(state)}")
    return text


def read_instructions(given: Any) -> str:
    """Convert the instructions before the state to text; "" for none. Raises RequestError."""
    return (_text_of(given, "instructions") or "").strip()


def _read(name: Any, fields: Any) -> Question:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS:
        text = f"the id of a question must be a text of 1 to {MAX_ID_CHARS} characters"
        raise RequestError(f"{text}, got {_shown(name)}")
    where = f"question {_shown(name)}"
    if not isinstance(fields, QuestionFields):
        try:
            fields = msgspec.convert(fields, QuestionFields)
        except msgspec.ValidationError as error:
            raise RequestError(f"{where}: {error}") from error
    read = _READERS.get(fields.type)
    if read is None:
        raise RequestError(f"{where}: type must be one of {', '.join(_READERS)}, got {_shown(fields.type)}")
    asked = (_text_of(fields.instructions, f"{where}: instructions") or "").strip()
    return read(name, where, asked, fields.criteria)


def _choice(name: str, where: str, asked: str, criteria: Any) -> Question:
    if not isinstance(criteria, Mapping) or not 1 <= len(criteria) <= MAX_OPTIONS:
        got = len(criteria) if isinstance(criteria, Mapping) else _shown(criteria)
        text = f"criteria of a choice must be an object of 1 to {MAX_OPTIONS} options"
        raise RequestError(f"{where}: {text}, each with a description or null, got {got}")
    letters = string.ascii_uppercase[: len(criteria)]
    lines = []
    for letter, (option, given) in zip(letters, criteria.items(), strict=True):
        if not isinstance(option, str) or not option.strip():
            raise RequestError(f"{where}: the name of an option must be a text, got {_shown(option)}")
        described = _text_of(given, f"{where}: the description of {_shown(option)}")
        lines.append(f"{letter}: {option} - {described}" if described else f"{letter}: {option}")
    labels = tuple((letter,) for letter in letters)
    return Question(name, "choice", tuple(criteria), labels, _lines(asked, lines))


def _noul(name: str, where: str, asked: str, criteria: Any) -> Question:
    criteria = {} if criteria is None else criteria
    if not isinstance(criteria, Mapping) or not criteria.keys() <= {"true", "false"}:
        text = 'criteria of a noul must be an object of descriptions of "true" and "false", or null'
        raise RequestError(f"{where}: {text}, got {_shown(criteria)}")
    lines = [
        f"{label}: {described}"
        for label, side in (("yes", "true"), ("no", "false"))
        if (described := _text_of(criteria.get(side), f"{where}: the description of {side}"))
    ]
    if not asked and not lines:
        raise RequestError(f"{where}: give instructions, which state the question")
    labels = (("yes", "Yes"), ("no", "No"))
    return Question(name, "noul", ("yes", "no"), labels, _lines(asked, [*lines, "Yes or no?"]))


def _score(name: str, where: str, asked: str, criteria: Any) -> Question:
    if not isinstance(criteria, list | tuple) or not 2 <= len(criteria) <= MAX_LEVELS:
        got = len(criteria) if isinstance(criteria, list | tuple) else _shown(criteria)
        text = f"criteria of a score must be a list of 2 to {MAX_LEVELS} levels, from the lowest on"
        raise RequestError(f"{where}: {text}, got {got}")
    levels = tuple(_text_of(level, f"{where}: a level") or "" for level in criteria)
    if not all(level.strip() for level in levels) or len(set(levels)) < len(levels):
        raise RequestError(f"{where}: the levels of a score must be different texts, got {_shown(list(levels))}")
    digits = string.digits[: len(levels)]
    lines = [f"{digit}: {level}" for digit, level in zip(digits, levels, strict=True)]
    labels = tuple((digit,) for digit in digits)
    return Question(name, "score", levels, labels, _lines(asked, lines))


_READERS: dict[str, Callable[[str, str, str, Any], Question]] = {"choice": _choice, "noul": _noul, "score": _score}


def _lines(asked: str, options: Sequence[str]) -> str:
    return "\n".join([*([f"Question: {asked}"] if asked else []), *options])


def _text_of(value: Any, where: str) -> str | None:
    """Return a text unchanged, JSON as text, null as None. Raises RequestError."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} must be a text or JSON: {error}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
