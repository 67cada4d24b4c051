"""Decode attention in the emulator, in any order of threads, and the errors of its Python side."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import decode_attention_cases as cases
from tests.kernels.attention_batch import make_batch
from tests.kernels.decode_attention_cases import BF16, E4M3, FP16, Setup
from tests.kernels.emulator import EmulatorLauncher, check_orders
from vllm_lite.kernels.cuda.attention import decode_attention as decode_module
from vllm_lite.kernels.cuda.attention.attention_inputs import tensor_core_reason
from vllm_lite.kernels.cuda.attention.attention_work import RowWork, SplitList
from vllm_lite.kernels.cuda.attention.decode_attention import SOURCE, Workspace, decode_attention, head_tiles
from vllm_lite.kernels.cuda.launcher import Launcher

CPU = torch.device("cpu")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "name", ["splits of 48", "2 rows each, splits", "head size 256", "window 17", "float8, window", "group 33"]
)
def test_the_order_of_threads_changes_no_bit(name: str) -> None:
    batch = make_batch(cases.SETUPS[name], CPU)
    check_orders(lambda launcher: cases.run(batch, launcher))


@pytest.mark.parametrize(
    "setup",
    [
        Setup((208, 144), head_size=128),
        Setup((208, 144), head_size=120, kv_dtype=E4M3, block_size=32),
        Setup((208, 144), head_size=64, block_size=4),
    ],
    ids=["two lines a row", "float8", "small blocks"],
)
def test_lines_that_are_fetched_ahead(
    setup: Setup, launcher: EmulatorLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of V from a warp's second tile on, and of K from its third on, and nothing else."""
    monkeypatch.setattr(decode_module, "FETCH", True)
    batch = make_batch(setup, CPU)
    kernel = launcher.kernel(SOURCE, setup.kernel)
    kernel.prefetched()
    cases.run(batch, launcher)
    kv, warps, want = batch.kv, 4, []
    for table, seen in zip(batch.block_tables.tolist(), setup.lens, strict=True):
        for which, first in ((0, 2 * warps * 16), (1, warps * 16)):
            for token in range(first, seen):
                at = table[token // setup.block_size], which, 0, token % setup.block_size
                row = sum(index * stride for index, stride in zip(at, kv.stride(), strict=False)) * kv.itemsize
                want += [kv.data_ptr() + row + line for line in range(0, setup.head_size * kv.itemsize, 128)]
    assert sorted(kernel.prefetched()) == sorted(want)


@pytest.mark.usefixtures("emulated")
def test_the_simple_kernel_in_any_order_of_threads() -> None:
    batch = make_batch(cases.SIMPLE_SETUPS["mixed"], CPU)
    check_orders(lambda launcher: cases.run_simple(batch, launcher))


# ---- what is refused

SIMPLE = Setup((8, 2))
SCORING = ("scale", "window", "soft_cap", "alibi_slopes", "sinks")


def refuse(launcher: Launcher, message: str, **changes: Any) -> None:
    batch = make_batch(SIMPLE, CPU)
    out = changes.pop("out", batch.out())
    query, workspace = changes.pop("query", batch.query), changes.pop("workspace", None)
    split_tokens, seen = changes.pop("split_tokens", 0), np.array(changes.pop("seen", (8, 3)))
    lists = SplitList.on(CPU, RowWork(np.arange(2), np.arange(2), seen))._replace(**changes.pop("lists", {}))
    scoring = replace(batch.scoring, **{name: changes.pop(name) for name in SCORING if name in changes})
    cache = batch.cache._replace(**{"query_start_loc": None} | changes)
    with pytest.raises(ValueError, match=message):
        decode_attention(launcher, out, query, cache, lists, scoring, workspace=workspace, split_tokens=split_tokens)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("float16 or bfloat16, not torch.float32", {"query": torch.zeros(2, 2, 64), "out": torch.zeros(2, 2, 64)}),
        ("out must have the shape", {"out": torch.zeros(2, 2, 64)}),
        (r"not \[num_blocks, 2,", {"kv": torch.zeros(4, 2, 1, 16, 32, dtype=BF16)}),
        ("torch.float16 does not go with queries", {"kv": torch.zeros(4, 2, 1, 16, 64, dtype=FP16)}),
        ("2 heads cannot share 3 KV heads", {"kv": torch.zeros(4, 2, 3, 16, 64, dtype=BF16)}),
        ("power of two, got 24", {"kv": torch.zeros(4, 2, 1, 24, 64, dtype=BF16)}),
        ("multiples of 8 elements", {"kv": torch.zeros(4, 2, 1, 16, 68, dtype=BF16)[..., :64]}),
        ("multiples of 16 elements", {"kv": torch.zeros(4, 2, 1, 16, 72, dtype=torch.uint8).view(E4M3)[..., :64]}),
        ("must be adjacent", {"query": torch.zeros(2, 2, 128, dtype=BF16)[..., :64]}),
        ("multiples of 16 bytes", {"query": torch.zeros(2, 132, dtype=BF16)[:, :128].view(2, 2, 64)}),
        ("seq_lens is torch.int64", {"seq_lens": torch.zeros(2, dtype=torch.int64)}),
        (r"start_loc is torch.int32 \[2\]", {"query_start_loc": torch.zeros(2, dtype=torch.int32)}),
        ("a workspace of 520 floats", {"seen": (8, 600)}),
        (r"float32 \[520 or more\]", {"seen": (8, 600), "workspace": Workspace.on(CPU, 519, 8)}),
        (r"int32 \[8 or more\]", {"seen": (8, 600), "workspace": Workspace.on(CPU, 520, 7)}),
        ("splits is torch.int64", {"lists": {"splits": torch.zeros(2, 4, dtype=torch.int64)}}),
        (r"int32 \[n, 4\], contiguous", {"lists": {"splits": torch.zeros(2, 3, dtype=torch.int32)}}),
        ("window of 0", {"window": 0}),
        ("split of 24", {"split_tokens": 24}),
        ("scale", {"scale": 0.0}),
        ("soft cap", {"soft_cap": -1.0}),
        ("alibi_slopes must be", {"alibi_slopes": torch.zeros(3)}),
        (r"sinks must be float32 \[2\]", {"sinks": torch.zeros(2, dtype=BF16)}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any], launcher: EmulatorLauncher) -> None:
    refuse(launcher, message, **changes)


def test_heads_of_a_block() -> None:
    assert [head_tiles(*shape) for shape in ((8, 128), (9, 128), (9, 192), (1, 256))] == [1, 2, 1, 1]


def test_reasons() -> None:
    assert tensor_core_reason(BF16, 128) is None
    assert tensor_core_reason(FP16, 8, E4M3) is None
    assert "torch.float32" in str(tensor_core_reason(torch.float32, 128))
    assert "head size 100" in str(tensor_core_reason(FP16, 100))
    assert "264" in str(tensor_core_reason(BF16, 264))
    assert "torch.float16" in str(tensor_core_reason(BF16, 64, FP16))
