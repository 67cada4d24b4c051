"""Weights of linear layers: how a checkpoint stores them, which part a rank holds, and their matrix products."""
