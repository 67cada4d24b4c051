"""Formats of quantized checkpoints: each module unpacks the tensors of one format."""
