"""Cost of HTTP: the same streams over the engine's own socket and over HTTP, in turns, against one server.

    python benchmarks/http_overhead.py --out benchmarks/results/http-cpu.json

Both clients ask for texts: the raw one gets token ids and decodes them itself, the other one gets text from the server.
Each client is a process. Besides tokens/s and times to the first token, it reports the CPU seconds of every process,
which depend less on other load.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from vllm_lite.client.async_client import AsyncClient
from vllm_lite.config import DEMO_MODEL
from vllm_lite.protocol.params import SamplingParams

PROMPT = "Once upon a time"
STREAMS = (1, 16, 64)
READY_S = 120.0
NUM_BLOCKS = 1024
"""Enough for all streams; few, so that the first 1000 requests touch all of the KV cache's memory."""
MEMORY_AT_ONCE = 32
_EVENT = b'"finish_reason"'

Figures = dict[str, Any]


# ---- the clients, each a process: the engine's or the server's address, streams, tokens -> one line of JSON


async def raw(address: str, streams: int, tokens: int) -> Figures:
    """AsyncClient."""
    async with AsyncClient(address) as client:

        async def one(number: int) -> tuple[float, int]:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number)
            start_s, first_s, pieces = time.perf_counter(), 0.0, 0
            async for _ in client.generate(PROMPT, params):
                first_s = first_s or time.perf_counter() - start_s
                pieces += 1
            return first_s, pieces

        await one(0)
        return await _timed(one, streams, tokens)


async def http(address: str, streams: int, tokens: int) -> Figures:
    """Read streams with as little client code as possible, so that the server is measured."""
    host, port = address.removeprefix("http://").split(":")

    async def one(number: int) -> tuple[float, int]:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": number}
        data = json.dumps(body).encode()
        start_s, first_s, pieces = time.perf_counter(), 0.0, 0
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        while data := await reader.read(1 << 16):
            found = data.count(_EVENT)  # one cut in two by a read is not counted
            if found:
                first_s = first_s or time.perf_counter() - start_s
                pieces += found
        writer.close()
        return first_s, pieces

    await one(0)
    return await _timed(one, streams, tokens)


async def _timed(one: Callable[[int], Awaitable[tuple[float, int]]], streams: int, tokens: int) -> Figures:
    cpu_s, start_s = time.process_time(), time.perf_counter()
    found = await asyncio.gather(*(one(number) for number in range(streams)))
    seconds = time.perf_counter() - start_s
    if any(first_s == 0 for first_s, _ in found):
        raise RuntimeError("a stream ended without a token")
    return {
        "tokens_s": streams * tokens / seconds,
        "first_ms": [1e3 * first_s for first_s, _ in found],
        "pieces": sum(pieces for _, pieces in found),
        "client_cpu_s": time.process_time() - cpu_s,
    }


def client(kind: str, address: str, streams: int, tokens: int) -> Figures:
    """Run one client in a process."""
    command = [sys.executable, __file__, "--client", kind, address, str(streams), str(tokens)]
    found: Figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


# ---- the server


class Server:
    """`vllm-lite serve`, whose engine also listens at `engine`."""

    def __init__(self, process: subprocess.Popen[str], url: str, engine: str) -> None:
        self.url = url
        self.engine = engine
        self._processes = {"server": psutil.Process(process.pid)}
        for child in self._processes["server"].children(recursive=True):
            for name in ("engine", "worker"):
                if any(word.startswith(f"vllm_lite.{name}.process") for word in child.cmdline()):
                    self._processes[name] = child

    def cpu_s(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: time.user + time.system for name, time in times.items()}

    def memory_mib(self) -> dict[str, float]:
        """MiB of each process's private pages, without pages shared with other processes."""
        return {name: process.memory_full_info().uss / 2**20 for name, process in self._processes.items()}


@contextmanager
def serving(model: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="vlb") as folder:
        engine = f"ipc://{folder}/engine"
        flags = ["--port", "0", "--address", engine, "--log-level", "error"]
        flags += ["--max-num-seqs", str(max(STREAMS)), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        command = [sys.executable, "-m", "vllm_lite", "serve", model, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if "ready at " not in line:
                raise RuntimeError(f"the server did not start: {line}")
            yield Server(process, line.split("ready at ")[1].split(",")[0], engine)
        finally:
            process.terminate()
            process.wait(READY_S)


# ---- what is measured


def overhead(server: Server, streams: int, tokens: int, rounds: int) -> Figures:
    """Raw and HTTP in turns: medians of `rounds`; CPU microseconds of each process for each token."""
    results: dict[str, list[Figures]] = {"raw": [], "http": []}
    for _ in range(rounds):
        for kind, address in (("raw", server.engine), ("http", server.url)):
            before = server.cpu_s()
            found = client(kind, address, streams, tokens)
            after = server.cpu_s()
            count = (streams + 1 / streams) * tokens  # with the stream that warms up
            cpu_us = {name: 1e6 * (after[name] - before[name]) / count for name in after}
            cpu_us["client"] = 1e6 * found["client_cpu_s"] / (streams * tokens)
            results[kind].append({**found, "cpu_us": cpu_us})
    figures: Figures = {"streams": streams, "tokens": tokens}
    figures |= {kind: _medians(found, rounds * streams * tokens) for kind, found in results.items()}
    figures["ratio"] = round(figures["http"]["tokens_s"] / figures["raw"]["tokens_s"], 3)
    return figures


def _medians(found: list[Figures], tokens: int) -> Figures:
    """Medians of several rounds with `tokens` tokens in all."""
    firsts = sorted(first for one in found for first in one["first_ms"])
    return {
        "tokens_s": round(statistics.median(one["tokens_s"] for one in found), 1),
        "first_ms_median": round(statistics.median(firsts), 2),
        "first_ms_p99": round(firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))], 2),
        "tokens_per_piece": round(tokens / sum(one["pieces"] for one in found), 2),
        "cpu_us_per_token": {
            name: round(statistics.median(one["cpu_us"][name] for one in found), 1) for name in found[0]["cpu_us"]
        },
    }


def memory(server: Server, requests: int) -> list[Figures]:
    """Memory after 100 requests, and after each tenfold number up to `requests`."""
    found, done, goal = [], 0, 100
    while done < requests:
        while done < min(goal, requests):
            client("http", server.url, MEMORY_AT_ONCE, 4)
            done += MEMORY_AT_ONCE + 1
        found.append({"requests": done, **{name: round(mib, 1) for name, mib in server.memory_mib().items()}})
        goal *= 10
    return found


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        kind, address, *numbers = sys.argv[2:]
        coroutine = {"raw": raw, "http": http}[kind](address, *map(int, numbers))
        print(json.dumps(asyncio.run(coroutine)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint folder [demo]")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream [128]")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are told [5]")
    parser.add_argument("--requests", type=int, default=10_000, help="after which memory is looked at; 0: not [10000]")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    figures: Figures = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "device": f"CPU, {os.cpu_count()} cores"}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    figures |= {"commit": commit.stdout.strip(), "model": Path(arguments.model).name, "rows": []}
    with serving(arguments.model) as server:
        for streams in STREAMS:
            figures["rows"].append(overhead(server, streams, arguments.tokens, arguments.rounds))
            print(json.dumps(figures["rows"][-1]), flush=True)
        if arguments.requests:
            figures["memory_mib"] = memory(server, arguments.requests)
            print(json.dumps(figures["memory_mib"]))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
