"""Models that transformers computes, over this engine's attention, KV cache, linear layers and loader."""
