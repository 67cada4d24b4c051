"""Attention within whole images: the reference, and other backends, whose kernels are causal, compared with one dense
formula."""

import random
from typing import Any

import pytest
import torch

from tests.attention_steps import attention_shape, step_batch
from tests.kernels import emulator
from vllm_lite.attention.backend import AttentionBackend, AttentionShape, Heads
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.cuda import CudaBackend
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.select import select_backend
from vllm_lite.attention.step_batch import StepBatch, WholeImage
from vllm_lite.attention.whole_images import WholeImages
from vllm_lite.kernels import cpu

HEADS = (4, 2, 16)
BLOCK = 4
FP32 = torch.float32


class Step:
    """Sequences of (computed before, tokens of the step) with images at some places, each whole or to its end."""

    def __init__(self, seed: int, **spec: Any) -> None:
        rng, data = random.Random(seed), torch.Generator().manual_seed(seed)
        windows = tuple(spec.pop("windows", (None, 5)))
        self.shape = attention_shape(HEADS, BLOCK, FP32, windows, whole_images=16, **spec)
        self.images, self.spans, lengths, row = list[WholeImage](), list[list[tuple[int, int]]](), [], 0
        for index in range(rng.randint(1, 4)):
            own, position = list[tuple[int, int]](), 0
            for _ in range(rng.randint(0, 3)):
                start = position + rng.randint(0, 4)
                own.append((start, position := start + rng.randint(1, 9)))
            length = position + rng.randint(1, 4)
            before = rng.choice([0, rng.randint(0, length - 1)])  # also in the middle of an image
            lengths.append((length - before, length))
            for start, end in own:
                if end > before:
                    first = max(start, before)
                    self.images.append(WholeImage(index, row + first - before, end - first, end))
            self.spans.append(own)
            row += length - before
        self.lengths = lengths
        counts = [-(-length // BLOCK) for _, length in lengths]
        ids = (torch.randperm(sum(counts), generator=data) + 1).split(counts)
        table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for index, own_ids in enumerate(ids):
            table[index, : len(own_ids)] = own_ids
        self.keys, self.values = ([torch.randn(t, 2, 16, generator=data) for _, t in lengths] for _ in range(2))
        self.query = torch.randn(row, 4, 16, generator=data)
        slots = [
            torch.tensor([int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for p in range(t - q, t)])
            for i, (q, t) in enumerate(lengths)
        ]
        self.kv = torch.full((sum(counts) + 1, 2, 2, BLOCK, 16), torch.nan)
        for i, (query_len, length) in enumerate(lengths):  # earlier tokens
            for position in range(length - query_len):
                place = self.kv[int(table[i, position // BLOCK]), :, :, position % BLOCK]
                place[0], place[1] = self.keys[i][position], self.values[i][position]
        groups = len(windows)
        self.batch: StepBatch = step_batch(lengths, [table] * groups, [torch.cat(slots)] * groups)
        self.batch.images = tuple(self.images)

    def run(self, backend: AttentionBackend, group: int, *, whole: bool = True) -> torch.Tensor:
        new = [
            [own[t - q :] for own, (q, t) in zip(part, self.lengths, strict=True)] for part in (self.keys, self.values)
        ]
        out, kv = torch.full_like(self.query, torch.nan), self.kv.clone()
        self.batch.images = tuple(self.images) if whole else ()
        backend.prepare(self.batch)
        heads = Heads(self.query.clone(), torch.cat(new[0]), torch.cat(new[1]))
        backend.write_kv(heads, kv, self.batch, group)
        backend.attend(heads.query, kv, self.batch, group, out, new=heads)
        return out

    def dense(self, group: int) -> torch.Tensor:
        """A row sees (position - window, end of its image)."""
        window, rows, row = self.shape.groups[group].window or 10**6, [], 0
        for own, keys, values, (query_len, length) in zip(
            self.spans, self.keys, self.values, self.lengths, strict=True
        ):
            for position in range(length - query_len, length):
                end = next((end for start, end in own if start <= position < end), position + 1)
                seen = slice(max(0, position - window + 1), end)
                key, value = (part[seen].double().repeat_interleave(2, 1) for part in (keys, values))
                scores = torch.einsum("hd,thd->ht", self.query[row].double(), key) * self.shape.groups[group].scale
                rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value))
                row += 1
        return torch.stack(rows).float()


@pytest.mark.parametrize("seed", range(25))
def test_the_reference_is_the_formula(seed: int) -> None:
    step = Step(seed)
    for group in range(2):
        found = step.run(ReferenceBackend(step.shape), group)
        assert torch.allclose(found, step.dense(group), atol=1e-5)


@pytest.mark.parametrize("seed", range(25))
def test_the_native_backend_is_the_formula(seed: int) -> None:
    step = Step(seed)
    backend = select_backend(step.shape)
    assert isinstance(backend, WholeImages) == cpu.available()
    for group in range(2):
        assert torch.allclose(step.run(backend, group), step.dense(group), atol=1e-5)


@pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")
def test_the_backend_for_gpus_is_the_formula() -> None:
    for seed in range(4):
        step = Step(seed)
        backend = WholeImages(CudaBackend(step.shape, emulator.EmulatorLauncher()))
        for group in range(2):
            assert torch.allclose(step.run(backend, group), step.dense(group), atol=1e-5)


def test_layers_that_do_not_see_images_as_a_whole_are_causal() -> None:
    step = Step(3)
    assert step.images
    groups = (step.shape.groups[0].__class__(*HEADS, scale=HEADS[2] ** -0.5), step.shape.groups[1])
    shape = AttentionShape(groups, BLOCK, FP32, torch.device("cpu"))
    for backend in (ReferenceBackend(shape), select_backend(shape)):
        assert torch.allclose(step.run(backend, 0), step.run(ReferenceBackend(shape), 0, whole=False), atol=1e-5)
        assert torch.allclose(step.run(backend, 1), step.dense(1), atol=1e-5)


def test_a_soft_cap_holds_for_images() -> None:
    step = Step(5, soft_cap=1.5)
    for group in range(2):
        expected = step.run(ReferenceBackend(step.shape), group)
        assert torch.allclose(step.run(select_backend(step.shape), group), expected, atol=1e-5)
        assert not torch.allclose(step.run(ReferenceBackend(step.shape), group, whole=False), expected, atol=1e-3)


def test_a_backend_is_wrapped_only_where_a_model_needs_it() -> None:
    plain, whole = attention_shape(HEADS, BLOCK, FP32), attention_shape(HEADS, BLOCK, FP32, whole_images=16)
    if not cpu.available():
        pytest.skip("the reference is never wrapped")
    backend = select_backend(whole)
    assert isinstance(backend, WholeImages)
    assert isinstance(backend.inner, CpuBackend)
    assert isinstance(select_backend(plain), CpuBackend)
    assert isinstance(select_backend(whole, "reference"), ReferenceBackend)
    assert backend.layout_name == select_backend(plain).layout_name
    assert backend.graph_safe
    room = backend.workspace_bytes(512, 4, 4096)
    assert room > backend.inner.workspace_bytes(512, 4, 4096)
    windowed = attention_shape(HEADS, BLOCK, FP32, (8,), whole_images=16)
    assert room > select_backend(windowed).workspace_bytes(512, 4, 4096)
