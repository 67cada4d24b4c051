"""Layers that keep a state of the sequence instead of KV: Gated DeltaNet, Mamba-2 and short convolutions."""
