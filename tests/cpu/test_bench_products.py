"""Which products `vllm-lite bench kernels` measures."""

import pytest
import torch

from vllm_lite.kernels import cpu
from vllm_lite.tools.bench.kernels_linear import ALL, choose, measure


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
