"""Weights packed once for the native products: dense, grouped, of GGUF files, and low-rank adapters."""
