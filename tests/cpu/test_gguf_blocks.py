"""Blocks of GGUF files: taken apart as gguf-py does it, and natively as in plain torch, on every instruction set."""

import gguf
import numpy as np
import pytest
import torch

from tests.cpu.test_native_grouped import check_packed
from tests.rows import random
from vllm_lite.checkpoint.gguf.kinds import BY_NAME, KINDS, READ
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.kernels import cpu, gguf_blocks
from vllm_lite.kernels.cpu.weights import gguf_blocks as native
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.kernels.gguf_blocks import BLOCK, BlockRows, take_apart
from vllm_lite.kernels.grouped import GroupedWeight, dequantize
from vllm_lite.layers.quantized import gguf as layer
from vllm_lite.layers.quantized.gguf import BlockWeight
from vllm_lite.layers.weights.weight_form import LinearShape

CPU = torch.device("cpu")
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,), "MXFP4": (), "TQ1_0": (52,), "TQ2_0": (64,), "NVFP4": (), "IQ1_M": ()}
"""Byte offsets of the float16 numbers in a block; a kind that is not listed has one, at offset 0."""
needs_native = pytest.mark.skipif(not cpu.available(), reason="no native library")


def blocks(kind: str, num_rows: int, per_row: int) -> torch.Tensor:
    """Random bytes with finite scales, some of them zero and some negative."""
    rng, num_bytes = np.random.default_rng(3), BLOCK[kind][1]
    found = rng.integers(0, 256, (num_rows, per_row * num_bytes), dtype=np.uint8)
    each = found.reshape(-1, num_bytes)
    for at in HALVES.get(kind, (0,)):
        halves = rng.normal(size=(len(each), 1)).astype(np.float16)
        halves[::7] = 0
        each[:, at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        each[:, 0] = rng.integers(120, 132, len(each))
    if kind == "IQ1_M":  # the highest of its four bits of exponent is the sign and one more
        each[:, 55] = each[:, 55] & 191
    return torch.from_numpy(found)


@pytest.mark.parametrize("kind", READ)
def test_blocks_are_taken_apart_as_gguf_py_does_it(kind: str) -> None:
    some = blocks(kind, 6, 3)
    found = take_apart(BlockRows(kind, some))
    assert found.shape == (6, 3 * BLOCK[kind][0])
    expected = gguf.quants.dequantize(some.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(dequantize(found).numpy(), expected)


def test_every_scale_of_nvfp4_agrees_with_gguf_py() -> None:
    """All bytes, also the one for NaN and those with the sign bit, which scales never have."""
    some = torch.full((64, 36), 0x11, dtype=torch.uint8)
    some[:, :4] = torch.arange(256, dtype=torch.uint8).view(64, 4)
    expected = gguf.quants.dequantize(some.numpy(), gguf.GGMLQuantizationType.NVFP4)
    assert np.array_equal(dequantize(take_apart(BlockRows("NVFP4", some))).numpy(), expected)


def test_blocks_that_only_torch_knows_are_taken_apart_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = BlockRows("IQ2_XS", blocks("IQ2_XS", 7, 2), torch.arange(512).flip(0))
    whole = native.take_apart(rows)
    monkeypatch.setattr(gguf_blocks, "ELEMENTS_AT_ONCE", 1024)
    found = native.take_apart(rows)
    assert torch.equal(found.codes, whole.codes)
    assert torch.equal(found.scales, whole.scales)
    assert found.order is rows.order
    assert torch.equal(dequantize(found), dequantize(take_apart(rows)))


@needs_native
@pytest.mark.parametrize("kind", READ)
@pytest.mark.usefixtures("each_isa")
def test_natively_they_are_the_same_bit_for_bit(kind: str) -> None:
    """All bytes are random: scales may be infinite, or no numbers. Of a row only some blocks are wanted."""
    num_bytes = BLOCK[kind][1]
    wide = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (300, 5 * num_bytes), dtype=np.uint8))
    rows = BlockRows(kind, wide[:, num_bytes : 4 * num_bytes])
    ours, plain = native.take_apart(rows), take_apart(rows)
    assert torch.equal(ours.codes, plain.codes)
    assert ours.group_size == plain.group_size
    assert ours.values is plain.values
    assert (ours.minima is None) == (plain.minima is None)
    both = [(ours.scales, plain.scales)]
    if ours.minima is not None and plain.minima is not None:
        both.append((ours.minima, plain.minima))
    for one, other in both:
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7.0).view(torch.int32), other.nan_to_num(7.0).view(torch.int32))


@needs_native
@pytest.mark.parametrize("kind", READ)
def test_packed_blocks_have_the_values_of_gguf_py(each_isa: str, kind: str) -> None:
    """Rows bit for bit, and products; 70 outputs are two whole blocks of the packed weight and a part."""
    rows = BlockRows(kind, blocks(kind, 70, 3))
    plain, packed = take_apart(rows), PackedWeight(rows)
    found = torch.empty(plain.shape)
    packed.rows(torch.arange(70), found)
    assert torch.equal(found, dequantize(plain))
    for num_rows in (1, 14):
        x = random(num_rows, plain.shape[1])
        check_packed(packed, plain, x, None, (each_isa, num_rows), whole=bool(packed._record.are_whole))


@needs_native
def test_the_smallest_scale_and_the_largest_are_kept() -> None:
    """MXFP4's powers of two exceed float16, and the scale for byte 0 is a denormal number."""
    some = blocks("MXFP4", 254, 1)
    some[:, 0] = torch.arange(254, dtype=torch.uint8)
    rows = BlockRows("MXFP4", some)
    found = torch.empty(254, 32)
    PackedWeight(rows).rows(torch.arange(254), found)
    assert torch.equal(found, dequantize(take_apart(rows)))


@pytest.mark.parametrize("is_native", [True, False])
def test_a_dense_table_is_made_some_rows_at_a_time(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "CHUNK_ELEMENTS", 40 * 64)
    if not is_native:
        monkeypatch.setattr(cpu, "available", lambda: False)
    some = blocks("Q8_0", 70, 2)
    sizes: list[int] = []

    def counted(rows: BlockRows) -> GroupedWeight:
        sizes.append(len(rows.blocks))
        return take_apart(rows)

    monkeypatch.setattr("vllm_lite.kernels.gguf_blocks.take_apart", counted)
    monkeypatch.setattr(native, "take_apart", counted)
    shape = LinearShape(Split.whole(64), (Split.whole(70),), torch.bfloat16, CPU)
    found = BlockWeight.of("Q8_0", ("w",), shape).dense((some,))
    assert torch.equal(found, dequantize(take_apart(BlockRows("Q8_0", some))).bfloat16())
    assert sizes == [32, 32, 6]


def test_the_types_have_the_sizes_that_gguf_py_knows() -> None:
    theirs = {number.value: (number.name, *sizes) for number, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: tuple(kind) for number, kind in KINDS.items()} == theirs
    assert {name: BY_NAME[name][1:] for name in READ} == BLOCK


def test_a_type_that_is_not_supported_is_named() -> None:
    for take in (take_apart, native.take_apart, native.pack_blocks):
        with pytest.raises(ModelError, match=r"Q1_0 are not supported; supported: Q4_0"):
            take(BlockRows("Q1_0", torch.zeros(1, 18, dtype=torch.uint8)))
        with pytest.raises(ModelError, match=r"rows of 35 bytes are not whole blocks of type Q8_0, which have 34"):
            take(BlockRows("Q8_0", torch.zeros(1, 35, dtype=torch.uint8)))


@needs_native
def test_no_rows_are_taken_apart_and_not_packed() -> None:
    rows = BlockRows("Q8_0", torch.empty(0, 68, dtype=torch.uint8))
    assert native.take_apart(rows).shape == take_apart(rows).shape == (0, 64)
    with pytest.raises(ValueError, match=r"blocks must be a matrix on the CPU, got \[0, 68\] on cpu"):
        native.pack_blocks(rows)
