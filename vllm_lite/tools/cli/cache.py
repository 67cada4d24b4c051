"""Look into a directory of KV on disk (--kv-cache-dir), or remove what lies there: all of it, or the KV of one model as
`ls` names it. Engines that use it meanwhile go on: what is gone is computed."""

import argparse
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_lite.errors import ConfigError
from vllm_lite.kv_disk.directory import check_directory
from vllm_lite.kv_disk.format import PAGE, Damaged, Foreign, RunHeader, read_header
from vllm_lite.kv_disk.usage import ABOUT, DRAFT_PREFIX, held_files
from vllm_lite.tools.sizes import size_text

MAX_ABOUT = 200


class ModelKV(NamedTuple):
    """KV of one model with one set of settings, of all its ranks."""

    name: str
    about: str
    num_files: int
    num_bytes: int
    used_s: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "show", "rm"), help="list models, show one, or remove")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the engine's --kv-cache-dir")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="the beginning of a name that ls shows")


def run(arguments: argparse.Namespace) -> int:
    folder: Path = check_directory(arguments.folder)
    models = _chosen(folder, arguments.model)
    if arguments.action == "ls":
        print("\n".join(_table(models)))
    elif arguments.action == "show":
        for model in models:
            print("\n".join(_shown(folder, model)))
    else:
        for model in models:
            shutil.rmtree(folder / model.name)
            print(f"removed {model.name}: {model.num_files} files, {size_text(model.num_bytes)}")
    return 0


def _chosen(folder: Path, beginning: str | None) -> list[ModelKV]:
    """The models of a directory, or the one whose name begins so. Raises ConfigError if that is not exactly one."""
    models = [_measured(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    if beginning is None:
        return models
    found = [model for model in models if model.name.startswith(beginning)]
    if len(found) != 1:
        names = ", ".join(model.name for model in models) or "none"
        raise ConfigError(f"{beginning!r} is the beginning of {len(found)} names; there are {names}")
    return found


def _measured(path: Path) -> ModelKV:
    about = path / ABOUT
    text = about.read_text(errors="replace")[:MAX_ABOUT] if about.is_file() else "unknown"
    files = [held for held in held_files(path.parent) if Path(held.path).is_relative_to(path)]
    files = [held for held in files if DRAFT_PREFIX not in held.path]
    used_s = max((held.used_s for held in files), default=0.0)
    return ModelKV(path.name, text, len(files), sum(held.num_bytes for held in files), used_s)


def _table(models: list[ModelKV]) -> Iterator[str]:
    yield f"{'NAME':32}  {'FILES':>7}  {'SIZE':>10}  {'LAST USED':16}  MODEL"
    for model in models:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.used_s)) if model.used_s else "never"
        yield f"{model.name:32}  {model.num_files:7}  {size_text(model.num_bytes):>10}  {used:16}  {model.about}"


def _shown(folder: Path, model: ModelKV) -> Iterator[str]:
    yield f"{model.name}: {model.about}, {model.num_files} files, {size_text(model.num_bytes)}"
    for rank in sorted(path for path in (folder / model.name).iterdir() if path.is_dir()):
        headers, num_bad = _headers(rank)
        number, _, world = rank.name.partition("-")
        sizes = {header.item_bytes: 0 for header in headers}
        for header in headers:
            sizes[header.item_bytes] += len(header.keys)
        held = ", ".join(f"{count} of {size_text(item_bytes)}" for item_bytes, count in sorted(sizes.items()))
        bad = f"; {num_bad} files cannot be read" if num_bad else ""
        yield f"  rank {number} of {world}: {held or 'no'} blocks or states{bad}"


def _headers(rank: Path) -> tuple[list[RunHeader], int]:
    """The headers of a rank's files, and the number of files without a sound one."""
    headers, num_bad = [], 0
    for held in held_files(rank.parent):
        if not Path(held.path).is_relative_to(rank):
            continue
        if DRAFT_PREFIX in held.path:
            continue
        try:
            with open(held.path, "rb") as file:
                headers.append(read_header(file.read(PAGE), held.num_bytes))
        except (OSError, Foreign, Damaged):
            num_bad += 1
    return headers, num_bad
