"""Norms and rotary embedding of `CpuOps` against exact arithmetic, on each instruction set and in each dtype."""

import pytest
import torch
from torch.nn.functional import layer_norm

from tests.rows import SIZES, assert_close, assert_gaps_untouched, strided, twin, values
from vllm_lite.checkpoint.layer_specs.rope import Rope
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.ops import Rotation, TorchOps, WideNormWeights
from vllm_lite.layers.attention.rope import RotaryEmbedding

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

CPU = torch.device("cpu")
EPS = 1e-5


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x.double() * scale * weight.double()


# ---- norms


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int, dtype: torch.dtype, ops: CpuOps) -> None:
    x, weight = values(5, size, dtype=dtype), values(size, dtype=dtype, seed=1)
    exact, spread, out = exact_norm(x, weight), strided(x), strided(torch.zeros_like(x))
    ops.rms_norm(spread, weight, EPS, out)
    assert_close(out, exact, 1.1 if dtype != torch.float32 else 8)  # it is rounded twice, each time by half a unit
    assert torch.equal(spread, x)
    assert_gaps_untouched(out)
    ops.rms_norm(spread, weight, EPS, spread)
    assert torch.equal(spread, out)


@pytest.mark.usefixtures("each_vector_isa")
def test_rms_norm_of_heads_inside_wider_rows(dtype: torch.dtype, ops: CpuOps) -> None:
    rows, weight = values(7, 10 * 24, dtype=dtype), values(24, dtype=dtype, seed=1)
    heads, before = rows.view(7, 10, 24)[:, 2:6], rows.clone()
    exact = exact_norm(heads, weight)
    ops.rms_norm(heads, weight, EPS, heads)
    assert_close(heads, exact, 1.1 if dtype != torch.float32 else 8)
    others = [0, 1, 6, 7, 8, 9]
    assert torch.equal(rows.view(7, 10, 24)[:, others], before.view(7, 10, 24)[:, others])


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(size: int, dtype: torch.dtype, ops: CpuOps) -> None:
    residual, x = values(5, size, dtype=dtype), values(5, size, dtype=dtype, seed=2)
    weight, total = values(size, dtype=dtype, seed=1), residual + x
    exact = exact_norm(total, weight)
    stream, spread, out = strided(residual), strided(x), strided(torch.zeros_like(x))
    ops.add_rms_norm(stream, spread, weight, EPS, out)
    assert torch.equal(stream, total)
    assert_close(out, exact, 1.1 if dtype != torch.float32 else 8)
    assert_gaps_untouched(stream)
    assert_gaps_untouched(out)
    stream.copy_(residual)
    ops.add_rms_norm(stream, spread, weight, EPS, spread)  # as the layers do
    assert torch.equal(spread, out)
    assert torch.equal(stream, total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_round_as_the_plain_ones(dtype: torch.dtype) -> None:
    """The quotient is rounded before it is multiplied by the weight: without that a third of all would differ."""
    x, weight = values(256, 1024, dtype=dtype), values(1024, dtype=dtype, seed=1)
    plain, found = torch.empty_like(x), torch.empty_like(x)
    TorchOps().rms_norm(x, weight, EPS, plain)
    CpuOps().rms_norm(x, weight, EPS, found)
    assert (plain != found).float().mean() < 1e-3


# ---- norms that are computed in float32 to their end


def wide_weights(size: int, *, bias: bool, centered: bool) -> WideNormWeights:
    weight = values(size, dtype=torch.float32, seed=1)
    return WideNormWeights(weight, values(size, dtype=torch.float32, seed=3) if bias else None, EPS, centered)


def assert_wide(out: torch.Tensor, x: torch.Tensor, norm: WideNormWeights) -> None:
    """The norm is exact but for one rounding of the result and float32's errors on the way."""
    wide, weight = x.double(), norm.weight.double()
    bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.double()
    if norm.centered:
        exact = layer_norm(wide, wide.shape[-1:], weight, bias, norm.eps)
    else:
        exact = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight + bias
    largest = wide.abs().amax(-1, keepdim=True) / (wide.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    within = 1e-6 * ((exact - bias).abs() + (2 + largest) * weight.abs() + bias.abs())
    numbers = torch.finfo(out.dtype)
    assert ((out.double() - exact).abs() <= 0.5 * numbers.eps * (exact.abs() + numbers.tiny) + within).all()


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_wide_norm(*, centered: bool, bias: bool, dtype: torch.dtype, ops: CpuOps) -> None:
    for size in SIZES:
        x, norm = values(5, size, dtype=dtype) + 2, wide_weights(size, bias=bias, centered=centered)
        spread, out = strided(x), strided(torch.zeros_like(x))
        ops.wide_norm(spread, norm, out)
        assert_wide(out, x, norm)
        assert torch.equal(spread, x)
        assert_gaps_untouched(out)
        ops.wide_norm(spread, norm, spread)
        assert torch.equal(spread, out)


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("centered", [True, False])
def test_wide_norm_of_heads_inside_wider_rows(*, centered: bool, dtype: torch.dtype, ops: CpuOps) -> None:
    rows, norm = values(7, 10 * 24, dtype=dtype), wide_weights(24, bias=False, centered=centered)
    heads, before = rows.view(7, 10, 24)[:, 2:6], rows.clone()
    ops.wide_norm(heads, norm, heads)
    assert_wide(heads, before.view(7, 10, 24)[:, 2:6], norm)
    others = [0, 1, 6, 7, 8, 9]
    assert torch.equal(rows.view(7, 10, 24)[:, others], before.view(7, 10, 24)[:, others])


@pytest.mark.usefixtures("each_vector_isa")
def test_wide_norm_of_groups_with_weights_of_their_own(dtype: torch.dtype, ops: CpuOps) -> None:
    rows, (weight, bias) = values(7, 10 * 24, dtype=dtype), values(2, 4, 30, dtype=torch.float32, seed=1)[..., :24]
    groups, before, plain = rows.view(7, 10, 24)[:, 2:6], rows.clone(), torch.empty(7, 4, 24, dtype=dtype)
    norm = WideNormWeights(weight, bias, EPS, centered=False)
    twin.wide_norm(groups, norm, plain)
    ops.wide_norm(groups, norm, groups)
    for index in range(4):
        own = norm._replace(weight=weight[index], bias=bias[index])
        for out in (groups, plain):
            assert_wide(out[:, index], before.view(7, 10, 24)[:, 2 + index], own)


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("centered", [True, False])
def test_add_wide_norm(*, centered: bool, dtype: torch.dtype, ops: CpuOps) -> None:
    for size in SIZES:
        residual, x = values(5, size, dtype=dtype), values(5, size, dtype=dtype, seed=2)
        norm, total = wide_weights(size, bias=True, centered=centered), residual + x
        stream, spread, out, alone = strided(residual), strided(x), strided(torch.zeros_like(x)), torch.empty_like(x)
        ops.add_wide_norm(stream, spread, norm, out)
        assert torch.equal(stream, total)
        ops.wide_norm(total, norm, alone)
        assert torch.equal(out, alone)
        assert_gaps_untouched(stream)
        assert_gaps_untouched(out)
        stream.copy_(residual)
        ops.add_wide_norm(stream, spread, norm, spread)  # as the layers do
        assert torch.equal(spread, out)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_norms_round_as_the_plain_ones(*, centered: bool, dtype: torch.dtype, ops: CpuOps) -> None:
    """Once, at the end: with the roundings of RMSNorm a third of all would differ."""
    x, norm = values(256, 1024, dtype=dtype), wide_weights(1024, bias=centered, centered=centered)
    plain, found = torch.empty_like(x), torch.empty_like(x)
    twin.wide_norm(x, norm, plain)
    ops.wide_norm(x, norm, found)
    assert (plain != found).float().mean() < 2e-3


# ---- rotary embedding


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("head_size", [2, 8, 24, 64, 128, 130])
def test_rotate(head_size: int, dtype: torch.dtype, ops: CpuOps) -> None:
    rows = values(6, 5 * head_size, dtype=dtype)
    heads = rows.view(6, 5, head_size)[:, 1:4]
    half, angles = head_size // 2, torch.arange(6 * (head_size // 2)).view(6, -1) / 7
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    low, high = heads.double().split(half, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    exact, before = torch.cat((low * c - high * s, high * c + low * s), -1), rows.clone()
    ops.rotate(heads, rotation)
    eps = torch.finfo(dtype).eps
    assert (heads.double() - exact).abs().max() <= 4 * eps
    assert ((heads.double() - exact).abs() <= 0.51 * eps * exact.abs() + 1e-6).all()  # rounded once
    assert torch.equal(rows.view(6, 5, -1)[:, [0, 4]], before.view(6, 5, -1)[:, [0, 4]])


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("head_size", [2, 24, 64])
def test_selected_rotations_match_plain_torch(head_size: int, dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(Rope(1e4), head_size, 50, device=CPU)
    positions = torch.tensor([0, 49, 3, 3, 17])
    native, plain = (Rotation(*torch.zeros(2, 5, head_size, dtype=dtype)) for _ in range(2))
    rope.select(positions, native)
    rope.native = False
    rope.select(positions, plain)
    assert torch.equal(native.cos, plain.cos)
    assert torch.equal(native.sin, plain.sin)
    assert (native.sin[1, : head_size // 2] == -native.sin[1, head_size // 2 :]).all()


@pytest.mark.parametrize("position", [-1, 50])
def test_a_position_outside_of_the_table_is_refused(position: int) -> None:
    rope, out = RotaryEmbedding(Rope(1e4), 8, 50, device=CPU), Rotation(*torch.ones(2, 3, 8))
    with pytest.raises(IndexError, match=f"position {position} .* 50"):
        rope.select(torch.tensor([0, position, 1]), out)
    assert (out.cos == 1).all()
