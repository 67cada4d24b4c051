"""Writes the checkpoint of a real GGUF file of a Llama: python -m runners.real_model FILE.Q4_1.gguf FOLDER

FOLDER gets the file's weights in bfloat16 and FOLDER-q4_1.gguf is the file itself, so that engines that read GGUF files
compute these blocks, and all of them can quantize the same dense weights.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(file: Path, folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.hf_quantizer, model.is_quantized = None, False  # else it refuses to be saved, as GGUF files may be packed
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}, indent=1) + "\n")
    link = Path(f"{folder}-{file.stem.rpartition('.')[2].lower()}.gguf")
    link.unlink(missing_ok=True)
    link.symlink_to(file.absolute())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
