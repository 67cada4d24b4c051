"""Checkpoints of the families that came before Llama: LayerNorm, biases, fused projections, learned positions."""

from tests.families.variant import Variant

VARIANTS: list[Variant] = []
