"""Chunks of prompts with torch's variable-length attention (FlashAttention), on a copy of their K and V.

`gather_kv` copies the K and V of a chunk's sequence into rows for torch's attention. A chunk's rows are the last of its
sequence: row j of q attends to seq_len - q + j + 1 keys. If torch has no such attention, as without a GPU,
scaled_dot_product_attention is used for each sequence. prefill_table.py selects the chunks.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from vllm_lite.kernels.cuda.attention.gather_kv import gather_kv
from vllm_lite.kernels.cuda.launcher import Launcher, require

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Rows and keys of a step's attention, the same for all layers."""

    rows: torch.Tensor | None  # int64 [num_rows], the step's rows that attend here; None: all rows
    query_start_loc: torch.Tensor  # int32 [num_attending + 1], among the rows that attend
    kv_start_loc: torch.Tensor  # int32 [num_attending + 1], among the gathered tokens
    gather_start_loc: torch.Tensor  # int32 [num_seqs + 1], among the gathered tokens
    queries: tuple[slice, ...]  # rows of each attending sequence, among the rows that attend
    keys: tuple[slice, ...]  # keys of each attending sequence, among the gathered tokens
    max_query_len: int
    max_seq_len: int


def make_plan(
    query_lens: Ints,  # [num_seqs]
    seq_lens: Ints,  # [num_seqs]
    num_tokens: int,  # rows of the step, including padding
    chosen: NDArray[np.bool_],  # [num_seqs]
    device: torch.device,
) -> VarlenPlan:
    """Make the plan for the chosen sequences with rows, from lengths on the host."""
    attending = np.flatnonzero(chosen & (query_lens > 0))
    first_rows = np.cumsum(query_lens) - query_lens
    rows = np.repeat(first_rows[attending], query_lens[attending]) + _counts(query_lens[attending])
    gathered = np.zeros(len(seq_lens), np.int64)
    gathered[attending] = seq_lens[attending]
    starts = [np.concatenate(([0], np.cumsum(lens))) for lens in (query_lens[attending], seq_lens[attending], gathered)]
    queries, keys = (tuple(slice(int(a), int(b)) for a, b in pairwise(ends)) for ends in starts[:2])
    query_start_loc, kv_start_loc, gather_start_loc = (_on(device, part.astype(np.int32)) for part in starts)
    return VarlenPlan(
        None if len(rows) == num_tokens else _on(device, rows.astype(np.int64)),
        query_start_loc,
        kv_start_loc,
        gather_start_loc,
        queries,
        keys,
        int(query_lens[attending].max(initial=0)),
        int(gathered.max(initial=0)),
    )


def _counts(sizes: Ints) -> Ints:
    """Concatenated ranges of these sizes: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)


def _on(device: torch.device, values: NDArray[Any]) -> torch.Tensor:
    """Copy to the device without blocking the host."""
    made = torch.from_numpy(values)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def torch_varlen() -> Callable[..., Any] | None:
    """torch's `varlen_attn` if it exists and supports causal attention, else None."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    function: Callable[..., Any] = varlen.varlen_attn
    names = inspect.signature(function).parameters
    return function if "scale" in names and ("window_size" in names or "is_causal" in names) else None


def varlen_prefill(  # noqa: PLR0913, PLR0917
    launcher: Launcher,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size]
    query: torch.Tensor,  # [num_tokens, num_heads, head_size]
    kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size], any strides but the last, which is 1
    block_tables: torch.Tensor,  # int32 [num_seqs, max_blocks]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    plan: VarlenPlan,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Causal attention of the sequences in `plan`; other rows of `out` are unchanged.

    float16 or bfloat16; the cache has the same type or float8. Needs 2 * num_kv_heads * head_size * (sum of the
    sequences' lengths) elements of scratch memory.
    """
    require(query.dim() == 3 and out.shape == query.shape, "query and out must be [num_tokens, num_heads, head_size]")
    if plan.max_query_len == 0:
        return
    shape = (plan.keys[-1].stop, kv.shape[2], kv.shape[4])
    keys, values = query.new_empty(shape), query.new_empty(shape)
    gather_kv(
        *(launcher, keys, values, kv, block_tables, plan.gather_start_loc, seq_lens),
        max_rows=plan.max_seq_len,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    rows = query if plan.rows is None else query.index_select(0, plan.rows)
    function = torch_varlen() if query.is_cuda else None
    if function is not None:
        attended = call_varlen(function, rows, keys, values, plan, scale)
    else:
        attended = attend_by_sequence(rows, keys, values, plan, scale)
    if plan.rows is None:
        out.copy_(attended)
    else:
        out.index_copy_(0, plan.rows, attended)


def call_varlen(
    function: Callable[..., Any],
    query: torch.Tensor,  # [num_rows, num_heads, head_size]
    keys: torch.Tensor,  # [num_kv_rows, num_kv_heads, head_size]
    values: torch.Tensor,  # like keys
    plan: VarlenPlan,
    scale: float,
) -> torch.Tensor:
    """Call torch's varlen_attn, of any version: options are those in its signature."""
    names = inspect.signature(function).parameters
    options: dict[str, Any] = {"scale": scale}
    options |= {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "num_splits" in names:
        options["num_splits"] = 1  # an order of additions that does not depend on the batch
    if query.shape[1] > keys.shape[1] and "enable_gqa" in names:
        options["enable_gqa"] = True  # versions without it always accept fewer KV heads
    lengths = (plan.query_start_loc, plan.kv_start_loc, plan.max_query_len, plan.max_seq_len)
    attended: torch.Tensor = function(query, keys, values, *lengths, **options)
    return attended


def attend_by_sequence(
    query: torch.Tensor,  # [num_rows, num_heads, head_size]
    keys: torch.Tensor,  # [num_kv_rows, num_kv_heads, head_size]
    values: torch.Tensor,  # like keys
    plan: VarlenPlan,
    scale: float,
) -> torch.Tensor:  # [num_rows, num_heads, head_size]
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: 1.5 s of CPU time

    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for rows, tokens in zip(plan.queries, plan.keys, strict=True):
        if tokens.start == tokens.stop:
            continue
        mask = causal_lower_right(rows.stop - rows.start, tokens.stop - tokens.start)
        q, k, v = (part.transpose(0, 1)[None] for part in (query[rows], keys[tokens], values[tokens]))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        out[rows] = attended[0].transpose(0, 1)
    return out
