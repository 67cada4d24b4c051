"""Cases of splits that several rows share: cascade_attention and decode_attention together give the same bits as
decode_attention alone, and the right result.

`CASES` holds (name, case); a case raises AssertionError. The emulator runs them in the tests, a GPU in a script.
"""

from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch

from tests.kernels import decode_attention_cases as plain
from tests.kernels.attention_batch import NO_BLOCK, Batch, make_batch
from tests.kernels.cases import Case
from tests.kernels.decode_attention_cases import BF16, E4M3, E5M2, FP16, Setup
from vllm_lite.kernels.cuda.attention import attention_work as work
from vllm_lite.kernels.cuda.attention import decode_attention as decode
from vllm_lite.kernels.cuda.attention.shared_prefix import CascadeLists, Worth, cascade_lists
from vllm_lite.kernels.cuda.launcher import Launcher


@dataclass(frozen=True)
class Sharing(Setup):
    common: tuple[tuple[int, int, int], ...] = ()
    """Triples (sequence, other, tokens): the sequence shares its first `tokens`, which are whole blocks, with the other
    one."""

    @property
    def cascade_kernel(self) -> str:
        return decode.cascade_name(self.dtype, self.cache_dtype, self.head_size, self.block_size)


def shared_batch(setup: Sharing, device: torch.device) -> Batch[Sharing]:
    batch = make_batch(setup, device)
    for own, other, tokens in setup.common:
        assert tokens % setup.block_size == 0
        batch.block_tables[own, : tokens // setup.block_size] = batch.block_tables[other, : tokens // setup.block_size]
        batch.contents[own][:, :, :tokens] = batch.contents[other][:, :, :tokens]
    return batch


def lists_of(batch: Batch[Sharing]) -> CascadeLists | None:
    setup = batch.setup
    query_lens, seq_lens = (np.array(lens) for lens in zip(*setup.lengths(), strict=True))
    rows = work.rows_of(query_lens, seq_lens, len(batch.query), query_lens <= setup.max_query_len)
    return cascade_lists(
        *(rows, batch.block_tables.cpu().numpy(), setup.block_size),
        decode.most_sharing(setup.num_heads // setup.num_kv_heads, setup.head_size),
        setup.num_kv_heads,
        worth=Worth(setup.split_tokens or 1024, 2, 1),
        split_tokens=setup.split_tokens,
    )


def run(batch: Batch[Sharing], launcher: Launcher) -> torch.Tensor:
    setup, out = batch.setup, batch.out()
    lists = lists_of(batch)
    assert lists is not None, "nothing is shared"
    given = lists.on(out.device)
    if setup.room:  # as a graph has it
        nothing = torch.full((setup.room, 4), NO_BLOCK, dtype=torch.int32, device=out.device)
        assert given.cascade is not None
        cascade = given.cascade._replace(shared=torch.cat((given.cascade.shared, nothing)))
        given = given._replace(splits=torch.cat((given.splits, nothing)), cascade=cascade)
    workspace = decode.Workspace.for_splits(out.device, given.most_splits, setup.num_heads, setup.head_size)
    workspace.parts.fill_(torch.nan)
    cache = batch.cache._replace(query_start_loc=None)
    for _ in range(2):  # the second launches find the workspace that the first ones left
        out.fill_(7.0)
        decode.decode_attention(
            *(launcher, out, batch.query, cache, given, batch.scoring),
            workspace=workspace,
            split_tokens=setup.split_tokens,
        )
    assert not workspace.arrived.any(), "a replay would find blocks that have arrived"
    return out


# ---- what is tested

LENS = (100, 90, 165, 70, 84)
ALL = tuple((i, 0, 64) for i in range(1, 5))
SHARED: dict[str, Sharing] = {
    "2 sequences": Sharing((100, 90), split_tokens=32, common=((1, 0, 64),)),
    "5 of several lengths": Sharing(LENS, split_tokens=32, common=ALL, num_heads=4, num_kv_heads=2),
    "16 sequences": Sharing(
        tuple(range(70, 86)), num_heads=1, split_tokens=16, common=tuple((i, 0, 64) for i in range(1, 16)), room=3
    ),
    "two levels and a stranger": Sharing(
        (*LENS, 120, 99),
        num_heads=8,
        split_tokens=16,
        common=((1, 0, 32), (2, 0, 32), (5, 2, 96), (3, 0, 32), (6, 1, 80)),
    ),
    "default splits": Sharing((1100, 1300, 1060), num_heads=4, common=((1, 0, 1040), (2, 0, 1040))),
    **{f"group {g}": Sharing(LENS, num_heads=2 * g, num_kv_heads=2, split_tokens=16, common=ALL) for g in range(1, 9)},
    **{f"head size {d}": Sharing(LENS, head_size=d, split_tokens=32, common=ALL) for d in (8, 80, 128, 192, 256)},
    **{f"block size {b}": Sharing(LENS, block_size=b, split_tokens=32, common=ALL) for b in (1, 8, 32, 64)},
    "half": Sharing(LENS, dtype=FP16, num_heads=4, split_tokens=32, common=ALL),
    "float8": Sharing(LENS, num_heads=8, kv_dtype=E4M3, split_tokens=16, common=ALL, k_scale=0.5, v_scale=3.0),
    "float8, head size 256": Sharing(LENS, head_size=256, kv_dtype=E5M2, dtype=FP16, split_tokens=48, common=ALL),
    "float8, head size 128": Sharing(LENS, num_heads=4, head_size=128, kv_dtype=E4M3, split_tokens=48, common=ALL),
    "sinks, soft cap": Sharing(
        LENS, num_heads=6, num_kv_heads=2, sinks=True, soft_cap=2.0, split_tokens=16, common=ALL
    ),
    "sharp scores": Sharing(LENS, num_heads=4, sharpness=100.0, split_tokens=16, common=ALL),
    "queries beyond half": Sharing(LENS, num_heads=4, kv_dtype=E4M3, query_scale=1e6, split_tokens=16, common=ALL),
    "strided rows": Sharing(LENS, num_heads=4, num_kv_heads=2, fused_rows=True, split_tokens=32, common=ALL),
    "another layout": Sharing(LENS, num_heads=4, num_kv_heads=2, layout="block-layer", split_tokens=32, common=ALL),
    "rows of drafts, padding, prompts": Sharing(
        (*LENS, 40, 0), (4, 1, 2, 1, 3, 30, 1), max_query_len=4, num_heads=4, split_tokens=16, common=ALL, padding=2
    ),
}


def same_bits(setup: Sharing) -> Case:
    def case(launcher: Launcher, device: torch.device) -> None:
        batch = shared_batch(setup, device)
        together = run(batch, launcher)
        plain.check_rows(batch, together)  # type: ignore[arg-type]
        assert torch.equal(together, plain.run(batch, launcher))  # type: ignore[arg-type]

    return case


def several_splits_to_a_block(launcher: Launcher, device: torch.device) -> None:
    for setup in (SHARED["5 of several lengths"], SHARED["two levels and a stranger"]):
        batch = shared_batch(setup, device)
        one_each = run(batch, launcher)
        with patch.object(decode, "CASCADE_BLOCKS", 1):
            several = run(batch, launcher)
        assert torch.equal(several, one_each)


def nothing_is_shared(launcher: Launcher, device: torch.device) -> None:
    """Most steps of a graph are like this: the list of shared splits is empty but has room."""
    setup = Sharing(LENS, num_heads=4, split_tokens=32)
    batch = shared_batch(setup, device)
    assert lists_of(batch) is None
    given = work.SplitList.on(device, work.RowWork(np.arange(5), np.arange(5), np.array(LENS)), None, 32)
    nothing = torch.full((4, 4), NO_BLOCK, dtype=torch.int32, device=device)
    cascade = work.Cascade(nothing, nothing.ravel(), nothing[:, :2].contiguous())
    out = batch.out()
    workspace = decode.Workspace.for_splits(device, given.most_splits, 4, 64)
    cache = batch.cache._replace(query_start_loc=None)
    given = given._replace(cascade=cascade)
    decode.decode_attention(
        launcher, out, batch.query, cache, given, batch.scoring, workspace=workspace, split_tokens=32
    )
    assert torch.equal(out, plain.run(batch, launcher))  # type: ignore[arg-type]


CASES: list[tuple[str, Case]] = [
    *((name, same_bits(setup)) for name, setup in SHARED.items()),
    ("several splits to a block", several_splits_to_a_block),
    ("nothing is shared", nothing_is_shared),
]
assert {setup.dtype for setup in SHARED.values()} == {BF16, FP16}
