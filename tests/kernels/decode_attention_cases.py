"""Cases of decode attention that any launcher must pass: the engine's kernel and the simple one against float64.

`CASES` holds (name, case); a case raises AssertionError. The emulator runs them in the tests, a GPU in a script.
"""

from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch

from tests.kernels.attention_batch import NO_BLOCK, UNTOUCHED, AttentionSetup, Batch, make_batch, move_far, reference
from tests.kernels.cases import Case
from vllm_lite.kernels.cuda.attention import attention_simple as simple
from vllm_lite.kernels.cuda.attention import attention_work as work
from vllm_lite.kernels.cuda.attention import decode_attention as decode
from vllm_lite.kernels.cuda.launcher import Launcher

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCES = {BF16: 6e-3, FP16: 1e-3, FP32: 1e-5}
"""Largest error of a row, relative to its norm. One key too many or too few among 100 causes an error of 0.1."""


@dataclass(frozen=True)
class Setup(AttentionSetup):
    lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None  # None: 1 each
    max_query_len: int = 1  # sequences with more rows belong to another kernel
    split_tokens: int = 0
    room: int = 0  # unused entries at the end of the lists

    def lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.query_lens or (1,) * len(self.lens), self.lens, strict=True))

    @property
    def kernel(self) -> str:
        group = self.num_heads // self.num_kv_heads
        return decode.kernel_name(self.dtype, self.cache_dtype, self.head_size, group, self.block_size)


def run(batch: Batch[Setup], launcher: Launcher) -> torch.Tensor:
    setup, out = batch.setup, batch.out()
    query_lens, seq_lens = (np.array(lens) for lens in zip(*setup.lengths(), strict=True))
    rows = work.rows_of(query_lens, seq_lens, len(out), query_lens <= setup.max_query_len)
    given = work.SplitList.on(out.device, rows, setup.window, setup.split_tokens)
    if setup.room:  # like a graph's list: unused entries follow the used ones
        nothing = torch.full((setup.room, 4), NO_BLOCK, dtype=torch.int32, device=out.device)
        given = work.SplitList(torch.cat((given.splits, nothing)), several=True)
    workspace = decode.Workspace.for_splits(out.device, given.most_splits, setup.num_heads, setup.head_size)
    workspace.parts.fill_(torch.nan)
    decode.decode_attention(
        *(launcher, out, batch.query, batch.cache._replace(query_start_loc=None), given),
        batch.scoring,
        workspace=workspace if given.several else None,
        split_tokens=setup.split_tokens,
    )
    assert not workspace.arrived.any(), "a replay would find blocks that have arrived"
    return out


def run_simple(batch: Batch[Setup], launcher: Launcher) -> torch.Tensor:
    out = batch.out()
    simple.attention_simple(launcher, out, batch.query, batch.cache, batch.scoring)
    return out


def check_rows(batch: Batch[Setup], out: torch.Tensor, *, decodes_only: bool = True) -> None:
    """Check every row of `out`: it is right, zero if its context is empty, or untouched if it belongs to another
    kernel."""
    setup, out = batch.setup, out.cpu()
    starts = batch.query_start_loc.tolist()
    for i, seq_len in enumerate(setup.lens):
        rows = out[starts[i] : starts[i + 1]]
        if decodes_only and len(rows) > setup.max_query_len:
            assert (rows == UNTOUCHED).all(), f"rows of sequence {i} were written"
        elif seq_len == 0:
            assert (rows == 0).all(), f"rows of the empty sequence {i} are not zero"
        elif len(rows):
            want = reference(batch, i)
            error = ((rows.double() - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(torch.inf)
            worst, tolerance = error.max(), TOLERANCES[setup.dtype]
            assert worst <= tolerance, f"sequence {i}, length {seq_len}: off by {worst:.2e}, more than {tolerance:.0e}"
    assert (out[starts[-1] :] == 0).all(), "rows after the last sequence are not zero"


# ---- what is tested

RAGGED = (0, 1, 15, 16, 17, 513)
SHORT = (17, 40, 5)
MIXED = (1, 3, 1, 0, 1, 1, 2)  # query lengths for the contexts in
MIXED_LENS = (33, 9, 0, 0, 70, 1, 0)

SETUPS: dict[str, Setup] = {
    "ragged": Setup(RAGGED),
    "ragged, NHD": Setup(RAGGED, num_heads=4, num_kv_heads=2, layout="block-token-head"),
    "in one split": Setup(RAGGED, split_tokens=1024),
    **{f"splits of {n}": Setup((0, 1, 100, 513), num_heads=4, split_tokens=n, room=3) for n in (16, 48, 256)},
    "sharp scores, splits": Setup((513, 90), num_heads=4, sharpness=100.0, split_tokens=16),
    **{f"head size {d}": Setup(SHORT, head_size=d) for d in (8, 32, 80, 96, 112, 120, 128, 192, 256)},
    **{f"half, head size {d}": Setup(SHORT, head_size=d, dtype=FP16) for d in (64, 128)},
    **{f"group {g}": Setup(SHORT, num_heads=2 * g, num_kv_heads=2) for g in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33)},
    "group 71": Setup(SHORT, num_heads=71),
    "group 12, head size 128": Setup(SHORT, num_heads=12, head_size=128),
    "group 12, head size 256": Setup(SHORT, num_heads=12, head_size=256),
    **{f"block size {b}": Setup((17, 140), block_size=b, num_kv_heads=2) for b in (1, 4, 8, 32, 64, 128)},
    **{f"window {w}": Setup((150, 16, 5), window=w, split_tokens=32) for w in (1, 5, 16, 17, 18, 100)},
    "window, block size 4": Setup((158, 16, 5), window=21, block_size=4, split_tokens=16),
    "soft cap": Setup(SHORT, soft_cap=1.5),
    "alibi": Setup(SHORT, num_heads=6, num_kv_heads=2, alibi=True),
    "sinks": Setup(RAGGED, num_heads=6, num_kv_heads=2, sinks=True, split_tokens=1024),
    "sinks, splits": Setup((0, 1, 100, 513), num_heads=4, sinks=True, split_tokens=48, room=3),
    "sinks, soft cap, window": Setup((90, 40), num_heads=20, soft_cap=2.0, window=29, split_tokens=16, sinks=True),
    "sinks, float8": Setup(SHORT, num_heads=4, kv_dtype=E4M3, k_scale=0.5, v_scale=3.0, sinks=True),
    "alibi, soft cap, window": Setup((90, 40), num_heads=20, alibi=True, soft_cap=2.0, window=29, split_tokens=16),
    **{
        f"{cache}, {dtype}, head size {d}": Setup(
            SHORT, head_size=d, dtype=dtype, kv_dtype=cache, num_heads=6, num_kv_heads=2, k_scale=0.5, v_scale=3.0
        )
        for cache, dtype, d in (
            *((E4M3, BF16, 64), (E5M2, BF16, 120), (E4M3, FP16, 256), (E5M2, FP16, 64)),
            *((E4M3, BF16, 128), (E4M3, BF16, 192), (E5M2, BF16, 32)),
        )
    },
    "float8, window": Setup((90, 21), kv_dtype=E4M3, window=21, block_size=8, layout="block-layer"),
    "float8, queries beyond half": Setup(SHORT, kv_dtype=E4M3, query_scale=1e6),
    "float8, queries below half": Setup(SHORT, kv_dtype=E4M3, num_heads=4, query_scale=1e-9),
    **{
        layout: Setup(SHORT, num_heads=6, num_kv_heads=3, layout=layout)
        for layout in ("block-token-head", "block-layer", "kv-block-token-head")
    },
    "strided rows": Setup(SHORT, num_heads=4, num_kv_heads=2, fused_rows=True),
    "decodes among others": Setup(MIXED_LENS, MIXED, num_heads=4, padding=9),
    **{
        f"{n} rows each, {name}": Setup(
            (513, 90, n), (n, n, n), max_query_len=n, num_heads=6, num_kv_heads=2, **options
        )
        for n, name, options in (
            (2, "splits", {"sinks": True}),
            (5, "window", {"window": 40, "split_tokens": 16, "soft_cap": 2.0}),
            (16, "float8", {"kv_dtype": E4M3, "alibi": True}),
        )
    },
    "decodes among others, splits": Setup(MIXED_LENS, MIXED, num_heads=9, padding=1, split_tokens=32),
}
SIMPLE_SETUPS: dict[str, Setup] = {
    "ragged": Setup(RAGGED, dtype=FP32, num_heads=4, num_kv_heads=2),
    "mixed": Setup(MIXED_LENS, MIXED, dtype=FP32, padding=2, head_size=80, block_size=1, fused_rows=True),
    "options": Setup(
        (90, 40, 8), (5, 1, 8), dtype=FP32, num_heads=3, head_size=20, alibi=True, soft_cap=2.0, window=29
    ),
    "sinks": Setup(MIXED_LENS, MIXED, dtype=FP32, num_heads=4, padding=2, sinks=True, window=29, soft_cap=2.0),
    "float8": Setup(SHORT, dtype=BF16, kv_dtype=E4M3, head_size=256, k_scale=0.5, v_scale=3.0),
}


def kernel_matches(setup: Setup) -> Case:
    def case(launcher: Launcher, device: torch.device) -> None:
        batch = make_batch(setup, device)
        check_rows(batch, run(batch, launcher))

    return case


def simple_matches(setup: Setup) -> Case:
    def case(launcher: Launcher, device: torch.device) -> None:
        batch = make_batch(setup, device)
        check_rows(batch, run_simple(batch, launcher), decodes_only=False)

    return case


def same_bits_in_any_batch(launcher: Launcher, device: torch.device) -> None:
    """A row has the same bits alone, with others, in a list with unused entries, and as one of a sequence's rows."""
    for window in (None, 70):
        setup = Setup((530, 16, 77, 33), num_heads=6, num_kv_heads=2, window=window, sinks=True)
        batch = make_batch(setup, device)
        together = run(batch, launcher)
        for i, seq_len in enumerate(setup.lens):
            for room in (0, 300):
                alone = replace(
                    batch,
                    setup=replace(setup, lens=(seq_len,), room=room),
                    query=batch.query[i : i + 1],
                    block_tables=batch.block_tables[i : i + 1],
                    seq_lens=batch.seq_lens[i : i + 1],
                )
                assert torch.equal(run(alone, launcher), together[i : i + 1]), f"sequence {i}, {room}, {window}"


def drafts_have_the_bits_of_decodes(launcher: Launcher, device: torch.device) -> None:
    """Each of several rows of a sequence has the bits that it has alone, before the later rows exist."""
    setup = Setup((530,), (4,), max_query_len=4, num_heads=6, num_kv_heads=2, sinks=True)
    batch = make_batch(setup, device)
    together = run(batch, launcher)
    for row in range(4):
        alone = replace(
            batch, setup=replace(setup, lens=(527 + row,), query_lens=(1,)), query=batch.query[row : row + 1]
        )
        assert torch.equal(run(alone, launcher), together[row : row + 1]), f"row {row}"


def several_splits_to_a_block(launcher: Launcher, device: torch.device) -> None:
    """In a large batch each block computes several splits in turn, with the same bits."""
    for setup in (
        Setup((513, 40, 0, 300), num_heads=4, split_tokens=16),
        Setup((513, 65), head_size=256, split_tokens=48, window=450),
        Setup((513, 65), num_heads=16, split_tokens=32, kv_dtype=E4M3, block_size=8),
    ):
        batch = make_batch(setup, device)
        one_each = run(batch, launcher)
        with patch.object(decode, "TARGET_BLOCKS", 1):
            several = run(batch, launcher)
        check_rows(batch, several)
        assert torch.equal(several, one_each)


def tiles_fetched_ahead_have_the_same_bits(launcher: Launcher, device: torch.device) -> None:
    """The variant that prefetches tiles into L2 gives the same bits, and prefetches no memory outside of the cache."""
    for setup in (
        Setup((513, 40, 0, 300), num_heads=4, split_tokens=16),
        Setup((150, 16, 5), window=17, split_tokens=32, block_size=4),
        Setup((90, 21), kv_dtype=E4M3, head_size=120, block_size=32),
    ):
        batch = make_batch(setup, device)
        plain, fetch = run(batch, launcher), decode.FETCH
        try:
            decode.FETCH = not fetch
            other = run(batch, launcher)
        finally:
            decode.FETCH = fetch
        check_rows(batch, other)
        assert torch.equal(other, plain)


def offsets_beyond_32_bits(launcher: Launcher, device: torch.device) -> None:
    batch = make_batch(Setup((36,), kv_dtype=E4M3), device)
    move_far(batch)
    check_rows(batch, run(batch, launcher))


def one_token_more_would_show(launcher: Launcher, device: torch.device) -> None:
    """The tolerance distinguishes a window of 100 tokens from one of 101."""
    batch = make_batch(Setup((513,), window=100), device)
    want = reference(batch, 0)
    other = reference(replace(batch, setup=replace(batch.setup, window=101)), 0)
    assert ((other - want).norm(dim=-1) > TOLERANCES[BF16] * want.norm(dim=-1)).all()


CASES: list[tuple[str, Case]] = [
    *((name, kernel_matches(setup)) for name, setup in SETUPS.items()),
    *((f"simple, {name}", simple_matches(setup)) for name, setup in SIMPLE_SETUPS.items()),
    ("same bits in any batch", same_bits_in_any_batch),
    ("drafts have the bits of decodes", drafts_have_the_bits_of_decodes),
    ("several splits to a block", several_splits_to_a_block),
    ("tiles fetched ahead have the same bits", tiles_fetched_ahead_have_the_same_bits),
    ("offsets beyond 32 bits", offsets_beyond_32_bits),
    ("one token more would show", one_token_more_would_show),
]
