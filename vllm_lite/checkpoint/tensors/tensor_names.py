"""canonical(): the canonical name of a checkpoint's tensor, equal for a model by itself and as the text part of a
larger one.

Models are also stored without the prefix of their class (GPT-2's "transformer."), and in a multimodal model under the
wrapper's prefix. `canonical` removes prefixes, for the loader and the planner. Token and position tables, and the parts
of experts, have the same names in all families, as they are treated alike.
"""

import re

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLES = ("model.embed_tokens", "model.embed_tokens_per_layer")
"""Lookup tables with a row per token."""
PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("visual.", "model.visual."),
    ("language_model.model.blocks.", "model.layers."),  # Kimi's, as transformers writes it
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("image_newline", "model.image_newline"),
    ("model.embed_vision.multimodal_embedder.", "model.embed_vision."),
    ("model.vision_embedder.", "model.embed_vision."),
    ("vision_embedder.", "model.embed_vision."),
    ("embed_vision.", "model.embed_vision."),
    ("model.decoder.", "model."),
    ("decoder.", "model."),
    ("distilbert.transformer.", ""),
    ("distilbert.", ""),
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
    ("layers.", "model.layers."),
    ("embed_tokens.", "model.embed_tokens."),
    ("norm.", "model.norm."),
    ("final_norm.", "model.final_norm."),
    ("backbone.embeddings.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("model.embeddings.", "embeddings."),
    ("bert.", ""),
    ("roberta.", ""),
    ("nomic_bert.", ""),
    ("gte.", ""),
    ("new.", ""),
)
"""Prefixes in checkpoints -> canonical prefixes; the first match applies."""
EXPERT_PARTS = (
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.router.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".block_sparse_moe.", ".mlp."),
    (".shared_mlp.input_linear.", ".mlp.shared_experts.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.shared_experts.down_proj."),
    (".mlp.shared_expert.", ".mlp.shared_experts."),
    (".mlp.moe_statics.", ".mlp.gate."),
    (".mlp.gate.moe_statics.", ".mlp.gate."),
    (".mlp.router.", ".mlp.gate."),
    (".feed_forward.experts.", ".mlp.experts."),
    (".feed_forward.gate.", ".mlp.gate."),
    (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".router.proj.", ".mlp.gate."),
    (".router.", ".mlp.gate."),
)
"""Substrings in layers with experts -> canonical ones; the first match applies."""
HEAD_GATES = ".self_attn.g_proj", ".self_attn.gate_proj"
"""transformers' name of LFM3's head gates, also in adapters -> the name in its files."""
_BESIDE_MLP = re.compile(r"(.*\.layers\.\d+)(\.experts\..*)")
"""Experts beside an MLP instead of in its place get the usual names."""
EXPERT_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Names of an expert's matrices -> canonical ones."""
_EXPERT_MATRIX = re.compile(rf"(.*\.mlp\.experts\.\d+\.)({'|'.join(EXPERT_MATRICES)})(\..*)")
OWN_KV = tuple(f"self_attn.{part}." for part in ("k_proj", "v_proj", "k_norm", "v_norm"))
"""Unused tensors of layers that attend to another layer's K and V."""
OLD_MASKS = (".attn.masked_bias", ".attn.bias", ".attention.masked_bias", ".attention.bias")
KV_SCALES = (
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".q_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
"""Tensors for an 8-bit KV cache, which `kv_scales` reads, and for queries."""
OTHER_PARTS = (
    "visual.",
    "vision_tower.",
    "vision_model.",
    "vision_embedder.",
    "vision_adapter.",
    "vision_projection.",
    "connector.",
    "multi_modal_projector.",
    "mm_projector.",
    "image_newline",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "mtp.",
)
"""Prefixes of parts other than the text model, each also possible after "model."."""
TOWERS = (
    "model.vision_model.",
    "model.connector.",
    "model.visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.image_newline",
    "model.embed_vision.",
)
"""Canonical prefixes of vision towers."""


_ONE_BLOCK = re.compile(r"(backbone|model|mtp)\.layers\.(\d+)\.(norm|mixer)\.((\w*).*)")
"""Names in layers with one block, called "mixer" whatever its kind, and its norm."""
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MAMBA_PARTS = ("in_proj", "out_proj", "conv1d", "norm", "A_log", "D", "dt_bias")


def canonical(name: str) -> str:
    """Return the name by which models request a tensor."""
    if (".mixer." in name or name.startswith(("backbone.", "mtp."))) and (found := _ONE_BLOCK.fullmatch(name)):
        of = "mtp" if found[1] == "mtp" else "model"
        return f"{of}.layers.{found[2]}.{_block(found[3], found[5])}.{found[4]}"
    for stored, here in PREFIXES:
        if name.startswith(stored):
            name = here + name[len(stored) :]
            break
    for stored, here in EXPERT_PARTS:
        if stored in name:
            name = name.replace(stored, here, 1)
            break
    name = name.replace(*HEAD_GATES)
    if ".experts." in name and (beside := _BESIDE_MLP.fullmatch(name)):
        name = f"{beside[1]}.mlp{beside[2]}"
    if ".mlp.experts." in name and (found := _EXPERT_MATRIX.fullmatch(name)):
        return f"{found[1]}{EXPERT_MATRICES[found[2]]}{found[3]}"
    return name


def _block(kind: str, part: str) -> str:
    if kind == "norm":
        return "input_layernorm"
    return "self_attn" if part in ATTENTION_PARTS else "mamba" if part in MAMBA_PARTS else "mlp"


DENSE_OF_TOWERS = (".pos_embed.weight", ".position_embedding.weight", ".mm_input_projection_weight")
"""Endings of two-dimensional tensors of towers that are never quantized: position tables, and a matrix that is stored
transposed."""


def is_of_tower(name: str) -> bool:
    """Whether the canonical `name` belongs to a vision tower, which is whole on every rank, and not loaded by text
    models."""
    return name.startswith(TOWERS)


def is_ignored(
    name: str, *, tied: bool, unread_layers: range = range(0), without_kv: frozenset[int] = frozenset()
) -> bool:
    """Whether the canonical `name` is a tensor that no model needs: a copy of a `tied` head, old rope tables and masks,
    vision parts, `unread_layers`, K and V of layers `without_kv`."""
    if (unread_layers or without_kv) and (found := _LAYER.match(name)):
        layer = int(found[1])
        if layer in unread_layers or (layer in without_kv and name[found.end() :].startswith(OWN_KV)):
            return True
    if name.endswith((".rotary_emb.inv_freq", *OLD_MASKS, *KV_SCALES)):
        return True
    if tied and name == HEAD:
        return True
    return name.removeprefix("model.").startswith(OTHER_PARTS)
