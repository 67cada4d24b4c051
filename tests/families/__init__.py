"""Tiny random checkpoints of every family, for the tests that hold each of them to transformers."""
