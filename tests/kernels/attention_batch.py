"""Batches for tests of the CUDA attention kernels: random Q, K and V in a paged cache, and the right results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, Scoring

UNTOUCHED = 7.0
"""Value that `out` holds before the call; rows outside the batch must keep it."""
NO_BLOCK = 10**6
"""Block id in the entries of the table that no kernel may read."""


@dataclass(frozen=True, kw_only=True)
class AttentionSetup:
    """Fields of a setup that all kernels share; each kernel's setup adds the lengths of its sequences."""

    num_heads: int = 2
    num_kv_heads: int = 1
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "block-head-token"
    padding: int = 0  # rows after the last sequence's
    fused_rows: bool = False  # query is a part of wider rows, and out too
    query_scale: float = 1.0
    sharpness: float = 1.0
    """Factor of the scores. At 100 one token has nearly all of a row's weight, and the exponentials of scores exceed
    the range of floats."""

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def lengths(self) -> Sequence[tuple[int, int]]:
        """(query_len, seq_len) of each sequence."""
        raise NotImplementedError


AnySetup = TypeVar("AnySetup", bound=AttentionSetup)


@dataclass
class Batch(Generic[AnySetup]):
    """The tensors of a setup on the device, and K and V of each sequence in float64 on the CPU."""

    setup: AnySetup
    query: torch.Tensor
    kv: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    contents: list[torch.Tensor]  # [2, num_kv_heads, seq_len, head_size]

    @property
    def scale(self) -> float:
        return float(self.setup.head_size**-0.5) * self.setup.sharpness / self.setup.query_scale

    @property
    def cache(self) -> PagedKV:
        return PagedKV(self.kv, self.block_tables, self.query_start_loc, self.seq_lens)

    @property
    def scoring(self) -> Scoring:
        setup = self.setup
        scales = (setup.k_scale, setup.v_scale)
        return Scoring(self.scale, setup.soft_cap, self.slopes, setup.window, *scales, sinks=self.sinks)

    def out(self) -> torch.Tensor:
        num_tokens, num_heads, head_size = self.query.shape
        wide = (num_tokens, num_heads + self.setup.fused_rows, head_size)
        return torch.full(wide, UNTOUCHED, dtype=self.query.dtype, device=self.query.device)[:, :num_heads]


def make_kv(setup: AttentionSetup, num_blocks: int) -> torch.Tensor:
    """A cache full of NaN on the CPU, [num_blocks, 2, num_kv_heads, block_size, head_size] by strides."""
    n, h, b, d = num_blocks, setup.num_kv_heads, setup.block_size, setup.head_size
    views: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
        "block-head-token": ((n, 2, h, b, d), lambda kv: kv),
        "block-token-head": ((n, 2, b, h, d), lambda kv: kv.transpose(2, 3)),
        "block-layer": ((n, 3, 2, h, b, d), lambda kv: kv[:, 1]),
        "kv-block-token-head": ((2, n, b, h, d), lambda kv: kv.transpose(0, 1).transpose(2, 3)),
    }
    shape, view = views[setup.layout]
    if setup.cache_dtype.itemsize == 1:
        return view(torch.full(shape, 0x7F, dtype=torch.uint8).view(setup.cache_dtype))
    return view(torch.full(shape, torch.nan, dtype=setup.cache_dtype))


def store(kv: torch.Tensor, table: torch.Tensor, values: torch.Tensor, first: int) -> None:
    """Put values [2, num_kv_heads, seq_len, head_size] from position `first` on into the blocks of `table`."""
    kv, values = (x.view(torch.uint8) if kv.itemsize == 1 else x for x in (kv, values))
    block_size = kv.shape[3]
    for position in range(first, values.shape[2]):
        kv[table[position // block_size], :, :, position % block_size] = values[:, :, position]


def make_batch(setup: AnySetup, device: torch.device, seed: int = 0) -> Batch[AnySetup]:
    random = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = zip(*setup.lengths(), strict=True)
    starts = torch.tensor((0, *query_lens)).cumsum(0)
    counts = [-(-n // setup.block_size) for n in seq_lens]
    ids = (torch.randperm(sum(counts), generator=random) + 1).split(counts)
    tables = torch.full((len(counts), max(counts) + 2), NO_BLOCK, dtype=torch.int32)
    storage = make_kv(setup, sum(counts) + 1)
    contents = []
    for table, blocks, seq_len, query_len in zip(tables, ids, seq_lens, query_lens, strict=True):
        table[: len(blocks)] = blocks
        shape = (2, setup.num_kv_heads, seq_len, setup.head_size)
        values = torch.randn(shape, generator=random).to(setup.cache_dtype)
        # Tokens that no row sees are not in the cache, and their blocks are not in the table.
        first = 0 if setup.window is None else max(0, seq_len - query_len - setup.window + 1)
        store(storage, table, values, first)
        table[: first // setup.block_size] = NO_BLOCK
        scales = torch.tensor([setup.k_scale, setup.v_scale] if values.itemsize == 1 else [1.0, 1.0])
        contents.append(values.double() * scales.view(2, 1, 1, 1))
    wide = setup.num_heads + (2 * setup.num_kv_heads if setup.fused_rows else 0)
    rows = torch.randn(int(starts[-1]) + setup.padding, wide, setup.head_size, generator=random) * setup.query_scale
    return Batch(
        setup,
        rows.to(setup.dtype).to(device)[:, : setup.num_heads],
        to_device(storage, device),
        tables.to(device),
        starts.to(torch.int32).to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        torch.linspace(0.05, 0.7, setup.num_heads).to(device) if setup.alibi else None,
        torch.linspace(-3, 5, setup.num_heads).to(device) if setup.sinks else None,
        contents,
    )


def to_device(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `view` to the device with its strides and all bytes between its elements."""
    base = view._base if view._base is not None else view
    flat = base.as_strided((base.untyped_storage().nbytes() // base.itemsize,), (1,), 0).to(device)
    return flat.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())


def reference(batch: Batch[AnySetup], sequence: int) -> torch.Tensor:
    """The right output [query_len, num_heads, head_size] of one sequence, in float64 by the definition of attention."""
    setup = batch.setup
    start, end = batch.query_start_loc[sequence : sequence + 2].tolist()
    query = batch.query[start:end].cpu().double()
    keys, values = batch.contents[sequence].repeat_interleave(setup.num_heads // setup.num_kv_heads, 1)
    scores = torch.einsum("qhd,hkd->hqk", query, keys) * batch.scale
    if setup.soft_cap:
        scores = setup.soft_cap * torch.tanh(scores / setup.soft_cap)
    seq_len = keys.shape[1]
    distance = torch.arange(seq_len) - torch.arange(seq_len - (end - start), seq_len)[:, None]
    if batch.slopes is not None:
        scores = scores + batch.slopes.cpu().double()[:, None, None] * distance
    hidden = distance > 0
    if setup.window is not None:
        hidden |= distance <= -setup.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if batch.sinks is not None:
        sinks = batch.sinks.cpu().double()[:, None, None].expand(-1, end - start, 1)
        return torch.einsum("hqk,hkd->qhd", torch.cat((scores, sinks), -1).softmax(-1)[..., :-1], values)
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values)


def move_far(batch: Batch[AnySetup]) -> None:
    """Move three blocks of the only sequence, in float8, behind 2^31 elements; only the blocks in use take memory."""
    far = 2**31 // batch.kv[0].numel() + 2
    kv = torch.empty((far + 4, *batch.kv.shape[1:]), dtype=torch.uint8, device=batch.kv.device)
    for i in range(3):
        kv[far + i] = batch.kv.view(torch.uint8)[int(batch.block_tables[0, i])]
        batch.block_tables[0, i] = far + i
    batch.kv = kv.view(batch.kv.dtype)
