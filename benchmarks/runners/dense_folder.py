"""The checkpoint of a GGUF file of floats, as transformers reads it: python -m runners.dense_folder FILE.gguf FOLDER

optimum-cli exports this folder for OpenVINO. transformers cannot save a model that it read from a GGUF file itself.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    where = {"pretrained_model_name_or_path": args.source.parent, "gguf_file": args.source.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    args.folder.mkdir(parents=True, exist_ok=True)
    type(model.config).from_dict(config).save_pretrained(args.folder)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**where).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
