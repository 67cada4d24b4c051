"""List the engines and servers of this user below TMPDIR, with their models, addresses and states."""

import argparse
import json
import time
from typing import Any

from vllm_lite.client.engines.instances import Instance, clean, find
from vllm_lite.protocol.stats import Stats

COLUMNS = ("pid", "kind", "model", "state", "up", "workers", "memory", "running", "waiting", "restarts", "address")
NUMBERS = ("pid", "up", "workers", "memory", "running", "waiting", "restarts")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clean", action="store_true", help="remove files of dead processes")
    parser.add_argument("--json", action="store_true", help="print one list of objects")


def run(arguments: argparse.Namespace) -> int:
    instances = find()
    if arguments.clean:
        for instance in instances:
            if instance.state == "stale":
                clean(instance)
    rows = [row(instance) for instance in instances]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("no engine of yours is running")
    else:
        _print(rows)
    return 0


def row(instance: Instance) -> dict[str, Any]:
    """An instance as printed by --json."""
    record, stats = instance.record, instance.stats
    return {
        "pid": record.main.pid,
        "name": instance.folder.name,
        "kind": "engine" if record.server is None else "server",
        "model": record.model,
        "url": record.url,
        "address": record.address,
        "state": instance.state,
        "uptime_s": round(max(0.0, time.time() - record.started_s), 1),
        "workers": [worker._asdict() for worker in instance.workers],
        "memory_bytes": instance.memory_bytes,
        "running": None if stats is None else stats.num_running,
        "waiting": None if stats is None else stats.num_waiting,
        "restarts": None if stats is None else num_restarts(stats),
    }


def num_restarts(stats: Stats) -> int:
    """Number of replaced workers of this engine, and of engines before it."""
    return sum(count for cause, count in stats.restarts.items() if cause != "engine") + stats.life - 1


def _print(rows: list[dict[str, Any]]) -> None:
    lines = [COLUMNS, *(_words(values) for values in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for words in lines:
        cells = (
            word.rjust(width) if name in NUMBERS else word.ljust(width)
            for name, word, width in zip(COLUMNS, words, widths, strict=True)
        )
        print("  ".join(cells).rstrip())


def _words(values: dict[str, Any]) -> tuple[str, ...]:
    """Format the cells of a row."""
    counts = ["" if values[name] is None else str(values[name]) for name in ("running", "waiting", "restarts")]
    memory = f"{values['memory_bytes'] / 2**20:,.0f} MiB" if values["memory_bytes"] else ""
    names = (str(values["pid"]), values["kind"], values["model"], values["state"])
    workers = str(len(values["workers"]) or "")
    return (*names, _span(values["uptime_s"]), workers, memory, *counts, values["url"] or values["address"])


def _span(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{seconds:.0f}s"
    return f"{minutes}m" if hours < 1 else f"{hours}h{minutes % 60:02}m" if hours < 48 else f"{hours // 24}d"
