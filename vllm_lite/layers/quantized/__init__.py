"""Weights as quantized checkpoints store them: each module takes the tensors of one format apart."""
