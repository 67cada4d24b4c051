"""Common behaviour of all operations of `CpuOps`: threads, batches, NaN, no rows, fall-backs, programs."""

import math
from typing import Any

import pytest
import torch

from tests.rows import values
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import fused
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.kernels.ops import Ops, Rotation, TorchOps, WideNormWeights
from vllm_lite.kernels.select import ops_for

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

CPU = torch.device("cpu")
EPS = 1e-5


class Operands:
    """Operands of each operation. All are made again from `x` and `other`."""

    def __init__(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        self.x, self.other = (values(num_tokens, size, dtype=dtype, seed=seed) for seed in (0, 1))
        self.weight, self.wide = values(size, dtype=dtype, seed=2), values(size, dtype=torch.float32, seed=3)
        self.rotation = Rotation(*(values(num_tokens, 16, dtype=dtype, seed=seed) for seed in (4, 5)))
        self.positions = torch.arange(num_tokens) % 7
        self.table, self.factors = values(7, size, dtype=dtype, seed=6), values(7, dtype=torch.float32, seed=7)
        self.residual, self.heads = self.other.clone(), self.x.view(num_tokens, size // 16, 16).clone()
        self.gates, self.xielu = self.other[:, : size // 16].clone(), torch.tensor([0.8, 1.3, 0.5, -1e-6])
        self.gate_up, self.logits = torch.cat((self.x, self.other), dim=1), self.x.float()
        self.outs = [torch.empty_like(self.x) for _ in range(8)]

    def apply(self, ops: Ops) -> None:
        """Run every operation, each on the results of those before it."""
        outs = self.outs
        ops.add_rms_norm(self.residual, self.x, self.weight, EPS, outs[0])
        ops.add_wide_norm(self.residual, self.x, WideNormWeights(self.wide, self.wide, EPS, True), outs[1])
        ops.add(self.residual, self.x)
        ops.scale(self.residual, 0.3)
        ops.add_rows(self.residual, self.table, self.positions)
        ops.rms_norm(self.heads, self.weight[:16], EPS, self.heads)
        ops.rotate(self.heads, self.rotation)
        ops.scale_rows(self.heads, self.factors, self.positions)
        ops.wide_norm(self.heads, WideNormWeights(self.wide[:16], None, EPS, False), self.heads)
        ops.scale_and_cap(self.logits, 0.5, 1.5)
        for out, kind in zip(outs[2:], fused.KINDS, strict=True):
            ops.activate_and_mul(kind, self.gate_up, out)
        ops.activate("gelu", self.gate_up)
        ops.gate_heads(self.heads, self.gates)
        ops.xielu(self.residual, self.xielu)

    @property
    def results(self) -> list[torch.Tensor]:
        return [self.residual, self.heads, self.logits, self.gate_up, *self.outs]


def run_all(ops: Ops, num_tokens: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    operands = Operands(num_tokens, size, dtype)
    operands.apply(ops)
    return operands.results


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
    assert [len(result) for result in run_all(ops, 0, 32, dtype)] == [0] * 12


def test_a_program_runs_them_all(dtype: torch.dtype, ops: CpuOps) -> None:
    eager, recorded, program = Operands(5, 48, dtype), Operands(5, 48, dtype), Program()
    program.record(lambda: recorded.apply(ops))
    assert len(set(program.names)) == 14
    eager.apply(ops)
    program.replay()
    for found, expected in zip(recorded.results, eager.results, strict=True):
        assert torch.equal(found, expected)
    recorded.positions[3] = 7
    with pytest.raises(RuntimeError, match="vllm_lite_add_rows"):
        program.replay()


def test_torch_computes_everything_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, plain = CpuOps(), TorchOps()
    for name in vars(ops):
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
    norm = WideNormWeights(torch.ones(32)[::2], None, EPS, True)
    ops.wide_norm(x, norm, out)
    plain.wide_norm(x, norm, wanted)
    assert torch.equal(out, wanted)
    assert not fused.select_rotation(torch.ones(4, 2, 4), torch.zeros(1).int(), Rotation(*torch.zeros(2, 1, 8)))


def test_each_device_has_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(ops_for(CPU), CpuOps)
    assert not isinstance(ops_for(torch.device("meta")), CpuOps)
    monkeypatch.setattr(cpu, "available", lambda: False)
    found: Any = ops_for(CPU)
    assert type(found) is TorchOps
