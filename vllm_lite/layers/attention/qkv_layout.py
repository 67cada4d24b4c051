"""Rows of Q, K and V in the tensors of a checkpoint, for a rank's heads in the order of the kernels."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.checkpoint.shard import HeadSplit, Split

Layout = Literal["separate", "stacked", "by head"]
"""A tensor for each of Q, K and V; or one in which they are concatenated; or one in which each KV head follows the
query heads that attend to it: q ... q k v, q ... q k v."""


class QKVSplits(NamedTuple):
    """A rank's part of each projection, as rows of the tensor that contains it."""

    query: Split
    key: Split
    value: Split


@lru_cache  # layers are alike, and rows are counted one by one
def qkv_splits(
    spec: AttentionSpec,  # of the whole model
    heads: HeadSplit,
    layout: Layout,
    order: tuple[int, ...] | None,  # of the elements of each head of Q and K, see Rope.order
) -> QKVSplits:
    """Rows of a rank's heads. `heads` are numbered in the whole model."""
    size, num_query, num_kv = spec.head_size, spec.num_heads, spec.num_kv_heads
    group = num_query // num_kv
    natural = range(size)
    turned = natural if order is None else order

    def rows(part: Split, total: int, first: Sequence[int], elements: Sequence[int]) -> Split:
        """`first`: position of each head in the tensor, counted in heads."""
        indices = [first[head] * size + element for head in range(part.start, part.end) for element in elements]
        return Split.of(total * size, indices)

    if layout == "separate":
        return QKVSplits(
            rows(heads.query, num_query, range(num_query), turned),
            rows(heads.kv, num_kv, range(num_kv), turned),
            rows(heads.kv, num_kv, range(num_kv), natural),
        )
    total = num_query + 2 * num_kv
    if layout == "stacked":
        queries: Sequence[int] = range(num_query)
        keys: Sequence[int] = range(num_query, num_query + num_kv)
        values: Sequence[int] = range(num_query + num_kv, total)
    else:
        queries = [head // group * (group + 2) + head % group for head in range(num_query)]
        keys = range(group, total, group + 2)
        values = range(group + 1, total, group + 2)
    return QKVSplits(
        rows(heads.query, total, queries, turned),
        rows(heads.kv, total, keys, turned),
        rows(heads.kv, total, values, natural),
    )


def gated_query(query: Split, head_size: int) -> tuple[Split, Split]:
    """Rows of Q, and of the gate of the heads' output, in a tensor in which each head's gate follows its Q. `query`:
    rows of Q in a tensor without gates."""
    indices = query.order or range(query.start, query.end)
    own = [index // head_size * 2 * head_size + index % head_size for index in indices]
    heads = dict.fromkeys(index // head_size for index in indices)
    gates = [(2 * head + 1) * head_size + element for head in heads for element in range(head_size)]
    return Split.of(2 * query.total, own), Split.of(2 * query.total, gates)
