"""What the engine decided, in a file: records, their writer and reader, and the story of one request told from them.

A trace holds every input of the scheduler and a digest of every decision, so that engine/replay.py can decide again
and compare. It holds no prompt: of a prompt there is its length and truncated, seeded digests of its blocks.
"""
