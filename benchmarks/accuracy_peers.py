"""Other engines on the weights that accuracy.py measures: transformers, llama.cpp and OpenVINO.

The last two run in environments of their own (runners/setup.sh makes them), by a process for each file.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

Scores = list[torch.Tensor]
"""float32 log-probabilities [len(text), vocabulary] of each text."""
RUNNERS = Path(__file__).parent / "runners"
LLAMA_TYPES = {"file": (), "dense": ("Q8_0", "Q4_K_M", "Q4_1", "Q4_0"), "off-grid": ("Q8_0", "Q4_K_M", "Q4_1", "Q4_0")}
"""Types to which llama.cpp quantizes a form; it computes `file` directly."""
OPENVINO = {
    "bfloat16": (None, ()),
    "int8": ("int8", ()),
    "int8, exact": ("int8", ("--exact",)),
    "int4": ("int4", ()),
    "int4, exact": ("int4", ("--exact",)),
}
"""The form to which OpenVINO quantizes, and flags of its runner. Without "exact", inputs are rounded by its plugin's
default, as in the race."""


def read_checkpoint(file: Path) -> Any:
    """Load the model with transformers, in float32."""
    from transformers import AutoModelForCausalLM  # takes seconds, and ours does not need it

    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def oracle(file: Path, texts: list[list[int]], dtype: torch.dtype) -> Scores:
    """Scores of transformers for the same weights, with all modules in `dtype`."""
    model = read_checkpoint(file).to(dtype)
    return [model(torch.tensor([tokens])).logits[0].float().log_softmax(-1) for tokens in texts]


def llama(python: Path, file: Path, texts: list[list[int]], num_threads: int, kv: str = "f16") -> Scores:
    return _logits(_llama_command(python, "logits", file, "--kv", kv), texts, num_threads)


def llama_files(python: Path, file: Path, form: str) -> Iterator[tuple[str, Path]]:
    """The files that llama.cpp computes, with their names in the table."""
    if form == "file":
        yield "llama.cpp", file
    for kind in LLAMA_TYPES[form]:
        made = file.with_name(f"{file.stem}-{kind}.gguf")
        if not made.exists():
            _run(_llama_command(python, "quantize", file, made, kind))
        yield f"llama.cpp {kind}", made


def openvino(python: Path, model: Path, texts: list[list[int]], num_threads: int, flags: tuple[str, ...]) -> Scores:
    return _logits([python, "-P", RUNNERS / "openvino_logits.py", "logits", model, *flags], texts, num_threads)


def openvino_files(python: Path, file: Path) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """The models that OpenVINO computes, with their names in the table and flags of its runner."""
    exported = file.with_name(f"{file.stem}-openvino")
    if not exported.is_dir():
        _export_openvino(python, file, exported)
    dense = exported / "openvino_model.xml"
    for way, (form, flags) in OPENVINO.items():
        made = dense if form is None else exported.with_name(f"{exported.name}-{form}.xml")
        if not made.exists():
            _run([python, "-P", RUNNERS / "openvino_logits.py", "quantize", dense, made, form])
        yield f"OpenVINO {way}", made, flags


def _export_openvino(python: Path, file: Path, folder: Path) -> None:
    checkpoint = file.with_name(f"{file.stem}-checkpoint")
    if not checkpoint.is_dir():
        model = read_checkpoint(file)
        model.hf_quantizer, model.is_quantized = None, False  # else it refuses to be saved, as GGUF files may be packed
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(checkpoint)
    settings = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--disable-convert-tokenizer"]
    _run([python.with_name("optimum-cli"), "export", "openvino", "-m", checkpoint, *settings, folder])


def _llama_command(python: Path, *arguments: object) -> list[object]:
    return [python, "-P", RUNNERS / "llama_cpp_logits.py", *arguments]  # -P: llama_cpp.py lies beside it


def _logits(command: list[object], texts: list[list[int]], num_threads: int) -> Scores:
    """Run a runner's command for logits. It gets the paths of tokens and logits after the model's."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder) / "tokens.json", Path(folder) / "logits.npy"
        tokens.write_text(json.dumps(texts))
        place = next(i for i, each in enumerate(command) if each == "logits") + 2  # after the word and the model
        _run([*command[:place], tokens, out, *command[place:], "--threads", num_threads])
        logits = torch.from_numpy(np.load(out))
    return [part.log_softmax(-1) for part in logits.split([len(tokens) for tokens in texts])]


def _run(command: list[object]) -> None:
    subprocess.run([str(each) for each in command], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
