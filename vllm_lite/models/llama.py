"""Llama, Mistral and Qwen3, which differ only by what ModelSpec says."""

from vllm_lite.models.decoder import Decoder


class Llama(Decoder):
    """Layers of two blocks, each behind an RMSNorm, with gated MLPs."""
