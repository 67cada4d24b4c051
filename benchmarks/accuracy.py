"""Distance from the exact model of each way to store and multiply weights, on real models, ours and other engines'.

    python benchmarks/accuracy.py [--models smollm2 gemma3-270m] [--forms file dense off-grid] [--ways int8 ...]
        [--llama-python VENV/bin/python] [--openvino-python VENV/bin/python] [--work DIR] [--out FILE.json [--keep]]

Transformers in float32, our engine in every mode, and llama.cpp and OpenVINO, if their Pythons are given, read a page
of prose, one of code and a chat (benchmarks/texts). All have the same weights: a file of scripts/fetch_real.py
(`file`), its blocks converted to floats (`dense`, which every engine quantizes again), or these floats moved off their
grid (`off-grid`, see runners/dense_gguf.py). DIR keeps the files that are derived.
"""

import argparse
import hashlib
import itertools
import json
import platform
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accuracy_peers import Scores, llama, llama_files, openvino, openvino_files, oracle
from quantization_quality import Reader
from runners.dense_gguf import write_dense

from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.kernels.cpu.library import isa
from vllm_lite.runtime.machine import num_physical_cores

HERE = Path(__file__).parent
TEXTS = HERE / "texts"
REAL = Path("~/.cache/vllm-lite/real").expanduser()
TOP = 10


class Model(NamedTuple):
    file: str
    """Path below the folder of scripts/fetch_real.py."""
    turn: str
    """A turn of a chat."""
    assistant: str
    """The role of answers."""


MODELS = {
    "smollm2": Model(
        "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "<|im_start|>{role}\n{content}<|im_end|>\n", "assistant"
    ),
    "gemma3-270m": Model(
        "gemma3-270m/gemma-3-270m-q4_k_m.gguf", "<start_of_turn>{role}\n{content}<end_of_turn>\n", "model"
    ),
}


class Way(NamedTuple):
    """A way to compute a model."""

    dtype: torch.dtype = torch.bfloat16
    quantization: Quantization | None = None
    kv_dtype: torch.dtype | None = None
    exact: bool = False


FLOATS = {
    "float32": Way(torch.float32),
    "bfloat16": Way(),
    "bfloat16, exact": Way(exact=True),
    "bfloat16, KV int8": Way(kv_dtype=torch.int8),
}
ON_LOAD: dict[str, Way] = {}
for _form in ("int8", "fp8", "int4_g32", "int4"):
    ON_LOAD[_form] = Way(quantization=_form)
    ON_LOAD[f"{_form}, exact"] = Way(quantization=_form, exact=True)
    ON_LOAD[f"{_form}, float32"] = Way(torch.float32, _form)
WAYS = {
    "file": FLOATS,
    "dense": {name: way for name, way in FLOATS.items() if not way.exact} | ON_LOAD,
    "off-grid": {name: way for name, way in ON_LOAD.items() if not way.exact},
}

MOST_SENSITIVE = "smollm2"
"""The model with the largest channels, on which all ways are measured."""
ELSEWHERE = {"dense": ("int8", "int8, float32", "fp8", "int4_g32", "int4_g32, float32", "int4")}
ELSEWHERE["off-grid"] = ELSEWHERE["dense"]
"""Ways with quantized weights of the other models."""
PEERS = ("transformers", "llama.cpp", "OpenVINO")


class Figures(NamedTuple):
    """Means over positions, against the exact model; in nats."""

    next_token: float
    """Difference of the log-probability of the token that follows."""
    top: float
    """The same for the TOP most likely tokens of the exact model."""
    same_greedy: float
    divergence: float
    perplexity: float

    @classmethod
    def of(cls, exact: Scores, others: Scores, texts: list[list[int]]) -> "Figures":
        """Means over all texts; exact, others: float32 log-probabilities [len(text), vocabulary] of each."""
        return cls.mean([differences(*each) for each in zip(exact, others, texts, strict=True)])

    @classmethod
    def mean(cls, found: list[torch.Tensor]) -> "Figures":
        means = torch.cat(found).double().mean(0)
        near, top, same, divergence, loss = (round(float(each), 5) for each in (*means[:4], means[4].exp()))
        return cls(near, top, same, divergence, loss)


def differences(log_p: torch.Tensor, log_q: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """log_p, log_q: float32 [len(tokens), vocabulary], exact and another's -> [len(tokens) - 1, 5], as Figures, but for
    perplexity the negative log-probability."""
    log_p, log_q, following = log_p[:-1], log_q[:-1], torch.tensor(tokens[1:])[:, None]
    own = log_q.gather(1, following)[:, 0]
    best = log_p.topk(TOP).indices
    parts = (
        (own - log_p.gather(1, following)[:, 0]).abs(),
        (log_p.gather(1, best) - log_q.gather(1, best)).abs().mean(1),
        (best[:, 0] == log_q.argmax(1)).float(),
        (log_p.exp() * (log_p - log_q)).sum(1),
        -own,
    )
    return torch.stack(parts, dim=1)


def read_texts(model: Model, file: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.load(file)
    texts = {name: (TEXTS / f"{name}.txt").read_text() for name in ("prose", "code")}
    roles = {"user": "user", "assistant": model.assistant}
    turns = json.loads((TEXTS / "chat.json").read_text())
    texts["chat"] = "".join(model.turn.format(role=roles[turn["role"]], content=turn["content"]) for turn in turns)
    return {name: tokenizer.encode(text) for name, text in texts.items()}


def ours(file: Path, texts: list[list[int]], way: Way) -> Scores:
    longest = max(map(len, texts))
    kv_dtype = way.kv_dtype or way.dtype
    reader = Reader(str(file), longest, way.quantization, kv_dtype, dtype=way.dtype, exact=way.exact)
    return [reader.logits(torch.tensor(tokens)).log_softmax(-1) for tokens in texts]


def form_of(source: Path, form: str, work: Path) -> Path:
    """The file of a form; created if it is missing."""
    if form == "file":
        return source
    file = work / f"{source.stem}-{form}.gguf"
    if not file.exists():
        write_dense(source, file, off_grid=form == "off-grid")
    return file


def exact_scores(file: Path, texts: list[list[int]], work: Path) -> Scores:
    """Scores of transformers in float32, kept in `work`. `file` and `dense` have the same weights, and so the same
    scores."""
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:8]
    kept = work / f"{file.stem.removesuffix('-dense')}-exact-{digest}.npy"
    if not kept.exists():
        np.save(kept, torch.cat(oracle(file, texts, torch.float32)).numpy())
    return list(torch.from_numpy(np.load(kept)).split([len(tokens) for tokens in texts]))


def wanted_ways(name: str, form: str, only: list[str]) -> dict[str, Way]:
    """Our ways to measure. Exact products and float32 with weights that are quantized on load are measured with one
    model only."""
    ways = {way: how for way, how in WAYS[form].items() if not only or way.partition(",")[0] in only}
    if name == MOST_SENSITIVE:
        return ways
    return {way: how for way, how in ways.items() if how.quantization is None or way in ELSEWHERE[form]}


def measure(name: str, form: str, args: argparse.Namespace, known: dict[str, object]) -> dict[str, object]:
    """Measure a form. known: figures by way; those that are measured now are replaced."""
    model, found = MODELS[name], dict(known)
    file = form_of(args.real / model.file, form, args.work)
    by_name = read_texts(model, file)
    texts = list(by_name.values())
    exact = exact_scores(file, texts, args.work)
    print(f"\n{name}, {form}: {sum(map(len, texts)) - len(texts)} positions", flush=True)
    print(f"{'':28}{'next':>9}{f'top {TOP}':>9}{'greedy':>9}{'KL':>10}{'perplexity':>12}", flush=True)

    def add(way: str, scores: Scores) -> None:
        parts = [differences(*each) for each in zip(exact, scores, texts, strict=True)]
        figures = Figures.mean(parts)
        of_texts = {text: Figures.mean([part])._asdict() for text, part in zip(by_name, parts, strict=True)}
        found[way] = figures._asdict() | of_texts
        print(
            f"{way:28}{figures.next_token:9.4f}{figures.top:9.4f}{100 * figures.same_greedy:8.2f}%"
            f"{figures.divergence:10.5f}{figures.perplexity:12.3f}",
            flush=True,
        )

    add("transformers float32", exact)
    if form == "dense" and "transformers bfloat16" not in found:
        add("transformers bfloat16", oracle(file, texts, torch.bfloat16))
    for way, how in wanted_ways(name, form, args.ways).items():
        add(way, ours(file, texts, how))
    threads = num_physical_cores()
    if args.llama_python is not None:
        for way, each in llama_files(args.llama_python, file, form):
            add(way, llama(args.llama_python, each, texts, threads))
    if args.openvino_python is not None and form != "file":
        for way, each, flags in openvino_files(args.openvino_python, file):
            add(way, openvino(args.openvino_python, each, texts, threads, flags))
    return found


def kept_figures(out: Path | None, revision: str) -> dict[str, Any]:
    """Figures of an earlier run, by model and form: ours only if the commit is the same, those of peers always."""
    if out is None or not out.exists():
        return {}
    before = json.loads(out.read_text())
    same = before["commit"] == revision
    return {
        name: {
            form: {way: each for way, each in ways.items() if same or way.startswith(PEERS)}
            for form, ways in forms.items()
        }
        for name, forms in before["models"].items()
    }


def commit() -> str:
    """HEAD, with a + if the working tree has changes."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--forms", nargs="+", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--ways", nargs="*", default=[], help="of ours, by what stands before the comma; default: all")
    parser.add_argument("--real", type=Path, default=REAL, help="the folder of scripts/fetch_real.py")
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama-cpp-python")
    parser.add_argument("--openvino-python", type=Path, help="a Python that has openvino, optimum-intel and nncf")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for dense files")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument(
        "--keep", action="store_true", help="and keep what is there of other ways: of peers, and ours of this commit"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    revision = commit()
    found = kept_figures(args.out if args.keep else None, revision)
    with torch.inference_mode():
        for name, form in itertools.product(args.models, args.forms):
            forms = found.setdefault(name, {})
            forms[form] = measure(name, form, args, forms.get(form, {}))
            if args.out is not None:
                write(args.out, revision, found)


def write(out: Path, revision: str, found: dict[str, Any]) -> None:
    machine = {"processor": platform.processor() or platform.machine(), "instruction set": isa()}
    about = {"date": f"{datetime.now(UTC):%F}", "commit": revision, "machine": machine}
    out.write_text(json.dumps(about | {"models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
