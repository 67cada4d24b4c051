"""Attention on a GPU over the paged KV cache: decode, prefill, and shared code."""
