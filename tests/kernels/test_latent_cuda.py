"""Attention over cached latents in the emulator, in any order of threads, and the errors of its Python side."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import latent_attention_cases as cases
from tests.kernels.emulator import EmulatorLauncher, check_orders
from tests.kernels.latent_attention_cases import BF16, FP16, Setup
from vllm_lite.kernels.cuda.attention import latent_attention as latent
from vllm_lite.kernels.cuda.attention.attention_work import RowWork, SplitList
from vllm_lite.kernels.cuda.attention.decode_attention import Workspace
from vllm_lite.kernels.cuda.attention.latent_attention import latent_attention, latent_reason, row_tiles, shared_bytes

CPU = torch.device("cpu")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["splits of 48", "17 heads, splits", "prompts", "48 elements, 40 of V"])
def test_the_order_of_threads_changes_no_bit(name: str) -> None:
    batch = cases.make_batch(cases.SETUPS[name], CPU)
    check_orders(lambda launcher: cases.run(batch, launcher))


@pytest.mark.parametrize("name", ["splits of 48", "17 heads, splits", "ragged"])
def test_blocks_with_several_entries_in_any_order_of_threads(
    name: str, emulated: EmulatorLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = cases.make_batch(cases.SETUPS[name], CPU)
    one_each = cases.run(batch, emulated)
    monkeypatch.setattr(latent, "TARGET_BLOCKS", 1)
    assert all(torch.equal(one_each, cases.run(batch, EmulatorLauncher(order_seed))) for order_seed in range(4))


def test_a_small_multiprocessor_has_room_for_a_block(emulated: EmulatorLauncher) -> None:
    batch = cases.make_batch(cases.SETUPS["17 heads, splits"], CPU)
    small = cases.run(batch, EmulatorLauncher(multiprocessor_bytes=100 * 1024))
    assert torch.allclose(small.float(), cases.run(batch, emulated).float(), atol=1e-2)
    assert row_tiles(128, 100 * 1024) == row_tiles(16, 228 * 1024) == 1
    assert shared_bytes(576, 1) + 1024 <= 100 * 1024
    assert 2 * (shared_bytes(576, 2) + 1024) <= 228 * 1024, "two blocks"


# ---- what is refused


def refuse(launcher: EmulatorLauncher, message: str, **changes: Any) -> None:
    batch = cases.make_batch(Setup((8, 2)), CPU)
    out = changes.pop("out", torch.zeros(2, 5, 32, dtype=BF16))
    query, workspace = changes.pop("query", batch.query), changes.pop("workspace", None)
    options = {name: changes.pop(name) for name in ("split_tokens",) if name in changes}
    scale, seen = changes.pop("scale", 0.2), np.array(changes.pop("seen", (8, 3)))
    lists = SplitList.on(CPU, RowWork(np.arange(2), np.arange(2), seen))._replace(**changes.pop("lists", {}))
    cache = batch.cache._replace(**changes)
    with pytest.raises(ValueError, match=message):
        latent_attention(launcher, out, query, cache, lists, scale, workspace=workspace, **options)


def cache_of(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("float16 or bfloat16, not torch.float32", {"query": torch.zeros(2, 5, 40), "out": torch.zeros(2, 5, 32)}),
        (r"must be torch.bfloat16 \[2, 5, V\]", {"out": torch.zeros(2, 4, 32, dtype=BF16)}),
        ("40 elements, 36 of them V", {"out": torch.zeros(2, 5, 36, dtype=BF16)}),
        (r"not \[num_blocks, 1, 1,", {"kv": cache_of(4, 2, 1, 16, 40)}),
        ("torch.float16 does not go with queries", {"kv": cache_of(4, 1, 1, 16, 40, dtype=FP16)}),
        ("power of two, got 24", {"kv": cache_of(4, 1, 1, 24, 40)}),
        ("multiples of 8 elements", {"kv": cache_of(4, 1, 1, 16, 44)[..., :40]}),
        ("must be adjacent", {"query": torch.zeros(2, 5, 80, dtype=BF16)[..., :40]}),
        ("multiples of 16 bytes", {"query": torch.zeros(2, 204, dtype=BF16)[:, :200].view(2, 5, 40)}),
        ("seq_lens is torch.int64", {"seq_lens": torch.zeros(2, dtype=torch.int64)}),
        ("a workspace of 660 floats", {"seen": (8, 600)}),
        (r"float32 \[660 or more\]", {"seen": (8, 600), "workspace": Workspace.on(CPU, 659, 20)}),
        ("splits is torch.int64", {"lists": {"splits": torch.zeros(2, 4, dtype=torch.int64)}}),
        ("split of 24", {"split_tokens": 24}),
        ("scale", {"scale": 0.0}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any], launcher: EmulatorLauncher) -> None:
    refuse(launcher, message, **changes)


def test_reasons() -> None:
    assert latent_reason(BF16, 576, 512) is None
    assert latent_reason(FP16, 8, 8, FP16) is None
    assert "torch.float32" in str(latent_reason(torch.float32, 576, 512))
    assert "584 elements" in str(latent_reason(BF16, 584, 512))
    assert "520 of them V" in str(latent_reason(BF16, 576, 520))
    assert "torch.float8_e4m3fn" in str(latent_reason(BF16, 576, 512, torch.float8_e4m3fn))
