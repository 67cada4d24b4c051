"""One layer's attention: the projections of its heads, and attention over the paged cache."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.kernels.ops import HeadNormWeights
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.qk_norm import HeadNorms, QKNorm, make_qk_norm
from vllm_lite.layers.attention.qkv_layout import Layout, QKVSplits, gated_query, qkv_splits
from vllm_lite.layers.buffers import HeadRows, StepRows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack


class AttentionNames(NamedTuple):
    """A checkpoint's names for the parts of a layer's attention."""

    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    """Three equal names mean one fused tensor."""
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str = "sinks"
    gate: str = "gate_proj"
    """Projection to the gate of the heads' output, if it is not in the tensor of Q."""
    layout: Layout = "separate"


class Attention(Protocol):
    """A layer's causal self-attention in three parts: `write` runs for every token, `attend` and `project` perhaps only
    for the rows whose hidden states are wanted."""

    kind: int
    """Index of the layer's kind in Parts.kinds and Rows.by_kind."""
    kv_scales: KVScales | None
    """Scales of the layer's float8 cache; None: the layer has none of its own, or another type of cache."""

    def __init__(self, parts: Parts, layer: int) -> None: ...

    def write(
        self, x: torch.Tensor, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend
    ) -> None:
        """Compute the attention inputs of x: [num_tokens, hidden_size], and write K and V to the cache `kv`."""
        ...

    def attend(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """Attend with Q of `write`, of all rows or of some as a batch of their own; `project` continues from it."""
        ...

    def project(self, rows: StepRows) -> None:
        """Project the attended rows into rows.hidden."""
        ...

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0.self_attn."."""
        ...


class AttentionBlock:
    """Multi-head or grouped-query attention.

    A family whose checkpoints name or lay out the projections differently sets `names`, and `transposed` if they are
    stored as [inputs, outputs].
    """

    names = AttentionNames()
    transposed = False
    has_kv = True
    """Whether the layer writes K and V; False: it attends to those of another layer."""

    def __init__(self, parts: Parts, layer: int) -> None:
        spec, whole, own = parts.spec, parts.spec.layers[layer], parts.layers[layer]
        heads, self.head_size = whole.attention.heads(parts.shard), whole.attention.head_size
        self.ops = ops_for(parts.device)
        self.kind = parts.kinds.index(own.blocks[0])
        self.kv_scales: KVScales | None = None
        kv_layer, groups = layer if whole.kv_layer is None else whole.kv_layer, enumerate(spec.kv_groups)
        self.group = next((index for index, group in groups if kv_layer in group.layers), self.kind)
        self.grows = whole.query_growth is not None
        self.order = None if whole.rope is None else whole.rope.order(self.head_size)
        hidden = Split.whole(spec.hidden_size)
        splits = qkv_splits(whole.attention, heads, spec.qkv_layout or self.names.layout, self.order)
        self.gated = whole.output_gate
        """Gate of the heads' output, see LayerSpec.output_gate."""
        self.make_projections(parts, layer, splits)
        self.sinks: torch.Tensor | None = None  # float32 [num_heads], by `load_sinks`
        self.sink_heads, self.device = heads.query if whole.attention.sinks else None, parts.device
        query = heads.query.times(self.head_size)
        self.output = parts.row_parallel(query, hidden, bias=spec.output_bias, transposed=self.transposed)

    def make_projections(self, parts: Parts, layer: int, splits: QKVSplits) -> None:
        """Make the projection to Q, K and V, and their norms."""
        hidden, spec = Split.whole(parts.spec.hidden_size), parts.spec
        outputs: tuple[Split, ...] = splits
        if self.gated in ("elements", "heads"):
            heads = spec.layers[layer].attention.heads(parts.shard).query
            outputs = *splits, heads if self.gated == "heads" else heads.times(self.head_size)
        elif self.gated:
            query, gate = gated_query(splits.query, self.head_size)
            outputs = query, splits.key, splits.value, gate
        self.qkv = parts.linear(hidden, *outputs, bias=spec.qkv_bias, transposed=self.transposed)
        self.qk_norm: QKNorm | None = make_qk_norm(parts, splits, self.head_size, self.order)

    def write(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        rows: StepRows,
        kv: torch.Tensor,  # the layer's cache: [num_blocks, 2, num_kv_heads, block_size, head_size]
        batch: StepBatch,
        backend: AttentionBackend,
    ) -> None:
        """Compute Q, K and V of `x`, and write K and V to the cache."""
        own = rows.by_kind[self.kind]
        if (norms := self.later_norms(own, backend)) is not None:
            self.qkv.forward(x, out=own.qkv)
            backend.write_kv(replace(own.heads, norms=norms), kv, batch, self.group, self.kv_scales)
            return
        self.make_heads(x, own)
        if self.grows and rows.query_growth is not None:
            self.ops.scale_rows(own.heads.query, rows.query_growth, batch.positions)
        self.rotate_and_keep(own, kv, batch, backend)

    def attend(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See Attention.attend."""
        own = rows.by_kind[self.kind]
        given = (own.heads.query, kv, batch, self.group, own.attended_heads, self.sinks)
        backend.attend(*given, scales=self.kv_scales, new=own.heads if self.has_kv else None)
        if own.gate is not None:
            if self.gated == "heads":
                self.ops.gate_heads(own.attended_heads, own.gate)
            else:
                self.ops.sigmoid_gate(own.attended, own.gate)

    def later_norms(self, own: HeadRows, backend: AttentionBackend) -> HeadNormWeights | None:
        """Norms of Q and K if the backend can fuse them with the rotation, and nothing is computed in between."""
        if not backend.fuses_norms or self.grows or own.heads.rotation is None:
            return None
        return self.qk_norm.weights() if isinstance(self.qk_norm, HeadNorms) else None

    def make_heads(self, x: torch.Tensor, own: HeadRows) -> None:
        """Compute Q, K and V before their rotation."""
        self.qkv.forward(x, out=own.qkv)
        if self.qk_norm is not None:
            self.qk_norm.forward(own)

    def rotate_and_keep(self, own: HeadRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """Rotate Q and K, and write K and V to the cache."""
        backend.write_kv(own.heads, kv, batch, self.group, self.kv_scales)

    def project(self, rows: StepRows) -> None:
        """Project the attended rows into rows.hidden."""
        self.output.forward(rows.by_kind[self.kind].attended, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0.self_attn."."""
        gate = () if not self.gated else self.names.qkv[:1] if self.gated == "elements beside Q" else (self.names.gate,)
        yield self.qkv.group(*(f"{prefix}{name}" for name in (*self.names.qkv, *gate)))
        if self.qk_norm is not None:
            names = self.names
            yield from self.qk_norm.weight_groups(f"{prefix}{names.query_norm}", f"{prefix}{names.key_norm}")
        if (held := self.sink_heads) is not None:
            slot = WeightSlot(f"{prefix}{self.names.sinks}", (held.total,), (held.start,), (held.size,))
            yield WeightGroup((WeightStack((slot,), torch.float32, self.device),), self.load_sinks)
        yield self.output.group(f"{prefix}{self.names.output}")

    def load_sinks(self, sinks: torch.Tensor) -> None:
        """Keep the sinks: float32 [num_heads] of this rank."""
        self.sinks = sinks
