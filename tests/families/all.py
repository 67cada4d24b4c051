"""The checkpoints of all families."""

from tests.families import classic, gemma_like, hybrid, latent, llama_like, mixtures

VARIANTS = [
    *llama_like.VARIANTS,
    *gemma_like.VARIANTS,
    *classic.VARIANTS,
    *mixtures.VARIANTS,
    *latent.VARIANTS,
    *hybrid.VARIANTS,
]
