"""Distance of each way of storing and multiplying weights from the exact model, on real models and beside llama.cpp.

    python benchmarks/accuracy.py [--models smollm2 gemma3-270m] [--forms file dense off-grid] [--ways int8 ...]
        [--llama-python VENV/bin/python] [--work DIR] [--out FILE.json]

A page of prose, one of code and a chat (benchmarks/texts) are read by transformers in float32, by us in every mode, and
by llama.cpp if --llama-python names a Python that has llama-cpp-python. All compute the same weights: a file of
scripts/fetch_real.py as it is (`file`), all its blocks as floats (`dense`: what each of us quantizes again), or these
moved off the grid on which they lie (`off-grid`, see runners/dense_gguf.py). DIR keeps the dense files.
"""

import argparse
import json
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
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
    """Below the folder of scripts/fetch_real.py."""
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
LLAMA_TYPES = {"file": (), "dense": ("Q8_0", "Q4_K_M", "Q4_1", "Q4_0"), "off-grid": ("Q8_0", "Q4_K_M", "Q4_1", "Q4_0")}
"""Types that llama.cpp makes of a form; of a file it computes the file."""


class Figures(NamedTuple):
    """Means over positions, against the exact model; in nats."""

    next_token: float
    """Difference of the log-probability of the token that follows."""
    top: float
    """The same of the TOP tokens that the exact model finds most likely."""
    same_greedy: float
    divergence: float
    perplexity: float

    @classmethod
    def of(cls, exact: list[torch.Tensor], others: list[torch.Tensor], texts: list[list[int]]) -> "Figures":
        """exact, others: float32 log-probabilities [len(text), vocabulary] of each text."""
        found: list[torch.Tensor] = []
        for left, right, tokens in zip(exact, others, texts, strict=True):
            log_p, log_q, following = left[:-1], right[:-1], torch.tensor(tokens[1:])[:, None]
            own = log_q.gather(1, following)[:, 0]
            best = log_p.topk(TOP).indices
            found.append(
                torch.stack(
                    (
                        (own - log_p.gather(1, following)[:, 0]).abs(),
                        (log_p.gather(1, best) - log_q.gather(1, best)).abs().mean(1),
                        (log_p.argmax(1) == log_q.argmax(1)).float(),
                        (log_p.exp() * (log_p - log_q)).sum(1),
                        -own,
                    ),
                    dim=1,
                )
            )
        means = torch.cat(found).double().mean(0)
        near, top, same, divergence, loss = (round(float(each), 5) for each in (*means[:4], means[4].exp()))
        return cls(near, top, same, divergence, loss)


Scores = list[torch.Tensor]
"""float32 log-probabilities [len(text), vocabulary] of each text."""


def read_texts(model: Model, file: Path) -> dict[str, list[int]]:
    tokenizer = Tokenizer.load(file)
    texts = {name: (TEXTS / f"{name}.txt").read_text() for name in ("prose", "code")}
    roles = {"user": "user", "assistant": model.assistant}
    turns = json.loads((TEXTS / "chat.json").read_text())
    texts["chat"] = "".join(model.turn.format(role=roles[turn["role"]], content=turn["content"]) for turn in turns)
    return {name: tokenizer.encode(text) for name, text in texts.items()}


def oracle(file: Path, texts: list[list[int]], dtype: torch.dtype) -> Scores:
    """transformers on the same weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()
    return [model(torch.tensor([tokens])).logits[0].float().log_softmax(-1) for tokens in texts]


def ours(file: Path, texts: list[list[int]], way: Way) -> Scores:
    longest = max(map(len, texts))
    kv_dtype = way.kv_dtype or way.dtype
    reader = Reader(str(file), longest, way.quantization, kv_dtype, dtype=way.dtype, exact=way.exact)
    return [reader.logits(torch.tensor(tokens)).log_softmax(-1) for tokens in texts]


def llama(python: Path, file: Path, texts: list[list[int]], num_threads: int) -> Scores:
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder) / "tokens.json", Path(folder) / "logits.npy"
        tokens.write_text(json.dumps(texts))
        _llama(python, "logits", file, tokens, out, "--threads", num_threads)
        logits = torch.from_numpy(np.load(out))
    return [part.log_softmax(-1) for part in logits.split([len(tokens) for tokens in texts])]


def _llama(python: Path, *arguments: object) -> None:
    command = [python, "-P", HERE / "runners" / "llama_cpp_logits.py", *arguments]  # -P: llama_cpp.py lies beside it
    subprocess.run([str(each) for each in command], check=True)


def form_of(source: Path, form: str, work: Path) -> Path:
    """The file of a form, made where it is not there."""
    if form == "file":
        return source
    file = work / f"{source.stem}-{form}.gguf"
    if not file.exists():
        write_dense(source, file, off_grid=form == "off-grid")
    return file


def llama_files(python: Path, file: Path, form: str) -> Iterator[tuple[str, Path]]:
    """The files that llama.cpp computes, with their names in the table."""
    if form == "file":
        yield "llama.cpp", file
    for kind in LLAMA_TYPES[form]:
        made = file.with_name(f"{file.stem}-{kind}.gguf")
        if not made.exists():
            _llama(python, "quantize", file, made, kind)
        yield f"llama.cpp {kind}", made


def measure(name: str, form: str, args: argparse.Namespace) -> dict[str, object]:
    model = MODELS[name]
    file = form_of(args.real / model.file, form, args.work)
    by_name = read_texts(model, file)
    texts = list(by_name.values())
    exact = oracle(file, texts, torch.float32)
    found: dict[str, object] = {}
    print(f"\n{name}, {form}: {sum(map(len, texts)) - len(texts)} positions", flush=True)
    print(f"{'':28}{'next':>9}{f'top {TOP}':>9}{'greedy':>9}{'KL':>10}{'perplexity':>12}", flush=True)

    def add(way: str, scores: Scores) -> None:
        figures = Figures.of(exact, scores, texts)
        found[way] = figures._asdict() | {
            text: Figures.of([left], [right], [tokens])._asdict()
            for (text, tokens), left, right in zip(by_name.items(), exact, scores, strict=True)
        }
        print(
            f"{way:28}{figures.next_token:9.4f}{figures.top:9.4f}{100 * figures.same_greedy:8.2f}%"
            f"{figures.divergence:10.5f}{figures.perplexity:12.3f}",
            flush=True,
        )

    add("transformers float32", exact)
    if form == "dense":
        add("transformers bfloat16", oracle(file, texts, torch.bfloat16))
    for way, how in WAYS[form].items():
        if not args.ways or way.partition(",")[0] in args.ways:
            add(way, ours(file, texts, how))
    if args.llama_python is not None:
        for way, each in llama_files(args.llama_python, file, form):
            add(way, llama(args.llama_python, each, texts, num_physical_cores()))
    return found


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
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for dense files")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        found = {name: {form: measure(name, form, args) for form in args.forms} for name in args.models}
    if args.out is not None:
        machine = {"processor": platform.processor() or platform.machine(), "instruction set": isa()}
        about = {"date": f"{datetime.now(UTC):%F}", "commit": commit(), "machine": machine}
        args.out.write_text(json.dumps(about | {"models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
