"""Native writes into the paged cache and copies of its blocks, by value, for every instruction set of this machine."""

import pytest
import torch

from tests.attention_steps import attention_shape, step_batch
from tests.cpu.test_attention_cpu import FLOAT8, FLOATS, threads  # noqa: F401
from vllm_lite.attention.backend import Heads
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.memory import copy_blocks
from vllm_lite.kernels.ops import Rotation

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 6, 2, 4


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation_of(num_tokens, head_size, dtype):
    angles = torch.arange(num_tokens)[:, None] * torch.logspace(0, -3, head_size // 2)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), dim=1).to(dtype), torch.cat((-sin, sin), dim=1).to(dtype))


def rotated(heads, rotation):
    """Rotate in float32, and round once."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1).float()
    return (heads.float() * rotation.cos[:, None].float() + swapped * rotation.sin[:, None].float()).to(heads.dtype)


class Write:
    """New tokens, and a pool of NaN that they are written to."""

    def __init__(self, num_tokens, head_size, dtype, kv_dtype=None, slots=None, **scales):
        heads = (NUM_HEADS, NUM_KV_HEADS, head_size)
        self.shape = attention_shape(heads, BLOCK_SIZE, dtype, kv_dtype=kv_dtype, **scales)
        num_blocks = num_tokens // BLOCK_SIZE + 2
        self.pool = torch.full((num_blocks, 3, 2, NUM_KV_HEADS, BLOCK_SIZE, head_size), torch.nan)
        self.pool = self.pool.to(self.shape.cache_dtype)
        self.slots = torch.randperm(num_blocks * BLOCK_SIZE)[:num_tokens] if slots is None else torch.tensor(slots)
        self.rows = random(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, head_size).to(dtype)
        self.heads = self.rows.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)

    def run(self, rotation=None):
        """The rows and the slots of the pool afterwards."""
        batch = step_batch([], [torch.zeros(0, 1, dtype=torch.int32)], [self.slots])
        backend = CpuBackend(self.shape)
        backend.prepare(batch)
        query, key, value = self.heads
        backend.write_kv(Heads(query, key, value, rotation), self.pool[:, 1], batch, 0)
        return self.pool[:, 1].float().permute(0, 3, 1, 2, 4).flatten(0, 1)  # [slot, 2, num_kv_heads, head_size]


@pytest.mark.parametrize("head_size", [8, 16, 24, 64, 80, 120, 128, 256, 512])
@pytest.mark.parametrize("dtype", FLOATS)
def test_turns_and_stores(each_vector_isa, dtype, head_size):
    write = Write(37, head_size, dtype)
    rotation = rotation_of(37, head_size, dtype)
    query, key, value = (x.clone() for x in write.heads)
    slots = write.run(rotation)
    limit = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]  # one unit in the last place
    for turned, heads in zip(write.heads[:2], (query, key), strict=True):
        assert torch.allclose(turned.float(), rotated(heads, rotation).float(), rtol=limit, atol=limit)
    assert torch.equal(write.heads[2], value)
    assert torch.equal(slots[write.slots, 0], write.heads[1].float())
    assert torch.equal(slots[write.slots, 1], value.float())
    untouched = torch.ones(len(slots), dtype=torch.bool)
    untouched[write.slots] = False
    assert slots[untouched].isnan().all()
    assert write.pool[:, [0, 2]].float().isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_tokens_without_a_slot_are_turned_but_not_stored(each_vector_isa, dtype):
    write = Write(4, 16, dtype, slots=[5, PAD_SLOT, 0, PAD_SLOT])
    rotation = rotation_of(4, 16, dtype)
    before = write.rows.clone()
    slots = write.run(rotation)
    assert not torch.equal(write.rows[3, :NUM_HEADS], before[3, :NUM_HEADS])
    assert slots[[5, 0]].isfinite().all()
    assert slots[[1, 2, 3, 4, 6, 7]].isnan().all()


def test_nothing_is_turned_without_a_rotation(each_vector_isa):
    write = Write(5, 16, torch.bfloat16)
    before = write.rows.clone()
    slots = write.run()
    assert torch.equal(write.rows, before)
    assert torch.equal(slots[write.slots, 0], before[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS].float())


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_every_float8_is_loaded_as_torch_does(each_vector_isa, kv_dtype):
    """A sequence of one token attends to its own V alone; the 256 codes are the V of 32 sequences of 8 elements."""
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    for dtype in (torch.float32, torch.bfloat16):
        shape = attention_shape((1, 1, 8), 1, dtype, kv_dtype=kv_dtype, v_scale=2.0)
        kv = torch.zeros(32, 2, 1, 1, 8).to(kv_dtype)
        kv[:, 1] = codes.view(32, 1, 1, 8)
        table = torch.arange(32, dtype=torch.int32)[:, None]
        batch = step_batch([(1, 1)] * 32, [table], [torch.full((32,), PAD_SLOT)])
        backend = CpuBackend(shape)
        backend.prepare(batch)
        out = torch.empty(32, 1, 8, dtype=dtype)
        backend.attend(torch.zeros(32, 1, 8, dtype=dtype), kv, batch, 0, out)
        expected, given = 2 * codes.float(), out.flatten().float()
        finite = expected.isfinite()
        assert torch.equal(given[finite], expected[finite])
        assert not given[~finite].isfinite().any()


@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float8_is_rounded_as_torch_does_but_saturates(each_vector_isa, dtype, kv_dtype):
    """All values of bfloat16 or float16, and values halfway between two float8 or next to halfway."""
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
    codes = codes[codes.isfinite()].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    every = torch.arange(65536).to(torch.uint16).view(dtype if dtype.itemsize == 2 else torch.bfloat16).to(dtype)
    values = torch.cat((every.float(), codes, between, between * 1.001, between * 0.999)).to(dtype)
    values = torch.cat((values, values.new_zeros(-len(values) % 16)))
    write = Write(len(values) // 16, 8, dtype, kv_dtype, v_scale=0.5)
    write.heads[2].copy_(values.view(-1, NUM_KV_HEADS, 8))
    slots = write.run()[write.slots, 1].flatten()
    limit = torch.finfo(kv_dtype).max
    expected = (values.float() / 0.5).clamp(-limit, limit).to(kv_dtype).float()
    assert torch.allclose(slots, expected, rtol=0, atol=0, equal_nan=True)


def test_many_tokens_on_several_threads(each_vector_isa, threads):  # noqa: F811
    results = []
    for count in (1, 2, 4):
        threads(count)
        torch.manual_seed(0)
        write = Write(1000, 64, torch.bfloat16)
        results.append((write.run(rotation_of(1000, 64, torch.bfloat16)).nan_to_num(), write.rows))
    for slots, rows in results[1:]:
        assert torch.equal(slots, results[0][0])
        assert torch.equal(rows, results[0][1])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("elements", [3, 5000, 400_000])
def test_copies_of_blocks(threads, count, elements):  # noqa: F811
    """Blocks that are smaller and larger than the bytes that one task copies, within a pool and between pools."""
    threads(count)
    pairs = torch.tensor([[1, 9], [1, 8], [3, 7], [0, 0]])
    source, other = random(10, elements), random(12, elements, seed=1)
    expected, within = other.clone(), source.clone()
    expected[pairs[:, 1]] = source[pairs[:, 0]]
    within[pairs[:3, 1]] = source[pairs[:3, 0]]
    copy_blocks(source, other, pairs)
    copy_blocks(source, source, pairs[:3])
    assert torch.equal(other, expected)
    assert torch.equal(source, within)


def test_copies_of_many_small_blocks(threads):  # noqa: F811
    threads(2)
    source, destination = random(5000, 100), torch.zeros(5000, 100)
    order = torch.randperm(5000)
    copy_blocks(source, destination, torch.stack((order, torch.arange(5000)), dim=1))
    assert torch.equal(destination, source[order])
    copy_blocks(source, destination, torch.zeros(0, 2, dtype=torch.int64))
    assert torch.equal(destination, source[order])


def test_copies_that_make_no_sense_are_refused():
    pool = torch.zeros(4, 8)
    one = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="blocks of"):
        copy_blocks(pool, torch.zeros(4, 9), one)
    with pytest.raises(ValueError, match="must be contiguous"):
        copy_blocks(torch.zeros(8, 4).T, pool, one)
    with pytest.raises(ValueError, match="pairs must be int64"):
        copy_blocks(pool, pool, one.int())
