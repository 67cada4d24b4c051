"""One layer's latent attention (MLA; DeepSeek-AI 2024), absorbed: heads attend to the cached latents directly.

A head's K is its matrix times the latent, followed by a rotated part that all heads share; its V is another matrix
times the latent. K and V are never computed: once per token, the head's Q is multiplied by the first matrix (absorb),
and the head's result by the second (expand). The attention backend sees one KV head, whose K is the latent and the
rotated part, and whose V is the latent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.layer_specs.latent import LatentSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.errors import ModelError
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.head_matmul import HeadMatmul, form_of_heads, make_head_matmul
from vllm_lite.layers.buffers import HeadRows, LatentRows, StepRows
from vllm_lite.layers.norm import RMSNorm
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.weight_slot import WeightGroup


class LatentAttention:
    """Latent attention. Heads are split over ranks; each rank has all latents."""

    def __init__(self, parts: Parts, layer: int) -> None:
        whole, own, hidden = parts.spec.layers[layer], parts.layers[layer], Split.whole(parts.spec.hidden_size)
        if whole.latent is None or whole.rope is None:
            raise ModelError(f"layer {layer} has no latent attention with a rotated part")
        self.spec = spec = whole.latent
        self.grows = whole.query_growth is not None
        self.ops = ops_for(parts.device)
        self.kind = parts.kinds.index(own)
        self.kv_scales: KVScales | None = None
        self.group = next(index for index, group in enumerate(parts.spec.kv_groups) if layer in group.layers)
        self.heads = heads = whole.attention.heads(parts.shard).query
        turned = whole.rope.order(spec.rope_size) or range(spec.rope_size)
        query, cached = _query_rows(spec, heads, turned), _cached_rows(spec, turned)
        expanded = spec.query_rank is not None
        rank = Split.whole(spec.query_rank or 0)
        self.first = parts.linear(hidden, rank if expanded else query, cached, bias=False)
        self.first_width = (rank if expanded else query).size + cached.size
        self.query = parts.linear(rank, query, bias=False) if expanded else None
        self.query_norm, self.latent_norm = (
            RMSNorm(size, spec.norm_eps, dtype=parts.dtype, device=parts.device) for size in (rank.size, spec.rank)
        )
        plain = parts.without_adapters()  # HeadMatmul multiplies these, not linear layers
        plain = replace(plain, form=form_of_heads(parts.form, parts.device))
        self.absorb, self.expand = _by_head(plain, spec, heads)
        nothing = Split(spec.rank, 0, 0), Split(spec.value_size, 0, 0)
        sizes = spec.nope_size, spec.rank
        absorb, expand = (
            plain.linear(Split.whole(size), none, bias=False) for size, none in zip(sizes, nothing, strict=True)
        )
        self.elsewhere = absorb, expand
        """Layers for heads of other ranks: their tensors must be in the checkpoint, but are not read."""
        self.output = parts.row_parallel(heads.times(spec.value_size), hidden, bias=False)

    @cached_property
    def absorbing(self) -> HeadMatmul:
        """Product from the unrotated part of Q to the space of the latent; available once weights are loaded."""
        return make_head_matmul([linear.matmul for linear in self.absorb])

    @cached_property
    def expanding(self) -> HeadMatmul:
        """Product from the space of the latent to V; available once weights are loaded."""
        return make_head_matmul([linear.matmul for linear in self.expand])

    def write(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        rows: StepRows,
        kv: torch.Tensor,  # the layer's cache: [num_blocks, 1, 1, block_size, cached_size]
        batch: StepBatch,
        backend: AttentionBackend,
    ) -> None:
        """See AttentionBlock.write."""
        own = rows.by_kind[self.kind]
        self.first.forward(x, out=own.qkv[:, : self.first_width])
        self.prepare(own)
        if self.grows and rows.query_growth is not None:
            self.ops.scale_rows(own.heads.query, rows.query_growth, batch.positions)
        backend.write_kv(own.heads, kv, batch, self.group, self.kv_scales)

    def attend(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See AttentionBlock.attend."""
        own = rows.by_kind[self.kind]
        backend.attend(own.heads.query, kv, batch, self.group, own.attended_heads, scales=self.kv_scales)

    def prepare(self, own: HeadRows) -> None:
        """Compute the absorbed Q and the cached rows from the outputs of the first projections."""
        latent, spec, heads = _latent(own), self.spec, own.heads
        if self.query is not None and spec.query_rank is not None:
            vector = own.qkv[:, : spec.query_rank]
            self.query_norm.forward(vector, out=vector)
            self.query.forward(vector, out=latent.query)
        query = latent.query_heads
        self.absorbing.forward(query[..., : spec.nope_size], heads.query[..., : spec.rank])
        self.ops.rotate_into(query[..., spec.nope_size :], latent.rotation, heads.query[..., spec.rank :])
        vector = heads.value[:, 0]
        self.latent_norm.forward(vector, out=vector)
        self.ops.rotate(heads.key[..., spec.rank :], latent.rotation)

    def project(self, rows: StepRows) -> None:
        """See AttentionBlock.project."""
        own = rows.by_kind[self.kind]
        latent = _latent(own)
        self.expanding.forward(own.attended_heads, latent.value_heads)
        self.output.forward(latent.values, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """See AttentionBlock.weight_groups."""
        query = "q_proj" if self.query is None else "q_a_proj"
        yield self.first.group(f"{prefix}{query}", f"{prefix}kv_a_proj_with_mqa")
        if self.query is not None:
            yield self.query_norm.group(f"{prefix}q_a_layernorm")
            yield self.query.group(f"{prefix}q_b_proj")
        yield self.latent_norm.group(f"{prefix}kv_a_layernorm")
        yield from self._groups_of_heads(prefix)
        yield self.output.group(f"{prefix}o_proj")

    def _groups_of_heads(self, prefix: str) -> Iterator[WeightGroup]:
        if self.spec.stored == "together":
            for linear in (*self.absorb, *self.expand):
                yield linear.group(f"{prefix}kv_b_proj")
            return
        held = range(self.heads.start, self.heads.end)
        for head in range(self.heads.total):
            index = head - held.start
            absorb, expand = (self.absorb[index], self.expand[index]) if head in held else self.elsewhere
            yield absorb.group(f"{prefix}k_b_proj.{head}")
            yield expand.group(f"{prefix}v_b_proj.{head}")


def _latent(own: HeadRows) -> LatentRows:
    if own.latent is None:
        raise ValueError("the buffers were made for layers without latent attention")
    return own.latent


def _query_rows(spec: LatentSpec, heads: Split, turned: Sequence[int]) -> Split:
    """Rows of Q of a rank's heads, with the rotated part of each in the order of the kernels."""
    size = spec.query_size
    order = [*range(spec.nope_size), *(spec.nope_size + place for place in turned)]
    return Split.of(heads.total * size, [head * size + row for head in range(heads.start, heads.end) for row in order])


def _cached_rows(spec: LatentSpec, turned: Sequence[int]) -> Split:
    """Rows of the latent and of the rotated part of K, the latter in the order of the kernels."""
    return Split.of(spec.cached_size, [*range(spec.rank), *(spec.rank + place for place in turned)])


def _by_head(parts: Parts, spec: LatentSpec, heads: Split) -> tuple[list[Linear], list[Linear]]:
    """Matrices of a rank's heads, from Q to the space of the latent and from there to V.

    A head's rows of kv_b_proj are those of its K [nope_size, rank], then those of its V [value_size, rank]. Q is
    multiplied by the former transposed.
    """
    size, latent = spec.nope_size + spec.value_size, Split.whole(spec.rank)
    if spec.stored == "by head":
        key, value = Split.whole(spec.nope_size), Split.whole(spec.value_size)
        each = range(heads.size)
        return [parts.linear(key, latent, bias=False) for _ in each], [
            parts.linear(latent, value, bias=False) for _ in each
        ]
    absorb, expand = [], []
    for head in range(heads.start, heads.end):
        key = Split(heads.total * size, head * size, spec.nope_size)
        value = Split(heads.total * size, head * size + spec.nope_size, spec.value_size)
        absorb.append(parts.linear(key, latent, bias=False, transposed=True))
        expand.append(parts.linear(latent, value, bias=False))
    return absorb, expand
