"""Checkpoints of architectures that no class of this package computes, but transformers'."""

from typing import Any

from tests.families.variant import Variant


def variant(name: str, classes: str, **settings: Any) -> Variant:
    """`classes`: prefix of the config's and the model's class names."""
    usual: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    return Variant(name, f"{classes}Config", f"{classes}ForCausalLM", usual | settings)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i / 4 for i in range(8)],
    "original_max_position_embeddings": 64,
    "factor": 8.0,
}
WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}

VARIANTS = [
    variant("seed-oss", "SeedOss", num_attention_heads=6, hidden_size=96),  # biases, TP plan
    variant("exaone4", "Exaone4", **WINDOWS),  # norms behind blocks and on Q and K, windows, no rope on full layers
    variant("helium", "Helium"),  # interleaved rope
    variant("nemotron", "Nemotron", tie_word_embeddings=True),  # LayerNorm of 1 + w, partial rope, no gate
    variant("stablelm", "StableLm"),  # LayerNorm with biases, no TP plan
    variant("persimmon", "Persimmon", num_key_value_heads=4),  # fused QKV by head, biases
    variant("ernie", "Ernie4_5", tie_word_embeddings=True),
    variant("apertus", "Apertus"),  # an activation with weights of its own, some of them numbers
    variant("vaultgemma", "VaultGemma", sliding_window=20),  # scaled token vectors, soft caps
    variant("phi", "Phi"),  # a head with a bias
    variant("longrope", "Phi3", rope_parameters=LONGROPE, max_position_embeddings=512),
]
FOREIGN = {
    "bloom": (variant("bloom", "Bloom", num_key_value_heads=4), "does not attend through its attention interface"),
    "diffllama": (variant("diffllama", "DiffLlama"), "layer 0 attends 2 times in a step"),
    "falcon": (
        Variant("falcon", "FalconConfig", "FalconForCausalLM", {"num_attention_heads": 4, "alibi": False}),
        "does not attend through its attention interface",
    ),
    "doge": (variant("doge", "Doge"), "adds something of its own to the scores"),
    "mixtral": (variant("mixtral", "Mixtral"), "merged weights"),
}
"""Refused checkpoints, each with the reason."""
