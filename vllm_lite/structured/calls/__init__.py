"""Grammars of tool calls: the shape of a call, its arguments, and schemas that are loosened for them."""
