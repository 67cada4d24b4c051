"""The chat that kv_disk.py and kv_disk_llama.py measure: the same ids for every engine. It imports no engine."""

import json
import os
import random
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Chat:
    """A chat of random ids, and further turns of it."""

    def __init__(self, num_tokens: int, num_new: int) -> None:
        self._draw = random.Random(0)
        self.num_new = num_new
        self.tokens = self._ids(num_tokens)

    def turn(self) -> list[int]:
        return [*self.tokens, *self._ids(self.num_new)]

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(3, 30000) for _ in range(count)]


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each value."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def report(name: str, found: dict[str, Any], out: str | None, **about: Any) -> None:
    """Print what was found, and append it to the JSON file `out`."""
    date = datetime.now(UTC).date().isoformat()
    result = {"date": date, "shape": name, **about, "cores": os.cpu_count()} | found
    print(json.dumps(result, indent=1))
    if out:
        path = Path(out)
        known = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*known, result], indent=1) + "\n")
