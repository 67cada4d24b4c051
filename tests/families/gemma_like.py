"""Checkpoints of the families that put norms and blocks together in another way than Llama."""

from tests.families.variant import Variant

VARIANTS: list[Variant] = []
