"""Which products `vllm-lite bench kernels` measures."""

import pytest
import torch

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.library import ISAS, function, int32
from vllm_lite.tools.bench.kernels_linear import ALL, choose, measure
from vllm_lite.tools.bench.kernels_timing import multiply_registers


def test_what_is_not_named_stays_as_it_is() -> None:
    assert choose({}) == ALL._replace(isas=[])
    chosen = choose({"shapes": "64x32,8x4", "rows": "1,3", "dtypes": "bfloat16", "forms": "int8,torch", "isas": "avx2"})
    assert chosen == ([(64, 32), (8, 4)], [1, 3], [torch.bfloat16], ["int8", "torch"], ["avx2"])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("shapes", "64", "a shape must be outputs x inputs, such as 6144x1024, got '64'"),
        ("shapes", "64x0", "a size must be a whole number above 0, got '0'"),
        ("rows", "1,-2", "a size must be a whole number above 0, got '-2'"),
        ("dtypes", "int4", "'int4' is none of float32, bfloat16, float16"),
        ("forms", "int3", "'int3' is none of dense, int8,"),
        ("isas", "mmx", "'mmx' is none of baseline, avx2,"),
    ],
)
def test_what_cannot_be_measured_is_said(name: str, text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        choose({name: text})
    assert str(error.value).startswith(said)


@pytest.mark.skipif(not cpu.available(), reason="no native library")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_registers_multiply_is_counted(isa: str, dtype: torch.dtype) -> None:
    """Every thread has as many operations, in every round."""
    before, threads = cpu.isa(), cpu.num_threads()
    if not function("vllm_lite_set_isa", (int32,), int32)(ISAS.index(isa)):
        pytest.skip(f"this machine has no {isa}")
    try:
        counts = [multiply_registers(dtype, rounds) for rounds in (1, 3)]
    finally:
        function("vllm_lite_set_isa", (int32,), int32)(ISAS.index(before))
    assert counts[1] == 3 * counts[0]
    assert counts[0] > 0
    assert counts[0] % threads == 0


@pytest.mark.skipif(not cpu.available(), reason="no native library")
def test_instruction_sets_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the one that was chosen is chosen again."""
    monkeypatch.setattr("vllm_lite.tools.bench.kernels_linear.WORKING_SET_BYTES", 1)
    monkeypatch.setattr("vllm_lite.tools.bench.kernels_linear.MIN_TIME_S", 0)
    monkeypatch.setattr("vllm_lite.tools.bench.kernels_linear.read_bandwidth_gb_s", lambda _threads: 1.0)
    before, threads = cpu.isa(), cpu.num_threads()
    forms = {"forms": "dense,int8", "dtypes": "bfloat16", "isas": f"baseline,{before}"}
    rows = list(measure(threads, choose({"shapes": "64x256", "rows": "3"} | forms)))
    assert [row["kernel"].split(" bfloat16")[0] for row in rows] == [
        f"own {form} {isa}" for form in ("dense", "int8") for isa in ("baseline", before)
    ]
    assert all(row["shape"] == "3 x 256 x 64" and row["gflop_s"] > 0 for row in rows)
    assert cpu.isa() == before
