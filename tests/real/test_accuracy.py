"""Every way of computing real weights: none is a tenth less exact than it was measured with these instructions.

Run benchmarks/accuracy.py after a change that is meant to make one of them better or worse: accuracy-cpu.json of
benchmarks/results has the figures of AVX512-BF16, accuracy-amx-cpu.json those of AMX's tiles. The exact model is ours
in float32: transformers takes ten times as long to read the files, and the test of float32 holds us to its perplexity.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.real.cache import ROOT
from vllm_lite.kernels import cpu

sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy import MODELS, WAYS, Figures, Way, form_of, ours, read_texts
from accuracy_peers import Scores

RESULTS = ROOT / "benchmarks" / "results"
RECORDS = {"avx512_bf16": "accuracy-cpu.json", "amx": "accuracy-amx-cpu.json"}
RECORD = RECORDS.get(cpu.isa() if cpu.available() else "", "accuracy-cpu.json")
MEASURED: dict[str, Any] = json.loads((RESULTS / RECORD).read_text())
SHOWN = {"dense": ("bfloat16",), "off-grid": ("int8", "fp8", "int4_g32", "int4")}
"""Rounding shows only with weights off the grid: any method with the same groups finds weights on it again."""
CASES = [
    (name, form, way)
    for name, forms in MEASURED["models"].items()
    for form, ways in forms.items()
    for way in WAYS[form]
    if way in ways and (form == "file" or (name != "gemma3-270m" and way in SHOWN[form]))
]
"""Gemma's other forms take a minute more, and show nothing that SmolLM2's do not. Exact products and float32 of each
form are held by tests/cpu/test_accuracy_bar.py."""
SLACK = 5e-4
"""Tolerance of float32 in nats: sums are added up in other orders."""
EXACT = "float32"


class Exact(NamedTuple):
    file: Path
    prose: list[int]
    scores: Scores


@pytest.fixture(scope="module")
def exact(real: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Exact]:
    work = tmp_path_factory.mktemp("dense")

    @cache
    def find(name: str, form: str) -> Exact:
        model = MODELS[name]
        source = real(Path(model.file).parent.name) / Path(model.file).name
        file = form_of(source, form, work)
        if form == "dense":  # the weights of the file, as floats
            return find(name, "file")._replace(file=file)
        prose = read_texts(model, file)["prose"]
        with torch.inference_mode():
            return Exact(file, prose, ours(file, [prose], Way(torch.float32)))

    return find


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "form", "way"), CASES)
def test_no_way_is_less_exact_than_it_was(exact: Callable[[str, str], Exact], name: str, form: str, way: str) -> None:
    if cpu.isa() != MEASURED["machine"]["instruction set"]:
        pytest.skip(f"the figures are of {MEASURED['machine']['instruction set']}, and this machine has {cpu.isa()}")
    file, prose, scores = exact(name, form)
    with torch.inference_mode():
        others = scores if way == EXACT else ours(file, [prose], WAYS[form][way])
        found = Figures.of(scores, others, [prose])
    before = MEASURED["models"][name][form][way]["prose"]
    assert found.next_token <= 1.1 * before["next_token"] + SLACK
    assert found.top <= 1.1 * before["top"] + SLACK
    assert found.divergence <= 1.2 * before["divergence"] + SLACK
    assert found.same_greedy >= before["same_greedy"] - 0.015
    if way == EXACT:
        expected = MEASURED["models"][name][form]["transformers float32"]["prose"]["perplexity"]
        assert found.perplexity == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("name", [name for name, forms in MEASURED["models"].items() if "dense" in forms])
def test_bfloat16_is_as_exact_as_torchs(name: str) -> None:
    """As measured; the test above compares with the recorded figures."""
    ways = MEASURED["models"][name]["dense"]
    assert ways["bfloat16"]["next_token"] <= ways["transformers bfloat16"]["next_token"]
    assert ways["bfloat16"]["top"] <= 1.02 * ways["transformers bfloat16"]["top"]  # Gemma: 0.0541 and 0.0538
