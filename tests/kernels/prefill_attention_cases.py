"""Cases of chunked prefill that any launcher must pass: our kernel and the gathered path against float64.

`CASES` holds (name, case); a case raises AssertionError. The emulator runs them in the tests, a GPU in a script.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.kernels.attention_batch import UNTOUCHED, AttentionSetup, Batch, make_batch, move_far, reference
from tests.kernels.cases import Case
from vllm_lite.kernels.cuda.attention.attention_work import prefill_tiles
from vllm_lite.kernels.cuda.attention.gather_kv import gather_kv
from vllm_lite.kernels.cuda.attention.prefill_attention import kernel_name, prefill_attention
from vllm_lite.kernels.cuda.attention.varlen import make_plan, varlen_prefill
from vllm_lite.kernels.cuda.launcher import Launcher

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCES = {BF16: 8e-3, FP16: 1.2e-3}
"""Largest error of a row, relative to its length. One key too many or too few of 600 makes 0.04."""


@dataclass(frozen=True)
class Setup(AttentionSetup):
    chunks: tuple[tuple[int, int], ...]  # (query_len, tokens before it) of each sequence
    min_query_len: int = 2

    def lengths(self) -> list[tuple[int, int]]:
        return [(query_len, query_len + before) for query_len, before in self.chunks]

    @property
    def kernel(self) -> str:
        return kernel_name(self.dtype, self.cache_dtype, self.head_size, 64 if self.head_size <= 128 else 32)


def run(batch: Batch[Setup], launcher: Launcher) -> torch.Tensor:
    setup, out = batch.setup, batch.out()
    query_lens, seq_lens = (np.array(lens) for lens in zip(*setup.lengths(), strict=True))
    group = setup.num_heads // setup.num_kv_heads
    tiles = prefill_tiles(query_lens, seq_lens, group, query_lens >= setup.min_query_len)
    on_device = torch.from_numpy(tiles).to(out.device)
    prefill_attention(launcher, out, batch.query, batch.cache, on_device, batch.scoring)
    return out


def check_rows(batch: Batch[Setup], out: torch.Tensor) -> None:
    """Check that every row of `out` is right, or untouched if it is padding or a decode's."""
    setup, out = batch.setup, out.cpu()
    end = 0
    for i, (query_len, before) in enumerate(setup.chunks):
        start, end = end, end + query_len
        if query_len < setup.min_query_len:
            assert (out[start:end] == UNTOUCHED).all(), f"rows of sequence {i} were written"
            continue
        want = reference(batch, i)
        error = (out[start:end].double() - want).norm(dim=-1) / want.norm(dim=-1)
        worst = int(error.nan_to_num(torch.inf).flatten().argmax())
        tolerance = TOLERANCES[setup.dtype]
        assert (error <= tolerance).all(), (
            f"sequence {i} ({query_len} after {before}): row {worst // setup.num_heads} of head "
            f"{worst % setup.num_heads} is off by {error.flatten()[worst]:.2e}, more than {tolerance:.0e}"
        )
    assert (out[end:] == UNTOUCHED).all(), "padding rows were written"


# ---- what is tested

RAGGED = tuple((query_len, 40) for query_len in (2, 15, 1, 16, 17, 63, 64, 65, 130))
SMALL = ((17, 40), (33, 0), (1, 50))

SETUPS: dict[str, Setup] = {
    **{f"prefix {n}": Setup(tuple((q, n) for q, _ in RAGGED)) for n in (0, 1, 15, 16, 17, 513)},
    "single rows too": Setup(((1, 0), (1, 16), (1, 513), (5, 3), (1, 63), (1, 64)), min_query_len=1),
    "only long ones": Setup(RAGGED, min_query_len=64),
    **{f"head size {d}": Setup(SMALL, head_size=d) for d in (8, 32, 80, 96, 112, 120, 128, 192, 256)},
    **{f"half, head size {d}": Setup(SMALL, head_size=d, dtype=FP16) for d in (64, 128)},
    **{f"group {g}": Setup(SMALL, num_heads=2 * g, num_kv_heads=2) for g in (1, 3, 4, 5, 7, 8, 16)},
    "group 71": Setup(SMALL, num_heads=71),
    **{f"block size {b}": Setup(((17, 140), (65, 5)), block_size=b, num_kv_heads=2) for b in (1, 4, 8, 32, 64, 128)},
    **{f"window {w}": Setup(((70, 150), (3, 64), (20, 0)), window=w) for w in (1, 7, 33, 64, 100, 1000)},
    "soft cap": Setup(SMALL, soft_cap=1.5),
    "alibi": Setup(SMALL, num_heads=4, num_kv_heads=2, alibi=True),
    "sinks": Setup(RAGGED, num_heads=6, num_kv_heads=2, sinks=True),
    "sinks, soft cap, window": Setup(((40, 90), (5, 0)), num_heads=3, soft_cap=2.0, window=29, sinks=True),
    "sinks, float8": Setup(SMALL, num_heads=4, kv_dtype=E4M3, k_scale=0.5, v_scale=3.0, sinks=True),
    "alibi, soft cap, window": Setup(((40, 90), (5, 0)), num_heads=3, alibi=True, soft_cap=2.0, window=29),
    **{
        f"{cache}, {dtype}, head size {d}": Setup(
            SMALL, head_size=d, dtype=dtype, kv_dtype=cache, num_kv_heads=2, k_scale=0.5, v_scale=3.0
        )
        for cache, dtype, d in ((E4M3, BF16, 64), (E5M2, BF16, 120), (E4M3, FP16, 256), (E5M2, FP16, 64))
    },
    "scales of another cache do not count": Setup(SMALL, k_scale=0.5, v_scale=3.0),
    "float8, window": Setup(((40, 90), (5, 0)), kv_dtype=E4M3, window=21, block_size=8, layout="block-layer"),
    **{
        layout: Setup(SMALL, num_heads=6, num_kv_heads=3, layout=layout)
        for layout in ("block-token-head", "block-layer", "kv-block-token-head")
    },
    "strided rows, padding rows": Setup(SMALL, num_heads=4, num_kv_heads=2, fused_rows=True, padding=3),
    "empty chunks": Setup(((0, 0), (5, 3), (0, 20), (4, 0), (0, 0))),
}


def kernel_matches(setup: Setup) -> Case:
    def case(launcher: Launcher, device: torch.device) -> None:
        batch = make_batch(setup, device)
        check_rows(batch, run(batch, launcher))

    return case


def gathered_matches(setup: Setup) -> Case:
    """The path through torch; where torch has FlashAttention this shows how it aligns its causal mask."""

    def case(launcher: Launcher, device: torch.device) -> None:
        batch = make_batch(setup, device)
        out = batch.out()
        query_lens, seq_lens = (np.array(lens) for lens in zip(*setup.lengths(), strict=True))
        plan = make_plan(query_lens, seq_lens, len(out), query_lens >= setup.min_query_len, device)
        varlen_prefill(
            *(launcher, out, batch.query, batch.kv, batch.block_tables, batch.seq_lens, plan),
            scale=batch.scale,
            k_scale=setup.k_scale,
            v_scale=setup.v_scale,
        )
        check_rows(batch, out)

    return case


def rows_of_nothing_are_zero(launcher: Launcher, device: torch.device) -> None:
    """A sequence of length 0 has rows where a captured graph is padded: they become zero, neighbours stay right."""
    batch = make_batch(Setup(((3, 0), (4, 20))), device)
    batch.seq_lens[0] = 0
    out = run(batch, launcher)
    assert (out[:3] == 0).all()
    assert (out[3:].cpu().double() - reference(batch, 1)).norm() < 0.01 * reference(batch, 1).norm()


def same_bits_in_any_batch(launcher: Launcher, device: torch.device) -> None:
    batch = make_batch(Setup(((70, 33), (19, 100), (2, 0)), num_heads=6, num_kv_heads=2), device)
    together, end = run(batch, launcher), 0
    for i, chunk in enumerate(batch.setup.chunks):
        start, end = end, end + chunk[0]
        alone = replace(
            batch,
            setup=replace(batch.setup, chunks=(chunk,)),
            query=batch.query[start:end],
            block_tables=batch.block_tables[i : i + 1],
            query_start_loc=batch.query_start_loc[i : i + 2] - start,
            seq_lens=batch.seq_lens[i : i + 1],
        )
        assert torch.equal(run(alone, launcher), together[start:end]), f"sequence {i} depends on the others"


def same_bits_in_any_chunks(launcher: Launcher, device: torch.device) -> None:
    for window, head_size in ((None, 64), (45, 64), (None, 256)):
        setup = Setup(((150, 0),), num_heads=3, window=window, head_size=head_size, min_query_len=1, sinks=True)
        batch = make_batch(setup, device)
        whole = run(batch, launcher)
        for sizes in ((64, 86), (1, 149), (17, 33, 99, 1)):
            start = 0
            for size in sizes:
                part = replace(
                    batch,
                    setup=replace(setup, chunks=((size, start),)),
                    query=batch.query[start : start + size],
                    query_start_loc=torch.tensor([0, size], dtype=torch.int32, device=device),
                    seq_lens=torch.tensor([start + size], dtype=torch.int32, device=device),
                )
                assert torch.equal(run(part, launcher), whole[start : start + size]), f"{sizes} differs from one chunk"
                start += size


def offsets_beyond_32_bits(launcher: Launcher, device: torch.device) -> None:
    batch = make_batch(Setup(((6, 30),), kv_dtype=E4M3), device)
    move_far(batch)
    check_rows(batch, run(batch, launcher))
    keys, values = torch.empty(2, 36, 1, 64, dtype=BF16, device=device)
    start_loc = torch.tensor([0, 36], dtype=torch.int32, device=device)
    gather_kv(launcher, keys, values, batch.kv, batch.block_tables, start_loc, batch.seq_lens, max_rows=36)
    assert torch.equal(torch.stack([keys, values]).cpu().double(), batch.contents[0].transpose(1, 2))


def gather_takes_the_last_rows(launcher: Launcher, device: torch.device) -> None:
    """Any number of rows of a sequence, also none; other rows are not read."""
    setup = Setup(((5, 60), (2, 7), (1, 39)), num_heads=3, num_kv_heads=3, head_size=24, kv_dtype=E5M2, v_scale=0.5)
    batch = make_batch(setup, device)
    wanted = (37, 0, 40)
    batch.block_tables[0, :1] = 0
    start_loc = torch.tensor([0, 37, 37, 77], dtype=torch.int32, device=device)
    keys, values = torch.empty(2, 77, 3, 24, dtype=BF16, device=device)
    tables, lens = batch.block_tables, batch.seq_lens
    gather_kv(launcher, keys, values, batch.kv, tables, start_loc, lens, max_rows=40, v_scale=0.5)
    rows = [kv[:, :, kv.shape[2] - n :] for kv, n in zip(batch.contents, wanted, strict=True)]
    assert torch.equal(torch.stack([keys, values]).cpu().double(), torch.cat(rows, 2).transpose(1, 2))


GATHERED: dict[str, Setup] = {
    "ragged": Setup(RAGGED, num_heads=6, num_kv_heads=2),
    "all rows": Setup(((17, 40), (33, 0), (1, 50)), min_query_len=1),
    "half, block size 4": Setup(SMALL, dtype=FP16, head_size=128, block_size=4, layout="block-token-head"),
    "float8": Setup(SMALL, kv_dtype=E4M3, k_scale=0.5, v_scale=2.0, num_heads=4, num_kv_heads=2, padding=2),
    "empty chunks": Setup(((0, 0), (5, 3), (0, 20), (4, 0), (0, 0))),
}

CASES: list[tuple[str, Case]] = [
    *((name, kernel_matches(setup)) for name, setup in SETUPS.items()),
    *((f"gathered, {name}", gathered_matches(setup)) for name, setup in GATHERED.items()),
    ("rows of nothing are zero", rows_of_nothing_are_zero),
    ("same bits in any batch", same_bits_in_any_batch),
    ("same bits in any chunks", same_bits_in_any_chunks),
    ("offsets beyond 32 bits", offsets_beyond_32_bits),
    ("gather takes the last rows", gather_takes_the_last_rows),
]
