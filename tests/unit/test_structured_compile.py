"""Grammars of users' formats: they accept exactly what was asked for, and an error names the place."""

import json
import random
import re
import threading
from typing import Any

import jsonschema
import pytest

from tests.deadlines import scaled
from tests.grammar_walk import Walker
from tests.hostile_grammars import ATTACKS, hostile_forms
from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.structured.check import Passed, fault_of
from vllm_lite.structured.compile import compile_grammar
from vllm_lite.structured.limits import MAX_REPEATS, MAX_SCHEMA_PARTS
from vllm_lite.structured.regexes.patterns import too_many_repeats
from vllm_lite.structured.schemas.texts import FORMATS

WALKER = Walker()


def grammar_of(**form: Any) -> str:
    return compile_grammar(StructuredOutputsParams(**form))


def obj(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required) or list(properties),
        "additionalProperties": False,
    }


# ---- what is let through is valid

TREE = {**obj("v", v={"type": "integer", "minimum": 0, "maximum": 9}), "$defs": {}}
TREE["properties"]["next"] = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": obj(a={"type": "integer"}, b={"type": "boolean"}, c={"type": "null"}),
    "optional": obj("b", a={"type": "boolean"}, b={"type": "boolean"}, c={"type": "boolean"}),
    "nested": obj(
        o=obj(p=obj(q={"enum": ["x", "y"]})), l={"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    ),
    "recursive": TREE,
    "defs": {**obj(a={"$ref": "#/$defs/%C3%A9~1"}), "$defs": {"é/": {"enum": [1, "two", None, [3], {"f": "ö"}]}}},
    "union": {"anyOf": [{"type": "integer", "minimum": 5, "exclusiveMaximum": 700}, obj(k={"const": 'a"b\\c\n'})]},
    "tagged": {"oneOf": [obj(t={"const": "a"}, x={"type": "integer"}), obj(t={"const": "b"}, y={"type": "boolean"})]},
    "merged": {"allOf": [obj("a", a={"type": "integer"}, b={"type": "string", "maxLength": 2}), {"required": ["b"]}]},
    "lengths": obj(s={"type": "string", "minLength": 2, "maxLength": 4}, e={"type": "string", "maxLength": 0}),
    "pattern": obj(s={"type": "string", "pattern": "^[a-c]{2}\\d+(é|ß)?$", "maxLength": 9}),
    "formats": obj(
        d={"type": ["string", "null"], "format": "date"},
        u={"type": "string", "format": "uuid"},
        i={"type": "string", "format": "ipv4"},
    ),
    "numbers": obj(n={"type": "number", "minimum": -1.5, "maximum": 2.25}, m={"type": "integer", "multipleOf": 7}),
    "names": obj(**{'a"b': {"type": "boolean"}, "c\\d": {"type": "boolean"}, "x-guidance": {"type": "boolean"}}),
    "kinds": {"type": ["boolean", "null", "integer"]},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["z"]}], "items": False, "minItems": 1},
    "map": {"type": "object", "patternProperties": {"^[a-d]$": {"type": "boolean"}}, "additionalProperties": False},
    "idle": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "propertyNames": {}},
    "options": {**obj(a={"type": "boolean"}), "x-guidance": {"whitespace_pattern": "\\n*", "lenient": True}},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_walks_end_in_json_that_the_schema_takes(name: str) -> None:
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    grammar, ended = grammar_of(json=schema), 0
    for seed in range(6):
        text, is_whole = WALKER.walk(grammar, random.Random(seed))
        if is_whole:
            validator.validate(json.loads(text))
            outside = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
            assert not re.search(r"\s\s|\n|[^:,]\s|[:,]\S", outside), text
            ended += 1
    assert ended >= 3


@pytest.mark.parametrize("form", [{"json": {}}, {"json": True}, {"json_object": True}, {"json": '{"type": "array"}'}])
def test_free_json_has_bounded_white_space(form: dict[str, Any]) -> None:
    grammar = grammar_of(**form)
    for seed in range(8):
        text, is_whole = WALKER.walk(grammar, random.Random(seed))
        if is_whole:
            json.loads(text)
    assert not WALKER.takes(grammar, '{"a":  1}')
    assert not WALKER.takes(grammar, "[1,\n2]")


def test_white_space_is_as_asked_for() -> None:
    schema = obj(a={"type": "integer"}, b={"type": "integer"})
    spaced, compact = '{"a": 1, "b": 2}', '{"a":1,"b":2}'
    asked: dict[str, dict[str, Any]] = {
        "default": {},
        "compact": {"disable_any_whitespace": True},
        "pattern": {"whitespace_pattern": "[ \\n]?"},
    }
    taken = {
        name: [WALKER.takes(grammar_of(json=schema, **options), text) for text in (spaced, compact, '{ "a":1,\n"b":2}')]
        for name, options in asked.items()
    }
    assert taken == {
        "default": [True, False, False],
        "compact": [False, True, False],
        "pattern": [True, True, True],
    }


def test_objects_are_closed_when_asked_for() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    schema = {"type": "object", "properties": {"o": inner, "p": {**inner, "additionalProperties": True}}}
    for closed in (False, True):
        grammar = grammar_of(json=schema, disable_additional_properties=closed)
        assert WALKER.takes(grammar, '{"o": {"x": 1}}') is not closed
        assert WALKER.takes(grammar, '{"p": {"x": 1}}')


@pytest.mark.parametrize("schema", ['{"enum": ["a", 1]}', {"enum": ["a", 1]}])
def test_a_schema_may_be_a_text(schema: Any) -> None:
    grammar = grammar_of(json=schema)
    assert WALKER.takes(grammar, '"a"')
    assert WALKER.takes(grammar, "1")
    assert not WALKER.takes(grammar, "a")


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        ("[ab]+/\\d", "ab/1", "ab1"),
        ("^a\\/b\nc$", "a/b\nc", "a/b"),
        ("(yes|no|)", "", "maybe"),
        ("\\\\\\w{2}", "\\ab", "ab"),
        ('"é😀"', '"é😀"', "é"),
        ("", "", "a"),
        ("(?i)ok", "OK", "o"),
        ("[\\w.-]+@\\W[^\\d]", "a_1.-@ x", "é@ x"),
        ("\\d+", "12", "\u0661"),
    ],
)
def test_regexes(pattern: str, taken: str, refused: str) -> None:
    grammar = grammar_of(regex=pattern)
    assert WALKER.takes(grammar, taken)
    assert not WALKER.takes(grammar, refused)
    for seed in range(4):
        text, is_whole = WALKER.walk(grammar, random.Random(seed), 60)
        assert not is_whole or re.fullmatch(pattern, text)


def test_choices_are_exact() -> None:
    choices = ["yes", "yes, but", 'a"\\b', "\x01\x7f\n", "é😀", "/x/", "%json {}", "yes"]
    grammar = grammar_of(choice=choices)
    assert all(WALKER.takes(grammar, choice) for choice in choices)
    assert not any(WALKER.takes(grammar, text) for text in ("ye", "yes,", "YES", ""))


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" NUMBER\nNUMBER: /[0-9]+/', 'root ::= "a" number\nnumber ::= [0-9]+', 'start: "a" n\nn: /[0-9]/ n?'],
)
def test_grammars_of_lark_and_gbnf(grammar: str) -> None:
    made = grammar_of(grammar=grammar)
    assert WALKER.takes(made, "a12")
    assert not WALKER.takes(made, "a")


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_readers(name: str) -> None:
    schema = {"type": "string", "format": name}
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    grammar, ended = grammar_of(json=schema), 0
    for seed in range(40):
        text, is_whole = WALKER.walk(grammar, random.Random(seed), 60)
        if is_whole:
            validator.validate(json.loads(text))
            ended += 1
    assert ended or name in ("email", "uri"), "texts of any length seldom end by chance"


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0004-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "0000-01-01"]),
        ("time", ["23:59:59Z", "00:00:00.5+13:00"], ["23:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2024-02-30T12:00:00Z", "2024-02-28 12:00:00Z"]),
    ],
)
def test_dates_exist(name: str, taken: list[str], refused: list[str]) -> None:
    grammar = grammar_of(json={"type": "string", "format": name})
    assert [text for text in taken + refused if WALKER.takes(grammar, f'"{text}"')] == taken
    both = grammar_of(json={"type": "string", "format": name, "pattern": "^2", "maxLength": 40})
    assert [text for text in taken if WALKER.takes(both, f'"{text}"')] == [text for text in taken if text[0] == "2"]


# ---- structural tags

TAG = {"begin": "<f=get>", "schema": obj(n={"type": "integer"}), "end": "</f>"}


def test_structural_tags_of_both_kinds() -> None:
    old = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f="]}
    content = {"type": "json_schema", "json_schema": TAG["schema"]}
    tag = {"type": "tag", "begin": TAG["begin"], "content": content, "end": TAG["end"]}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]}
    for given in (old, {"type": "structural_tag", "format": form}, json.dumps({"format": form})):
        grammar = grammar_of(structural_tag=given)
        assert WALKER.takes(grammar, "so <f= "[:3] + '<f=get>{"n": 1}</f> and <f=get>{"n": 2}</f>.')
        assert WALKER.takes(grammar, "only text")
        assert not WALKER.takes(grammar, "a <f=set>")
        assert not WALKER.takes(grammar, 'a <f=get>{"m": 1}</f>')


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [
        ({"type": "const_string", "value": "a b"}, "a b", "a"),
        ({"type": "regex", "pattern": "a+"}, "aa", "b"),
        ({"type": "any_text"}, "x\ny", None),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, {"type": "any_text"}]}, "xyz", "yz"),
        ({"type": "or", "elements": [{"type": "const_string", "value": v} for v in "ab"]}, "b", "c"),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"}, "<b>", "<b"),
    ],
)
def test_formats_of_structural_tags(form: dict[str, Any], taken: str, refused: str | None) -> None:
    grammar = grammar_of(structural_tag={"type": "structural_tag", "format": form})
    assert WALKER.takes(grammar, taken)
    assert refused is None or not WALKER.takes(grammar, refused)


def test_tags_that_have_to_come() -> None:
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "\\d"}, "end": "</a>"}
    for form, taken, refused in (
        ({"type": "triggered_tags", "triggers": ["<a"], "at_least_one": True}, "<a>1</a>b", "b"),
        ({"type": "triggered_tags", "triggers": ["<a"], "stop_after_first": True}, "b<a>1</a>", "b<a>1</a>c"),
        ({"type": "tags_with_separator", "separator": ", ", "at_least_one": True}, "<a>1</a>, <a>2</a>", ""),
    ):
        grammar = grammar_of(structural_tag={"type": "structural_tag", "format": {**form, "tags": [tag]}})
        assert WALKER.takes(grammar, taken)
        assert not WALKER.takes(grammar, refused)


# ---- refusals name the place

DEEP: dict[str, Any] = {"type": "object"}
for _ in range(120):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": obj(a=obj(b={"not": {}}))}, "at #/properties/a/properties/b: the keyword 'not' is not supported"),
        ({"json": obj(**{"a/b~": {"type": "strin"}})}, r"at #/properties/a~1b~0: type is 'strin'"),
        (
            {"json": {**obj(a={"$ref": "#/$defs/x"}), "$defs": {"x": {"type": "strin"}}}},
            r"at #/\$defs/x: type is 'strin'",
        ),
        (
            {"json": {"anyOf": [{"type": "null"}, {"pattern": "a("}]}},
            r"at #/anyOf/1: the regular expression is wrong at column 2: unclosed",
        ),
        (
            {"json": obj(a={"type": "integer", "minimum": 3, "maximum": 2})},
            r"at #: Unsatisfiable schema: required property 'a'",
        ),
        ({"json": {"items": {"$ref": "https://a.invalid/s"}}}, r"at #/items: \$ref leads to 'https://a.invalid/s'"),
        ({"json": {"items": {"multipleOf": 1000003}}}, "at #/items: multipleOf 1000003"),
        ({"json": {"items": {"uniqueItems": True}}}, "at #/items: the keyword 'uniqueItems'"),
        ({"json": {"items": {"pattern": "(a{200}){200}"}}}, "at #/items: the pattern repeats a part more than"),
        ({"json": obj(*"x", **{f"p{i}": {} for i in range(401)})}, "at #: 401 properties may be missing; at most 400"),
        ({"json": DEEP}, "nested more than 100 levels deep"),
        ({"json": {"$ref": "#"}}, "at #: \\$ref leads to '#', and from there to itself"),
        ({"json": '{"a":\n 1,}'}, "not JSON at line 2, column 4"),
        ({"json": '{"a": 1, "a": 2}'}, "the key 'a' twice"),
        ({"json": '{"a": NaN}'}, "has NaN, which is not JSON"),
        ({"json": {"const": float("inf")}}, "cannot be written as JSON"),
        ({"json": {"const": "\ud800"}}, "half a surrogate pair"),
        ({"json": {"const": {1: 2}}}, "at #/const: keys must be texts, got 1"),
        ({"json": "[1]"}, "an object, true or false, got list"),
        ({"json": "[" * 100_000}, "nested too deeply"),
        ({"json": "1" * 300_000}, "300000 characters"),
        ({"json": False}, "false, which nothing matches"),
        ({"regex": "ab("}, "regex is not valid: the regular expression is wrong at column 3: unclosed group"),
        ({"regex": "ab\\"}, "at column 3 a backslash is followed by nothing"),
        ({"regex": "(?=a)b"}, "column 1: look-around"),
        ({"regex": "xa{20000}"}, f"more than {MAX_REPEATS} times, with the count at column 3"),
        ({"regex": "\ud800"}, "regex has half a surrogate pair at character 0"),
        ({"json": {}, "whitespace_pattern": "["}, "whitespace_pattern is not valid: .* column 1"),
        ({"choice": []}, "between 1 and 4096 texts, got 0"),
        ({"choice": ["a", ""]}, "not empty, got '' at position 1"),
        ({"choice": ["\ud800"]}, "half a surrogate pair"),
        ({"grammar": 'start: "a" foo\n'}, 'line 1, column 8: unknown name: "foo"'),
        ({"grammar": "start: /a(/"}, "line 1, column 8: the regular expression is wrong at column 2"),
        ({"grammar": 'start: "a"\nA: /a{20000}/'}, "line 2 repeats a part more than"),
        ({"grammar": "root ::= ("}, r"the GBNF grammar is not valid: Expected '\)' at line 1"),
        ({"grammar": "start: a\na: a"}, "nothing matches it"),
        ({"grammar": '{"grammars": []}'}, "got JSON; a JSON schema is given as json"),
        ({"structural_tag": "{"}, "structural_tag is not JSON at line 1, column 2"),
        ({"structural_tag": {"format": {"type": "zz"}}}, r"must be one of [a-z_, ]+, got 'zz' - at `\$.format.type`"),
        (
            {"structural_tag": {"structures": [TAG], "triggers": ["<g"]}},
            r"format.tags\[0\].begin must start with one of",
        ),
        ({"structural_tag": {"triggers": []}}, "either format, or structures and triggers"),
        (
            {"structural_tag": {"structures": [{**TAG, "schema": {"items": {"not": {}}}}], "triggers": ["<f"]}},
            r"format.tags\[0\].content: the JSON schema at #/items: the keyword 'not'",
        ),
    ],
)
def test_refusals(form: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        grammar_of(**form)


def test_a_schema_of_too_many_parts_is_refused() -> None:
    with pytest.raises(RequestError, match=f"more than {MAX_SCHEMA_PARTS} parts"):
        grammar_of(json={"anyOf": [{"type": "string"}] * MAX_SCHEMA_PARTS})


@pytest.mark.parametrize(
    ("pattern", "column"),
    [
        ("a{10000}", None),
        ("a{10001}", 2),
        ("(a{100}b){101}", 10),
        ("(a{100}){50}(b{100}){50}", None),
        ("[a{99999}]", None),
        ("\\{99999}", None),
        ("(a{2000,9000}|b){2}", 17),
        ("a*{20000}", 3),
        ("(((a{30}){30}){30})", 15),
    ],
)
def test_repeats_are_multiplied(pattern: str, column: int | None) -> None:
    assert too_many_repeats(pattern) == column


def test_hostile_forms_are_refused_or_compiled() -> None:
    """Each attack twice. Other exceptions and long times count as faults of the library."""
    outcomes = dict.fromkeys(("refused", "compiled"), 0)
    for name, form in hostile_forms(2 * len(ATTACKS), seed=7):
        try:
            grammar = grammar_of(**form)
        except (RequestError, ValueError, TypeError):
            outcomes["refused"] += 1
        else:
            outcomes["compiled"] += 1
            assert fault_of(grammar) is None, name
    assert min(outcomes.values()) >= 10


# ---- texts that have passed


def test_a_limited_number_of_passed_grammars_is_remembered() -> None:
    passed = Passed(2)
    for text in "abc":
        passed.add(text)
    assert [passed.has(text) for text in "abc"] == [False, True, True]
    passed.has("b")
    passed.add("d")
    assert [passed.has(text) for text in "bcd"] == [True, False, True]


def test_threads_compile_at_once() -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(grammar_of(json=SCHEMAS["nested"]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=scaled(30))
    assert found == [grammar_of(json=SCHEMAS["nested"])] * 8
