"""Every way of computing real weights: none is a tenth less exact than benchmarks/results/accuracy-cpu.json has it.

Run benchmarks/accuracy.py after a change that is meant to make one of them better or worse.
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
from tests.real.models import read_once
from vllm_lite.kernels.cpu.library import isa

sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy import MODELS, WAYS, Figures, Scores, form_of, oracle, ours, read_texts

MEASURED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "accuracy-cpu.json").read_text())
CASES = [
    (name, form, way)
    for name, forms in MEASURED["models"].items()
    for form, ways in forms.items()
    for way in WAYS[form]
    if way in ways
]
SLACK = 5e-4
"""What float32 may be off, in nats: sums are added up in other orders."""


class Exact(NamedTuple):
    file: Path
    prose: list[int]
    scores: Scores


@pytest.fixture(scope="module")
def exact(real: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Exact]:
    @cache
    def find(name: str, form: str) -> Exact:
        model = MODELS[name]
        source = real(Path(model.file).parent.name) / Path(model.file).name
        file = form_of(source, form, tmp_path_factory.mktemp("dense"))
        if form == "dense":  # the weights of the file, as floats
            return find(name, "file")._replace(file=file)
        prose = read_texts(model, file)["prose"]
        with read_once(), torch.inference_mode():
            return Exact(file, prose, oracle(file, [prose], torch.float32))

    return find


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "form", "way"), CASES)
def test_no_way_is_less_exact_than_it_was(exact: Callable[[str, str], Exact], name: str, form: str, way: str) -> None:
    if isa() != MEASURED["machine"]["instruction set"]:
        pytest.skip(f"the figures are of {MEASURED['machine']['instruction set']}, and this machine has {isa()}")
    file, prose, scores = exact(name, form)
    with torch.inference_mode():
        found = Figures.of(scores, ours(file, [prose], WAYS[form][way]), [prose])
    before = MEASURED["models"][name][form][way]["prose"]
    assert found.next_token <= 1.1 * before["next_token"] + SLACK
    assert found.divergence <= 1.2 * before["divergence"] + SLACK
    assert found.same_greedy >= before["same_greedy"] - 0.015
