"""Cases of attention over cached latents that any launcher must pass: the kernel against float64.

`CASES` holds (name, case); a case raises AssertionError. The emulator runs them in the tests, a GPU in a script.
"""

from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch

from tests.kernels.attention_batch import NO_BLOCK, UNTOUCHED
from tests.kernels.cases import Case
from vllm_lite.kernels.cuda.attention import attention_work as work
from vllm_lite.kernels.cuda.attention import decode_attention as decode
from vllm_lite.kernels.cuda.attention import latent_attention as latent
from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV
from vllm_lite.kernels.cuda.launcher import Launcher

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCES = {BF16: 6e-3, FP16: 1e-3}
"""Largest error of a row, relative to its norm. One token too many or too few among 100 causes an error of 0.1."""


@dataclass(frozen=True)
class Setup:
    lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None  # None: 1 each
    num_heads: int = 5
    head_size: int = 40
    value_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = BF16
    split_tokens: int = 0
    room: int = 0  # unused entries at the end of the list
    padding: int = 0  # rows after the last sequence's
    wide: int = 0  # gap between rows of the cache, in elements, and between rows of a step, in heads
    sharpness: float = 1.0

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5) * self.sharpness


@dataclass
class Batch:
    """A step on the device, and the latents of each sequence in float64 on the CPU."""

    setup: Setup
    query: torch.Tensor
    cache: PagedKV
    contents: list[torch.Tensor]  # [seq_len, head_size]

    @property
    def query_lens(self) -> tuple[int, ...]:
        return self.setup.query_lens or (1,) * len(self.setup.lens)


def make_batch(setup: Setup, device: torch.device) -> Batch:
    data = torch.Generator().manual_seed(7)
    lens, size, block_size = setup.lens, setup.head_size, setup.block_size
    query_lens = setup.query_lens or (1,) * len(lens)
    counts = [-(-n // block_size) for n in lens]
    ids = (torch.randperm(sum(counts), generator=data) + 1).split(counts)
    tables = torch.full((len(lens), max(counts) + 1), NO_BLOCK, dtype=torch.int32)
    storage = torch.full((sum(counts) + 1, 1, 1, block_size, size + setup.wide), torch.nan, dtype=setup.dtype)
    contents = []
    for table, blocks, seq_len in zip(tables, ids, lens, strict=True):
        table[: len(blocks)] = blocks
        latents = torch.randn(seq_len, size, generator=data).to(setup.dtype)
        for position in range(seq_len):
            block = int(table[position // block_size])
            storage[block, 0, 0, position % block_size, :size] = latents[position]
        contents.append(latents.double())
    rows = sum(query_lens) + setup.padding
    query = torch.randn(rows, setup.num_heads + setup.wide, size, generator=data).to(setup.dtype)
    starts = torch.tensor((0, *query_lens)).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    kv = storage.to(device)[..., :size]
    cache = PagedKV(kv, tables.to(device), starts.to(device), seq_lens.to(device))
    return Batch(setup, query.to(device)[:, : setup.num_heads], cache, contents)


def run(batch: Batch, launcher: Launcher) -> torch.Tensor:
    setup, device = batch.setup, batch.query.device
    shape = len(batch.query), setup.num_heads + setup.wide, setup.value_size
    out = torch.full(shape, UNTOUCHED, dtype=setup.dtype, device=device)
    query_lens, seq_lens = np.array(batch.query_lens), np.array(setup.lens)
    rows = work.rows_of(query_lens, seq_lens, len(out), query_lens > 0)
    given = work.SplitList.on(device, rows, None, setup.split_tokens)
    if setup.room:  # like a graph's list: unused entries follow the used ones
        nothing = torch.full((setup.room, 4), NO_BLOCK, dtype=torch.int32, device=device)
        given = work.SplitList(torch.cat((given.splits, nothing)), several=True)
    workspace = decode.Workspace.for_splits(device, given.most_splits, setup.num_heads, setup.value_size)
    workspace.parts.fill_(torch.nan)
    latent.latent_attention(
        *(launcher, out[:, : setup.num_heads], batch.query, batch.cache, given, setup.scale),
        workspace=workspace if given.several else None,
        split_tokens=setup.split_tokens,
    )
    assert not workspace.arrived.any(), "a replay would find blocks that have arrived"
    assert (out[:, setup.num_heads :] == UNTOUCHED).all(), "heads of others were written"
    return out[:, : setup.num_heads]


def reference(batch: Batch, sequence: int) -> torch.Tensor:
    """[query_len, num_heads, value_size] in float64, from the definition."""
    start = sum(batch.query_lens[:sequence])
    count, seq_len = batch.query_lens[sequence], batch.setup.lens[sequence]
    query, latents = batch.query[start : start + count].cpu().double(), batch.contents[sequence]
    scores = torch.einsum("qhd,kd->hqk", query, latents) * batch.setup.scale
    hidden = torch.ones(count, seq_len, dtype=torch.bool).triu(seq_len - count + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, latents[:, : batch.setup.value_size])


def check_rows(batch: Batch, out: torch.Tensor) -> None:
    """Every row of `out` is right, and zero where there is nothing to see."""
    out, start = out.cpu(), 0
    for i, (count, seq_len) in enumerate(zip(batch.query_lens, batch.setup.lens, strict=True)):
        rows = out[start : start + count]
        start += count
        if seq_len == 0:
            assert (rows == 0).all(), f"rows of the empty sequence {i} are not zero"
        elif count:
            want = reference(batch, i)
            error = ((rows.double() - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(torch.inf).max()
            tolerance = TOLERANCES[batch.setup.dtype]
            assert error <= tolerance, f"sequence {i}, length {seq_len}: off by {error:.2e}, more than {tolerance:.0e}"
    assert (out[start:] == 0).all(), "rows after the last sequence are not zero"


# ---- what is tested

RAGGED = (0, 1, 7, 8, 9, 31, 32, 33, 130)
SETUPS: dict[str, Setup] = {
    "DeepSeek": Setup((33, 70, 1), num_heads=16, head_size=576, value_size=512),
    "DeepSeek, many heads": Setup((40,), num_heads=40, head_size=576, value_size=512),
    "DeepSeek, splits": Setup((100, 17), num_heads=16, head_size=576, value_size=512, split_tokens=48, room=2),
    "ragged": Setup(RAGGED),
    "ragged, half": Setup(RAGGED, dtype=FP16),
    "cut by length": Setup((513, 300, 16)),
    **{f"splits of {n}": Setup((0, 1, 100, 213), split_tokens=n, room=3) for n in (16, 48, 112)},
    "sharp scores, splits": Setup((213, 90), sharpness=100.0, split_tokens=16),
    **{f"{n} heads": Setup((17, 40), num_heads=n) for n in (1, 8, 9, 16, 17, 33)},
    "17 heads, splits": Setup((100, 40), num_heads=17, split_tokens=32),
    **{
        f"{d} elements, {v} of V": Setup((17, 70), head_size=d, value_size=v) for d, v in ((8, 8), (192, 128), (48, 40))
    },
    "all of it is V": Setup((45,), head_size=64, value_size=64),
    **{f"block size {b}": Setup((17, 140), block_size=b) for b in (1, 4, 8, 32, 128)},
    "strided": Setup((17, 40), wide=8),
    "prompts": Setup((9, 40, 33, 0), (9, 5, 33, 2), padding=3, split_tokens=latent.WHOLE),
    "drafts, splits": Setup((130, 64), (4, 3), split_tokens=32, num_heads=18),
}


def kernel_matches(setup: Setup) -> Case:
    def case(launcher: Launcher, device: torch.device) -> None:
        batch = make_batch(setup, device)
        check_rows(batch, run(batch, launcher))

    return case


def same_bits_in_any_batch(launcher: Launcher, device: torch.device) -> None:
    """Alone, in company, in a list with room for more: the same bits."""
    setup = Setup((530, 16, 77, 33), num_heads=18)
    batch = make_batch(setup, device)
    together = run(batch, launcher)
    for i, seq_len in enumerate(setup.lens):
        for room in (0, 100):
            cache = batch.cache._replace(
                block_tables=batch.cache.block_tables[i : i + 1],
                seq_lens=batch.cache.seq_lens[i : i + 1],
                query_start_loc=None,
            )
            alone = replace(setup, lens=(seq_len,), room=room)
            got = run(Batch(alone, batch.query[i : i + 1], cache, batch.contents[i : i + 1]), launcher)
            assert torch.equal(got, together[i : i + 1]), f"sequence {i}, {room}"


def several_splits_to_a_block(launcher: Launcher, device: torch.device) -> None:
    """As in a large batch: blocks compute several splits in turn, with the same bits."""
    batch = make_batch(Setup((213, 40, 0, 100), num_heads=20, split_tokens=32), device)
    one_each = run(batch, launcher)
    with patch.object(latent, "TARGET_BLOCKS", 1):
        several = run(batch, launcher)
    check_rows(batch, several)
    assert torch.equal(several, one_each)


def one_token_more_would_show(launcher: Launcher, device: torch.device) -> None:
    """A control: the tolerance distinguishes 100 tokens from 101."""
    batch = make_batch(Setup((101, 101)), device)
    want = reference(batch, 0)
    batch.setup, batch.contents = replace(batch.setup, lens=(100, 100)), [one[:100] for one in batch.contents]
    other = reference(batch, 0)
    assert ((other - want).norm(dim=-1) > TOLERANCES[BF16] * want.norm(dim=-1)).all()


CASES: list[tuple[str, Case]] = [
    *((name, kernel_matches(setup)) for name, setup in SETUPS.items()),
    ("same bits in any batch", same_bits_in_any_batch),
    ("several splits to a block", several_splits_to_a_block),
    ("one token more would show", one_token_more_would_show),
]
