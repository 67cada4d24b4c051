"""Bounds on the size of a grammar and on its work: the same for clients, which check grammars, and for workers, so that
a worker accepts all that a client accepts."""

from llguidance import LLParserLimits

MAX_SCHEMA_DEPTH = 100
"""Maximum nesting of a schema's JSON; values described by recursive `$ref`s may be deeper. (llguidance: 128.)"""
MAX_MULTIPLE = 10_000
"""Maximum `multipleOf` in units of its last decimal: it becomes an automaton with as many states, and a million of them
took 4.4 s."""
MAX_SCHEMA_PARTS = 2000
"""Maximum number of subschemas. Making a matcher of 5000 takes 1.5 s."""
MAX_OPTIONAL = 400
"""Maximum number of optional properties of one object: each makes 4 items of a parser row."""
MAX_OPTIONAL_IN_PART = 100
"""The same for a schema within a larger grammar, whose rows are shorter."""
MAX_REPEATS = 10_000
"""Maximum repetitions of a part of a regular expression, nested counts multiplied. Writing a million forced characters
takes a second, in one step."""
MAX_GRAMMAR_SYMBOLS = 100_000
MAX_LEXER_STATES = 50_000
"""Maximum number of lexer states, of 1 to 2 kB each."""
INITIAL_LEXER_FUEL = 200_000
STEP_LEXER_FUEL = 200_000
"""Lexer work for one mask: about 15 ms."""
STEP_ITEMS = 50_000
ROW_ITEMS_OF_SCHEMA = 2_000
ROW_ITEMS = 500
"""Items in a row for grammars other than schemas, which may be ambiguous: the time of a step grows with the cube of it,
from 0.1 s at 450 items to 7 s at 1200."""


def parser_limits(grammar: str = "{") -> LLParserLimits:
    """The limits of a matcher of `grammar`. A matcher that exceeds them in a step fails its request with an error.

    A grammar that llguidance has made of a schema alone is JSON with the schema in it, and is the default; all other
    grammars are Lark.
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
