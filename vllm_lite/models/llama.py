"""Llama, and the many that differ from it only by what ModelSpec says: Mistral, Qwen, SmolLM3 and others."""

from vllm_lite.models.decoder import Decoder


class Llama(Decoder):
    """Layers of two blocks, each behind an RMSNorm, with gated MLPs."""
