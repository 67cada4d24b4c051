"""Preallocated activations: one set per model, used by all its layers in turn, sliced to a step's number of tokens."""

from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.kernels.ops import Rotation
from vllm_lite.layers.weight_slot import Shard


@dataclass(frozen=True, slots=True)
class Rows:
    """The buffers of a step with n tokens. Heads are views into the fused rows of `qkv`."""

    residual: torch.Tensor  # [n, hidden_size]
    hidden: torch.Tensor  # [n, hidden_size], input and output of every block
    qkv: torch.Tensor  # [n, (num_heads + 2 * num_kv_heads) * head_dim]
    query: torch.Tensor  # [n, num_heads, head_dim], in qkv
    key: torch.Tensor  # [n, num_kv_heads, head_dim], in qkv
    value: torch.Tensor  # [n, num_kv_heads, head_dim], in qkv
    rotation: Rotation
    attended: torch.Tensor  # [n, num_heads * head_dim]
    attended_heads: torch.Tensor  # [n, num_heads, head_dim], the same memory
    gate_up: torch.Tensor  # [n, 2 * intermediate_size]
    activated: torch.Tensor  # [n, intermediate_size]


class Buffers:
    """Activations for up to `max_num_tokens` tokens. The sizes are this rank's share of the model's."""

    def __init__(
        self, spec: ModelSpec, shard: Shard, max_num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def buffer(*shape: int) -> torch.Tensor:
            return torch.zeros(max_num_tokens, *shape, dtype=dtype, device=device)

        self.max_num_tokens = max_num_tokens
        self.head_dim = head_dim = spec.head_dim
        self.num_heads = num_heads = spec.num_heads // shard.world
        self.num_kv_heads = num_kv_heads = spec.kv_heads_per_rank(shard.world)
        intermediate_size = spec.intermediate_size // shard.world
        self.residual = buffer(spec.hidden_size)
        self.hidden = buffer(spec.hidden_size)
        self.qkv = buffer((num_heads + 2 * num_kv_heads) * head_dim)
        self.cos = buffer(head_dim)
        self.sin = buffer(head_dim)
        self.attended = buffer(num_heads * head_dim)
        self.gate_up = buffer(2 * intermediate_size)
        self.activated = buffer(intermediate_size)
        self._last: tuple[int, Rows] | None = None

    def rows(self, n: int) -> Rows:
        """Views of the first n rows; kept until another n is asked for, as decode steps ask for the same again."""
        if self._last is None or self._last[0] != n:
            self._last = (n, self._slice(n))
        return self._last[1]

    def gather(self, rows: Rows, wanted: torch.Tensor) -> Rows:  # wanted: int64 [k], k <= n
        """The residual stream and attention's result of some rows, moved together; all else of them is lost."""
        residual, attended = rows.residual[wanted], rows.attended[wanted]
        few = self.rows(len(wanted))
        few.residual.copy_(residual)
        few.attended.copy_(attended)
        return few

    def _slice(self, n: int) -> Rows:
        if n > self.max_num_tokens:
            raise ValueError(f"a step of {n} tokens exceeds the {self.max_num_tokens} that the buffers were made for")
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv, attended = self.qkv[:n], self.attended[:n]
        by_head = qkv.view(n, heads + 2 * kv_heads, self.head_dim)
        return Rows(
            residual=self.residual[:n],
            hidden=self.hidden[:n],
            qkv=qkv,
            query=by_head[:, :heads],
            key=by_head[:, heads : heads + kv_heads],
            value=by_head[:, heads + kv_heads :],
            rotation=Rotation(self.cos[:n], self.sin[:n]),
            attended=attended,
            attended_heads=attended.view(n, heads, self.head_dim),
            gate_up=self.gate_up[:n],
            activated=self.activated[:n],
        )
