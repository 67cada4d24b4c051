"""Distance from the exact model of KV cache forms: int8, and forms that the engine does not have, such as 4 bits.

    python benchmarks/kv_forms.py [--models smollm2 gemma3-270m] [--forms NAME ...] [--llama-python VENV/bin/python]
        [--work DIR]

The weights, texts and figures are those of accuracy.py, all else is computed in float32, and K and V are rounded on
their way into the cache: so what is left is the error of the cache alone. "turned": by a Hadamard matrix as large as
the largest power of two in the head, as QuaRot does (Ashkboos et al., 2024), and as our cache in int8 is. llama.cpp
turns K and V by itself, and reads the same weights as floats.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accuracy import MODELS, REAL, Figures, exact_scores, form_of, read_texts
from accuracy_peers import Scores, llama
from quantization_quality import Reader

from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.runtime.machine import num_physical_cores

NORMAL = (7, 20, 34, 48, 63, 80, 100, 127)
"""Positive levels with the least error for 64 normally distributed numbers, whose largest is the last level."""
TRIED = (1.0, 0.93, 0.86)
"""Candidates for the last level, relative to the largest number: the one with the least error is taken."""


class Form(NamedTuple):
    """A way to store K or V: codes and a scale for each group of a head of a token."""

    levels: str
    bits: int
    group: int | None = None
    """None: the whole head."""
    turned: bool = False

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [..., head_size] after storing them in a cache of this form and reading them."""
        head_size = rows.shape[-1]
        group = self.group if self.group and head_size % self.group == 0 else head_size
        wide = _turned(rows.float()) if self.turned else rows.float()
        out: torch.Tensor = LEVELS[self.levels](wide.unflatten(-1, (-1, group)), self.bits).flatten(-2)
        return (_turned(out) if self.turned else out).to(rows.dtype)


def _turned(rows: torch.Tensor) -> torch.Tensor:
    whole = rows.shape[-1] & -rows.shape[-1]
    matrix = torch.ones(1, 1)
    while len(matrix) < whole:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    turned: torch.Tensor = rows.unflatten(-1, (-1, whole)) @ matrix / math.sqrt(whole)
    return turned.flatten(-2)


def _symmetric(groups: torch.Tensor, bits: int) -> torch.Tensor:
    most = 2 ** (bits - 1) - 1
    scale = _some(groups.abs().amax(-1, keepdim=True) / most)
    return (groups / scale).round() * scale


def _largest(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales as in llama.cpp's Q4_0: the largest number gets the one level without a positive counterpart."""
    most = 2 ** (bits - 1)
    top = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = _some(-top / most)
    return (groups / scale + 0.5).floor().clamp(-most, most - 1) * scale.half().float()


def _range(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales as in Q4_1, with a minimum."""
    low, high = groups.amin(-1, keepdim=True).half().float(), groups.amax(-1, keepdim=True)
    most = 2**bits - 1
    scale = _some(((high - low) / most).half().float())
    return ((groups - low) / scale).round().clamp(0, most) * scale + low


def _normal(groups: torch.Tensor, bits: int) -> torch.Tensor:  # noqa: ARG001 (there are levels for 4 bits alone)
    levels = torch.tensor([*(-size for size in reversed(NORMAL)), *NORMAL], dtype=torch.float32)
    between = (levels[1:] + levels[:-1]) / 2
    top = _some(groups.abs().amax(-1, keepdim=True))
    found = []
    for part in TRIED:
        near = levels[torch.bucketize(groups / (top * part) * NORMAL[-1], between)]
        scale = (groups * near).sum(-1, keepdim=True) / near.square().sum(-1, keepdim=True)
        found.append(near * scale)
    all_found = torch.stack(found)
    best = (all_found - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return all_found.gather(0, best.expand_as(all_found[:1]))[0]


def _some(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1.0, scale)


LEVELS = {"symmetric": _symmetric, "largest": _largest, "range": _range, "normal": _normal}
INT8 = Form("symmetric", 8)
TURNED = Form("normal", 4, turned=True)
FORMS: Mapping[str, tuple[Form, Form]] = {
    "int8": (INT8, INT8),
    "int8, turned": (Form("symmetric", 8, turned=True),) * 2,
    "4 bits, normal levels, turned": (TURNED, TURNED),
    "the same, not turned": (Form("normal", 4),) * 2,
    "Q4_0, turned": (Form("largest", 4, 32, turned=True),) * 2,
    "Q4_0": (Form("largest", 4, 32),) * 2,
    "Q4_1, turned": (Form("range", 4, 32, turned=True),) * 2,
    "K int8, V 4 bits, turned": (INT8, TURNED),
}
LLAMA: Mapping[str, tuple[str, dict[str, str]]] = {
    "llama.cpp f16": ("f16", {}),
    "llama.cpp q8_0": ("q8_0", {}),
    "llama.cpp q4_0": ("q4_0", {}),
    "llama.cpp q4_1": ("q4_1", {}),
    "llama.cpp q4_0, not turned": ("q4_0", {"LLAMA_ATTN_ROT_DISABLE": "1"}),
}
"""Types of its caches, and variables of its environment."""


class RoundingBackend(ReferenceBackend):
    """Attention over K and V that were rounded before they were stored."""

    def __init__(self, shape: AttentionShape, keys: Form, values: Form) -> None:
        super().__init__(shape)
        self.keys, self.values = keys, values

    def write_kv(self, heads: Heads, *place: Any) -> None:
        heads.turn(self.ops)
        key, value = self.keys.rounded(heads.key), self.values.rounded(heads.value)
        super().write_kv(replace(heads, key=key, value=value, rotation=None), *place)


def scores(
    file: Path, texts: list[list[int]], only: list[str], llama_python: Path | None
) -> Iterator[tuple[str, Scores]]:
    """Names and scores of the forms in `only`, or of all."""
    wanted = {name: forms for name, forms in FORMS.items() if not only or name in only}
    reader = Reader(str(file), max(map(len, texts)), None, torch.float32, dtype=torch.float32)
    for name, forms in wanted.items():
        reader.backend = RoundingBackend(reader.backend.shape, *forms)
        yield name, [reader.logits(torch.tensor(tokens)).log_softmax(-1) for tokens in texts]
    if llama_python is None:
        return
    for name, (kind, variables) in LLAMA.items():
        if not only or name in only:
            os.environ.update(variables)
            yield name, llama(llama_python, file, texts, num_physical_cores(), kv=kind)
            for variable in variables:
                del os.environ[variable]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--forms", nargs="*", default=[], help="of these alone; default: all")
    parser.add_argument("--real", type=Path, default=REAL, help="the folder of scripts/fetch_real.py")
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama-cpp-python")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for dense files")
    args = parser.parse_args()
    if unknown := set(args.forms) - {*FORMS, *LLAMA}:
        raise SystemExit(f"unknown forms {sorted(unknown)}; there are {', '.join((*FORMS, *LLAMA))}")
    args.work.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        for model in args.models:
            source = args.real / MODELS[model].file
            file = form_of(source, "dense", args.work)
            texts = list(read_texts(MODELS[model], source).values())
            exact = exact_scores(file, texts, args.work)
            print(f"\n{model}{'':{34 - len(model)}}{'next':>9}{'top 10':>9}{'greedy':>9}{'KL':>10}", flush=True)
            for name, found in scores(file, texts, args.forms, args.llama_python):
                of = Figures.of(exact, found, texts)
                numbers = f"{of.next_token:9.4f}{of.top:9.4f}{100 * of.same_greedy:8.2f}%{of.divergence:10.5f}"
                print(f"{name:34}{numbers}", flush=True)


if __name__ == "__main__":
    main()
