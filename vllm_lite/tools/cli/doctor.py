"""Check the installation and this machine, and give advice on problems. Exit status 1 if something does not work."""

import argparse
import json
import sys
from pathlib import Path

from vllm_lite.errors import ConfigError
from vllm_lite.tools.doctor.bundle import redactor, write_bundle
from vllm_lite.tools.doctor.checks import Line, as_json, examine, guarded
from vllm_lite.tools.doctor.disk import kv_disk
from vllm_lite.tools.doctor.model import chats, implementation


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="a folder, or demo: also show the model's implementation, template and formats"
    )
    parser.add_argument("--port", type=int, default=8000, help="port for a server [8000]")
    parser.add_argument("--kv-cache-dir", metavar="DIR", help="also measure this disk for the KV cache")
    parser.add_argument("--json", action="store_true", help="print one list of objects")
    parser.add_argument("--bundle", metavar="FILE", help="also write an archive (.tar.gz) for support, without secrets")


def run(arguments: argparse.Namespace) -> int:
    lines = examine(arguments.port)
    if arguments.model is not None:
        lines += guarded("model", lambda: implementation(_folder(arguments.model)))
        lines += guarded("model", lambda: chats(_folder(arguments.model)))
    if arguments.kv_cache_dir is not None:
        lines += guarded("KV on disk", lambda: kv_disk(arguments.kv_cache_dir))
    if arguments.json:
        print(redactor()(json.dumps(as_json(lines), indent=1, ensure_ascii=False)))
    else:
        _print(lines)
    if arguments.bundle:
        try:
            write_bundle(Path(arguments.bundle), lines)
        except OSError as error:
            raise ConfigError(f"the archive {arguments.bundle!r} cannot be written: {error.strerror}") from error
        print(f"wrote {arguments.bundle}; look at it before you send it to anybody", file=sys.stderr)
    return int(any(line.level == "FAIL" for line in lines))


def _folder(model: str) -> str:
    from vllm_lite.config import DEMO_MODEL, demo_folder  # imports msgspec, which may be what is missing

    return demo_folder() if model == DEMO_MODEL else model


def _print(lines: list[Line]) -> None:
    hide = redactor()
    for line in lines:
        advice = f"\n{'':<25}{line.advice}" if line.advice else ""
        print(hide(f"{line.level:<5} {line.name:<18} {line.text}{advice}"))
    counts = {level: sum(line.level == level for line in lines) for level in ("OK", "WARN", "FAIL")}
    print(f"\n{counts['OK']} OK, {counts['WARN']} to look at, {counts['FAIL']} that do not work")
