"""Checkpoints of the families that differ little from Llama."""

from tests.families.variant import Variant, drop_in_layers, without_rope_scaling

VARIANTS: list[Variant] = [
    Variant(
        "llama-yarn",
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        },
        {"yarn": drop_in_layers(without_rope_scaling)},
    ),
]
