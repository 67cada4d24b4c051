"""compile_form(): makes a grammar's text from a user's constraints."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import MAX_CHOICES, MAX_GRAMMAR_CHARS, StructuredOutputsParams
from vllm_lite.structured.check import check_lark, check_regex, check_schema, check_text
from vllm_lite.structured.findings import Findings
from vllm_lite.structured.lark import quoted, regex
from vllm_lite.structured.limits import MAX_OPTIONAL, MAX_OPTIONAL_IN_PART
from vllm_lite.structured.schemas import schema as schemas
from vllm_lite.structured.schemas.preparing import prepared
from vllm_lite.structured.schemas.schema import Schema
from vllm_lite.structured.tags import tag_grammar

ANY_OBJECT: Schema = {"type": "object"}


class CompiledGrammar(NamedTuple):
    """The text of a grammar, and the keywords of its schema that are not enforced, with their places: `#/a:
    'format'`."""

    grammar: str
    notes: tuple[str, ...] = ()


def compile_grammar(wanted: StructuredOutputsParams) -> str:
    """The grammar that compile_form() makes, alone."""
    return compile_form(wanted).grammar


def compile_form(wanted: StructuredOutputsParams) -> CompiledGrammar:
    """Make the grammar of `wanted` for SamplingParams.grammar, and check it under the limits.

    It takes less than a millisecond for most, and up to a second for the largest, without the GIL: call it in a thread
    if others must not wait. Raises RequestError, which names the place: the JSON pointer of a schema, the line and
    column of a text.
    """
    if wanted.whitespace_pattern is not None:
        check_regex(wanted.whitespace_pattern, "whitespace_pattern")
    findings = Findings(is_lenient=False)
    options = schemas.options(compact=wanted.disable_any_whitespace, whitespace_pattern=wanted.whitespace_pattern)

    def prepare(schema: str | Mapping[str, Any] | bool) -> Schema:
        most = MAX_OPTIONAL if wanted.structural_tag is None else MAX_OPTIONAL_IN_PART
        is_closed = wanted.disable_additional_properties
        return prepared(schemas.read(schema), options, findings, max_optional=most, is_closed=is_closed)

    if wanted.regex is not None:
        check_regex(wanted.regex, "regex")
        return CompiledGrammar(check_lark(f"%llguidance {{}}\nstart: {regex(wanted.regex)}\n"))
    if wanted.choice is not None:
        return CompiledGrammar(_choice_grammar(wanted.choice))
    if wanted.grammar is not None:
        return CompiledGrammar(_own_grammar(wanted.grammar))
    if wanted.structural_tag is not None:
        grammar = tag_grammar(wanted.structural_tag, prepare)
    else:
        grammar = check_schema(prepare(ANY_OBJECT if wanted.json is None else wanted.json))
    return CompiledGrammar(grammar, tuple(findings.notes))


def _choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of a choice: a single terminal, as separate rules would take longer at each step."""
    texts = list(dict.fromkeys(choices))
    if not texts or len(texts) > MAX_CHOICES:
        raise RequestError(f"choice takes between 1 and {MAX_CHOICES} texts, got {len(texts)}")
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise RequestError(f"choice takes texts that are not empty, got {text!r} at position {place}")
        check_text(text, "choice")
    return check_lark("%llguidance {}\nstart: CHOICE\nCHOICE: " + " | ".join(map(quoted, texts)) + "\n", "choice")


def _own_grammar(grammar: str) -> str:
    """Check a user's grammar. Lark is used verbatim; GBNF, recognized by `::=`, is converted to Lark."""
    check_text(grammar, "grammar")
    if len(grammar) <= MAX_GRAMMAR_CHARS and "::=" in grammar:
        try:
            grammar = any_to_lark(grammar)
        except GbnfToLarkError as error:
            raise RequestError(f"the GBNF grammar is not valid: {error}") from error
        except (RecursionError, ValueError, LookupError) as error:
            raise RequestError(f"the GBNF grammar cannot be read: {error}") from error
    if grammar.lstrip().startswith("{"):
        raise RequestError("grammar must be in the syntax of Lark or GBNF, got JSON; a JSON schema is given as json")
    return check_lark(grammar)


# ---- Two grammars of which an output follows one


_NAMES = ("first", "second")


def either(first: str, second: str) -> str:
    """Make the grammar of outputs that match the grammar `first` or `second`.

    Raises RequestError if both together exceed the limits.
    """
    named: list[dict[str, Any]] = [{"lark_grammar": f"start: @{_NAMES[0]} | @{_NAMES[1]}\n"}]
    for name, text in zip(_NAMES, (first, second), strict=True):
        if not text.startswith("{"):
            named.append({"name": name, "lark_grammar": text})
            continue
        grammars = msgspec.json.decode(text, type=dict[str, list[dict[str, Any]]])["grammars"]
        named += [{**grammars[0], "name": name}, *grammars[1:]]
    return check_lark(msgspec.json.encode({"grammars": named}).decode(), "the grammar of calls or an answer")
