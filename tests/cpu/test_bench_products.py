"""Products and attention that `python benchmarks kernels` measures."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from micro import commands, kernels_attention
from micro.kernels_attention import AttentionSelection, HeadCounts, chosen
from micro.kernels_linear import ALL, choose, kernels_of, measure
from micro.kernels_timing import multiply_registers

from tests.isas import PRODUCTS
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library
from vllm_lite.kernels.cpu.library import ISAS, function, int32


def test_unnamed_options_keep_their_defaults() -> None:
    assert choose({}) == ALL._replace(isas=[])
    chosen = choose({"shapes": "64x32,8x4", "rows": "1,3", "dtypes": "bfloat16", "forms": "int8,Q4_0", "isas": "avx2"})
    assert chosen == ([(64, 32), (8, 4)], [1, 3], [torch.bfloat16], ["int8", "Q4_0"], ["avx2"], 128)
    assert choose({"working_set": "16"}).working_set == 16


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
def test_invalid_options_are_refused_by_name(name: str, text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        choose({name: text})
    assert str(error.value).startswith(said)


@pytest.mark.skipif(not cpu.available(), reason="no native library")
@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_operations_in_registers_are_counted(isa: str, dtype: torch.dtype) -> None:
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
    """Afterwards the instruction set is again the one that was set before."""
    monkeypatch.setattr("micro.kernels_linear.MIB", 1)
    monkeypatch.setattr("micro.kernels_linear.MIN_TIME_S", 0)
    monkeypatch.setattr("micro.kernels_linear.read_bandwidth_gb_s", lambda _threads, _num_bytes: 1.0)
    before, threads = cpu.isa(), cpu.num_threads()
    forms = {"forms": "dense,int8,Q4_K", "dtypes": "bfloat16", "isas": f"baseline,{before}"}
    rows = list(measure(threads, choose({"shapes": "64x256", "rows": "3"} | forms)))
    assert [row["kernel"].split(" bfloat16")[0] for row in rows] == [
        f"own {form} {isa}" for form in ("dense", "int8", "Q4_K") for isa in ("baseline", before)
    ]
    assert all(row["shape"] == "3 x 256 x 64" and row["gflop_s"] > 0 for row in rows)
    assert cpu.isa() == before


@pytest.mark.skipif(not cpu.available(), reason="no native library")
def test_types_of_files_need_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("micro.kernels_linear.read_bandwidth_gb_s", lambda _threads, _num_bytes: 1.0)
    with pytest.raises(ValueError, match="blocks of Q4_K have 256 inputs, of which 384 is no multiple"):
        list(measure(cpu.num_threads(), choose({"shapes": "64x384", "forms": "Q4_K"})))


def test_a_case_of_attention() -> None:
    assert chosen("32x1@1024:24/8x64") == AttentionSelection(32, 1, 1024, HeadCounts(24, 8, 64))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("32x1@1024", "a case of attention must be sequences x new tokens @ context : heads / KV heads x head size"),
        ("0x1@1024:8/8x64", "a case of attention must be"),
        ("1x9@8:8/8x64", "9 new tokens are more than the context of 8 in '1x9@8:8/8x64'"),
        ("1x1@8:9/8x64", "9 heads cannot share 8 KV heads in '1x1@8:9/8x64'"),
    ],
)
def test_invalid_cases_of_attention_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        chosen(text)
    assert str(error.value).startswith(said)


@pytest.mark.skipif(not cpu.available(), reason="no native library")
def test_cases_of_attention_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding is measured by the bytes of its cache, chunks by their multiplications: row i of 3 sees 6 + i of 8
    keys."""
    monkeypatch.setattr(kernels_attention, "WORKING_SET_BYTES", 5 * 2 * 8 * 2 * 2 * 16 * 2)  # 5 caches of two sequences
    monkeypatch.setattr(kernels_attention, "read_bandwidth_gb_s", lambda _threads: 1.0)
    monkeypatch.setattr(kernels_attention, "peak_tflop_s", lambda _threads, _dtype: 1.0)
    passes: list[int] = []

    def timed(_clock: object, calls: Sequence[partial[None]], _time_s: float) -> list[float]:
        passes.append(len(calls[0].args[0]))
        calls[0]()
        return [6.0]

    monkeypatch.setattr(kernels_attention, "best_times", timed)
    cases = [chosen("2x1@8:4/2x16"), chosen("1x3@8:4/2x16")]
    decode, prefill = kernels_attention.measure(cpu.num_threads(), cases, [torch.bfloat16])
    assert passes == [6, 1]
    assert decode["shape"] == "2 x 1 of 8, heads 4/2 x 16, bfloat16"
    assert decode["gb_s"] == decode["share"] == pytest.approx(2 * 8 * 2 * 2 * 16 * 2 / 1e9)
    assert prefill["tflop_s"] == prefill["share"] == pytest.approx(4 * 16 * 4 * (6 + 7 + 8) / 6 / 1e12)


@pytest.mark.skipif(not cpu.available(), reason="no native library")
def test_two_builds_of_the_library_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the library counts as another build. Ratios are not checked, but that each packs its own weights, and
    that kernels are this library's again afterwards."""
    monkeypatch.setattr("micro.kernels_linear.MIB", 1)
    monkeypatch.setattr("micro.kernels_attention.WORKING_SET_BYTES", 0)
    monkeypatch.setattr("micro.kernels_in_turn.LEAST_S", 0)
    copy, own, seen = tmp_path / "other.so", library.open_library()._name, list[str]()
    shutil.copy(own, copy)

    def packed(*given: Any) -> Any:
        seen.append(library.open_library()._name)
        return kernels_of(*given)

    monkeypatch.setattr("micro.kernels_in_turn.kernels_of", packed)
    words = ["kernels", "--library", str(copy), "--pairs", "3", "--parts", "linear,attention", "--threads", "1"]
    words += ["--shapes", "64x256", "--rows", "3", "--forms", "int8,Q4_K,torch", "--dtypes", "bfloat16"]
    assert commands.main([*words, "--cases", "2x1@40:4/2x64", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    names = ["int8 bfloat16 3 x 256 x 64", "Q4_K bfloat16 3 x 256 x 64", "attention bfloat16 2x1@40:4/2x64"]
    assert list(figures["ratios"]) == [f"{name}, threads: 1" for name in names]
    assert all(0 < row["smallest"] <= row["ratio"] <= row["largest"] for row in figures["ratios"].values())
    assert figures["differing"] == []
    assert seen == [str(copy), own] * 2
    assert library.open_library()._name == own


@pytest.mark.skipif(not cpu.available(), reason="no native library")
def test_a_file_that_is_no_library_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"text")
    assert commands.main(["kernels", "--library", str(other), "--parts", "linear", "--threads", "1"]) == 2
    assert f"--library {other} cannot be measured" in capsys.readouterr().err.splitlines()[-1]
