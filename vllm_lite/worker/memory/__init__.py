"""KV cache memory on one worker: how much fits, who holds the bytes, what moves them."""
