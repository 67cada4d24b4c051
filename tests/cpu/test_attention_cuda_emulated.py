"""The CUDA attention backend on the emulator against the reference backend: same step, same cache, same rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import mixed_heads
from tests.attention_steps import attention_shape, changed, step_batch
from tests.checkpoints import make_checkpoint
from tests.kernels import emulator
from tests.kernels.emulator import EmulatedKernel, EmulatorLauncher
from tests.paged import Oracle, Paged
from vllm_lite.attention.backend import AttentionBackend, AttentionShape, Heads
from vllm_lite.attention.cuda import CudaBackend, kernels_reason
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.step_batch import PAD_SLOT, StepBatch
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.kernels.ops import Rotation

pytestmark = pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NO_BLOCK = 10**6
TOLERANCES = {BF16: 2e-2, FP16: 3e-3, FP32: 3e-6}

SHAPE = attention_shape((4, 2, 64), 16, BF16)
DECODE = [(1, t) for t in (1, 2, 15, 16, 17, 33)]
PREFILL = [(t, t) for t in (2, 15, 16, 17)]
MIXED = [(5, 17), (1, 16), (16, 33), (1, 40), (2, 3), (1, 1)]
PADDED = [(1, 7), (3, 9), (1, 0), (2, 0), (0, 0)]
OPTIONS: list[dict[str, Any]] = [
    {"windows": (1,)},
    {"soft_cap": 1.5, "num_heads": 6},
    {"alibi_slopes": (0.5, 0.25, 0.1, 0.9)},
    {"kv_dtype": E4M3, "k_scale": 0.03, "v_scale": 0.02},
    {"kv_dtype": E5M2, "windows": (9,), "dtype": FP16},
    {"sinks": True, "soft_cap": 2.0},
]
"""Options that every CUDA backend supports."""


def option_id(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in changes.items()).replace("torch.", "")


@dataclass
class Step:
    """A step of (query_len, seq_len) sequences over a cache full of NaN; one group for each of the shape."""

    shape: AttentionShape
    batch: StepBatch
    heads: Heads
    kv: torch.Tensor  # a layer's view of a pool, [num_blocks, 2, num_kv_heads, block_size, head_size]
    sinks: torch.Tensor | None

    def run(
        self, backend: AttentionBackend, group: int = 0, *, hands_over: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of attend, and the cache after it. `hands_over`: it is given K and V of the step as
        well."""
        batch, kv = replace(self.batch), self.kv.clone()
        kv = kv.view(self.shape.cache_dtype)
        heads = Heads(self.heads.query.clone(), self.heads.key.clone(), self.heads.value.clone(), self.heads.rotation)
        out = torch.full(heads.query.shape, 7.0, dtype=self.shape.dtype)
        backend.prepare(batch)
        backend.write_kv(heads, kv, batch, group)
        backend.attend(heads.query, kv, batch, group, out, self.sinks, new=heads if hands_over else None)
        return out, kv


def make_step(shape: AttentionShape, lengths: list[tuple[int, int]], *, padding: int = 0, rotate: bool = False) -> Step:
    random = torch.Generator().manual_seed(3)
    spec, block_size = shape.groups[0], shape.block_size
    size, window = spec.head_size, spec.window
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    ids = (torch.randperm(sum(counts), generator=random) + 1).split(counts)
    pool_shape = (sum(counts) + 1, 3, 2, spec.num_kv_heads, block_size, size)
    filler = torch.full(pool_shape, math.nan, dtype=shape.dtype).to(shape.cache_dtype)
    kv = (filler.view(torch.uint8) if filler.itemsize == 1 else filler)[:, 1]
    tables = torch.full((len(lengths), max(counts) + 1), NO_BLOCK, dtype=torch.int32)
    slots = []
    for table, blocks, (query_len, seq_len) in zip(tables, ids, lengths, strict=True):
        table[: len(blocks)] = blocks
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        old = torch.randn(2, spec.num_kv_heads, seq_len, size, generator=random).to(shape.cache_dtype)
        for at in range(first, seq_len - query_len):
            kv[table[at // block_size], :, :, at % block_size] = old[:, :, at].view(kv.dtype)
        new = range(max(0, seq_len - query_len), seq_len)
        slots += [int(table[at // block_size]) * block_size + at % block_size for at in new]
        slots += [PAD_SLOT] * (query_len - len(new))
        table[: first // block_size] = NO_BLOCK
    num_tokens = sum(query_len for query_len, _ in lengths) + padding
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    fused = torch.randn(num_tokens, sum(heads), size, generator=random).to(shape.dtype)
    angles = torch.rand(num_tokens, size // 2, generator=random) * 6
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    rotation = Rotation(cos.to(shape.dtype), sin.to(shape.dtype)) if rotate else None
    num_groups = len(shape.groups)
    batch = step_batch(lengths, [tables] * num_groups, [torch.tensor(slots + [PAD_SLOT] * padding)] * num_groups)
    query, key, value = fused.split(heads, 1)
    sinks = torch.linspace(-4, 4, spec.num_heads) if spec.sinks else None
    return Step(shape, batch, Heads(query, key, value, rotation), kv, sinks)


def backend_for(shape: AttentionShape) -> CudaBackend:
    return CudaBackend(shape, emulator.EmulatorLauncher())


def check(step: Step, group: int = 0) -> None:
    check_found(step, step.run(backend_for(step.shape), group), group)


def check_found(step: Step, found: tuple[torch.Tensor, torch.Tensor], group: int = 0) -> None:
    """Compare an output and a cache with the reference backend's."""
    (out, kv), (want, want_kv) = found, step.run(ReferenceBackend(step.shape), group)
    error = (out.double() - want.double()).abs().max()
    assert error <= TOLERANCES[step.shape.dtype], f"off by {error}"
    if step.heads.rotation is None:
        assert torch.equal(kv.float().nan_to_num(-1), want_kv.float().nan_to_num(-1)), "the caches differ"


BATCHES = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED, "padded": PADDED, "one chunk": [(7, 50)]}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_like_the_reference(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(make_step(changed(SHAPE, dtype=dtype), lengths, padding=3 if lengths is PADDED else 0))


@pytest.mark.parametrize(
    "changes",
    [
        {"windows": (7,), "block_size": 4},
        {"windows": (16,), "soft_cap": 2.0},
        *OPTIONS,
        {"kv_dtype": E4M3, "dtype": FP32},
        {"sinks": True, "dtype": FP32, "windows": (7,)},
        {"block_size": 1, "head_size": 40},
    ],
    ids=option_id,
)
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_options_like_the_reference(lengths: list[tuple[int, int]], changes: dict[str, Any]) -> None:
    check(make_step(changed(SHAPE, **changes), lengths))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("sink", [-1e30, -200.0, 200.0, 1e30])
def test_a_sink_far_from_the_scores_takes_nothing_or_all(sink: float, dtype: torch.dtype) -> None:
    check(replace(make_step(changed(SHAPE, dtype=dtype, sinks=True), MIXED), sinks=torch.full((4,), sink)))


def test_a_layer_with_sinks_must_pass_them() -> None:
    step = replace(make_step(changed(SHAPE, sinks=True), DECODE), sinks=None)
    with pytest.raises(ValueError, match="was given no sinks for layers whose spec says sinks=True"):
        step.run(backend_for(step.shape))


def test_rotates_before_it_stores() -> None:
    check(make_step(changed(SHAPE, dtype=FP16), MIXED, rotate=True))


def test_groups_have_their_own_tables_and_windows() -> None:
    shape = changed(SHAPE, windows=(None, 5))
    step = make_step(shape, MIXED)
    other = torch.full_like(step.batch.block_tables[0], NO_BLOCK)
    step.batch.block_tables = (other, step.batch.block_tables[0])
    step.batch.slot_mapping = (
        torch.full_like(step.batch.slot_mapping[0], PAD_SLOT),
        step.batch.slot_mapping[1],
    )
    check(replace(step, shape=shape), group=1)


def run_as_a_graph(step: Step, backend: CudaBackend, max_seq_len: int) -> torch.Tensor:
    """Planned once for any lengths, brought up to date, and then launched."""
    batch, lens = replace(step.batch, host=None, max_seq_len=max_seq_len), step.batch.host
    assert lens is not None
    heads, out = step.heads, torch.full(step.heads.query.shape, 7.0, dtype=step.shape.dtype)
    backend.prepare(batch)
    places = [part.data_ptr() for part in (batch.plan.memory, batch.plan.decodes[0].splits)]
    for lengths in (np.full(len(lens.seq_lens), max_seq_len), lens.seq_lens[: int((lens.seq_lens > 0).sum())]):
        backend.refresh(batch, lengths)
    assert places == [part.data_ptr() for part in (batch.plan.memory, batch.plan.decodes[0].splits)]
    backend.write_kv(heads, step.kv, batch, 0)
    backend.attend(heads.query, step.kv, batch, 0, out, step.sinks)
    return out


@pytest.mark.parametrize("windows", [(None,), (None, 40)], ids=str)
def test_a_row_has_the_bits_of_a_padded_bucket(windows: tuple[int | None, ...]) -> None:
    """As in a graph: with further sequences of length 0, and room for a longer context."""
    shape = changed(SHAPE, windows=windows)
    step = make_step(shape, [(1, 40), (1, 600)])
    bucket = make_step(shape, [(1, 40), (1, 600), (1, 0), (1, 0)], padding=0)
    bucket.kv = step.kv
    bucket.batch.block_tables[0][:2] = step.batch.block_tables[0]
    for name in ("query", "key", "value"):
        getattr(bucket.heads, name)[:2] = getattr(step.heads, name)
    bucket.batch.slot_mapping[0][:2] = step.batch.slot_mapping[0]
    alone = step.run(backend_for(shape))[0]
    padded = run_as_a_graph(bucket, backend_for(shape), 5000)
    assert torch.equal(padded[:2], alone)
    assert (padded[2:] == 0).all()


DRAFTS = [(5, 600), (1, 40), (16, 530), (17, 540), (3, 512)]


@pytest.mark.parametrize("windows", [(None,), (40, None)], ids=str)
def test_a_few_rows_behind_a_long_context_are_decoded(windows: tuple[int | None, ...]) -> None:
    shape = changed(SHAPE, windows=windows)
    check(make_step(shape, DRAFTS))
    plan = plan_of(backend_for(shape), DRAFTS)
    decoded = {int(sequence) for sequence in plan.decodes[0].splits[1:, 1]}
    assert (decoded, {int(sequence) for sequence in plan.prefills[0][:, 0]}) == ({0, 1, 2}, {3, 4})


class CountingLauncher(EmulatorLauncher):
    """Counts how often a kernel is requested. A repeated launch does not request it again."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def kernel(self, source: str, name: str) -> EmulatedKernel:
        self.count += 1
        self.names.append(name.partition("<")[0])
        return super().kernel(source, name)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_other_layers_of_a_step_launch_the_same_kernels_as_the_first(dtype: torch.dtype) -> None:
    """With their own cache, sinks and scales."""
    shape = changed(SHAPE, sinks=True, kv_dtype=E4M3, dtype=dtype)
    first = make_step(shape, MIXED, rotate=True)
    assert first.sinks is not None
    launcher = CountingLauncher()
    backends: tuple[AttentionBackend, ...] = (CudaBackend(shape, launcher), ReferenceBackend(shape))
    batches = [replace(first.batch), replace(first.batch)]
    pools = [first.kv.clone().view(E4M3) for _ in range(2)]
    for used, batch in zip(backends, batches, strict=True):
        used.prepare(batch)
    heads, out = first.heads, [torch.zeros(first.heads.query.shape, dtype=dtype) for _ in range(2)]
    asked = []
    for layer in range(4):
        scales = KVScales(0.5, 2.0) if layer == 3 else None
        sinks = first.sinks * (1 - layer)
        pools = [pool.view(torch.uint8).flip(-1).clone().view(E4M3) for pool in pools]
        rows = [part.clone() for part in (heads.query, heads.key, heads.value)]
        for which, (used, batch) in enumerate(zip(backends, batches, strict=True)):
            for part, value in zip((heads.query, heads.key, heads.value), rows, strict=True):
                part.copy_(value)
            used.write_kv(heads, pools[which], batch, 0, scales)
            used.attend(heads.query, pools[which], batch, 0, out[which], sinks, scales=scales)
        asked.append(launcher.count)
        assert (out[0].double() - out[1].double()).abs().max() <= 3 * TOLERANCES[dtype], layer
    assert asked == [asked[0], asked[0], asked[0], 2 * asked[0]], "other scales are another launch"


# ---- decisions of the host


def plan_of(backend: CudaBackend, lengths: list[tuple[int, int]], **changes: Any) -> Any:
    batch = replace(make_step(backend.shape, lengths).batch, **changes)
    backend.prepare(batch)
    return batch.plan


def test_only_kernels_that_have_work_are_launched() -> None:
    def launched(lengths: list[tuple[int, int]], **changes: Any) -> list[bool]:
        plan = plan_of(backend_for(SHAPE), lengths, **changes)
        return [plan.decodes[0] is not None, plan.prefills[0] is not None]

    assert launched(DECODE) == [True, False]
    assert launched(MIXED) == [True, True]
    equal = [(4, 9), (4, 4)]
    assert launched(equal) == [False, True]
    assert launched(equal, num_tokens=9) == [True, True], "a padding row has to be cleared"
    assert not plan_of(backend_for(SHAPE), DECODE).decodes[0].several


def test_the_workspace_is_within_what_was_announced_and_stays() -> None:
    shape = changed(SHAPE, max_seq_len=100_000, windows=(None, 64))
    backend = backend_for(shape)
    assert plan_of(backend, DECODE).workspace is None
    graph = plan_of(backend, DECODE, host=None, max_seq_len=100_000)
    parts, arrived = graph.workspace
    assert parts.nbytes == 6 * 64 * 4 * 65 * 4, "sequences, splits, heads, head size and a log-sum-exp"
    taken = parts.nbytes + arrived.nbytes + graph.memory.nbytes
    assert taken <= backend.workspace_bytes(10**6, len(DECODE), 100_000) <= 1.2 * taken + 2048 * 4 * 66 * 4
    assert plan_of(backend, [(1, 2000)]).workspace is graph.workspace
    wider = changed(changed(SHAPE, max_seq_len=100_000), num_heads=6, head_size=128).groups
    both = backend_for(replace(shape, groups=shape.groups + wider))
    plan = plan_of(both, DECODE, host=None, max_seq_len=100_000)
    assert plan.workspace.parts.nbytes == 6 * 64 * 6 * 129 * 4, "as the largest"
    assert backend_for(replace(shape, dtype=FP32)).workspace_bytes(10**6, 256, 100_000) == 0


def test_a_graph_refuses_lengths_that_it_was_not_made_for() -> None:
    backend = backend_for(SHAPE)
    batch = replace(make_step(SHAPE, DECODE).batch, host=None, max_seq_len=600)
    backend.prepare(batch)
    with pytest.raises(ValueError, match="a length is too large"):
        backend.refresh(batch, np.full(6, 4000))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": FP32}, None),
        ({"kv_dtype": E5M2}, None),
        ({"num_heads": 5}, "5 heads cannot share 2 KV heads"),
        ({"alibi_slopes": (1.0,)}, "1 ALiBi slopes for 4 heads"),
        ({"block_size": 24}, "2\\^n tokens, not of 24"),
        ({"head_size": 36}, "head size 36 is not a multiple of 8"),
        ({"head_size": 512}, "head size 512 is not a multiple of 8 up to 256"),
        ({"head_size": 264, "dtype": FP32}, "head size 264 is above 256"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"kv_dtype": FP32}, "torch.float32 does not go with queries of torch.bfloat16"),
        ({"kv_dtype": BF16, "dtype": FP32}, "torch.bfloat16 does not go with"),
    ],
)
def test_shapes_with_kernels(changes: dict[str, Any], reason: str | None) -> None:
    given = kernels_reason(changed(SHAPE, **changes))
    if reason is None:
        assert given is None
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(given)


def test_a_cpu_is_refused() -> None:
    assert CudaBackend.supports(SHAPE) == "it runs on a CUDA device, not on cpu"


# ---- a model


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 0.15)])
def test_a_model_gives_the_logits_of_the_reference_backend(tmp_path: Path, dtype: str, tolerance: float) -> None:
    check_model(Oracle(make_checkpoint(tmp_path / "model", head_dim=32), dtype), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 0.15)])
def test_layers_may_differ_in_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tolerance: float
) -> None:
    """Each has kernels of its head size; the scratch memory has room for the largest."""
    mixed_heads.install(monkeypatch)
    path = mixed_heads.make_mixed(tmp_path / "model", (mixed_heads.FULL, mixed_heads.SLIDING, mixed_heads.FULL))
    check_model(mixed_heads.MixedOracle(path, dtype), tolerance)


def check_model(
    oracle: Oracle, tolerance: float, backend_for: Callable[[AttentionShape], AttentionBackend] = backend_for
) -> None:
    """Prefills in chunks, mixed with decodes; logits are of the order of 10."""
    logits = []
    for emulated in (False, True):
        paged = Paged(oracle)
        paged.backend = backend_for(paged.shape) if emulated else ReferenceBackend(paged.shape)
        first, second = paged.sequence(oracle.tokens), paged.sequence(oracle.tokens.flip(0))
        for work in ([(first, 20)], [(first, 1), (second, 13)], [(first, 1), (second, 1)], [(second, 1), (first, 5)]):
            paged.step(*work)
        logits.append(torch.cat(first.logits + second.logits).float())
    assert logits[0].isfinite().all()
    assert float((logits[0] - logits[1]).abs().max()) < tolerance
