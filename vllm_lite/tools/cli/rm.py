"""Remove models from the hub's cache, which other programs may use, too."""

import argparse

from vllm_lite.checkpoint.hub_cache import remove_cached
from vllm_lite.tools.sizes import size_text


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="names as vllm-lite list shows them")
    parser.add_argument("--download-dir", metavar="DIR", help="folder of downloads [huggingface_hub's own]")


def run(arguments: argparse.Namespace) -> int:
    for name in arguments.models:
        model, num_bytes = remove_cached(name, arguments.download_dir)
        print(f"removed {model.name}: {size_text(num_bytes)} are free")
    return 0
