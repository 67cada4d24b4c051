"""Chunked prefill in the emulator, in any order of threads; errors of its Python side; calls of torch's attention."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import prefill_attention_cases as cases
from tests.kernels.attention_batch import make_batch
from tests.kernels.emulator import EmulatorLauncher, check_orders
from tests.kernels.prefill_attention_cases import FP16, Setup
from vllm_lite.kernels.cuda.attention.prefill_attention import keys_a_tile, prefill_attention, shared_bytes
from vllm_lite.kernels.cuda.attention.varlen import VarlenPlan, call_varlen, make_plan, torch_varlen
from vllm_lite.kernels.cuda.launcher import Launcher

CPU = torch.device("cpu")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["prefix 17", "head size 256", "window 33", "float8, window", "group 7"])
def test_the_order_of_threads_changes_no_bit(name: str) -> None:
    batch = make_batch(cases.SETUPS[name], CPU)
    check_orders(lambda launcher: cases.run(batch, launcher))


def test_small_tiles_where_a_multiprocessor_has_little_shared_memory() -> None:
    """As on 8.6, 8.9 and 12.0; two blocks with heads of 128 fit there."""
    small = EmulatorLauncher(multiprocessor_bytes=100 * 1024)
    for setup in (cases.SETUPS["head size 128"], cases.SETUPS["head size 80"]):
        batch = make_batch(setup, CPU)
        cases.check_rows(batch, cases.run(batch, small))
    assert [keys_a_tile(head, 100 * 1024) for head in (64, 72, 128, 256)] == [64, 32, 32, 32]
    assert [keys_a_tile(head, 164 * 1024) for head in (64, 72, 128, 256)] == [64, 64, 64, 32]
    assert 100 * 1024 // (shared_bytes(128, 32) + 1024) == 2
    assert 100 * 1024 // (shared_bytes(64, 64) + 1024) == 3


# ---- what is refused

SIMPLE = Setup(((5, 3), (2, 0)))
SCORING = ("scale", "window", "soft_cap", "alibi_slopes")


def refuse(launcher: Launcher, message: str, **changes: Any) -> None:
    batch = make_batch(SIMPLE, CPU)
    out = changes.pop("out", batch.out())
    query, tiles = changes.pop("query", batch.query), changes.pop("tiles", torch.zeros(1, 2, dtype=torch.int32))
    scoring = replace(batch.scoring, **{name: changes.pop(name) for name in SCORING if name in changes})
    cache = batch.cache._replace(**changes)
    with pytest.raises(ValueError, match=message):
        prefill_attention(launcher, out, query, cache, tiles, scoring)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("float16 or bfloat16, not torch.float32", {"query": torch.zeros(7, 2, 64), "out": torch.zeros(7, 2, 64)}),
        ("must have the shape and type of query", {"out": torch.zeros(7, 2, 64)}),
        ("does not go with queries of", {"kv": torch.zeros(4, 2, 1, 16, 64, dtype=FP16)}),
        ("kv has shape", {"kv": torch.zeros(4, 2, 1, 16, 72, dtype=torch.bfloat16)}),
        ("2 heads cannot share 3", {"kv": torch.zeros(4, 2, 3, 16, 64, dtype=torch.bfloat16)}),
        ("multiples of 8 elements", {"kv": torch.zeros(4, 2, 1, 16, 68, dtype=torch.bfloat16)[..., 4:]}),
        ("must be adjacent", {"query": torch.zeros(7, 2, 128, dtype=torch.bfloat16)[..., :64]}),
        ("rows of query must begin", {"query": torch.zeros(7, 132, dtype=torch.bfloat16)[:, 4:].view(7, 2, 64)}),
        ("block_tables is torch.int64", {"block_tables": torch.zeros(2, 3, dtype=torch.int64)}),
        ("it must be int32 \\[3\\]", {"query_start_loc": torch.zeros(2, dtype=torch.int32)}),
        ("sees nothing", {"window": 0}),
        ("k_scale is 0", {"scale": 0.0}),
        ("soft cap is -1", {"soft_cap": -1.0}),
        ("alibi_slopes must be float32 \\[2\\]", {"alibi_slopes": torch.zeros(3)}),
        (r"tiles is torch.int64 \[1, 2\]", {"tiles": torch.zeros(1, 2, dtype=torch.int64)}),
        (r"int32 \[n, 2\], contiguous", {"tiles": torch.zeros(2, 4, dtype=torch.int32)[:, :2]}),
    ],
)
def test_refused(message: str, changes: dict[str, Any], launcher: EmulatorLauncher) -> None:
    refuse(launcher, message, **changes)


# ---- arguments for torch's variable-length attention, in any of its versions


def plan_for(query_lens: list[int], seq_lens: list[int], num_tokens: int, least: int = 2) -> VarlenPlan:
    query_lens_, seq_lens_ = np.array(query_lens), np.array(seq_lens)
    return make_plan(query_lens_, seq_lens_, num_tokens, query_lens_ >= least, torch.device("cpu"))


def test_a_plan_excludes_sequences_that_are_not_chosen() -> None:
    plan = plan_for([3, 1, 4], [10, 20, 4], 9)
    assert plan.rows is not None
    assert plan.rows.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert plan.query_start_loc.tolist() == [0, 3, 7]
    assert plan.kv_start_loc.tolist() == [0, 10, 14]
    assert plan.gather_start_loc.tolist() == [0, 10, 10, 14]
    assert (plan.max_query_len, plan.max_seq_len) == (4, 10)
    assert plan_for([3, 1, 4], [10, 20, 4], 8, least=1).rows is None


def modern(
    *args: Any, scale: Any = None, window_size: Any = None, enable_gqa: Any = None, num_splits: Any = None
) -> Any:
    return {"window_size": window_size, "enable_gqa": enable_gqa, "num_splits": num_splits, "heads": args[1].shape[1]}


def older(*args: Any, is_causal: Any = False, scale: Any = None) -> Any:
    return {"is_causal": is_causal, "heads": args[1].shape[1]}


def test_varlen_is_asked_in_the_words_of_its_version() -> None:
    plan = plan_for([3], [5], 3)
    query, keys = torch.zeros(3, 4, 8), torch.zeros(5, 2, 8)
    assert call_varlen(modern, query, keys, keys, plan, 0.1) == {
        "window_size": (-1, 0),
        "enable_gqa": True,
        "num_splits": 1,
        "heads": 2,
    }
    assert call_varlen(older, query, keys, keys, plan, 0.1) == {"is_causal": True, "heads": 2}, (
        "the operator takes fewer KV heads without being asked"
    )


def test_the_installed_torch_has_varlen_attention() -> None:
    function = torch_varlen()
    assert function is not None
    assert function.__module__ == "torch.nn.attention.varlen"


def cannot_be_causal(query: Any) -> None:
    raise AssertionError(query)


def test_a_varlen_that_cannot_be_causal_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", cannot_be_causal)
    assert torch_varlen() is None
