"""Attention over a paged KV cache: one interface, one StepBatch, several backends, the reference as truth."""
