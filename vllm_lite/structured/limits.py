"""Bounds on the size of a grammar and on the work it causes: one set of limits for the clients that check grammars and
the workers that follow them, so that what a client lets through a worker takes."""

from llguidance import LLParserLimits

MAX_SCHEMA_DEPTH = 100
"""How deep the JSON of a schema may be nested; what recursive `$ref`s describe may be deeper. (llguidance: 128.)"""
MAX_MULTIPLE = 10_000
"""The largest `multipleOf`, counted in units of its last decimal: it becomes an automaton with as many states, and a
million of them took 4.4 s."""
MAX_SCHEMA_PARTS = 2000
"""How many subschemas a schema may have. Making a matcher of 5000 takes 1.5 s."""
MAX_OPTIONAL = 400
"""How many properties of one object may be missing: each makes 4 items of a row of the parser."""
MAX_OPTIONAL_IN_PART = 100
"""The same where a schema is a part of a larger grammar, whose rows are shorter."""
MAX_REPEATS = 10_000
"""How often a regular expression may repeat a part, all nested counts multiplied. A million forced characters take a
second to write, in one step."""
MAX_GRAMMAR_SYMBOLS = 100_000
MAX_LEXER_STATES = 50_000
"""A state takes 1 to 2 kB."""
INITIAL_LEXER_FUEL = 200_000
STEP_LEXER_FUEL = 200_000
"""About 15 ms of one mask."""
STEP_ITEMS = 50_000
ROW_ITEMS_OF_SCHEMA = 2_000
ROW_ITEMS = 500
"""The same for other grammars, which may be ambiguous: the time of a step grows with the cube of it, from 0.1 s at 450
items to 7 s at 1200."""


def parser_limits(grammar: str = "{") -> LLParserLimits:
    """Make the limits of a matcher of `grammar`. One that runs into them in a step fails its request, with a sentence.

    JSON with a schema in it is what llguidance makes of schemas alone, and the default; all other grammars are in the
    syntax of Lark.
    """
    is_schema = grammar.startswith("{") and '"lark_grammar"' not in grammar
    return LLParserLimits(
        max_items_in_row=ROW_ITEMS_OF_SCHEMA if is_schema else ROW_ITEMS,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )
