"""Norms of Q and K before the rotation: over each head separately, or over all heads of a token."""

from collections.abc import Iterator
from typing import Protocol

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.ops import HeadNormWeights, Ops, WideNormWeights
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.qkv_layout import QKVSplits
from vllm_lite.layers.buffers import HeadRows
from vllm_lite.layers.norm import RMSNorm
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack


class QKNorm(Protocol):
    """Norms that an attention block applies to its rows."""

    def forward(self, own: HeadRows) -> None:
        """Norm the heads of Q and K in place."""
        ...

    def weight_groups(self, query: str, key: str) -> Iterator[WeightGroup]:
        """Request the checkpoint tensors `<query>.weight` and `<key>.weight`."""
        ...


class HeadNorms:
    """The model's norm over each head, with one weight for all query heads and one for all KV heads.

    `order`: of a head's elements (`Rope.order`), to which weights are permuted as the rows of Q and K are.
    """

    def __init__(self, parts: Parts, head_size: int, order: tuple[int, ...] | None) -> None:
        self.query, self.key = parts.norm(head_size), parts.norm(head_size)
        self.order = order

    def forward(self, own: HeadRows) -> None:
        self.query.forward(own.heads.query, out=own.heads.query)
        self.key.forward(own.heads.key, out=own.heads.key)

    def weights(self) -> HeadNormWeights | None:
        """Weights for a kernel that fuses the norms of heads; None for norms that no kernel fuses."""
        if not isinstance(self.query, RMSNorm) or not isinstance(self.key, RMSNorm):
            return None
        return HeadNormWeights(self.query.weight, self.key.weight, self.query.eps)

    def weight_groups(self, query: str, key: str) -> Iterator[WeightGroup]:
        yield self.query.group(query, self.order)
        yield self.key.group(key, self.order)


class BareHeadNorms:
    """RMSNorm over each head without a weight, computed in float32 throughout."""

    def __init__(self, parts: Parts, head_size: int) -> None:
        self.ops, ones = ops_for(parts.device), torch.ones(head_size, device=parts.device)
        self.norm = WideNormWeights(ones, None, parts.spec.norm.eps, centered=False)

    def forward(self, own: HeadRows) -> None:
        for heads in (own.heads.query, own.heads.key):
            self.ops.wide_norm(heads, self.norm, heads)

    def weight_groups(self, query: str, key: str) -> Iterator[WeightGroup]:  # noqa: ARG002
        """Request nothing."""
        yield from ()


class AllHeadsNorms:
    """RMSNorm over all heads of a token, computed in float32 throughout.

    Heads are split over ranks, so each rank has a part of the mean squares of Q and K: an all-reduce adds up these two
    numbers per token, in the same order on all ranks, so that all get the same bits.
    """

    def __init__(self, parts: Parts, splits: QKVSplits) -> None:
        self.ops, self.communicator = ops_for(parts.device), parts.communicator
        self.eps = parts.spec.norm.eps
        self.sizes = (splits.query.size, splits.key.size)
        self.query, self.key = _Weight(splits.query, parts), _Weight(splits.key, parts)
        world = parts.shard.world
        # With more ranks than KV heads, equally many ranks hold, and count, each KV head.
        totals = (float(splits.query.total), float(splits.key.size * world))
        self.totals = torch.tensor(totals, device=parts.device) if world > 1 else None

    def forward(self, own: HeadRows) -> None:
        num_query, num_key = self.sizes
        query, key = own.qkv[:, :num_query], own.qkv[:, num_query : num_query + num_key]
        if self.totals is None:
            self.ops.wide_norm(query, self.query.norm, query)
            self.ops.wide_norm(key, self.key.norm, key)
            return
        squares = torch.stack([part.float().square().sum(-1) for part in (query, key)], 1)  # [num_tokens, 2]
        self.communicator.all_reduce(squares)
        scales = (squares / self.totals + self.eps).rsqrt_()
        query.copy_(query * scales[:, :1] * self.query.norm.weight)
        key.copy_(key * scales[:, 1:] * self.key.norm.weight)

    def weight_groups(self, query: str, key: str) -> Iterator[WeightGroup]:
        yield self.query.group(query)
        yield self.key.group(key)


class _Weight:
    """Weight of a norm over all heads, for the rows `part` of its projection."""

    norm: WideNormWeights  # by `load`

    def __init__(self, part: Split, parts: Parts) -> None:
        self.part = part
        self.device, self.eps = parts.device, parts.spec.norm.eps

    def load(self, weight: torch.Tensor) -> None:
        """Keep `weight`: [this rank's heads * head_size]."""
        self.norm = WideNormWeights(weight, None, self.eps, centered=False)

    def group(self, name: str) -> WeightGroup:
        part = self.part
        slot = WeightSlot(f"{name}.weight", (part.total,), (part.start,), (part.size,), part.order)
        return WeightGroup((WeightStack((slot,), torch.float32, self.device),), self.load)


class Clipped:
    """Clamps Q, K and V, after the norms of Q and K if there are any."""

    def __init__(self, norm: QKNorm | None, limit: float, ops: Ops) -> None:
        self.norm, self.limit, self.ops = norm, limit, ops

    def forward(self, own: HeadRows) -> None:
        if self.norm is not None:
            self.norm.forward(own)
        self.ops.clamp(own.qkv, self.limit)

    def weight_groups(self, query: str, key: str) -> Iterator[WeightGroup]:
        if self.norm is not None:
            yield from self.norm.weight_groups(query, key)


def make_qk_norm(parts: Parts, splits: QKVSplits, head_size: int, order: tuple[int, ...] | None) -> QKNorm | None:
    """Make the norms of Q and K before the rotation; None without any."""
    norm = _norms(parts, splits, head_size, order)
    limit = parts.spec.qkv_clip
    return Clipped(norm, limit, ops_for(parts.device)) if limit else norm


def _norms(parts: Parts, splits: QKVSplits, head_size: int, order: tuple[int, ...] | None) -> QKNorm | None:
    match parts.spec.qk_norm:
        case None:
            return None
        case "head":
            return HeadNorms(parts, head_size, order)
        case "all heads":
            return AllHeadsNorms(parts, splits)
        case "bare head":
            return BareHeadNorms(parts, head_size)
