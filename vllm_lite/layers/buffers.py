"""Preallocated activations: one set per model, used by all its layers in turn, sliced to a step's number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_lite.attention.backend import Heads
from vllm_lite.kernels.ops import Rotation
from vllm_lite.layers.parts import HeadLayout, Parts
from vllm_lite.layers.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The attention activations of layers with one HeadLayout. Heads are views into the fused rows of `qkv`."""

    qkv: torch.Tensor  # [n, (num_heads + 2 * num_kv_heads) * head_size]
    heads: Heads  # in qkv
    attended: torch.Tensor  # [n, num_heads * head_size]
    attended_heads: torch.Tensor  # [n, num_heads, head_size], the same memory


@dataclass(frozen=True, slots=True)
class Rows:
    """The buffers of a step with n tokens."""

    residual: torch.Tensor  # [n, hidden_size]
    hidden: torch.Tensor  # [n, hidden_size], input and output of every block
    rotations: tuple[Rotation, ...]  # for each kind of rope; in the heads that are rotated by it
    by_layout: tuple[HeadRows, ...]  # for each of Parts.layouts; they share one memory
    gate_up: torch.Tensor  # [n, 2 * intermediate_size]
    activated: torch.Tensor  # [n, intermediate_size]


class Buffers:
    """Activations for up to `max_num_tokens` tokens. The sizes are this rank's share of the model's."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(max_num_tokens * size, dtype=parts.dtype, device=parts.device)

        spec, layouts = parts.spec, parts.layouts
        intermediate_size = spec.intermediate_size // parts.shard.world
        self.max_num_tokens = max_num_tokens
        self.layouts = layouts
        self.residual = buffer(spec.hidden_size).view(max_num_tokens, -1)
        self.hidden = buffer(spec.hidden_size).view(max_num_tokens, -1)
        self.qkv = buffer(max(layout.qkv_size for layout in layouts))
        self.attended = buffer(max(layout.query_size for layout in layouts))
        self.gate_up = buffer(2 * intermediate_size).view(max_num_tokens, -1)
        self.activated = buffer(intermediate_size).view(max_num_tokens, -1)
        ropes = dict.fromkeys((layout.rope, layout.head_size) for layout in layouts if layout.rope is not None)
        self._ropes = list(ropes)
        self._tables = [RotaryEmbedding(rope, size, max_model_len, device=parts.device) for rope, size in ropes]
        self._rotations = [[buffer(size).view(max_num_tokens, size) for _ in range(2)] for _, size in ropes]
        self._last: tuple[int, Rows] | None = None

    def rows(self, n: int) -> Rows:
        """Views of the first n rows; kept until another n is asked for, as decode steps ask for the same again."""
        if self._last is None or self._last[0] != n:
            self._last = (n, self._slice(n))
        return self._last[1]

    def select_rotations(self, rows: Rows, positions: torch.Tensor) -> None:
        """Fetch each token's rotations, once for all layers. positions: int64 [num_tokens]."""
        for table, rotation in zip(self._tables, rows.rotations, strict=True):
            table.select(positions, rotation)

    def gather(self, rows: Rows, wanted: torch.Tensor, layout: int) -> Rows:  # wanted: int64 [k], k <= n
        """The residual stream and attention's result of some rows, moved together; all else of them is lost."""
        residual, attended = rows.residual[wanted], rows.by_layout[layout].attended[wanted]
        few = self.rows(len(wanted))
        few.residual.copy_(residual)
        few.by_layout[layout].attended.copy_(attended)
        return few

    def _slice(self, n: int) -> Rows:
        if n > self.max_num_tokens:
            raise ValueError(f"a step of {n} tokens exceeds the {self.max_num_tokens} that the buffers were made for")
        rotations = tuple(Rotation(cos[:n], sin[:n]) for cos, sin in self._rotations)
        return Rows(
            residual=self.residual[:n],
            hidden=self.hidden[:n],
            rotations=rotations,
            by_layout=tuple(self._head_rows(layout, n, rotations) for layout in self.layouts),
            gate_up=self.gate_up[:n],
            activated=self.activated[:n],
        )

    def _head_rows(self, layout: HeadLayout, n: int, rotations: Sequence[Rotation]) -> HeadRows:
        heads, kv_heads = layout.num_heads, layout.num_kv_heads
        qkv = self.qkv[: n * layout.qkv_size].view(n, -1)
        attended = self.attended[: n * layout.query_size].view(n, -1)
        by_head = qkv.view(n, -1, layout.head_size)
        query, key, value = by_head[:, :heads], by_head[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]
        rope = layout.rope
        rotation = None if rope is None else rotations[self._ropes.index((rope, layout.head_size))]
        return HeadRows(qkv, Heads(query, key, value, rotation), attended, attended.view(n, heads, layout.head_size))
