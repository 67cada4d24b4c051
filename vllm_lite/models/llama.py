"""Llama, and families that differ from it only in their ModelSpec: Mistral, Qwen, SmolLM3, LLaVA and others."""

from vllm_lite.models.decoder import Decoder


class Llama(Decoder):
    """Layers of attention and a gated MLP, each after an RMSNorm."""
