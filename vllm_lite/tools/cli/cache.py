"""List or remove the contents of a directory of KV on disk (--kv-cache-dir): all of it, or the KV of one model as
listed by `ls`. Engines that use it continue: they compute removed KV again. Other files are left alone."""

import argparse
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vllm_lite.errors import ConfigError
from vllm_lite.kv_disk.directory import check_directory
from vllm_lite.kv_disk.format import PAGE, Damaged, Foreign, RunHeader, read_header
from vllm_lite.kv_disk.usage import ABOUT, Held, held_by_rank, models_in, ranks_in, remove_model
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
    parser.add_argument("model", metavar="MODEL", nargs="?", help="prefix of a name listed by ls")


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
            remove_model(folder / model.name)
            print(f"removed {model.name}: {model.num_files} files, {size_text(model.num_bytes)}")
    return 0


def _chosen(folder: Path, beginning: str | None) -> list[ModelKV]:
    """The models of a directory, or the one whose name begins with `beginning`. Raises ConfigError unless that is
    exactly one."""
    models = [_measured(path) for path in models_in(folder)]
    if beginning is None:
        return models
    found = [model for model in models if model.name.startswith(beginning)]
    if len(found) != 1:
        names = ", ".join(model.name for model in models) or "none"
        raise ConfigError(f"{beginning!r} is the beginning of {len(found)} names; there are {names}")
    return found


def _measured(model: Path) -> ModelKV:
    text = _begin(model / ABOUT, MAX_ABOUT).decode(errors="replace")
    about = "".join(each if each.isprintable() else "?" for each in text) or "unknown"
    files = [held for rank in ranks_in(model) for held in _whole(rank)]
    used_s = max((held.used_s for held in files), default=0.0)
    return ModelKV(model.name, about, len(files), sum(held.num_bytes for held in files), used_s)


def _whole(rank: Path) -> Iterator[Held]:
    return (held for held in held_by_rank(rank) if not held.is_draft)


def _table(models: list[ModelKV]) -> Iterator[str]:
    yield f"{'NAME':32}  {'FILES':>7}  {'SIZE':>10}  {'LAST USED':16}  MODEL"
    for model in models:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.used_s)) if model.used_s else "never"
        yield f"{model.name:32}  {model.num_files:7}  {size_text(model.num_bytes):>10}  {used:16}  {model.about}"


def _shown(folder: Path, model: ModelKV) -> Iterator[str]:
    yield f"{model.name}: {model.about}, {model.num_files} files, {size_text(model.num_bytes)}"
    for rank in ranks_in(folder / model.name):
        headers, num_bad = _headers(rank)
        number, _, world = rank.name.partition("-")
        sizes = {header.item_bytes: 0 for header in headers}
        for header in headers:
            sizes[header.item_bytes] += len(header.keys)
        held = ", ".join(f"{count} of {size_text(item_bytes)}" for item_bytes, count in sorted(sizes.items()))
        bad = f"; {num_bad} files cannot be read" if num_bad else ""
        yield f"  rank {number} of {world}: {held or 'no'} blocks or states{bad}"


def _headers(rank: Path) -> tuple[list[RunHeader], int]:
    """The headers of a rank's files, and the number of files without a valid one; files that vanish do not count."""
    headers, num_bad = [], 0
    for held in _whole(rank):
        try:
            headers.append(read_header(_begin(Path(held.path), PAGE), held.num_bytes))
        except (Foreign, Damaged):
            num_bad += os.path.lexists(held.path)
    return headers, num_bad


def _begin(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file; empty if it cannot be read, or is not a regular file, such as a pipe or link."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(num_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    return b""
