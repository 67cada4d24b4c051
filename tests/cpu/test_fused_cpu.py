"""`CpuOps` against exact arithmetic and against TorchOps, on each instruction set and in each dtype."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, silu

from vllm_lite.checkpoint.activation import Activation
from vllm_lite.checkpoint.rope import Rope
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import fused
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.ops import Ops, Rotation, TorchOps, ops_for
from vllm_lite.layers.rope import RotaryEmbedding

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

CPU = torch.device("cpu")
EPS = 1e-5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu_tanh"}
SIZES = [1, 3, 7, 8, 15, 16, 17, 31, 64, 100, 1024, 1025]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> CpuOps:
    """It may not fall back on what it is compared with."""
    for name in ("rms_norm", "add_rms_norm", "rotate", "activate_and_mul"):
        monkeypatch.setattr(TorchOps, name, None)
    return CpuOps()


def values(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are further apart, at an address that no vector is aligned to; nan in between."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 13), math.nan, dtype=tensor.dtype)
    view = wide[..., 5 : 5 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def assert_gaps_untouched(view: torch.Tensor) -> None:
    base = view._base
    assert base is not None
    assert base[..., :5].isnan().all()
    assert base[..., 5 + view.shape[-1] :].isnan().all()


def assert_close(found: torch.Tensor, exact: torch.Tensor, units: float | torch.Tensor) -> None:
    """Within so many units in the last place of `found`'s dtype; exact: float64."""
    eps = torch.finfo(found.dtype).eps
    least = float(torch.finfo(found.dtype).tiny) if found.dtype != torch.bfloat16 else 1e-37
    error = (found.double() - exact).abs()
    assert (error <= units * (eps * exact.abs() + least)).all(), (error / exact.abs()).max()


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x.double() * scale * weight.double()


# ---- norms


@pytest.mark.usefixtures("each_isa")
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


@pytest.mark.usefixtures("each_isa")
def test_rms_norm_of_heads_inside_wider_rows(dtype: torch.dtype, ops: CpuOps) -> None:
    rows, weight = values(7, 10 * 24, dtype=dtype), values(24, dtype=dtype, seed=1)
    heads, before = rows.view(7, 10, 24)[:, 2:6], rows.clone()
    exact = exact_norm(heads, weight)
    ops.rms_norm(heads, weight, EPS, heads)
    assert_close(heads, exact, 1.1 if dtype != torch.float32 else 8)
    others = [0, 1, 6, 7, 8, 9]
    assert torch.equal(rows.view(7, 10, 24)[:, others], before.view(7, 10, 24)[:, others])


@pytest.mark.usefixtures("each_isa")
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


# ---- activations


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated_activations(name: str, size: int, dtype: torch.dtype, ops: CpuOps) -> None:
    gate_up = values(4, 2 * size, dtype=dtype, scale=4)
    gate, up = gate_up.double().chunk(2, dim=-1)
    z = gate if name == "silu" else math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
    exact = gate * torch.sigmoid(z) * up
    spread, out = strided(gate_up), strided(torch.zeros(4, size, dtype=dtype))
    ops.activate_and_mul(KINDS[name], spread, out)
    # e^-z has the error of z, which gelu computes in several steps
    assert_close(out, exact, 1.1 if dtype != torch.float32 else 4 + (0.6 if name == "silu" else 2.5) * z.abs())
    assert_gaps_untouched(out)


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize(("name", "plain"), [("silu", silu), ("gelu", lambda x: gelu(x, approximate="tanh"))])
def test_extreme_gates(
    name: str, plain: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, ops: CpuOps
) -> None:
    extremes = [math.nan, math.inf, -math.inf, 0.0, -0.0, 88.0, -88.0, 100.0, -100.0, 6e4, -6e4, 1e-6, -1e-6]
    if dtype != torch.float16:
        extremes += [1e20, -1e20, 3e38, -3e38]
    gate = torch.tensor(extremes, dtype=dtype)
    out = torch.empty(1, len(extremes), dtype=dtype)
    ops.activate_and_mul(KINDS[name], torch.cat((gate, torch.ones_like(gate)))[None], out)
    torch.testing.assert_close(
        out[0], plain(gate), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-30, equal_nan=True
    )


def test_silu_over_its_whole_range(ops: CpuOps) -> None:
    gate = torch.linspace(-87, 87, 200_000)
    out = torch.empty(1, len(gate))
    ops.activate_and_mul("silu", torch.cat((gate, torch.ones_like(gate)))[None], out)
    assert_close(out[0], gate.double() * torch.sigmoid(gate.double()), 4 + 0.6 * gate.double().abs())


# ---- rotary embedding


@pytest.mark.usefixtures("each_isa")
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


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize("head_size", [2, 24, 64])
def test_selected_rotations_are_those_of_plain_torch(head_size: int, dtype: torch.dtype) -> None:
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


# ---- all of them


def run_all(ops: Ops, num_tokens: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    residual, x = values(num_tokens, size, dtype=dtype), values(num_tokens, size, dtype=dtype, seed=1)
    weight, heads = values(size, dtype=dtype, seed=2), x.view(num_tokens, size // 16, 16).clone()
    rotation = Rotation(values(num_tokens, 16, dtype=dtype, seed=4), values(num_tokens, 16, dtype=dtype, seed=5))
    outs = [torch.empty(num_tokens, size, dtype=dtype) for _ in range(2)]
    ops.add_rms_norm(residual, x, weight, EPS, outs[0])
    ops.rms_norm(heads, weight[:16], EPS, heads)
    ops.rotate(heads, rotation)
    ops.activate_and_mul("silu", torch.cat((x, residual), dim=1), outs[1])
    gated = torch.empty_like(x)
    ops.activate_and_mul("gelu_tanh", torch.cat((x, residual), dim=1), gated)
    return [residual, heads, *outs, gated]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_depends_neither_on_its_batch_nor_on_threads(num_threads: int, dtype: torch.dtype, ops: CpuOps) -> None:
    before = cpu.num_threads()
    cpu.set_num_threads(1)
    together = run_all(ops, 700, 512, dtype)
    cpu.set_num_threads(num_threads)
    try:
        for found, expected in zip(run_all(ops, 700, 512, dtype), together, strict=True):
            assert torch.equal(found, expected)
    finally:
        cpu.set_num_threads(before)
    x, weight, alone = values(700, 512, dtype=dtype), values(512, dtype=dtype, seed=2), torch.empty(1, 512, dtype=dtype)
    rows = torch.empty_like(x)
    ops.rms_norm(x, weight, EPS, rows)
    for row in (0, 333, 699):
        ops.rms_norm(x[row : row + 1], weight, EPS, alone)
        assert torch.equal(alone[0], rows[row])


def test_nan_is_passed_on(dtype: torch.dtype, ops: CpuOps) -> None:
    x = values(3, 40, dtype=dtype)
    x[1, 7] = math.nan
    out = torch.empty_like(x)
    ops.rms_norm(x, values(40, dtype=dtype), EPS, out)
    assert out.isnan().any(1).tolist() == [False, True, False]
    assert out[1].isnan().all()
    gated = torch.empty(3, 20, dtype=dtype)
    ops.activate_and_mul("silu", x, gated)
    assert gated.isnan().nonzero().tolist() == [[1, 7]]


def test_no_rows(dtype: torch.dtype, ops: CpuOps) -> None:
    assert [len(result) for result in run_all(ops, 0, 32, dtype)] == [0] * 5


def test_what_kernels_do_not_take_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, plain = CpuOps(), TorchOps()
    for name in ("_rms_norm", "_add_rms_norm", "_activation", "_rotate"):
        monkeypatch.setattr(ops, name, None)
    with monkeypatch.context() as patch:
        patch.setattr(fused, "FLOATS", ())
        for found, expected in zip(
            run_all(ops, 4, 32, torch.float32), run_all(plain, 4, 32, torch.float32), strict=True
        ):
            assert torch.equal(found, expected)
    x = values(4, 32, dtype=torch.float32)[:, ::2]  # elements apart
    out, wanted = torch.empty(4, 16), torch.empty(4, 16)
    ops.rms_norm(x, torch.ones(16), EPS, out)
    plain.rms_norm(x, torch.ones(16), EPS, wanted)
    assert torch.equal(out, wanted)
    assert not fused.select_rotation(torch.ones(4, 2, 4), torch.zeros(1).int(), Rotation(*torch.zeros(2, 1, 8)))


def test_which_ops_a_device_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(ops_for(CPU), CpuOps)
    assert not isinstance(ops_for(torch.device("meta")), CpuOps)
    monkeypatch.setattr(cpu, "available", lambda: False)
    found: Any = ops_for(CPU)
    assert type(found) is TorchOps
