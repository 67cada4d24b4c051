"""Layers that keep a state per sequence instead of KV: Gated DeltaNet, Mamba-2 and short convolutions."""
