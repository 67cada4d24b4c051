"""Mask sources in a worker: compiled grammars that follow an output token by token."""
