"""Cases of the fused operations, as named functions of a launcher and a device, without pytest."""

from functools import partial

import torch

from tests.kernels.cases import Case
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.ops import Rotation

DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
EPS = 1e-5


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def with_gaps(x: torch.Tensor, gap: int) -> torch.Tensor:
    """A copy of `x` whose rows have gaps between them, filled with NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def assert_rounded(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that `out` is `expected`, which is float64 with all roundings but the last, up to float32's errors.

    These errors may change a rounding by one unit, but only rarely.
    """
    unit = torch.finfo(out.dtype).eps
    exact = expected.cpu()
    rounded = exact.to(out.dtype)
    few, scale = (12.0, 0.0) if out.dtype == torch.float32 else (1.6, 2.0**-22)
    limit = few * unit * exact.abs() + (scale or 4 * unit) * exact.abs().max() + torch.finfo(out.dtype).smallest_normal
    error = (out.cpu().double() - exact).abs()
    assert bool((error <= limit).all()), f"off by up to {(error / limit).max():.2f} of what is allowed"
    if out.dtype != torch.float32:
        share = (out.cpu() == rounded).double().mean()
        assert share > 0.98, f"only {share:.3f} are rounded as they should be"


def expected_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    quotient = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    return quotient.to(x.dtype).double() * weight.double()


def rms_norm(dtype: torch.dtype, size: int, gap: int = 0) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        x, weight = with_gaps(draw((5, size), dtype, device, 3.0), gap), draw((size,), dtype, device)
        before = x.clone()
        out = with_gaps(torch.zeros_like(x), gap + (gap > 0) * 8)
        CudaOps(launcher).rms_norm(x, weight, EPS, out)
        assert_rounded(out, expected_norm(before, weight))
        assert torch.equal(x, before)
        alone = torch.empty_like(out[2:3])
        CudaOps(launcher).rms_norm(x[2:3].contiguous(), weight, EPS, alone)
        if gap % 8 == 0:  # only a row's length and alignment decide how threads divide it
            assert torch.equal(alone, out[2:3])
        CudaOps(launcher).rms_norm(x, weight, EPS, x)
        assert torch.equal(x, out)

    return run


def norm_of_heads(launcher: Launcher, device: torch.device) -> None:
    """Q of a fused projection: [num_tokens, num_heads, head_size] with the rows of all tokens far apart."""
    projected = draw((3, 7 * 80), torch.bfloat16, device)
    heads = projected.view(3, 7, 80)[:, 2:6]
    weight, before = draw((80,), torch.bfloat16, device), projected.clone()
    expected = expected_norm(heads, weight)
    CudaOps(launcher).rms_norm(heads, weight, EPS, heads)
    assert_rounded(heads, expected)
    assert torch.equal(projected.view(3, 7, 80)[:, [0, 1, 6]], before.view(3, 7, 80)[:, [0, 1, 6]])
    deep = draw((2, 3, 4, 80), torch.bfloat16, device)
    out = torch.empty_like(deep)
    CudaOps(launcher).rms_norm(deep, weight, EPS, out)
    assert_rounded(out, expected_norm(deep, weight))
    CudaOps(launcher).rms_norm(deep[0, 0, 0], weight, EPS, out[0, 0, 0].zero_())
    assert_rounded(out, expected_norm(deep, weight))


def norm_of_extremes(launcher: Launcher, device: torch.device) -> None:
    """Rows of zeros, of numbers whose squares overflow float16, and with a NaN, which must not change other rows."""
    x = torch.zeros(4, 64, dtype=torch.float16, device=device)
    x[1], x[2], x[3, 5] = 60000.0, 6e-5, torch.nan
    out = torch.empty_like(x)
    CudaOps(launcher).rms_norm(x, torch.ones_like(x[0]), EPS, out)
    assert_rounded(out[:3], expected_norm(x[:3], torch.ones_like(x[0])))
    assert bool(out[3].isnan().all())


def add_rms_norm(dtype: torch.dtype, size: int, gap: int = 0) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        x, weight = with_gaps(draw((5, size), dtype, device), gap), draw((size,), dtype, device)
        residual = with_gaps(draw((5, size), dtype, device, 2.0).flip(0), gap)
        total = (residual.double() + x.double()).to(dtype)
        CudaOps(launcher).add_rms_norm(residual, x, weight, EPS, x)
        assert torch.equal(residual, total)
        assert_rounded(x, expected_norm(total, weight))
        out = torch.empty_like(total)
        CudaOps(launcher).rms_norm(total, weight, EPS, out)
        if gap % 8 == 0:
            assert torch.equal(out, x)

    return run


def draw_rotation(num_tokens: int, head_size: int, dtype: torch.dtype, device: torch.device) -> Rotation:
    angles = draw((num_tokens, head_size // 2), torch.float32, device, 100.0)
    sin = angles.sin()
    return Rotation(angles.cos().repeat(1, 2).to(dtype), torch.cat((-sin, sin), 1).to(dtype))


def expected_turn(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    first, second = heads.double().chunk(2, dim=-1)
    cos, sin = rotation.cos.double()[:, None], rotation.sin.double()[:, None]
    return torch.cat((first, second), -1) * cos + torch.cat((second, first), -1) * sin


def rotate(dtype: torch.dtype, head_size: int, num_heads: int = 3) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        projected = draw((4, num_heads + 2, head_size), dtype, device)
        rotation = draw_rotation(4, head_size, dtype, device)
        before = projected.clone()
        heads = projected[:, 1:-1]
        CudaOps(launcher).rotate(heads, rotation)
        assert_rounded(heads, expected_turn(before[:, 1:-1], rotation))
        assert torch.equal(projected[:, [0, -1]], before[:, [0, -1]])
        by_head = before.transpose(0, 1).contiguous().transpose(0, 1)  # heads further apart than tokens
        CudaOps(launcher).rotate(by_head[:, 1:-1], rotation)
        assert torch.equal(by_head, projected)

    return run


def activation(name: str, dtype: torch.dtype, size: int, gap: int = 0) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        gate_up = with_gaps(draw((3, 2 * size), dtype, device, 3.0), gap)
        gate_up[0, 0], gate_up[1, 0] = -90.0, 90.0
        gate, up = gate_up[:, :size].clone(), gate_up[:, size:].clone()
        if name == "silu":
            active = gate.double() * gate.double().sigmoid()
        else:
            active = torch.nn.functional.gelu(gate.double(), approximate="tanh")
        ops = CudaOps(launcher)
        run_op = partial(ops.activate_and_mul, "silu" if name == "silu" else "gelu_tanh")
        out = torch.empty(3, size, dtype=dtype, device=device)
        run_op(gate_up, out)
        assert_rounded(out, active.to(dtype).double() * up.double())
        run_op(gate_up, gate_up[:, :size])
        assert torch.equal(gate_up[:, :size], out)
        assert torch.equal(gate_up[:, size:], up)

    return run


def add_gated(dtype: torch.dtype, size: int, gap: int = 0) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        x, residual = with_gaps(draw((4, size), dtype, device), gap), draw((4, size), dtype, device, 2.0).flip(0)
        gates = draw((4, 3), torch.float32, device, 3.0)[:, 1:2]
        gates[0], gates[1] = -200.0, 90.0
        expected = residual.double() + gates.double().sigmoid() * x.double()
        before = x.clone()
        CudaOps(launcher).add_gated(residual, x, gates)
        assert_rounded(residual, expected)
        assert torch.equal(x, before)

    return run


def nothing_to_do(launcher: Launcher, device: torch.device) -> None:
    ops, none, weight = CudaOps(launcher), torch.empty(0, 64, device=device), torch.empty(64, device=device)
    ops.rms_norm(none, weight, EPS, none)
    ops.add_rms_norm(none, none, weight, EPS, none)
    ops.rotate(none.view(0, 2, 32), draw_rotation(0, 32, torch.float32, device))
    ops.activate_and_mul("silu", torch.empty(0, 128, device=device), none)
    ops.add_gated(none, none, torch.empty(0, 1, device=device))


CASES: list[tuple[str, Case]] = [
    *((f"rms_norm_{name}_{size}", rms_norm(dtype, size)) for name, dtype in DTYPES.items() for size in (1000, 4096)),
    *((f"rms_norm_{name}_odd", rms_norm(dtype, 33, gap=3)) for name, dtype in DTYPES.items()),
    ("rms_norm_small", rms_norm(torch.bfloat16, 8)),
    ("rms_norm_gaps", rms_norm(torch.float16, 1000, gap=24)),
    ("rms_norm_misaligned", rms_norm(torch.bfloat16, 80, gap=1)),
    ("rms_norm_wide", rms_norm(torch.bfloat16, 16392)),
    ("norm_of_heads", norm_of_heads),
    ("norm_of_extremes", norm_of_extremes),
    *((f"add_rms_norm_{name}", add_rms_norm(dtype, 1000, gap=8)) for name, dtype in DTYPES.items()),
    *((f"add_rms_norm_{name}_odd", add_rms_norm(dtype, 77)) for name, dtype in DTYPES.items()),
    *((f"rotate_{name}_{size}", rotate(dtype, size)) for name, dtype in DTYPES.items() for size in (80, 128)),
    ("rotate_odd", rotate(torch.float16, 6)),
    ("rotate_many_heads", rotate(torch.bfloat16, 128, num_heads=40)),
    *(
        (f"{act}_{name}", activation(act, dtype, 1000, gap=8))
        for act in ("silu", "gelu")
        for name, dtype in DTYPES.items()
    ),
    *((f"{act}_odd", activation(act, torch.bfloat16, 2817)) for act in ("silu", "gelu")),
    ("silu_wide", activation("silu", torch.float16, 8192)),
    *((f"add_gated_{name}", add_gated(dtype, 1000, gap=8)) for name, dtype in DTYPES.items()),
    ("add_gated_odd", add_gated(torch.bfloat16, 77, gap=1)),
    ("nothing_to_do", nothing_to_do),
]
