"""The engine's decisions as a file: records, their writer and reader, and the story of one request made from them.

A trace holds every input of the scheduler and a digest of every decision, so that engine/observe/replay.py can
decide again and compare. It holds no prompt, only its length and truncated, seeded digests of its blocks.
"""
