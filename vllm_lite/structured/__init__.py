"""Structured outputs: grammars of llguidance behind one small interface, for clients and workers. The engine process
imports nothing of it: to the engine a grammar is a text.

Clients make grammars by compile_grammar() of compile and tool_grammar() of calls.tools; workers make masks of them.
limits has the bounds that both apply.
"""
