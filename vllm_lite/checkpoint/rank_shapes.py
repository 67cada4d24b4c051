"""What one rank holds of a checkpoint's tensor, by the tensor's name: for plans, which are made without a model.

A worker asks the weight slots of its model's layers, which are made with torch; `vllm-lite plan` answers without it.
Tests hold the two against each other, for every family. A tensor whose name is not known here counts as held whole, so
a plan is never too small for it.
"""

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.shard import Shard, Split

_BY_ROWS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "embed_tokens",
    "lm_head",
)
"""Ranks share out their outputs, the first axis of weight and bias."""
_QK_NORMS = ("q_norm", "k_norm")
_BY_COLUMNS = ("o_proj", "down_proj")
"""Ranks share out their inputs, the second axis of the weight; rank 0 has the bias."""


def rank_shape(name: str, shape: tuple[int, ...], spec: ModelSpec, shard: Shard) -> tuple[int, ...]:
    """The shape of this rank's part of the tensor `name`, which has `shape`; the same for a tensor that all hold.

    Raises ConfigError if so many ranks cannot share the model's heads.
    """
    *path, layer, kind = ("", *name.split("."))
    if layer in _BY_ROWS or (layer in _QK_NORMS and spec.qk_norm == "all heads"):
        return (_part(layer, path, shape[0], spec, shard), *shape[1:])
    if layer in _BY_COLUMNS and kind == "bias":
        return shape if shard.rank == 0 else (0,)
    if layer in _BY_COLUMNS:
        return (shape[0], _part(layer, path, shape[1], spec, shard))
    return shape


def _part(layer: str, path: list[str], size: int, spec: ModelSpec, shard: Shard) -> int:
    """How much of an axis of `size` is this rank's."""
    if layer in ("embed_tokens", "lm_head"):
        return Split.vocabulary(size, shard).size
    if layer in ("gate_proj", "up_proj", "gate_up_proj", "down_proj"):
        return Split.even(size, shard).size
    heads = spec.layers[int(path[path.index("layers") + 1])].attention.heads(shard)
    if layer == "qkv_proj":
        return size // (heads.query.total + 2 * heads.kv.total) * (heads.query.size + 2 * heads.kv.size)
    share = heads.kv if layer in ("k_proj", "v_proj") else heads.query
    return size // share.total * share.size
