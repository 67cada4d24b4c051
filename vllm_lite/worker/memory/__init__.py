"""KV cache memory on one worker: the profile of what fits, the pools, and the movement of blocks."""
