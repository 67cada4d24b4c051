"""Common parts of all runners: their command line, the repeats, what is measured, the result file.

A runner gives main() a function that loads its engine. Every runner is started as `python -m runners.NAME` in this
folder's parent, by the Python that has the engine installed, so only the standard library is imported here.
"""

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TypedDict

from runners import machine


class Request(TypedDict):
    id: int
    prompt: list[int]
    n: int  # tokens to generate


@dataclass(frozen=True)
class Outcome:
    """For each request: its tokens, and the time.monotonic() of its first and its last token."""

    tokens: list[list[int]]
    first_s: list[float]
    last_s: list[float]


class Recorder:
    """Collects an Outcome as tokens arrive."""

    def __init__(self, count: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._first_s = [0.0] * count
        self._last_s = [0.0] * count

    def add(self, place: int, tokens: list[int], at_s: float) -> None:
        if not self._tokens[place]:
            self._first_s[place] = at_s
        self._tokens[place] += tokens
        self._last_s[place] = at_s

    def outcome(self) -> Outcome:
        return Outcome(self._tokens, self._first_s, self._last_s)


class Engine(Protocol):
    info: dict[str, Any]  # versions and settings

    def run(self, requests: list[Request]) -> Outcome:
        """Continue all prompts greedily by exactly n tokens each, without stopping at an end token."""


def main(load: Callable[[argparse.Namespace], Engine]) -> None:
    args = _arguments()
    workloads = json.loads(Path(args.workload).read_text())["workloads"]
    names = args.only.split(",")
    begin_s = time.monotonic()
    engine = load(args)
    result: dict[str, Any] = {"info": engine.info, "load_s": time.monotonic() - begin_s, "runs": {}, "done": False}
    for name in names:
        runs: list[dict[str, Any]] = []
        result["runs"][name] = runs
        try:
            if workloads[name]["warmup"]:
                engine.run(workloads[name]["warmup"])
            for turn, rep in enumerate(map(int, args.reps.split(","))):
                machine.wait_until_quiet(args.quiet_wait)
                run = measure(engine, workloads[name]["reps"][rep], args.busy if turn % 2 else 0)
                runs.append({"rep": rep, **run, "clean": run["foreign_cores"] <= args.max_foreign})
                _write(args.out, result)
                if sum(run["clean"] for run in runs) >= args.need:
                    break
        except Exception as error:  # the other workloads continue
            traceback.print_exc()
            result.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:300]
    result["done"] = "errors" not in result
    _write(args.out, result)


def measure(engine: Engine, requests: list[Request], num_busy: int = 0) -> dict[str, Any]:
    """One repeat, beside `num_busy` foreign busy processes. Raises ValueError if a request got other than n tokens."""
    gc.collect()
    with ExitStack() as stack:
        stack.enter_context(machine.busy(num_busy))
        cpu = machine.CpuTimes.now()
        begin_s = time.monotonic()
        outcome = engine.run(requests)
        wall_s = time.monotonic() - begin_s
        foreign_cores = machine.CpuTimes.now().foreign_since(cpu)
    for request, tokens in zip(requests, outcome.tokens, strict=True):
        if len(tokens) != request["n"]:
            raise ValueError(f"request {request['id']} got {len(tokens)} tokens, not {request['n']}")
    num_tokens = sum(map(len, outcome.tokens))
    figures = {
        "busy": num_busy,
        "wall_s": wall_s,
        "out_tok_s": num_tokens / wall_s,
        "ttft_s": sum(first_s - begin_s for first_s in outcome.first_s) / len(requests),  # mean over the requests
        "first_at_s": min(outcome.first_s),
        "foreign_cores": foreign_cores,  # the busy processes are this one's children, so not counted
        "tokens": outcome.tokens,
    }
    if len(requests) == 1 and num_tokens > 1:
        figures["decode_tok_s"] = (num_tokens - 1) / (outcome.last_s[0] - outcome.first_s[0])
    return figures


def shared_prefix(requests: list[Request], least: int = 64) -> int:
    """Number of tokens with which all prompts begin, less the last token of the shortest; 0 if fewer than `least`.

    For engines that share a prefix only when told to.
    """
    if len(requests) < 2:
        return 0
    columns = zip(*(request["prompt"][:-1] for request in requests), strict=False)
    common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return common if common >= least else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a checkpoint's folder; converted models lie beside it")
    parser.add_argument("--workload", required=True, help="what make_workload.py wrote")
    parser.add_argument("--out", required=True, help="the result file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--need", type=int, default=3, help="stop after so many clean repeats")
    parser.add_argument("--reps", default="0,1,2,3", help="which repeats to draw from; each has its own tokens")
    parser.add_argument("--only", default="W1,W2,W3,W4")
    parser.add_argument("--max-foreign", type=float, default=0.12, help="cores others may take in a clean repeat")
    parser.add_argument("--quiet-wait", type=float, default=20.0, help="seconds to wait for others to be quiet")
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside every second repeat")
    return parser.parse_args()


def _write(path: str, result: dict[str, Any]) -> None:
    Path(f"{path}.tmp").write_text(json.dumps(result))
    Path(f"{path}.tmp").replace(path)
