"""A KV cache in int8: its rows, attention over them, bytes of a block, and a model with such a cache."""

import math
from hashlib import blake2b
from typing import Any

import pytest
import torch

from tests.attention_steps import attention_shape
from tests.checkpoints import make_checkpoint
from tests.cpu.test_attention_cpu import TOLERANCE, exact
from tests.cpu.test_attention_reference import CHUNKED, DECODE, Batch, backend  # noqa: F401
from tests.driver import Driver, make_prompt, new_request
from tests.plays import Recorder
from vllm_lite.attention.backend import Heads
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.int8_rows import dequantized, hadamard, quantized
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.select import select_backend
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.kv_disk.fingerprint import LAYOUT_VERSION
from vllm_lite.protocol.step import Finish

needs_library = pytest.mark.skipif(not cpu.available(), reason="needs the native library")
INT8 = torch.int8


def matrix(size):
    """The transform of rows of `size` elements: float64 [size, size]."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while size % (2 * len(block)) == 0:
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block)
    return torch.block_diag(*[block / math.sqrt(len(block))] * (size // len(block)))


def plain(rows):
    """`rows` as they come out of a cache that keeps them as they are, with one scale for each."""
    scales = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scales).round() * scales


def with_outliers(rows):
    """Channels of real keys: one is thirty times as large as the others, one half of that."""
    rows[..., 3] *= 30
    rows[..., -2] *= 15
    return rows


@pytest.mark.parametrize(
    ("size", "block"), [(4, 4), (8, 8), (24, 8), (64, 64), (80, 16), (96, 32), (120, 8), (256, 256)]
)
def test_a_transform_mixes_the_channels_of_a_block_and_is_its_own_inverse(size, block):
    rows = torch.randn(5, 3, size, generator=torch.Generator().manual_seed(size))
    mixed = hadamard(rows)
    assert torch.allclose(mixed.double(), rows.double() @ matrix(size), rtol=0, atol=2e-6)
    assert torch.allclose(hadamard(mixed), rows, rtol=0, atol=2e-6)
    assert torch.allclose((mixed[0] * mixed[1]).sum(-1), (rows[0] * rows[1]).sum(-1), rtol=0, atol=1e-4)
    assert hadamard(torch.eye(size)[0]).count_nonzero() == block


def test_a_row_is_codes_and_their_scale():
    row = [0.5, -2.0, 1.0, 0.0, 0.003, 1.99, -1.0, 0.25]
    mixed = (torch.tensor(row, dtype=torch.float64) @ matrix(8)).tolist()
    scale = max(map(abs, mixed)) / 127
    kept = quantized(torch.tensor([row]))
    assert kept[0, :8].tolist() == [round(x / scale) for x in mixed]
    assert kept[0, :8].abs().max() == 127
    assert kept[0, 8:].view(torch.float32).item() == pytest.approx(scale, rel=1e-6)
    assert torch.allclose(dequantized(kept)[0], torch.tensor(row), rtol=0, atol=2 * scale)


@pytest.mark.parametrize("head_size", [64, 80, 96, 256])
def test_channels_that_are_far_larger_cost_the_others_less(head_size):
    rows = with_outliers(torch.randn(500, head_size, generator=torch.Generator().manual_seed(1)))
    error, of_plain = ((kept - rows).square().mean().sqrt() for kept in (dequantized(quantized(rows)), plain(rows)))
    assert error < 0.35 * of_plain


def test_rows_of_zeros_and_of_next_to_nothing_are_zeros():
    rows = torch.tensor([[0.0] * 8, [1e-40] * 8])
    assert not quantized(rows).any()


def test_changed_bytes_of_rows_require_another_layout_version():
    """KV on disk is identified by its layout's number: a change of these bytes must raise it, and the digest here."""
    kept = quantized(torch.arange(-48.0, 48.0).view(1, 96))
    digest = blake2b(kept.numpy().tobytes(), digest_size=4).hexdigest()
    assert (LAYOUT_VERSION, digest) == (2, "b57e9c12")


@pytest.mark.parametrize("head_size", [8, 24, 32, 64, 80, 96, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@needs_library
def test_native_writes_keep_the_same_bytes(each_isa, dtype, head_size):
    batch = Batch(CHUNKED + DECODE, backend=CpuBackend, dtype=dtype, kv_dtype=INT8, head_size=head_size)
    batch.key[0], batch.value[1] = 0, 1e-40
    batch.key[2] *= 1e4
    step = batch.step()
    batch.backend.write_kv(Heads(batch.query, batch.key, batch.value), batch.kv, step, 0)
    for row, slot in enumerate(batch.slots):
        block, offset = divmod(slot, batch.block_size)
        assert torch.equal(batch.kv[block, 0, :, offset], quantized(batch.key[row]))
        assert torch.equal(batch.kv[block, 1, :, offset], quantized(batch.value[row]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nan_makes_its_row_nan(backend, bad):  # noqa: F811
    """And no other: a code in its place would hide a broken model."""
    batch = Batch([(1, 1), (1, 1)], backend=backend, kv_dtype=INT8)
    batch.value[0, 0, 5] = bad
    out = batch.run()
    assert out[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("head_size", [64, 80])
@needs_library
def test_attention_over_keys_with_large_channels_is_closer_than_over_plain_rows(each_isa, head_size):
    """In bfloat16 and float32, for one token and for a chunk, compared with attention over the unquantized K and V."""
    lengths = [(1, 300), (40, 40)]
    for dtype in (torch.float32, torch.bfloat16):
        source = Batch(lengths, dtype=dtype, head_size=head_size)
        for rows in (source.key, source.value, *source.keys, *source.values):
            with_outliers(rows)
        source.query[..., 3] /= 30
        expected = exact(source)
        batch = Batch(lengths, backend=CpuBackend, dtype=dtype, kv_dtype=INT8, head_size=head_size)
        batch.query, batch.key, batch.value = source.query, source.key, source.value
        batch.keys, batch.values = ([part.clone() for part in parts] for parts in (source.keys, source.values))
        batch.fill()
        kept = batch.run().double()
        source.keys, source.values = ([plain(part.float()) for part in parts] for parts in (source.keys, source.values))
        error, of_plain = ((each - expected).square().mean().sqrt() for each in (kept, exact(source)))
        assert error < 0.35 * of_plain, (dtype, error, of_plain)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 8e-6), (torch.bfloat16, 6e-2)])
def test_attention_equals_that_over_the_dequantized_rows(backend, dtype, tolerance):  # noqa: F811
    batch = Batch(CHUNKED + DECODE, backend=backend, dtype=dtype, kv_dtype=INT8)
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=tolerance)


SHORT = [(1, 530), (5, 17), (1, 0), (33, 40), (2, 3)]
OPTIONS = [
    {"block_size": 8, "head_size": 24},
    {"head_size": 96, "group": 3},
    {"head_size": 80, "windows": (70,)},
    {"block_size": 32, "head_size": 512, "num_kv_heads": 1},
    {"windows": (17,), "soft_cap": 2.0},
    {"sinks": True, "group": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@needs_library
def test_kernels(each_isa, options):
    for dtype in (torch.float32, torch.bfloat16):
        batch = Batch(SHORT, backend=CpuBackend, dtype=dtype, kv_dtype=INT8, **options)
        assert (batch.run().double() - exact(batch)).abs().max() <= TOLERANCE[dtype]


@needs_library
def test_a_scale_of_another_token_would_be_seen():
    """The negative control: with one scale changed the result is beyond the tolerance."""
    batch = Batch([(1, 20)], backend=CpuBackend, kv_dtype=INT8)
    block, offset = divmod(batch.slots[0], batch.block_size)
    batch.run()
    batch.kv[block, 1, 0, offset, -4:].copy_(torch.tensor([9.0]).view(INT8))
    step, out = batch.step(), torch.zeros_like(batch.query)
    batch.backend.attend(batch.query, batch.kv, step, 0, out)
    assert (out.double() - exact(batch)).abs().max() > 0.1


@needs_library
def test_a_row_has_the_same_bits_in_any_chunk():
    """Decoded alone, or as the last of a chunk that is computed in tiles."""
    whole = Batch([(130, 700)], backend=CpuBackend, kv_dtype=INT8, dtype=torch.bfloat16)
    expected = whole.run()[-1]
    step = Batch([(1, 700)], backend=CpuBackend, kv_dtype=INT8, dtype=torch.bfloat16).step()
    own = whole.blocks[0]
    step.block_tables[0][0, : len(own)] = torch.tensor(own, dtype=torch.int32)
    whole.backend.prepare(step)
    out = torch.zeros_like(whole.query[-1:])
    whole.backend.attend(whole.query[-1:], whole.kv, step, 0, out)
    assert torch.equal(out[0], expected)


def test_latent_attention_is_refused_by_name():
    shape = attention_shape((4, 1, 16), 16, torch.float32, kv_dtype=INT8, value_size=8)
    with pytest.raises(ConfigError, match="an int8 KV cache does not go with latent attention"):
        select_backend(shape)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, INT8])
def test_sparse_attention_is_refused_by_name(kv_dtype: torch.dtype):
    """The keys of its index would need separate scales."""
    shape = attention_shape((4, 1, 16), 16, torch.float32, kv_dtype=kv_dtype, index_size=8)
    with pytest.raises(ConfigError, match="a KV cache of 8 bits does not go with sparse attention"):
        select_backend(shape)


def test_scales_of_the_whole_cache_are_for_float8():
    with pytest.raises(ValueError, match=r"are for float8 caches, not for torch\.int8"):
        attention_shape((4, 2, 16), 16, torch.float32, kv_dtype=INT8, k_scale=0.5)


def test_the_reference_serves_it_everywhere():
    assert ReferenceBackend.supports(attention_shape((4, 2, 16), 16, torch.float32, kv_dtype=INT8)) is None


FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 21}, "qwen3": {}}
LOGITS_ERROR = 0.05
"""Maximum error of a model of random weights, relative to the standard deviation of a position's logits."""


def last_logits(model, **settings):
    """Logits after each of several prompts, whose tokens read the cache."""
    driver = Driver(model, **settings)
    recorder = Recorder(driver)
    for handle in range(8):
        prompt = make_prompt(20 + 9 * handle, seed=handle)
        first = 1 + 7 * (handle % 4)
        driver.run(new_request(handle, prompt, list(range(first, first + 7))))
        driver.run(Finish(handle))
    return torch.cat([logits[:1] for logits in recorder.logits if len(logits)])


@pytest.mark.parametrize("family", FAMILIES)
@needs_library
def test_a_models_logits_are_nearly_the_same(family, tmp_path):
    model = make_checkpoint(tmp_path / "model", family, **FAMILIES[family])
    dense, kept, eighth = (last_logits(model, kv_cache_dtype=kind) for kind in ("auto", "int8", "fp8"))
    error, of_fp8 = (((x - dense).std(-1) / dense.std(-1)).mean() for x in (kept, eighth))
    assert 0 < error < LOGITS_ERROR
    assert error < of_fp8, "a scale for each token and head is finer than float8"
    assert (kept.argmax(-1) == dense.argmax(-1)).float().mean() >= 0.75
