"""One layer's attention: the projections of its heads, and what they attend to in the paged cache."""

from collections.abc import Iterator

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.buffers import HeadRows, Rows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weight_slot import WeightGroup


class AttentionBlock:
    """Causal self-attention in two halves: `attend` is needed for every token, `project` for those that go on."""

    def __init__(self, parts: Parts, layer: int) -> None:
        spec, heads = parts.spec, parts.spec.layers[layer].attention
        hidden = Split.whole(spec.hidden_size)
        query, kv = (part.times(heads.head_size) for part in heads.heads(parts.shard))
        self.kind = parts.kinds.index(parts.layers[layer])
        self.group = next(index for index, group in enumerate(spec.kv_groups) if layer in group.layers)
        self.qkv = parts.linear(hidden, query, kv, kv, bias=spec.attention_bias)
        self.query_norm = parts.norm(heads.head_size) if spec.qk_norm else None
        self.key_norm = parts.norm(heads.head_size) if spec.qk_norm else None
        self.output = parts.row_parallel(query, hidden, bias=spec.attention_bias)

    def attend(
        self,
        rows: Rows,
        kv: torch.Tensor,  # the layer's cache: [num_blocks, 2, num_kv_heads, block_size, head_size]
        batch: StepBatch,
        backend: AttentionBackend,
    ) -> None:
        """Attend with rows.hidden, for `project` to go on from, and write K and V to the cache."""
        own = rows.by_kind[self.kind]
        self.qkv.forward(rows.hidden, out=own.qkv)
        self.normalize(own)
        backend.write_kv(own.heads, kv, batch, self.group)
        backend.attend(own.heads.query, kv, batch, self.group, own.attended_heads)

    def normalize(self, own: HeadRows) -> None:
        """Apply the norms on Q and K, before they are rotated, where the model has some: over each head."""
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.forward(own.heads.query, out=own.heads.query)
            self.key_norm.forward(own.heads.key, out=own.heads.key)

    def project(self, rows: Rows) -> None:
        """Project the attended rows into rows.hidden."""
        self.output.forward(rows.by_kind[self.kind].attended, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """What a checkpoint has of this block under `prefix`, like "model.layers.0.self_attn."."""
        yield self.qkv.group(*(f"{prefix}{part}_proj" for part in "qkv"))
        if self.query_norm is not None and self.key_norm is not None:
            yield self.query_norm.group(f"{prefix}q_norm")
            yield self.key_norm.group(f"{prefix}k_norm")
        yield self.output.group(f"{prefix}o_proj")
