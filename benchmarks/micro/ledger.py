"""A ledger sums up the time of each part of a process, step by step. It wraps functions, which need no change for
it."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "STEP_LEDGER_FOLDER"
"""The environment variable that names the folder of the files."""

Step = dict[str, int]
"""Nanoseconds of each part of a step, without the parts inside it; also WHOLE, REST, CPU and added counts."""
WHOLE, REST, CPU = "step", "rest", "cpu"


class Ledger:
    """The ledger of one thread; no other thread may call the wrapped functions."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._parts: set[str] = set()
        self._step: Step = {}
        self._inside = [0]  # for each running wrapped call: the time of wrapped calls inside it
        self._began_ns = time.perf_counter_ns()
        self._cpu_ns = time.process_time_ns()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its time is added to `part`, without the time of wrapped calls inside it."""
        self._parts.add(part)

        def wrapped(*args: Any, **named: Any) -> Any:
            self._inside.append(0)
            start_ns = time.perf_counter_ns()
            try:
                return function(*args, **named)
            finally:
                took_ns = time.perf_counter_ns() - start_ns
                self.add(part, took_ns - self._inside.pop())
                self._inside[-1] += took_ns

        return wrapped

    def watch(self, owner: Any, parts: dict[str, str]) -> None:
        """Wrap the functions of a class or module: name -> part."""
        for name, part in parts.items():
            setattr(owner, name, self.timed(part, getattr(owner, name)))

    def add(self, part: str, value: int) -> None:
        self._step[part] = self._step.get(part, 0) + value

    def end_step(self, **counts: int) -> None:
        """End the step and begin the next. Call it outside of wrapped functions."""
        now_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        step = dict.fromkeys(self._parts, 0) | self._step
        step[WHOLE], step[CPU] = now_ns - self._began_ns, cpu_ns - self._cpu_ns
        step[REST] = step[WHOLE] - self._inside[0]
        self.steps.append(step | counts)
        self._step, self._inside, self._began_ns, self._cpu_ns = {}, [0], now_ns, cpu_ns

    def save(self, name: str) -> None:
        """Write the steps to the folder that the environment names."""
        Path(os.environ[FOLDER], f"{name}.json").write_text(json.dumps(self.steps))


def load(folder: str, name: str) -> list[Step]:
    steps: list[Step] = json.loads(Path(folder, f"{name}.json").read_text())
    return steps
