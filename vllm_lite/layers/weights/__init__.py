"""Weights of linear layers: their storage in a checkpoint, the part of each rank, and their matrix products."""
