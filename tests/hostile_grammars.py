"""Hostile forms of outputs, with which a client could attack a server: deep, exponential, huge, wrong, or with external
references.

hostile_forms() makes any number of them by a seed, as keyword arguments of StructuredOutputsParams. Each must be
refused with a sentence, or compiled and followed within the limits.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

Form = dict[str, Any]


def hostile_forms(count: int, seed: int = 0) -> Iterator[tuple[str, Form]]:
    """Yield the name of an attack, and the form; all attacks come in rounds, each time with other sizes."""
    rng = random.Random(seed)
    for number in range(count):
        attack = ATTACKS[number % len(ATTACKS)]
        yield attack.__name__, attack(rng)


def size(rng: random.Random, most: int) -> int:
    """A random size up to `most`: mostly small, sometimes the maximum."""
    return max(1, int(most ** rng.random()))


# ---- JSON schemas


def deep_schema(rng: random.Random) -> Form:
    key = rng.choice(["items", "not", "additionalProperties", "p"])
    schema: Form = {"type": "string"}
    for _ in range(size(rng, 3000)):
        schema = {"type": "object", "properties": {"a": schema}} if key == "p" else {key: schema}
    return {"json": schema}


def doubling_refs(rng: random.Random) -> Form:
    """A schema that expands to 2 ** n parts if a reader copies references."""
    n, word = size(rng, 300), rng.choice(["allOf", "anyOf", "oneOf", "properties", "prefixItems"])
    defs: Form = {f"d{n}": {"type": "string"}}
    for i in range(n):
        refs = [{"$ref": f"#/$defs/d{i + 1}"}] * 2
        defs[f"d{i}"] = {word: dict(zip("xy", refs, strict=True)) if word == "properties" else refs}
    return {"json": {"$ref": "#/$defs/d0", "$defs": defs}}


def product_of_unions(rng: random.Random) -> Form:
    n, m = size(rng, 14), size(rng, 14)
    unions = [
        {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {"type": "string"}}} for j in range(m)]}
        for i in range(n)
    ]
    return {"json": {"allOf": unions}}


def circular_refs(rng: random.Random) -> Form:
    n = size(rng, 200)
    word = rng.choice(["$ref", "allOf", "anyOf", "items"])
    ref = [{"$ref": f"#/$defs/d{(i + 1) % n}"} for i in range(n)]
    defs = {f"d{i}": ref[i] if word == "$ref" else {word: ref[i] if word == "items" else [ref[i]]} for i in range(n)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": defs}}


def refs_elsewhere(rng: random.Random) -> Form:
    where = rng.choice(
        [
            "http://127.0.0.1:1/x",
            "https://a.invalid/s.json#/a",
            "file:///etc/passwd",
            "other.json",
            "#/nowhere",
            "#a/~2",
        ]
    )
    return {"json": {"type": "object", "properties": {"a": {rng.choice(["$ref", "$dynamicRef"]): where}}}}


def huge_enum(rng: random.Random) -> Form:
    return {"json": {"enum": [f"{rng.random()} {i}" for i in range(size(rng, 20_000))]}}


def many_properties(rng: random.Random) -> Form:
    kinds = [{"type": "string", "pattern": "^a.*b$"}, {"type": "string", "format": "uri"}, {"type": "integer"}, {}]
    names = {f"property{i}": rng.choice(kinds) for i in range(size(rng, 6000))}
    return {"json": {"type": "object", "properties": names, "required": list(names)[:: rng.randint(1, 3)]}}


def overlapping_patterns(rng: random.Random) -> Form:
    names = {f"^{'a?' * (i % 7)}{i}.*b": {"type": "integer"} for i in range(size(rng, 400))}
    return {"json": {"type": "object", "patternProperties": names}}


def large_numbers(rng: random.Random) -> Form:
    number = rng.choice([10**300, 10**18 + 9, 1_000_003, 0.1 + 0.2, 1e308, -1, 2**64, 7 * 10**9])
    key = rng.choice(["multipleOf", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems"])
    kind = rng.choice(["integer", "number", "string", "array"])
    return {"json": {"type": kind, key: number, "items": {"type": "integer"}}}


def counted_parts(rng: random.Random) -> Form:
    n, m = size(rng, 10**7), size(rng, 10**7)
    inner = {"type": "array", "minItems": n, "maxItems": n + m, "items": {"type": "string", "maxLength": m}}
    return {"json": {"type": "array", "maxItems": m, "items": inner}}


def no_schema(rng: random.Random) -> Form:
    return {
        "json": rng.choice(
            ["", "{", "[]", "1", "null", '{"a":NaN}', '{"a":1,"a":2}', "[" * 100_000, '{"const":"\\ud800"}', "\ud800"]
        )
    }


def wrong_keywords(rng: random.Random) -> Form:
    word = rng.choice(["type", "properties", "required", "enum", "anyOf", "$ref", "items", "pattern", "x-guidance"])
    value: Any = rng.choice([1, "x", None, [], [1], {}, {"a": 1}, [{}], True, {"lenient": True}, ["string", 3]])
    return {"json": {"type": "object", "properties": {"a": {word: value}}, word: value}}


def hostile_pattern(rng: random.Random) -> Form:
    return {"json": {"type": "string", "pattern": hostile_regex(rng)["regex"]}}


# ---- regular expressions, choices


def hostile_look_around(rng: random.Random) -> Form:
    """Different patterns with look-around, whose automata are large or empty."""

    def pattern(place: int) -> str:
        most = size(rng, 60) + place
        return rng.choice(
            (
                rf"^a*(?:\d{{0,{most}}}|(?=[\d.]{{1,{most + 3}}}0*$)\d{{0,{most}}}\.\d{{0,9}}0*$)$",
                rf"(?!.*a.{{{most}}}b)(?=.*b.{{{most}}}a)",
                "(?=" * size(rng, 60) + "a",
                rf"^(?:(?!a|b{{{most}}})(?=.*c).)*$",
                rf"(?:\b|\B|(?<!a)|(?=b)){{{most}}}",
                rf"(?=\p{{L}})[\p{{L}}\p{{N}}]{{{most}}}",
            )
        )

    return {"json": {"properties": {f"p{i}": {"type": "string", "pattern": pattern(i)} for i in range(size(rng, 100))}}}


def hostile_regex(rng: random.Random) -> Form:
    n = size(rng, 100_000)
    return {
        "regex": rng.choice(
            [
                f"(a{{{n}}}){{{n}}}",
                "(" * min(n, 5000) + "a" + ")*" * min(n, 5000),
                f"(a|aa)+.{{0,{n}}}b",
                f".*a.{{{min(n, 400)}}}",
                f"[\\p{{L}}\\p{{N}}]{{{n}}}",
                "|".join(f"a{i}.*" for i in range(min(n, 3000))),
                "(?=a)b",
                "(a)\\1",
                "a" * n,
                "[",
                "a\\",
                "(?i)" + "é" * min(n, 1000),
                f"(x{{0,{n}}}y?){{0,{n}}}z",
                f"\\w{{1,{n}}}",
                f"(.*,){{{min(n, 300)}}}",
            ]
        )
    }


def many_choices(rng: random.Random) -> Form:
    n = size(rng, 6000)
    return {"choice": ["a" * (i % 500) + str(i) for i in range(n)]}


# ---- grammars


def doubling_rules(rng: random.Random) -> Form:
    n, upper = size(rng, 60), rng.random() < 0.5
    name = "A" if upper else "a"
    lines = [f"start: {name}0", *(f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(n)), f'{name}{n}: "x"']
    return {"grammar": "\n".join(lines)}


def loops(rng: random.Random) -> Form:
    return {
        "grammar": rng.choice(
            [
                "start: start",
                'start: start start | "a" | ""',
                "start: a\na: b\nb: a",
                'start: a*\na: b*\nb: ""',
                'start: (("a"*)*)*',
                "root ::= root",
                'root ::= (root | "a")*',
                "start: A\nA: A",
                'start: x{0,1000000}\nx: y{0,1000000}\ny: "a"?',
            ]
        )
    }


def ambiguous_rules(rng: random.Random) -> Form:
    n = size(rng, 3000)
    return {
        "grammar": "start: e*\ne: "
        + " | ".join(f"a{i}" for i in range(n))
        + "".join(f"\na{i}: /[a-z]+/ | e e" for i in range(n))
    }


def long_alternatives(rng: random.Random) -> Form:
    n = size(rng, 20_000)
    return {"grammar": "start: " + " | ".join(f'"{i}" x' for i in range(n)) + '\nx: "y" | start'}


def wrong_grammar(rng: random.Random) -> Form:
    n = size(rng, 20_000)
    return {
        "grammar": rng.choice(
            [
                "",
                "start",
                'start: "a',
                "start: " + "(" * n + '"a"' + ")" * n,
                "root ::= " + "(" * min(n, 3000),
                "start: @other",
                "%import /etc/passwd\nstart: A",
                '{"grammars": [{"json_schema": {}}]}',
                "start: %json {",
                "start: <|x|> <[999999999]>",
                "start: /(/",
                "\x00" * n,
                "start: a[temperature=9, max_tokens=1]\na: /.*/",
                "root ::= [a-",
                "start: ~(~/a/ & ~/b/)",
                'start: %regex {"substring_chars": "' + "ab" * n + '"}',
            ]
        )
    }


def giant_text(rng: random.Random) -> Form:
    kind = rng.choice(["grammar", "regex", "json", "structural_tag"])
    return {kind: rng.choice(['start: "a" ', "a", '{"a":', " "]) * (300_000 + size(rng, 10**5))}


# ---- structural tags


def many_tags(rng: random.Random) -> Form:
    n = size(rng, 2000)
    structures = [{"begin": f"<f{i}>", "schema": {"type": "object"}, "end": "</f>"} for i in range(n)]
    return {"structural_tag": {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}}


def deep_tags(rng: random.Random) -> Form:
    form: Form = {"type": "any_text"}
    for _ in range(size(rng, 400)):
        form = {"type": rng.choice(["sequence", "or"]), "elements": [{"type": "any_text"}, form]}
        if rng.random() < 0.3:
            form = {"type": "tag", "begin": "<a>", "content": form, "end": "</a>"}

    return {"structural_tag": {"type": "structural_tag", "format": form}}


ATTACKS: tuple[Callable[[random.Random], Form], ...] = (
    deep_schema,
    doubling_refs,
    product_of_unions,
    circular_refs,
    refs_elsewhere,
    huge_enum,
    many_properties,
    overlapping_patterns,
    large_numbers,
    counted_parts,
    no_schema,
    wrong_keywords,
    hostile_pattern,
    hostile_look_around,
    hostile_regex,
    many_choices,
    doubling_rules,
    loops,
    ambiguous_rules,
    long_alternatives,
    wrong_grammar,
    giant_text,
    many_tags,
    deep_tags,
)
