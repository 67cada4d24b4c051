"""The worker process: holds a model's shard and its KV cache, executes steps, and decides nothing."""
