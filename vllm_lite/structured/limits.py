"""How large a grammar may be, and how much work it may make: one set of limits for the clients that check grammars and
the workers that follow them, so that what a client lets through a worker takes.
"""

from llguidance import LLParserLimits

from vllm_lite.protocol.structured import MAX_GRAMMAR_CHARS

__all__ = ["MAX_GRAMMAR_CHARS", "MAX_MULTIPLE", "MAX_SCHEMA_DEPTH", "parser_limits"]

MAX_SCHEMA_DEPTH = 100
"""How deep the JSON of a schema may be nested; what recursive `$ref`s describe may be deeper. (llguidance: 128.)"""
MAX_MULTIPLE = 10_000
"""The largest `multipleOf`, counted in units of its last decimal: it becomes an automaton with as many states, and a
million of them took 4.4 s."""
MAX_GRAMMAR_SYMBOLS = 100_000
MAX_LEXER_STATES = 50_000
"""A state takes 1 to 2 kB."""
INITIAL_LEXER_FUEL = 500_000
STEP_LEXER_FUEL = 200_000
"""About 15 ms of one mask."""
STEP_ITEMS = 50_000
ROW_ITEMS = 2_000


def parser_limits() -> LLParserLimits:
    """Make the limits of a matcher. One that runs into them in a step fails its request, with a sentence."""
    return LLParserLimits(
        max_items_in_row=ROW_ITEMS,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )
