"""Grammars of tool calls: the shape of a call, its arguments, and the loosening of schemas that llguidance rejects."""
