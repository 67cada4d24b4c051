"""Models run by transformers' code, with this engine's attention, KV cache, linear layers and loader."""
