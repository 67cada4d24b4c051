"""Sparse latent attention (DSA; DeepSeek-AI 2025): an index chooses the tokens that a query attends to.

The index's key of each token is cached after the latent. A query that sees no more tokens than it may choose attends to
all of them without scores. Longer rows of a step are scored against all keys before them, and attend again to the
chosen tokens: in plain torch, which reads the cache's blocks once per sequence.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from msgspec.structs import replace

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.layer_specs.latent import LatentSpec
from vllm_lite.checkpoint.model_spec import NormSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.kernels.ops import Rotation
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.latent_attention import LatentAttention
from vllm_lite.layers.buffers import HeadRows, StepRows
from vllm_lite.layers.norm import WideNorm
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup

NORM = NormSpec(1e-6, "layer", bias=True)
"""Norm on the index's keys."""
MOST_SCORES, MOST_GATHERED = 1 << 24, 1 << 22
"""Maximum scores of heads, and elements of chosen latents, in memory at a time; at least one row's."""


class LongRows(NamedTuple):
    """The rows of a sequence that see more tokens than they may attend to."""

    sequence: int
    rows: slice  # of the step's tokens, the last of the sequence's
    seq_len: int

    def parts(self, elements_of_row: int, most: int) -> Iterator[slice]:
        """Yield the rows in slices of at most `most` elements, and of at least one row."""
        step = max(1, most // elements_of_row)
        for start in range(self.rows.start, self.rows.stop, step):
            yield slice(start, min(start + step, self.rows.stop))


def long_rows(batch: StepBatch, count: int) -> list[LongRows]:
    """Find the rows of a step that see more than `count` tokens, the number to which a row may attend."""
    found, starts = [], batch.query_start_loc.tolist()
    for index, seq_len in enumerate(batch.seq_lens.tolist()):
        first, end = starts[index : index + 2]
        before = seq_len - (end - first)
        first += max(0, count - before)
        if first < end and seq_len:
            found.append(LongRows(index, slice(first, end), seq_len))
    return found


class Selection:
    """Positions that a step's rows attend to, as chosen by the last layer with an index. One per model."""

    chosen: torch.Tensor | None = None
    """int64 [num_tokens, count], valid in long rows; None: the step has none."""

    def keep(self, wanted: torch.Tensor) -> None:
        """Keep only the rows `wanted`: int64 [k]."""
        if self.chosen is not None:
            self.chosen = self.chosen[wanted]


class SparseIndex:
    """The index with which a layer scores cached tokens. Every rank holds all of it, and all choose the same tokens."""

    def __init__(self, parts: Parts, spec: LatentSpec, turned: tuple[int, ...]) -> None:
        """`turned`: order of the rotated elements of a head for the kernels."""
        if spec.index is None or spec.query_rank is None:
            raise ModelError("sparse attention needs an index, and a vector that Q is made of")
        self.spec, self.own, self.ops = spec, spec.index, ops_for(parts.device)
        size, hidden = self.own.head_size, Split.whole(parts.spec.hidden_size)
        self.order = (*turned, *range(spec.rope_size, size))
        rows = [head * size + element for head in range(self.own.num_heads) for element in self.order]
        plain = parts.without_adapters()
        self.query = plain.linear(Split.whole(spec.query_rank), Split.of(len(rows), rows), bias=False)
        self.key = plain.linear(hidden, Split.of(size, self.order), bias=False)
        self.weights = plain.linear(hidden, Split.whole(self.own.num_heads), bias=False)
        self.norm = WideNorm(size, NORM, device=parts.device)

    def write(self, x: torch.Tensor, own: HeadRows, rotation: Rotation) -> torch.Tensor:
        """Compute keys and weights of x: [num_tokens, hidden_size], after attention's own activations in its rows.
        Returns the keys."""
        key, weights = self._places(own)
        self.key.forward(x, out=key)
        self.weights.forward(x, out=weights)
        self.norm.forward(key, out=key)
        self.ops.rotate(key[:, None, : self.spec.rope_size], rotation)
        return key

    def choose(self, own: HeadRows, rotation: Rotation, keys: torch.Tensor, long: LongRows) -> Iterator[torch.Tensor]:
        """Yield the positions that the long rows attend to, int64 [rows, count], in slices of rows. keys: of the
        sequence's tokens, float32 [seq_len, head_size]."""
        index, rank = self.own, self.spec.query_rank
        seen = torch.arange(long.seq_len, device=keys.device)
        for part in long.parts(index.num_heads * long.seq_len, MOST_SCORES):
            count = part.stop - part.start
            query = own.qkv.new_empty(count, index.num_heads * index.head_size)
            self.query.forward(own.qkv[part, :rank], out=query)
            heads = query.view(count, index.num_heads, index.head_size)
            turned = Rotation(rotation.cos[part], rotation.sin[part])
            self.ops.rotate(heads[..., : self.spec.rope_size], turned)
            scores = (heads.float() @ keys.T).relu_()
            sums = (self._places(own)[1][part].float()[:, None] @ scores)[:, 0]
            position = long.seq_len - (long.rows.stop - part.start)
            ahead = seen > torch.arange(position, position + count, device=keys.device)[:, None]
            yield sums.masked_fill_(ahead, -torch.inf).topk(index.count, dim=-1).indices

    def _places(self, own: HeadRows) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.own.head_size, self.own.num_heads
        _, key, weights = own.qkv.split((own.qkv.shape[1] - sum(sizes), *sizes), dim=1)
        return key, weights

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0.self_attn.indexer."."""
        yield self.query.group(f"{prefix}wq_b")
        yield self.key.group(f"{prefix}wk")
        yield self.weights.group(f"{prefix}weights_proj")
        yield self.norm.group(f"{prefix}k_norm", self.order)


class SparseLatentAttention(LatentAttention):
    """Sparse latent attention; the model gives all its layers one `Selection`."""

    selection: Selection  # by the model

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        spec, own, index = parts.spec.layers[layer].attention, parts.spec.layers[layer], self.spec.index
        if index is None or own.rope is None:
            raise ModelError(f"layer {layer} has no index")
        self.count, self.scale, self.row_size = index.count, spec.scale, spec.head_size
        turned = replace(own.rope, interleaved=index.interleaved).order(self.spec.rope_size)
        turned = turned or tuple(range(self.spec.rope_size))
        self.index = None if index.is_shared else SparseIndex(parts, self.spec, turned)

    def write(
        self, x: torch.Tensor, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend
    ) -> None:
        """See LatentAttention.write; kv: [num_blocks, 1, 1, block_size, cached_size and the index's head_size]."""
        own = rows.by_kind[self.kind]
        if self.index is not None and own.latent is not None:
            key = self.index.write(x, own, own.latent.rotation)
            slots = batch.slot_mapping[self.group]
            written = slots >= 0
            slots = slots[written]
            kv[slots // kv.shape[3], 0, 0, slots % kv.shape[3], self.row_size :] = key[written]
        super().write(x, rows, kv[..., : self.row_size], batch, backend)

    def attend(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See LatentAttention.attend; long rows then attend again, to the chosen tokens."""
        super().attend(rows, kv[..., : self.row_size], batch, backend)
        own = rows.by_kind[self.kind]
        many = long_rows(batch, self.count)
        if self.index is not None:
            size = (batch.num_tokens, self.count)
            self.selection.chosen = batch.positions.new_zeros(size) if many else None
        for long in many:
            blocks = batch.block_tables[self.group][long.sequence, : -(-long.seq_len // kv.shape[3])]
            cached = kv.index_select(0, blocks)[:, 0, 0].flatten(0, 1)[: long.seq_len]
            chosen = self.selection.chosen
            if chosen is None or own.latent is None:
                raise RuntimeError("no layer before has chosen what this one attends to")
            if self.index is not None:
                keys = cached[:, self.row_size :].float()
                chosen[long.rows] = torch.cat(list(self.index.choose(own, own.latent.rotation, keys, long)))
            self._attend_to_chosen(own, cached[:, : self.row_size], chosen, long)

    def _attend_to_chosen(self, own: HeadRows, cached: torch.Tensor, chosen: torch.Tensor, long: LongRows) -> None:
        """Attend with the long rows. cached: [seq_len, head_size], K of the sequence's tokens; chosen: of all rows."""
        for part in long.parts(self.count * self.row_size, MOST_GATHERED):
            key = cached[chosen[part]].float()  # [rows, count, head_size]
            scores = own.heads.query[part].float() @ key.transpose(1, 2)  # [rows, num_heads, count]
            own.attended_heads[part] = scores.mul_(self.scale).softmax(-1) @ key[..., : self.spec.rank]

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """See LatentAttention.weight_groups."""
        yield from super().weight_groups(prefix)
        if self.index is not None:
            yield from self.index.weight_groups(f"{prefix}indexer.")
