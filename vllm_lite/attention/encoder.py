"""Attention of encoders: every token of a text sees all others, or those in a window to both sides. No KV is kept.

The tokens of all texts are concatenated without padding. On a CPU the native kernels of paged attention read K and V
directly from the outputs of the projections; elsewhere torch attends to texts of one length at a time.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from vllm_lite.attention.backend import Attend, AttentionBackend, AttentionShape, Heads
from vllm_lite.attention.step_batch import HostLens, StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.kernels.cpu import attention as kernels
from vllm_lite.kernels.cpu.dtypes import FLOATS, dtype_code
from vllm_lite.kernels.cpu.library import available
from vllm_lite.kernels.select import ops_for

BLOCK_TOKENS = 64
"""Block size for the native kernel, which reads its block table once per block."""


@dataclass(slots=True)
class _Plan:
    """Plans of a step, one for each kind of layer; `heads`: those of the layer that is being computed."""

    plans: list[Any]
    table: torch.Tensor | None
    heads: Heads | None = None


class EncoderBackend(AttentionBackend):
    """See AttentionBackend. `write_kv` turns Q and K and writes nothing; `attend` reads K and V from the rows that
    `write_kv` was given."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.ops = ops_for(shape.device)
        self.kernels: list[kernels.Kernels] = []
        if shape.device.type == "cpu" and available() and shape.dtype in FLOATS and all(map(_is_native, shape.groups)):
            self.kernels = [_make_kernels(spec, shape) for spec in shape.groups]

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        return shape.first_reason(_reason)

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Bytes of the scores of the longest text, in plain torch."""
        del max_num_tokens, max_num_seqs
        return 0 if self.kernels else 4 * max(spec.num_heads for spec in self.shape.groups) * max_seq_len**2

    def prepare(self, batch: StepBatch) -> None:
        if not self.kernels:
            batch.plan = _Plan([], None)
            return
        starts, lens = batch.query_start_loc, batch.seq_lens
        first = np.arange(0, max(batch.max_seq_len, 1), BLOCK_TOKENS, dtype=np.int32)
        table = torch.from_numpy(starts.numpy()[:-1, None] + first)
        plans = [
            kernel.plan(starts, lens, batch.num_tokens, batch.max_seq_len, spec.window)
            for kernel, spec in zip(self.kernels, self.shape.groups, strict=True)
        ]
        batch.plan = _Plan(plans, table)

    def write_kv(
        self, heads: Heads, kv: torch.Tensor, batch: StepBatch, group: int, scales: KVScales | None = None
    ) -> None:
        del kv, group, scales
        heads.turn(self.ops)
        batch.plan.heads = heads

    def attend_layer(self, call: Attend, batch: StepBatch) -> None:
        plan: _Plan = batch.plan
        heads = plan.heads
        if heads is None:
            raise ValueError("attend must be called after write_kv, which sets K and V")
        if plan.table is None:
            attend_plainly(self.shape.groups[call.group], heads, batch.host, call.out, call.sinks)
            return
        table = plan.table.data_ptr(), plan.table.stride(0)
        kernel, own = self.kernels[call.group], plan.plans[call.group]
        kernel.attend_tokens(own.ctypes.data, table, (call.query, heads.key, heads.value), call.out, call.sinks)


def attend_plainly(
    spec: AttentionSpec,
    heads: Heads,
    lens: HostLens | None,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,  # float32 [num_heads]
) -> None:
    """Attend within each text in plain torch, on any device; texts of one length are batched."""
    if lens is None:
        raise ValueError("the lengths of texts must be known on the host")
    out.zero_()
    ends = np.cumsum(lens.query_lens)
    for length in np.unique(lens.query_lens).tolist():
        if not length:
            continue
        starts = (ends - lens.query_lens)[lens.query_lens == length]
        rows = torch.from_numpy((starts[:, None] + np.arange(length)).reshape(-1)).to(out.device)
        query, key, value = (
            part[rows].unflatten(0, (len(starts), length)).transpose(1, 2)
            for part in (heads.query, heads.key, heads.value)
        )
        mask = None
        if spec.window is not None:
            places = torch.arange(length, device=out.device)
            mask = (places[:, None] - places).abs() < spec.window
        if sinks is not None:
            key, value, mask = _with_sinks(spec, key, value, mask, sinks)
        found = scaled_dot_product_attention(
            query, key, value, mask, scale=spec.scale, enable_gqa=spec.num_heads != spec.num_kv_heads
        )
        out[rows] = found.transpose(1, 2).flatten(0, 1)


def _with_sinks(
    spec: AttentionSpec,
    key: torch.Tensor,  # [num_texts, num_kv_heads, length, head_size]
    value: torch.Tensor,
    mask: torch.Tensor | None,  # bool [length, length]; None: all are seen
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append a token of zeros to K and V; the returned mask adds each head's sink to the token's score."""
    length = key.shape[2]
    seen = key.new_zeros(spec.num_heads, length, length + 1)
    if mask is not None:
        seen[:, :, :length].masked_fill_(~mask, -torch.inf)
    seen[:, :, length] = sinks.to(key.dtype)[:, None]
    return pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1)), seen


def _reason(spec: AttentionSpec) -> str | None:
    unusual = spec.alibi_slopes is not None, spec.soft_cap != 0, spec.value_size is not None
    return "encoders have no ALiBi, soft cap or latent attention here" if any(unusual) else None


def _is_native(spec: AttentionSpec) -> bool:
    return spec.head_size % 8 == 0 and spec.head_size <= kernels.MAX_HEAD_SIZE


def _make_kernels(spec: AttentionSpec, shape: AttentionShape) -> kernels.Kernels:
    code = dtype_code(shape.dtype)
    sizes = kernels.Shape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        value_size=spec.head_size,
        block_size=BLOCK_TOKENS,
        dtype=code,
        kv_dtype=code,
        both_ways=1,
        scale=spec.scale,
    )
    return kernels.Kernels(sizes)
