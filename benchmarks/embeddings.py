"""Texts per second of encoders, beside sentence-transformers, on random BERT models and texts of 8 to 256 tokens.

    pip install sentence-transformers
    python benchmarks/embeddings.py --shape 30m --texts 300

Both engines get the same words; each is its own process, and they are measured alternately. sentence-transformers runs
in both types and with two batch sizes, of which the best counts. Besides its speed, each run has the smallest cosine of
its vectors with those of sentence-transformers in float32, which shows the cost of a cheaper type.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]  # [texts, hidden size], each of length 1

SHAPES: dict[str, dict[str, Any]] = {
    "30m": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
    "110m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
NUM_WORDS = 30_517
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make(shape: str, folder: Path) -> None:
    """Write a random model with mean pooling, whose words are tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = [*SPECIAL, *(f"w{number}" for number in range(NUM_WORDS))]
    BertModel(BertConfig(vocab_size=len(words), **SHAPES[shape])).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(folder)
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SHAPES[shape]["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_texts(count: int) -> list[str]:
    rng = random.Random(1)
    return [" ".join(f"w{rng.randrange(NUM_WORDS)}" for _ in range(rng.randint(6, 254))) for _ in range(count)]


def ours(folder: Path, texts: list[str], settings: dict[str, Any]) -> tuple[float, Vectors]:
    """Texts per second of LLM.embed, and the vectors."""
    from vllm_lite import LLM

    with LLM(folder, **settings) as llm:
        llm.embed(texts[:64], use_tqdm=False)
        began_s = time.perf_counter()
        outputs = llm.embed(texts, use_tqdm=False)
        speed = len(texts) / (time.perf_counter() - began_s)
        return speed, np.array([output.outputs.embedding for output in outputs], np.float32)


def theirs(folder: Path, texts: list[str], settings: dict[str, Any]) -> tuple[float, Vectors]:
    """The same of SentenceTransformer.encode."""
    import torch
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found, unused-ignore]

    dtype = getattr(torch, settings["dtype"])
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"torch_dtype": dtype})
    model.encode(texts[:64])
    began_s = time.perf_counter()
    tensors = model.encode(
        texts,
        batch_size=settings["batch_size"],
        show_progress_bar=False,
        convert_to_tensor=True,
        convert_to_numpy=False,
    )
    speed = len(texts) / (time.perf_counter() - began_s)
    return speed, tensors.float().numpy()


RUNS: dict[str, dict[str, Any]] = {
    "ours bfloat16": {"dtype": "bfloat16"},
    "ours int8": {"dtype": "bfloat16", "quantization": "int8"},
    "ours float32": {"dtype": "float32"},
    **{
        f"sentence-transformers {dtype} {size}": {"dtype": dtype, "batch_size": size}
        for dtype in ("bfloat16", "float32")
        for size in (8, 32)
    },
}


ORACLE = "sentence-transformers float32 8"


def measure(name: str, folder: Path, count: int) -> None:
    """Write the vectors of one run into the folder, print its speed."""
    run = ours if name.startswith("ours") else theirs
    speed, vectors = run(folder, make_texts(count), RUNS[name])
    np.save(folder / f"{name}.npy", vectors)
    print("texts/s", speed)


def cosine(folder: Path, name: str) -> float:
    """The smallest cosine of any text."""
    return float((np.load(folder / f"{name}.npy") * np.load(folder / f"{ORACLE}.npy")).sum(axis=1).min())


def best_in_turn(program: str, runs: Iterable[str], folder: str, options: argparse.Namespace) -> dict[str, float]:
    """Texts per second of each run of `program`, the best of all rounds, each in a process of its own."""
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for name in runs:
            command = [sys.executable, program, "--run", name, "--folder", folder, "--texts", str(options.texts)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            speed = float(done.stdout.split("texts/s")[-1])
            best[name] = max(speed, best.get(name, 0.0))
            print(f"{name:36} {speed:7.1f} texts/s", flush=True)
    return best


def asked(description: str | None, shapes: Iterable[str], num_texts: int) -> argparse.Namespace:
    """Parse the command line of a program that `best_in_turn` calls. With `run`, the program does only this run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=list(shapes), default="30m")
    parser.add_argument("--texts", type=int, default=num_texts)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = asked(__doc__, SHAPES, 300)
    if options.run:
        measure(options.run, options.folder, options.texts)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(options.shape, Path(folder))
        best = best_in_turn(__file__, RUNS, folder, options)
        cosines = {name: cosine(Path(folder), name) for name in RUNS}
    peer = max(speed for name, speed in best.items() if not name.startswith("ours"))
    for name, speed in best.items():
        ratio = f"{speed / peer:.2f} x the best of sentence-transformers"
        print(f"{name:36} {speed:7.1f} texts/s, {ratio}, least cosine {cosines[name]:.5f}")


if __name__ == "__main__":
    main()
