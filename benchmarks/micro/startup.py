"""`python benchmarks startup`: the time from a command, `serve` or a script with `LLM`, to the first token, by parts.

Server, engine and workers write the end of each part into a file (`runtime.log.moment`), with the time of the machine's
common clock.
"""

import asyncio
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec.structs import replace
from tqdm import tqdm

from vllm_lite.client.engines.launch import SPAWNS_ENGINE
from vllm_lite.errors import EngineError
from vllm_lite.executor.multiproc import SPAWNS_WORKERS
from vllm_lite.runtime import log
from vllm_lite.tools.bench.serve_client import Endpoint, Outcome
from vllm_lite.tools.bench.serve_datasets import LoadItem
from vllm_lite.tools.bench.serve_http import HttpClient

START_S = 900.0
END_S = 30.0
ANSWER_S = 300.0
PROMPT = LoadItem([5, 6, 7, 8], 4, 16)
"""Token ids, which need no tokenizer."""
SCRIPT = """
import json, sys, time
from vllm_lite import LLM, SamplingParams
settings, prompt, max_tokens = json.loads(sys.argv[1])
with LLM(**settings) as llm:
    times = [time.monotonic()]
    for _ in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
        times += [output.metrics.arrival_time, output.metrics.first_token_time]
    print(json.dumps(times))
"""
"""A user's script that is measured instead of a server. It prints the time at which it was ready, and the times at
which two requests arrived and had their first tokens."""
SPAWNED_BY = {"engine": ("server", SPAWNS_ENGINE), "worker": ("engine", SPAWNS_WORKERS)}
"""Process -> its parent, and the parent's part at whose end the first part of the process begins."""
_BAR = 40


class StartupPart(msgspec.Struct, frozen=True):
    """One part of a process's start: its end, in seconds since the command, and its duration. Parts of several
    processes overlap."""

    process: str
    what: str
    end_s: float
    took_s: float


class StartTimes(msgspec.Struct, frozen=True):
    """Times of one start, in seconds since the command. `again_s` is the time to first token of the same request sent
    again."""

    ready_s: float
    first_token_s: float
    again_s: float
    parts: list[StartupPart]


def run(
    command: Sequence[str],
    measure: Callable[[], StartTimes],
    num_iters: int,
    *,
    idle_s: float = 0.0,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Measure `num_iters` starts, each after `idle_s` of idleness. The parts are those of the median start.

    Raises EngineError if a start fails, or a server does not answer.
    """
    starts, processor_s = list[StartTimes](), list[float]()
    for _ in tqdm(range(num_iters), desc="starts", disable=None if show_progress else True):
        time.sleep(idle_s)
        before_s = _processor_s()
        starts.append(measure())
        processor_s.append(_processor_s() - before_s)
    ordered = sorted(starts, key=lambda start: start.first_token_s)
    median = ordered[num_iters // 2]
    return {
        "command": list(command),
        "idle_s": idle_s,
        "ready_s": median.ready_s,
        "first_token_s": median.first_token_s,
        "again_s": median.again_s,
        "all_ready_s": [start.ready_s for start in starts],
        "all_first_token_s": [start.first_token_s for start in starts],
        "all_processor_s": processor_s,
        "parts": msgspec.to_builtins(median.parts),
    }


def _processor_s() -> float:
    """Processor time, in seconds, of all ended child processes of this one."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def serve_start(serve_words: Sequence[str]) -> StartTimes:
    """Start a server on a free port, send two requests to it, and end it."""
    with tempfile.TemporaryDirectory(prefix="vl-") as folder:
        moments = Path(folder, "moments")
        with open(Path(folder, "log"), "w+") as errors:
            begin_s = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_lite", "serve", *serve_words, "--port", "0"],
                env={**os.environ, log.MOMENTS_VARIABLE: str(moments)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            watchdog = threading.Timer(START_S, process.kill)
            watchdog.daemon = True
            watchdog.start()
            try:
                url = _wait_until_ready(process, errors.name)
                ready_s = time.monotonic()
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    first, again = runner.run(_ask(url))
            finally:
                watchdog.cancel()
                _end(process)
        parts = read_parts(moments.read_text(), begin_s)
    first_token_s = first.chunks_s[0] - begin_s
    parts = with_ready(parts, ready_s - begin_s)
    parts.append(StartupPart("client", "first request, first chunk", first_token_s, first.ttft_s))
    return StartTimes(ready_s - begin_s, first_token_s, again.ttft_s, parts)


def llm_start(settings: dict[str, Any]) -> StartTimes:
    """Run a script that makes LLM(**settings) and sends two requests."""
    request = json.dumps([settings, PROMPT.prompt, PROMPT.output_len])
    with tempfile.TemporaryDirectory(prefix="vl-") as folder:
        moments = Path(folder, "moments")
        begin_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, request],
            env={**os.environ, log.MOMENTS_VARIABLE: str(moments)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if done.returncode != 0:
            raise EngineError(f"the script did not come to its end; its last words: {_last_line(done.stderr)}")
        parts = read_parts(moments.read_text(), begin_s)
    ready_s, asked_s, first_s, asked_again_s, again_s = json.loads(done.stdout)
    parts = [replace(part, process="script") if part.process == "server" else part for part in parts]
    parts.append(StartupPart("script", "first request, first token", first_s - begin_s, first_s - asked_s))
    return StartTimes(ready_s - begin_s, first_s - begin_s, again_s - asked_again_s, parts)


def _wait_until_ready(process: "subprocess.Popen[str]", errors: str) -> str:
    """Wait for the server's address. Raises EngineError with the last line that the server wrote."""
    for line in process.stdout or ():
        if found := re.search(r"ready at (\S+),", line):
            if not found.group(1).startswith("http"):
                raise EngineError(f"the start is measured over TCP, this server listens at {found.group(1)}; no --uds")
            return found.group(1)
    raise EngineError(f"the server did not start; its last words: {_last_line(Path(errors).read_text())}")


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["none"])[-1]


async def _ask(url: str) -> tuple[Outcome, Outcome]:
    """Send the same request twice: once as the server's first request, and once more."""
    keys = os.environ.get("VLLM_LITE_API_KEY", "").split(",")
    client = HttpClient(url, {"Authorization": f"Bearer {keys[0]}"} if keys[0] else {}, check_tls=False)
    api = Endpoint(client, "/v1/completions", {"temperature": 0.0, "ignore_eos": True}, timeout_s=ANSWER_S)
    try:
        outcomes = await api.send(PROMPT), await api.send(PROMPT)
    finally:
        client.close()
    for outcome in outcomes:
        if outcome.error:
            raise EngineError(f"the server does not answer: {outcome.error}")
    return outcomes


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)
    if process.stdout is not None:
        process.stdout.close()


def with_ready(parts: Sequence[StartupPart], ready_s: float) -> list[StartupPart]:
    """The parts in order of time, with one added that ends when the ready line is read. Processes may write later
    parts."""
    said_s = max((part.end_s for part in parts if part.end_s < ready_s), default=0.0)
    reads = StartupPart("client", "reads the ready line", ready_s, ready_s - said_s)
    return sorted([*parts, reads], key=lambda part: part.end_s)


def read_parts(text: str, begin_s: float) -> list[StartupPart]:
    """Parse the moments of all processes into parts, in order of time. A part takes the time since the previous moment
    of its process, or, if it is the first one, since the parent's moment in SPAWNED_BY. If the parent wrote that moment
    too late, the first part took no time."""
    lines = (line.split("\t") for line in text.splitlines())
    moments = sorted((float(time_s) - begin_s, process, what) for time_s, process, what in lines)
    ends = {(process, what): time_s for time_s, process, what in moments}
    before = {"server": 0.0}
    parts = []
    for time_s, process, what in moments:
        from_s = before[process] if process in before else ends.get(SPAWNED_BY[process], 0.0)
        parts.append(StartupPart(process, what, time_s, max(0.0, time_s - from_s)))
        before[process] = time_s
    return parts


def table(figures: dict[str, Any]) -> str:
    times, ready, spent = (sorted(figures[f"all_{name}_s"]) for name in ("first_token", "ready", "processor"))
    idle = f" after {figures['idle_s']:g} s of nothing each" if figures["idle_s"] else ""
    lines = [
        " ".join(figures["command"]) + f": {len(times)} starts{idle}, medians (least to most), in seconds",
        f"  ready         {figures['ready_s']:7.3f}  ({ready[0]:.3f} to {ready[-1]:.3f})",
        f"  first token   {figures['first_token_s']:7.3f}  ({times[0]:.3f} to {times[-1]:.3f})",
        f"  processors    {statistics.median(spent):7.3f}  ({spent[0]:.3f} to {spent[-1]:.3f}), of all, to their end",
        f"  the same request a second time takes {1000 * figures['again_s']:.1f} ms to its first token",
        "",
        f"  {'process':<9}{'until':>7}{'took':>8}  {'':<{_BAR}}  what",
    ]
    scale = _BAR / figures["first_token_s"]
    for part in figures["parts"]:
        end_s, took_s = part["end_s"], part["took_s"]
        left = round((end_s - took_s) * scale)
        bar = " " * left + "#" * max(round(end_s * scale) - left, 1)
        if part["what"].startswith("waits"):
            bar = bar.replace("#", ".")
        lines.append(f"  {part['process']:<9}{end_s:7.3f}{took_s:8.3f}  {bar:<{_BAR}.{_BAR}}  {part['what']}")
    return "\n".join(lines)
