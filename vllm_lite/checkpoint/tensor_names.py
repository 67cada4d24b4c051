"""What a tensor of a checkpoint is called here: the same in a model alone as in the text part of a larger one.

Models are also stored without the prefix that their class adds (GPT-2's "transformer."), and within a multimodal model
under a prefix of the wrapper's. `canonical` takes these away, for the loader and for the planner. Tables of tokens and
positions are called alike in all families, as they are treated alike.
"""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.decoder.", "model."),
    ("decoder.", "model."),
    ("gpt_neox.embed_in.", "model.embed_tokens."),
    ("gpt_neox.", "model."),
    ("embed_out.", "lm_head."),
    ("transformer.wte.", "model.embed_tokens."),
    ("wte.", "model.embed_tokens."),
    ("transformer.wpe.", "model.embed_positions."),
    ("wpe.", "model.embed_positions."),
    ("transformer.word_embeddings.", "model.embed_tokens."),
    ("word_embeddings.", "model.embed_tokens."),
    ("transformer.", ""),
)
"""What a name begins with in the checkpoint -> here; the first that fits is taken."""
OLD_MASKS = (".attn.masked_bias", ".attn.bias", ".attention.masked_bias", ".attention.bias")
OTHER_PARTS = (
    "visual.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "mtp.",
)
"""Parts of larger models that write no text, each also under "model."."""


def canonical(name: str) -> str:
    """The name that models ask for."""
    for stored, here in PREFIXES:
        if name.startswith(stored):
            return here + name[len(stored) :]
    return name


def is_ignored(name: str, *, tied: bool) -> bool:
    """Whether the canonical `name` is that of a tensor that some checkpoints have and nobody needs: a copy of a `tied`
    head, old RoPE tables and masks, what sees images."""
    if name.endswith((".rotary_emb.inv_freq", *OLD_MASKS)):
        return True
    if tied and name == HEAD:
        return True
    return name.removeprefix("model.").startswith(OTHER_PARTS)
