"""The backend `paged` on the emulator against the reference backend: same step, same values in the cache, same rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention_steps import changed
from tests.checkpoints import make_checkpoint
from tests.cpu.test_attention_cuda_emulated import (
    BATCHES,
    BF16,
    DECODE,
    E4M3,
    E5M2,
    FP16,
    FP32,
    MIXED,
    OPTIONS,
    PADDED,
    SHAPE,
    TOLERANCES,
    Step,
    check_found,
    check_model,
    make_step,
    option_id,
)
from tests.kernels import emulator, kv_layouts
from tests.paged import Oracle
from vllm_lite.attention import paged
from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.paged import PagedBackend, split_layout_reason, split_views
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.checkpoint.layer_specs.block_sparse import BlockSparse
from vllm_lite.kernels.cuda.attention.paged_attention import PARTITION_TOKENS

pytestmark = pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")


def backend_for(shape: AttentionShape) -> PagedBackend:
    return PagedBackend(shape, emulator.EmulatorLauncher())


def as_bytes(kv: torch.Tensor) -> torch.Tensor:
    """Layouts of float8 are converted as bytes."""
    return kv.view(torch.uint8) if kv.element_size() == 1 else kv


def to_split_in_place(kv: torch.Tensor) -> None:
    """Reorder the blocks of a cache into the layout of the kernels."""
    for view, part in zip(split_views(as_bytes(kv)), kv_layouts.to_split(as_bytes(kv).clone()), strict=True):
        view.copy_(part)


def from_split(kv: torch.Tensor) -> torch.Tensor:
    keys, values = split_views(as_bytes(kv))
    return kv_layouts.from_split(keys, values).view(kv.dtype)


def run(step: Step, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the backend's output over the step's cache, and the cache after it, in the engine's layout."""
    kv = step.kv.clone()
    to_split_in_place(kv.view(step.shape.cache_dtype))
    out, kv = replace(step, kv=kv).run(backend_for(step.shape), group)
    return out, from_split(kv)


def check(step: Step, group: int = 0) -> None:
    check_found(step, run(step, group), group)


def test_a_layer_with_sinks_must_pass_them() -> None:
    step = replace(make_step(changed(SHAPE, sinks=True), DECODE), sinks=None)
    with pytest.raises(ValueError, match="was given no sinks for layers whose spec says sinks=True"):
        run(step)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_like_the_reference(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(make_step(changed(SHAPE, dtype=dtype), lengths, padding=3 if lengths is PADDED else 0))


@pytest.mark.parametrize("changes", [*OPTIONS, {"windows": (7,), "block_size": 8}], ids=option_id)
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_options_like_the_reference(lengths: list[tuple[int, int]], changes: dict[str, Any]) -> None:
    check(make_step(changed(SHAPE, **changes), lengths))


def test_rotates_before_it_stores() -> None:
    check(make_step(changed(SHAPE, dtype=FP16), MIXED, rotate=True))


def test_the_second_group_has_its_own_window() -> None:
    step = make_step(changed(SHAPE, windows=(5,)), MIXED)
    check(replace(step, shape=changed(SHAPE, windows=(None, 5)), batch=in_two_groups(step)), group=1)


def in_two_groups(step: Step) -> Any:
    batch = step.batch
    nowhere = torch.zeros_like(batch.block_tables[0])
    return replace(batch, block_tables=(nowhere, *batch.block_tables), slot_mapping=batch.slot_mapping * 2)


def test_both_versions_and_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of more than a partition is for v2; more rows than MAX_ROWS take several launches."""
    monkeypatch.setattr(paged, "MAX_ROWS", 4)
    check(make_step(SHAPE, [(1, PARTITION_TOKENS + 20), (6, 30), (1, 5)]))


def test_a_block_sparse_query_sees_its_pattern() -> None:
    """Local blocks of 16 tokens and no others: as a window that begins where the query's block does."""
    length, sparse = 40, BlockSparse(local_blocks=1, vert_stride=1000, block_tokens=16)
    step = make_step(changed(SHAPE, dtype=FP32, block_sparse=sparse), [(1, length)])
    seen_from = (length - 1) // 16 * 16
    window = changed(SHAPE, dtype=FP32, windows=(length - seen_from,))
    want, _ = replace(step, shape=window).run(ReferenceBackend(window))
    assert (run(step)[0] - want).abs().max() <= TOLERANCES[FP32]
    assert "block-sparse" in str(ReferenceBackend.supports(step.shape))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": FP32}, None),
        ({"kv_dtype": E5M2}, None),
        ({"num_heads": 5}, "5 heads cannot share 2 KV heads"),
        ({"alibi_slopes": (1.0,)}, "1 ALiBi slopes for 4 heads"),
        ({"block_size": 4}, "blocks of 8, 16, 32, 64, 128 tokens, not of 4"),
        ({"head_size": 40}, "not of 40"),
        ({"head_size": 120, "kv_dtype": E4M3}, "not of 120"),
        ({"kv_dtype": FP32}, "torch.float32 does not go with queries of torch.bfloat16"),
    ],
)
def test_shapes_with_kernels(changes: dict[str, Any], reason: str | None) -> None:
    given = split_layout_reason(changed(SHAPE, **changes))
    assert given is None if reason is None else reason in str(given)


def test_a_cpu_is_refused() -> None:
    assert PagedBackend.supports(SHAPE) == "it runs on a CUDA device, not on cpu"


def test_a_model_gives_the_logits_of_the_reference_backend(tmp_path: Path) -> None:
    check_model(Oracle(make_checkpoint(tmp_path / "model", head_dim=32), "float32"), 1e-3, backend_for)
