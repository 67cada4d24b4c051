"""Activations, sums and products of `CpuOps` against exact arithmetic and plain torch, on each instruction set."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from tests.rows import SIZES, assert_close, assert_gaps_untouched, strided, twin, values
from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.fused import CpuOps

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

PLAIN: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}


def exact_activation(kind: Activation, x: torch.Tensor) -> torch.Tensor:
    """The activation in float64, without the cancellations of the plain formulas."""
    wide = x.double()
    if kind == "gelu":
        return wide * (torch.erfc(wide * -math.sqrt(0.5)) / 2)
    z = wide if kind == "silu" else math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3)
    if kind in ("relu", "relu2"):
        return wide.relu() ** (2 if kind == "relu2" else 1)
    return wide * torch.sigmoid(z)


def units(kind: Activation, x: torch.Tensor) -> float | torch.Tensor:
    """Tolerated distance of a result from the exact activation of x, see `assert_close`."""
    if x.dtype != torch.float32:
        return 1.1  # it is rounded twice, each time by half a unit
    size = x.double().abs()
    # e^-z has the error of z, which the gelus compute in several steps
    z = {"silu": 0.6 * size, "gelu_tanh": 2.5 * (1.6 * size + 0.0714 * size**3), "gelu": 0.5 * size**2}
    return 4 + z.get(kind, torch.zeros_like(size))


# ---- activations


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("kind", PLAIN)
def test_activations(kind: Activation, dtype: torch.dtype, ops: CpuOps) -> None:
    for size in SIZES:
        gate_up = values(4, 2 * size, dtype=dtype, scale=4)
        gate, up = gate_up.chunk(2, dim=-1)
        exact = exact_activation(kind, gate)
        spread, out = strided(gate_up), strided(torch.zeros(4, size, dtype=dtype))
        ops.activate_and_mul(kind, spread, out)
        assert_close(out, exact * up.double(), units(kind, gate))
        assert_gaps_untouched(out)
        alone = strided(gate)
        ops.activate(kind, alone)
        assert_close(alone, exact, units(kind, gate))
        assert_gaps_untouched(alone)
        ops.activate_and_mul(kind, torch.cat((gate, torch.ones_like(gate)), 1), out)
        assert torch.equal(out, alone)
        ops.activate_and_mul(kind, spread, spread[:, :size])
        ops.activate_and_mul(kind, gate_up, out)
        assert torch.equal(spread[:, :size], out)


@pytest.mark.usefixtures("each_vector_isa")
def test_swiglu_of_gpt_oss(dtype: torch.dtype, ops: CpuOps) -> None:
    """Rounded once, with limits to the gate above and to up on both sides; NaN stays."""
    for size in SIZES:
        gate_up = values(4, 2 * size, dtype=dtype, scale=6)
        gate, up = gate_up.double().chunk(2, dim=-1)
        exact = (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
        spread, out = strided(gate_up), strided(torch.zeros(4, size, dtype=dtype))
        ops.activate_and_mul("swiglu_oai", spread, out)
        assert_close(out, exact, 12.0 + 2 * gate.abs() if dtype == torch.float32 else 0.51)
        assert_gaps_untouched(out)
        ops.activate_and_mul("swiglu_oai", spread, spread[:, :size])
        assert torch.equal(spread[:, :size], out)
    odd = torch.tensor([[torch.nan, 1.0, -200.0, 1.0, torch.nan, 1.0]], dtype=dtype)
    ops.activate_and_mul("swiglu_oai", odd, out := torch.zeros(1, 3, dtype=dtype))
    assert out.isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_round_as_the_plain_ones(kind: Activation, dtype: torch.dtype, ops: CpuOps) -> None:
    """The activation is rounded before it is multiplied: without that a fifth of all would differ."""
    gate_up, plain, found = values(64, 2048, dtype=dtype), *torch.empty(2, 64, 1024, dtype=dtype)
    twin.activate_and_mul(kind, gate_up, plain)
    ops.activate_and_mul(kind, gate_up, found)
    assert (plain != found).float().mean() < 4e-3


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("kind", PLAIN)
def test_extreme_gates(kind: Activation, dtype: torch.dtype, ops: CpuOps) -> None:
    extremes = [math.nan, math.inf, -math.inf, 0.0, -0.0, 88.0, -88.0, 100.0, -100.0, 6e4, -6e4, 1e-6, -1e-6]
    if dtype != torch.float16:
        extremes += [1e20, -1e20, 3e38, -3e38]
    gate = torch.tensor(extremes, dtype=dtype)
    out = gate[None].clone()
    ops.activate(kind, out)
    expected = PLAIN[kind](gate.double()).to(dtype)  # torch's own gelu of infinity is NaN in float32
    rtol = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out[0], expected, rtol=rtol, atol=1e-30, equal_nan=True)


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize(("kind", "reach"), [("silu", 87.0), ("gelu", 12.9)])
def test_activations_over_their_whole_range(kind: Activation, reach: float, ops: CpuOps) -> None:
    """Includes tiny results, down to the smallest numbers of float32."""
    x = torch.linspace(-reach, reach, 200_000)
    out = x[None].clone()
    ops.activate(kind, out)
    assert_close(out[0], exact_activation(kind, x), units(kind, x))


def test_gelu_agrees_with_torch(ops: CpuOps) -> None:
    x = torch.linspace(-15, 15, 200_001)
    out = x[None].clone()
    ops.activate("gelu", out)
    torch.testing.assert_close(out[0], gelu(x), rtol=3e-7, atol=1.5e-6)  # torch's own is off by up to 1.1e-6


@pytest.mark.usefixtures("each_vector_isa")
def test_xielu(dtype: torch.dtype, ops: CpuOps) -> None:
    """Includes inputs for which e^x - 1 - x is small compared with its terms."""
    for factors in ((0.8, 1.3, 0.5, -1e-6), (2.0, 0.6, 0.1, -0.3)):
        above, below, beta, eps = (float(torch.tensor(each)) for each in factors)
        for size, scale in [*((size, 4.0) for size in SIZES), (37, 0.3), (37, 1e-3), (37, 30.0)]:
            x = values(4, size, dtype=dtype, scale=scale)
            wide = x.double()
            power = torch.expm1(wide.clamp(max=eps))
            exact = torch.where(wide > 0, above * wide**2, below * (power - wide)) + beta * wide
            largest = torch.where(wide > 0, above * wide**2, below * (power.abs() + wide.abs())) + beta * wide.abs()
            spread = strided(x)
            ops.xielu(spread, torch.tensor(factors))
            most = torch.finfo(dtype).eps * (2 * largest + torch.finfo(dtype).tiny)  # or half a step of the smallest
            assert ((spread.double() - exact).abs() <= most).all()
            assert_gaps_untouched(spread)


@pytest.mark.usefixtures("each_vector_isa")
def test_one_gate_for_each_head(dtype: torch.dtype, ops: CpuOps) -> None:
    for size in (8, 24, 128):
        x, gate = values(4, 3 * size, dtype=dtype), values(4, 3, dtype=dtype, seed=1, scale=5)
        gate[0, 0], gate[1, 2] = 200, -200
        exact = (x.double().view(4, 3, size) * gate.double().sigmoid()[..., None]).flatten(1)
        spread, gates = strided(x), strided(gate)
        ops.gate_heads(spread.unflatten(1, (3, size)), gates)
        assert_close(spread, exact, 4)
        assert_gaps_untouched(spread)


# ---- sums and products: bit for bit, as each is rounded once


@pytest.mark.usefixtures("each_vector_isa")
def test_add(dtype: torch.dtype, ops: CpuOps) -> None:
    for size in SIZES:
        residual, x = values(5, size, dtype=dtype), values(5, size, dtype=dtype, seed=2)
        found = strided(residual)
        ops.add(found, strided(x))
        twin.add(residual, x)
        assert torch.equal(found, residual)
        assert_gaps_untouched(found)


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("factor", [45.25483399593904, 0.22, 1.0 / 3])
def test_scale(factor: float, dtype: torch.dtype, ops: CpuOps) -> None:
    for size in SIZES:
        x = values(5, size, dtype=dtype)
        found = strided(x)
        ops.scale(found, factor)
        twin.scale(x, factor)
        assert torch.equal(found, x)
        assert_gaps_untouched(found)


@pytest.mark.usefixtures("each_vector_isa")
def test_clamp(dtype: torch.dtype, ops: CpuOps) -> None:
    for size in SIZES:
        x = values(5, size, dtype=dtype)
        x[0, 0], x[1, 0], x[2, 0] = torch.inf, -torch.inf, torch.nan
        found = strided(x)
        ops.clamp(found, 1.0 / 3)
        twin.clamp(x, 1.0 / 3)
        assert torch.equal(found.nan_to_num(9), x.nan_to_num(9))
        assert_gaps_untouched(found)


@pytest.mark.usefixtures("each_vector_isa")
def test_scale_rows(dtype: torch.dtype, ops: CpuOps) -> None:
    """Heads within wider rows, of all sizes; the rest of a row stays."""
    table, positions = values(9, dtype=torch.float32, seed=3), torch.tensor([0, 8, 3, 3])
    for size in SIZES:
        rows = values(4, 5, size, dtype=dtype)
        found, heads = rows.clone(), rows[:, 1:4]
        ops.scale_rows(found[:, 1:4], table, positions)
        twin.scale_rows(heads, table, positions)
        assert torch.equal(found, rows)


@pytest.mark.usefixtures("each_vector_isa")
def test_add_rows(dtype: torch.dtype, ops: CpuOps) -> None:
    positions = torch.tensor([7, 0, 2, 2])
    for size in SIZES:
        x, table = values(4, size, dtype=dtype), values(10, size, dtype=dtype, seed=2)
        found = strided(x)
        ops.add_rows(found, strided(table)[2:], positions)
        twin.add_rows(x, table[2:], positions)
        assert torch.equal(found, x)
        assert_gaps_untouched(found)


@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_outside_of_a_table_is_refused(position: int, ops: CpuOps) -> None:
    positions, x, heads = torch.tensor([0, position, 1]), torch.ones(3, 4), torch.ones(3, 2, 4)
    with pytest.raises(IndexError, match=f"position {position} .* 8"):
        ops.add_rows(x, torch.ones(8, 4), positions)
    with pytest.raises(IndexError, match=f"position {position} .* 8"):
        ops.scale_rows(heads, torch.full((8,), 2.0), positions)
    assert (x == 1).all()
    assert (heads == 1).all()


# ---- logits


@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize(("factor", "cap"), [(1.0, 30.0), (1.0 / 3, 0.0), (0.0625, 5.0)])
def test_scale_and_cap(factor: float, cap: float, ops: CpuOps) -> None:
    for size in (*SIZES, 20_000):
        logits = values(3, size, dtype=torch.float32, scale=40)
        logits[0, 0], logits[1, 0] = 1e-6, -1e20
        scaled = (logits * factor).double()
        exact = cap * torch.tanh(scaled / cap) if cap else scaled
        found = strided(logits)
        ops.scale_and_cap(found, factor, cap)
        assert_close(found, exact, 6)
        assert_gaps_untouched(found)


def test_nan_stays_nan(ops: CpuOps) -> None:
    """The sampler refuses a row with a NaN: a cap must not hide it."""
    logits = torch.tensor([[math.nan, math.inf, -math.inf, 0.0, -0.0]])
    ops.scale_and_cap(logits, 2.0, 30.0)
    assert logits[0, 0].isnan()
    assert logits[0, 1:].tolist() == [30.0, -30.0, 0.0, 0.0]
