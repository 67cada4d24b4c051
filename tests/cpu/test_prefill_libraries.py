"""Prompts that go through torch's FlashAttention where a table says so, on the emulator: against the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention_steps import changed
from tests.cpu.test_attention_cuda_emulated import (
    BF16,
    E4M3,
    FP16,
    SHAPE,
    TOLERANCES,
    CountingLauncher,
    backend_for,
    make_step,
    plan_of,
)
from tests.kernels import emulator
from vllm_lite.attention import cuda as cuda_module
from vllm_lite.attention import prefix_chunks
from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.cuda import CudaBackend
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.kernels.cuda.attention import prefill_table
from vllm_lite.kernels.cuda.attention.prefill_table import Measured, PrefillTable
from vllm_lite.kernels.cuda.attention.torch_prefill import torch_prefill

pytestmark = pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")

# ---- prompts through a library


def table_of(*lengths: tuple[int, str], **changes: Any) -> PrefillTable:
    """A table of measurements in which a library was faster from these lengths on; "ours": it was not."""
    shape: dict[str, Any] = {"dtype": "bfloat16", "head_size": 64, "group": 2} | changes
    return PrefillTable(Measured(**shape, num_tokens=n, us={"ours": 10.0, way: 9.0}) for n, way in lengths)


FRESH = [(1, 40), (17, 17), (17, 17), (20, 20), (2, 2), (5, 30), (9, 600), (17, 17), (0, 0), (18, 50)]
LATE = table_of((16, "flash"))


def prompts_of(shape: AttentionShape, table: PrefillTable, lengths: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    plan = plan_of(CudaBackend(shape, emulator.EmulatorLauncher(), table), lengths)
    (fresh, *_) = plan.fresh
    return [] if fresh is None else [prompts[:3] for prompts in fresh.prompts]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that go through a library."""
    rows: list[int] = []

    def counted(out: torch.Tensor, query: torch.Tensor, *given: Any) -> None:
        rows.extend(prompts.num_prompts * prompts.length for prompts in given[2])
        torch_prefill(out, query, *given)

    monkeypatch.setattr(cuda_module, "torch_prefill", counted)
    return rows


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
def test_prompts_through_a_library_like_the_reference(rotate: bool, padding: int, handed: list[int]) -> None:
    """On K and V of the step, in the rows that are theirs; all else through our kernels."""
    step = make_step(SHAPE, FRESH, padding=padding, rotate=rotate)
    out, kv = step.run(CudaBackend(SHAPE, emulator.EmulatorLauncher(), LATE), hands_over=True)
    want, want_kv = step.run(ReferenceBackend(SHAPE))
    assert (out.double() - want.double()).abs().max() <= TOLERANCES[BF16]
    assert rotate or torch.equal(kv.float().nan_to_num(-1), want_kv.float().nan_to_num(-1))
    assert handed == [34, 20, 17]
    again, _ = step.run(CudaBackend(SHAPE, emulator.EmulatorLauncher(), LATE))
    assert handed == [34, 20, 17], "a layer that has no K and V of its own attends by our kernel"
    assert (again.double() - want.double()).abs().max() <= TOLERANCES[BF16]


def test_layers_of_a_step_that_hand_over_and_that_do_not(handed: list[int]) -> None:
    """Some layers attend to another layer's K and V: each launches the work that it needs, in either order."""
    step = make_step(SHAPE, FRESH)
    want, _ = step.run(ReferenceBackend(SHAPE))
    for order in ((True, False), (False, True)):
        backend, batch = CudaBackend(SHAPE, emulator.EmulatorLauncher(), LATE), replace(step.batch)
        kv, heads = step.kv.clone(), step.heads
        backend.prepare(batch)
        backend.write_kv(heads, kv, batch, 0)
        out = torch.empty_like(heads.query, memory_format=torch.contiguous_format)
        for hands_over in order:
            out.fill_(7.0)
            handed.clear()
            backend.attend(heads.query, kv, batch, 0, out, new=heads if hands_over else None)
            assert handed == ([34, 20, 17] if hands_over else [])
            assert (out.double() - want.double()).abs().max() <= TOLERANCES[BF16]


def test_a_step_of_prompts_alone_launches_no_kernel_of_ours(handed: list[int]) -> None:
    launcher = CountingLauncher()
    make_step(SHAPE, [(17, 17)] * 3).run(CudaBackend(SHAPE, launcher, LATE), hands_over=True)
    assert handed == [51]
    assert launcher.count == 1, "the write to the cache"


@pytest.mark.parametrize(
    ("changes", "table", "prompts"),
    [
        ({}, LATE, [(1, 2, 17), (35, 1, 20), (71, 1, 17)]),
        ({}, table_of((16, "ours"), (18, "flash")), [(35, 1, 20)]),
        ({}, table_of((16, "cudnn")), []),
        ({}, table_of((16, "flash"), (18, "ours")), [(1, 2, 17), (71, 1, 17)]),
        ({"windows": (17,)}, LATE, [(1, 2, 17), (71, 1, 17)]),
        ({"windows": (16,)}, LATE, []),
        ({"soft_cap": 2.0}, LATE, []),
        ({"sinks": True}, LATE, []),
        ({"alibi_slopes": (0.5, 0.25, 0.1, 0.9)}, LATE, []),
        ({"kv_dtype": E4M3}, LATE, []),
        ({"dtype": FP16}, LATE, []),
        ({"head_size": 128}, LATE, []),
        ({"num_heads": 2}, LATE, []),
        ({}, table_of((30, "flash")), []),
        ({}, PrefillTable(), []),
    ],
)
def test_a_table_decides_which_prompts_use_a_library(
    changes: dict[str, Any], table: PrefillTable, prompts: list[tuple[int, ...]]
) -> None:
    assert prompts_of(changed(SHAPE, **changes), table, FRESH) == prompts


def test_a_small_gain_is_none() -> None:
    assert Measured("bfloat16", 64, 2, 16, {"ours": 10.0, "flash": 9.6}).best() is None
    assert Measured("bfloat16", 64, 2, 16, {"ours": 10.0, "flash": 9.4, "cudnn": 1.0, "varlen": 1.0}).best() == "flash"
    assert Measured("bfloat16", 64, 2, 16, {"flash": 9.0}).best() is None


def test_a_table_is_kept_for_its_device_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = prefill_table.path_for("NVIDIA H100 80GB", tmp_path / "kernels")
    assert path.name == "prefill-nvidia-h100-80gb.json"
    assert not prefill_table.load(path).ways(BF16, 64, 2)
    prefill_table.save(path, [Measured("bfloat16", 64, 2, 16, {"ours": 2.0, "flash": 1.0})])
    assert prefill_table.load(path).ways(BF16, 64, 2) == [(16, "flash")]
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert not prefill_table.load(path).ways(BF16, 64, 2), "another torch has other kernels"
    for damaged in ("{", "[]", '{"torch": "1.0", "measured": [{"us": 1}]}'):
        path.write_text(damaged)
        caplog.clear()
        assert not prefill_table.load(path).ways(BF16, 64, 2)
        assert "is not a table of prefill times" in caplog.text


# ---- chunks after a prefix


def chunk_table(*points: tuple[int, int, str]) -> PrefillTable:
    """A table that says whether chunks of this many tokens after this many others are faster with gathered pages or
    with our kernel ("ours")."""
    shape: dict[str, Any] = {"dtype": "bfloat16", "head_size": 64, "group": 2}
    return PrefillTable(
        Measured(**shape, num_tokens=n, us={"ours": 10.0, way: 9.0}, num_before=before) for n, before, way in points
    )


CHUNKS = [(1, 40), (18, 50), (20, 20), (40, 140), (2, 2), (33, 49), (0, 0), (17, 90)]
GATHERING = chunk_table((16, 16, "varlen"), (32, 32, "varlen"))


def gathered_by(shape: AttentionShape, table: PrefillTable, lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rows of the step and lengths of the sequences that are gathered."""
    (plan, *_) = plan_of(CudaBackend(shape, emulator.EmulatorLauncher(), table), lengths).gathered
    if plan is None:
        return []
    starts, lens = plan.query_start_loc.diff().tolist(), plan.kv_start_loc.diff().tolist()
    return list(zip(starts, lens, strict=True))


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("padding", [0, 3])
def test_gathered_chunks_like_the_reference(padding: int, kv_dtype: torch.dtype | None) -> None:
    shape = changed(SHAPE, **({"kv_dtype": kv_dtype, "k_scale": 0.5, "v_scale": 2.0} if kv_dtype else {}))
    step = make_step(shape, CHUNKS, padding=padding)
    launcher = CountingLauncher()
    out, _ = step.run(CudaBackend(shape, launcher, GATHERING), hands_over=True)
    want, _ = step.run(ReferenceBackend(shape))
    assert launcher.names.count("gather_kv") == 1
    assert (out.double() - want.double()).abs().max() <= TOLERANCES[BF16]


def test_a_step_of_gathered_chunks_alone() -> None:
    """All of its rows attend there: nothing is picked out, and our prefill has no tile."""
    step = make_step(SHAPE, [(18, 50), (40, 140)])
    launcher = CountingLauncher()
    out, _ = step.run(CudaBackend(SHAPE, launcher, GATHERING))
    want, _ = step.run(ReferenceBackend(SHAPE))
    assert "prefill_attention" not in launcher.names
    assert (out.double() - want.double()).abs().max() <= TOLERANCES[BF16]


@pytest.mark.parametrize(
    ("changes", "table", "gathered"),
    [
        ({}, GATHERING, [(18, 50), (40, 140), (17, 90)]),
        ({}, chunk_table((16, 16, "varlen"), (16, 80, "ours")), [(18, 50), (33, 49), (17, 90)]),
        ({}, chunk_table((16, 16, "ours"), (30, 16, "varlen")), [(40, 140), (33, 49)]),
        ({}, chunk_table((16, 16, "ours")), []),
        ({}, table_of((16, "flash")), []),
        ({"kv_dtype": E4M3}, GATHERING, [(18, 50), (40, 140), (17, 90)]),
        ({"windows": (1000,)}, GATHERING, []),
        ({"soft_cap": 2.0}, GATHERING, []),
        ({"sinks": True}, GATHERING, []),
        ({"alibi_slopes": (0.5, 0.25, 0.1, 0.9)}, GATHERING, []),
        ({"dtype": FP16}, GATHERING, []),
        ({"num_heads": 2}, GATHERING, []),
    ],
)
def test_which_chunks_are_gathered(
    changes: dict[str, Any], table: PrefillTable, gathered: list[tuple[int, int]]
) -> None:
    assert gathered_by(changed(SHAPE, **changes), table, CHUNKS) == gathered


def test_chunks_that_find_no_room_go_through_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = 2 * 2 * 64 * 2
    monkeypatch.setattr(prefix_chunks, "GATHERED_BYTES", 140 * token_bytes)
    assert gathered_by(SHAPE, GATHERING, CHUNKS) == [(18, 50), (17, 90)]
    step = make_step(SHAPE, CHUNKS)
    out, _ = step.run(CudaBackend(SHAPE, emulator.EmulatorLauncher(), GATHERING))
    want, _ = step.run(ReferenceBackend(SHAPE))
    assert (out.double() - want.double()).abs().max() <= TOLERANCES[BF16]


def test_copies_of_k_and_v_are_part_of_the_workspace() -> None:
    sizes = 1000, 8, 500
    more = CudaBackend(SHAPE, emulator.EmulatorLauncher(), GATHERING).workspace_bytes(*sizes)
    returned = 1000 * 4 * (64 * 2 + 4)
    assert more - backend_for(SHAPE).workspace_bytes(*sizes) == returned + prefix_chunks.GATHERED_BYTES


def test_outputs_of_a_library_are_part_of_the_workspace() -> None:
    sizes = 1000, 8, 500
    more = CudaBackend(SHAPE, emulator.EmulatorLauncher(), LATE).workspace_bytes(*sizes)
    assert more - backend_for(SHAPE).workspace_bytes(*sizes) == 1000 * 4 * (64 * 2 + 4)
