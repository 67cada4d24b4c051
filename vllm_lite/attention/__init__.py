"""Attention over a paged KV cache: one interface, one metadata class, several backends, the reference as truth."""
