"""Chunked prefill without a kernel of our own for the products: gather the pages, then let torch attend.

torch's variable-length attention (FlashAttention-2) where torch offers it, else scaled_dot_product_attention for each
sequence. Both see a chunk's rows as the last of its sequence: row j of q sees seq_len - q + j + 1 keys. It serves as
the other opinion, in results and in speed, on `prefill_attention`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from vllm_lite.kernels.cuda.gather_kv import gather_kv
from vllm_lite.kernels.cuda.launcher import Launcher, require


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Which rows attend to what in a step: the same for all of its layers."""

    rows: torch.Tensor | None  # int64 [num_rows], rows of the step that attend here; None: all of them
    query_start_loc: torch.Tensor  # int32 [num_seqs + 1], among the rows that attend
    kv_start_loc: torch.Tensor  # int32 [num_seqs + 1], among the gathered tokens
    queries: tuple[slice, ...]  # of each sequence that attends, among the rows that attend
    keys: tuple[slice, ...]  # of each sequence that attends, among the gathered tokens
    max_query_len: int
    max_seq_len: int


def make_plan(
    query_start_loc: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor,  # int32 [num_seqs]
    num_tokens: int,  # rows of the step, padding included
    min_query_len: int = 2,
) -> VarlenPlan:
    """Plan for the sequences with at least `min_query_len` query rows. Waits for the device."""
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    rows: list[int] = []
    query_starts, kv_starts = [0], [0]
    for i, seq_len in enumerate(lens):
        attends = starts[i + 1] - starts[i] >= min_query_len
        rows += range(starts[i], starts[i + 1]) if attends else ()
        query_starts.append(len(rows))
        kv_starts.append(kv_starts[-1] + (seq_len if attends else 0))
    queries = tuple(slice(a, b) for a, b in pairwise(query_starts))
    keys = tuple(slice(a, b) for a, b in pairwise(kv_starts))
    attending = [i for i, query in enumerate(queries) if query.stop > query.start]

    def on_device(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=seq_lens.device)

    return VarlenPlan(
        None if rows == list(range(num_tokens)) else on_device(rows, torch.int64),
        on_device(query_starts, torch.int32),
        on_device(kv_starts, torch.int32),
        tuple(queries[i] for i in attending),
        tuple(keys[i] for i in attending),
        max((query.stop - query.start for query in queries), default=0),
        max((key.stop - key.start for key in keys), default=0),
    )


def varlen_reason(window: int | None, soft_cap: float, has_alibi: bool) -> str | None:
    """None when gathering serves this attention, else why only `prefill_attention` does."""
    if window is not None:
        return "gathering would copy what lies before the window"
    if soft_cap:
        return "torch's attention has no soft cap"
    if has_alibi:
        return "torch's variable-length attention has no ALiBi"
    return None


def torch_varlen() -> Callable[..., Any] | None:
    """torch's `varlen_attn` if this torch has one that can be causal, else None."""
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
    """Causal attention of the sequences in `plan`; other rows of `out` stay.

    float16 or bfloat16, the cache of that type or float8. Takes 2 * num_kv_heads * head_size * (sum of the sequences'
    lengths) elements of scratch memory.
    """
    require(query.dim() == 3 and out.shape == query.shape, "query and out must be [num_tokens, num_heads, head_size]")
    if plan.max_query_len == 0:
        return
    shape = (plan.keys[-1].stop, kv.shape[2], kv.shape[4])
    keys, values = query.new_empty(shape), query.new_empty(shape)
    gather_kv(
        *(launcher, keys, values, kv, block_tables, plan.kv_start_loc, seq_lens),
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
    """`function` is torch's varlen_attn of whatever version: its signature says what it takes."""
    names = inspect.signature(function).parameters
    options: dict[str, Any] = {"scale": scale}
    options |= {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "num_splits" in names:
        options["num_splits"] = 1  # one order of additions, whatever else is in the batch
    group = query.shape[1] // keys.shape[1]
    if group > 1 and "enable_gqa" in names:
        options["enable_gqa"] = True
    elif group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
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
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for rows, tokens in zip(plan.queries, plan.keys, strict=True):
        if tokens.start == tokens.stop:
            continue
        mask = causal_lower_right(rows.stop - rows.start, tokens.stop - tokens.start)
        q, k, v = (part.transpose(0, 1)[None] for part in (query[rows], keys[tokens], values[tokens]))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        out[rows] = attended[0].transpose(0, 1)
    return out
