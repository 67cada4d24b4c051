"""Outputs that have to have a form: grammars of llguidance behind one small interface, for clients and workers. The
engine process imports nothing of it: to the engine a grammar is a text.

Clients make grammars with compile_grammar() of compile and tool_grammar() of calls.tools, on top of the rest;
workers follow them. limits has what both have to agree on.
"""
