"""From what a user asks for to the text of a grammar that travels."""

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
    """A grammar as it travels, and the places of its schema at which something is not held: `#/a: 'format'`."""

    grammar: str
    notes: tuple[str, ...] = ()


def compile_grammar(wanted: StructuredOutputsParams) -> str:
    """Make the grammar of `wanted` as compile_form() does."""
    return compile_form(wanted).grammar


def compile_form(wanted: StructuredOutputsParams) -> CompiledGrammar:
    """Make the grammar of `wanted`, as SamplingParams.grammar carries it, and check it under the limits.

    It takes less than a millisecond for most, and up to a second for the largest, without the GIL: call it in a thread
    where others must not wait. Raises RequestError, which names the place: the JSON pointer of a schema, the line and
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
    """One terminal of all texts, as rules of their own would take longer at each step."""
    texts = list(dict.fromkeys(choices))
    if not texts or len(texts) > MAX_CHOICES:
        raise RequestError(f"choice takes between 1 and {MAX_CHOICES} texts, got {len(texts)}")
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise RequestError(f"choice takes texts that are not empty, got {text!r} at position {place}")
        check_text(text, "choice")
    return check_lark("%llguidance {}\nstart: CHOICE\nCHOICE: " + " | ".join(map(quoted, texts)) + "\n", "choice")


def _own_grammar(grammar: str) -> str:
    """A grammar of the user: Lark as it is, GBNF, which has `::=`, in the syntax of Lark."""
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
    """Make the grammar of what follows `first` or `second`, each in the form in which grammars travel.

    Raises RequestError if both together are beyond the limits.
    """
    named: list[dict[str, Any]] = [{"lark_grammar": f"start: @{_NAMES[0]} | @{_NAMES[1]}\n"}]
    for name, text in zip(_NAMES, (first, second), strict=True):
        if not text.startswith("{"):
            named.append({"name": name, "lark_grammar": text})
            continue
        grammars = msgspec.json.decode(text, type=dict[str, list[dict[str, Any]]])["grammars"]
        named += [{**grammars[0], "name": name}, *grammars[1:]]
    return check_lark(msgspec.json.encode({"grammars": named}).decode(), "the grammar of calls or an answer")
