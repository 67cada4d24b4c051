"""Download a model from the hub into the cache: the files that are needed, all of one commit. An interrupted download
is resumed."""

import argparse
from pathlib import Path

from vllm_lite.checkpoint.hub import HubSource, is_hub_id, local_folder
from vllm_lite.checkpoint.hub_cache import cached_at
from vllm_lite.checkpoint.library_names import hub_id
from vllm_lite.errors import ModelError
from vllm_lite.runtime import log
from vllm_lite.tools.sizes import size_text


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ORG/REPO[:LABEL]", help="hub id; LABEL chooses a GGUF file, like Q4_K_M")
    parser.add_argument("--revision", help="branch, tag or commit [main]")
    parser.add_argument("--download-dir", metavar="DIR", help="folder for downloads [huggingface_hub's own]")


def run(arguments: argparse.Namespace) -> int:
    log.setup("pull")
    name = hub_id(arguments.model)
    if not is_hub_id(name):
        raise ModelError(f"{arguments.model!r} is not a hub id; give ORG/REPO, or ORG/REPO:LABEL of a GGUF file")
    path = local_folder(HubSource(name, arguments.revision, arguments.download_dir))
    model = cached_at(Path(path), arguments.download_dir)
    facts = model.facts
    size = size_text(model.num_bytes)
    print(f"{model.name} at {model.commit[:12]}: {size}, {facts.family}, {facts.format} {facts.quantization}")
    print(f"in {path}\nTry: vllm-lite serve {model.name}")
    return 0
