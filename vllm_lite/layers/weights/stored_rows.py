"""Order of the rows of a family's own checkpoints in a file that has them in another: adapters are made for the
family's."""

import re

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.spec import Gguf
from vllm_lite.checkpoint.shard import HeadSplit, Split
from vllm_lite.layers.attention.qkv_layout import qkv_splits

_PROJECTION = re.compile(r"[^0-9]*\.(\d{1,6})\..*\.(q_proj|k_proj|query_key_value)")


def stored_rows(spec: ModelSpec, name: str) -> list[int] | None:
    """The family's row for each row of the matrix `name` as the files of `spec` have it; None: they are the same."""
    moved = spec.quantization.qkv_rows if isinstance(spec.quantization, Gguf) else None
    found = None if moved is None else _PROJECTION.fullmatch(name)
    if found is None:
        return None
    attention, is_fused = spec.layers[int(found[1])].attention, found[2] == "query_key_value"
    num_heads, num_kv, size = attention.num_heads, attention.num_kv_heads, attention.head_size
    if moved == "turned":
        starts = range(0, (num_heads if found[2] == "q_proj" else num_kv) * size, size)
        return [start + row for start in starts for pair in zip(*_halves(size), strict=True) for row in pair]
    if not is_fused:
        return None
    whole = HeadSplit(Split.whole(num_heads), Split.whole(num_kv))
    return [row for part in qkv_splits(attention, whole, "by head", None) for row in part.order or _rows(part)]


def _halves(size: int) -> tuple[range, range]:
    return range(size // 2), range(size // 2, size)


def _rows(part: Split) -> range:
    return range(part.start, part.end)
