"""A KV cache in int8: what its rows hold, attention over them, what a block's bytes are, and a model with one."""

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
from vllm_lite.attention.int8_rows import dequantized, quantized
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.select import select_backend
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.protocol.step import Finish

needs_library = pytest.mark.skipif(not cpu.available(), reason="needs the native library")
INT8 = torch.int8


def by_hand(row):
    """Codes and scale of a row of numbers, one by one; Python rounds to even, too."""
    values = [torch.tensor(x, dtype=torch.float32) for x in row]
    scale = max(abs(x) for x in values) / torch.tensor(127.0)
    return [round(float(x / scale)) for x in values], float(scale)


def test_a_row_is_codes_and_their_scale():
    row = [0.5, -2.0, 1.0, 0.0, 0.003, 1.99, -1.0, 0.25]
    codes, scale = by_hand(row)
    kept = quantized(torch.tensor([row]))
    assert kept[0, :8].tolist() == codes
    assert codes[1] == -127
    assert kept[0, 8:].view(torch.float32).item() == scale
    assert torch.equal(dequantized(kept)[0], torch.tensor(codes) * torch.tensor(scale))


def test_rows_of_zeros_and_of_next_to_nothing_are_zeros():
    rows = torch.tensor([[0.0] * 8, [1e-40] * 8])
    assert not quantized(rows).any()


@pytest.mark.parametrize("head_size", [24, 512])
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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 8e-6), (torch.bfloat16, 6e-2)])
def test_attention_is_that_over_what_the_rows_say(backend, dtype, tolerance):  # noqa: F811
    batch = Batch(CHUNKED + DECODE, backend=backend, dtype=dtype, kv_dtype=INT8)
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=tolerance)


SHORT = [(1, 530), (5, 17), (1, 0), (33, 40), (2, 3)]
OPTIONS = [
    {"block_size": 8, "head_size": 24},
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
    """Its index's keys would need scales of their own."""
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
"""Of the spread of a position's logits, their standard deviation: what a model of random weights may be off."""


def last_logits(model, **settings):
    """Logits after each of some prompts, whose tokens attend to each other through the cache."""
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
def test_a_model_says_nearly_the_same(family, tmp_path):
    model = make_checkpoint(tmp_path / "model", family, **FAMILIES[family])
    dense, kept, eighth = (last_logits(model, kv_cache_dtype=kind) for kind in ("auto", "int8", "fp8"))
    error, of_fp8 = (((x - dense).std(-1) / dense.std(-1)).mean() for x in (kept, eighth))
    assert 0 < error < LOGITS_ERROR
    assert error < of_fp8, "a scale for each token and head is finer than float8"
    assert (kept.argmax(-1) == dense.argmax(-1)).float().mean() >= 0.75
