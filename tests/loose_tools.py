"""Tools whose schemas a grammar cannot enforce completely, and the forms of calls in which they are tested."""

import json
from typing import Any

from tests.grammar_walk import Walker
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.structured.calls.tools import CallGrammar, CallShape, Tool, tool_grammar
from vllm_lite.structured.compile import compile_grammar

WALKER = Walker()
JSON_SHAPE = CallShape(
    call_begin='<tool_call>\n{"name": "', name_end='", "arguments": ', call_end="}\n</tool_call>", between="\n"
)
SHAPES = {
    "json": JSON_SHAPE,
    "python": CallShape(
        begin="[", call_begin="", name_end="(", call_end=")", between=", ", end="]", arguments="python"
    ),
    "tagged": CallShape(
        call_begin="<call=",
        name_end=">",
        call_end="</call>",
        arguments="tagged",
        key_begin="<",
        key_end=">",
        value_end="\n</v>\n",
    ),
    "gemma": CallShape(call_begin="<c>", name_end=":", call_end="</c>", arguments="gemma", quote='<|"|>'),
}
GOOD = Tool("good", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})


def grammar_of(schema: Any) -> str:
    return compile_grammar(StructuredOutputsParams(json=schema))


def taken(schema: Any, *values: Any) -> list[Any]:
    """The values that the grammar of a schema lets through."""
    grammar = grammar_of(schema)
    return [value for value in values if WALKER.takes(grammar, json.dumps(value, ensure_ascii=False))]


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def calls_of(parameters: Any, *, strict: bool = False, shape: str = "json") -> CallGrammar:
    return tool_grammar(SHAPES[shape], [GOOD, Tool("odd", parameters, strict=strict)], "required")


STRING: dict[str, Any] = {"type": "string"}
