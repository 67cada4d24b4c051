"""Show a model of the hub's cache: facts from its files, and whether it fits this machine or why not."""

import argparse
import json

from vllm_lite.checkpoint.hub_cache import find_cached
from vllm_lite.tools.cli.list import row
from vllm_lite.tools.sizes import size_text


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name as vllm-lite list shows it")
    parser.add_argument("--download-dir", metavar="DIR", help="folder of downloads [huggingface_hub's own]")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    values = row(find_cached(arguments.model, arguments.download_dir))
    if arguments.json:
        print(json.dumps(values, indent=2))
        return 0
    values["size"] = size_text(values.pop("size_bytes"))
    for name, value in values.items():
        if value is not None and name != "last_read":
            print(f"  {name.replace('_', ' '):<16} {value}")
    print(f"\nvllm-lite serve {values['name']}")
    return 0
