"""Traces: files of the engine's decisions. Their records, writer and reader, and the story of one request in words.

A trace has every input of the scheduler and a digest of every decision, so engine/observe/replay.py can repeat the
decisions and compare; difference.py compares two traces. Of a prompt it has only the length and truncated, seeded
digests of the blocks.
"""
