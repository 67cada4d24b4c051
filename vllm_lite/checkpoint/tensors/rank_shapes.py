"""rank_shape(): a rank's part of a checkpoint's tensor by its name, for plans, which are made without a model.

A worker asks the weight slots of its model's layers, which need torch; `vllm-lite plan` uses this module. Tests compare
the two for every family. A tensor with an unknown name counts as held whole, so a plan is never too small for it.
"""

from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.checkpoint.tensors.tensor_names import is_of_tower

_FUSED = ("qkv_proj", "c_attn", "query_key_value")
"""Names of fused Q, K and V."""
_UP, _DOWN = ("c_fc", "fc1", "dense_h_to_4h", "w1", "w3"), ("c_proj", "fc2", "dense_4h_to_h", "w2")
"""Names in ungated MLPs, or other names. GPT-2's attention also has a c_proj, whose heads are divided evenly like an
MLP's inputs."""
_TRANSPOSED = {"GPT2LMHeadModel": ("c_attn", "c_fc", "c_proj")}
"""Matrices stored as [inputs, outputs]."""
_BY_ROWS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "embed_tokens",
    "embed_tokens_per_layer",
    "lm_head",
    "c_attn",
    "query_key_value",
    "q_b_proj",
    "kv_b_proj",
    *_UP,
)
"""Matrices whose outputs, the first axis of weight and bias, are divided among ranks."""
_HEAD_BY_HEAD = ("k_b_proj", "v_b_proj")
"""Matrices for single heads, with the head's number appended."""
RECURRENT = (".linear_attn.", ".conv.", ".mamba.")
"""Substrings of the names of a recurrent layer's tensors."""
_QK_NORMS = ("q_norm", "k_norm")
_BY_COLUMNS = ("o_proj", "out_proj", "dense", "down_proj", *_DOWN)
"""Matrices whose inputs, the second axis of the weight, are divided among ranks; rank 0 has the bias."""


def rank_shape(name: str, shape: tuple[int, ...], spec: ModelSpec, shard: Shard) -> tuple[int, ...]:
    """Shape of this rank's part of the tensor `name` of `shape`; `shape` itself for a tensor that all ranks hold.

    A matrix is given as [outputs, inputs], regardless of its storage.

    Raises ConfigError if the model's heads cannot be divided.
    """
    try:
        return _known_shape(name, shape, spec, shard)
    except (LookupError, StopIteration, ValueError):  # a layer or axis that the model lacks: headers are untrusted
        return shape


def _known_shape(name: str, shape: tuple[int, ...], spec: ModelSpec, shard: Shard) -> tuple[int, ...]:
    *path, layer, kind = ("", *name.split("."))
    if is_of_tower(name):
        return shape
    if is_of_recurrent(name):
        recurrent = _layer_of(path, spec).recurrent
        named = kind if layer in ("linear_attn", "mamba") else layer
        return shape if recurrent is None else recurrent.per_rank(shard).rank_shape(named, shape)
    if is_of_experts(name, shape) and (own := _layer_of(path, spec).experts) is not None:
        return _of_experts(name.split("."), shape, own, shard)
    if layer.isdecimal() and path[-1] in _HEAD_BY_HEAD:
        heads = _layer_of(path, spec).attention.heads(shard).query
        return shape if heads.start <= int(layer) < heads.end else (0, *shape[1:])
    if kind == "weight" and layer in _TRANSPOSED.get(spec.architecture, ()):
        shape = shape[::-1]
    if kind == "sinks":
        return (_layer_of(path, spec).attention.heads(shard).query.size,)
    if layer in _BY_ROWS or (layer in _QK_NORMS and spec.qk_norm == "all heads"):
        return (_part(layer, path, shape[0], spec, shard), *shape[1:])
    if layer in _BY_COLUMNS and kind == "bias":
        return shape if shard.rank == 0 else (0,)
    if layer in _BY_COLUMNS:
        return (shape[0], _part(layer, path, shape[1], spec, shard))
    return shape


def is_of_recurrent(name: str) -> bool:
    return any(part in name for part in RECURRENT)


def is_of_experts(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of one expert, or of all of them; not the shared expert's."""
    return ".layers." in name and (len(shape) == 3 or ".experts." in name) and not is_of_recurrent(name)


def is_of_latent_heads(name: str) -> bool:
    """Whether a tensor expands latents to K and V; a GPU holds these densely."""
    return any(f".{layer}." in name for layer in ("kv_b_proj", *_HEAD_BY_HEAD))


def is_of_router(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor is a router or the shared expert's gate; these are never quantized."""
    *_, layer, _ = ("", *name.split("."))
    return spec.experts is not None and layer in ("gate", "shared_expert_gate")


def _of_experts(path: list[str], shape: tuple[int, ...], own: ExpertsSpec, shard: Shard) -> tuple[int, ...]:
    held, inner = own.held(shard), own.inner(shard).size
    if len(shape) == 3:  # all experts in one tensor, by its first axis
        _, rows, columns = shape
        if path[-1] == "gate_up_proj":
            return held.size, rows * inner // own.intermediate_size, columns
        return held.size, rows, columns * inner // own.intermediate_size
    if path[-1] == "gate_up_proj_bias":
        return held.size, shape[1] * inner // own.intermediate_size
    if path[-1] == "down_proj_bias":
        return held.size, shape[1] if shard.rank == 0 or shard.expert_parallel else 0
    index, layer = int(path[-3]), path[-2]
    if not held.start <= index < held.end:
        return 0, *shape[1:]
    if layer == "down_proj" and len(shape) == 1:
        return (shape[0] if shard.rank == 0 or shard.expert_parallel else 0,)
    if layer in ("gate_proj", "up_proj"):
        return inner, *shape[1:]
    return (shape[0], inner) if layer == "down_proj" else shape


def _layer_of(path: list[str], spec: ModelSpec) -> LayerSpec:
    return spec.layers[next(int(part) for part in path if part.isdecimal())]


def _part(layer: str, path: list[str], size: int, spec: ModelSpec, shard: Shard) -> int:
    """A rank's part of an axis of `size`."""
    if layer in ("embed_tokens", "embed_tokens_per_layer", "lm_head"):
        return Split.vocabulary(size, shard).size
    if layer in ("gate_proj", "up_proj", "gate_up_proj", "down_proj", *_UP, *_DOWN) and "self_attn" not in path:
        return Split.even(size, shard).size
    heads = _layer_of(path, spec).attention.heads(shard)
    if layer in _FUSED:
        return size // (heads.query.total + 2 * heads.kv.total) * (heads.query.size + 2 * heads.kv.size)
    share = heads.kv if layer in ("k_proj", "v_proj", "k_norm") else heads.query
    return size // share.total * share.size
