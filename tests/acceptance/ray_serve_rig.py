"""Common parts of the checks of replicas on Ray Serve: an application on a cluster of this machine, and its streams."""

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.acceptance.ray_check import cluster  # isort: skip - it sets variables that ray reads at its import

import psutil
import ray

from vllm_lite.ray.app import FASTER
from vllm_lite.ray.config import RayServeConfig
from vllm_lite.ray.deploy import deployed
from vllm_lite.tools.bench.serve_http import HttpClient, HttpError

ROOT = Path(__file__).parents[2]
os.environ |= FASTER  # as where ray-serve starts Ray
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "cpu_threads": 1,
    "log_level": "warning",
    "proxy_location": "HeadOnly",  # all nodes are one machine here, where the proxies of all would share the port
}
LOOK_S = 0.2
PATIENCE_S = 120.0
NUM_STREAMS, LENGTH = 8, 800


@contextmanager
def serving(num_nodes: int = 2, **settings: Any) -> Iterator[tuple[str, list[Any]]]:
    """An application on its own cluster, with a CPU on each node. Yields its URL and the nodes."""
    config = RayServeConfig.load({**SETTINGS, "port": free_port(), **settings})
    with cluster(num_nodes) as (_, nodes):
        try:
            with deployed(config, "check") as url:
                yield url, nodes
        finally:
            ray.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def num_engines(client: HttpClient) -> int:
    """Count the replicas that answer."""
    with suppress(HttpError):
        text = (await client.get("/metrics")).decode()
        return len(re.findall(r"^vllm:num_requests_running\{", text, re.MULTILINE))
    return 0


async def until(client: HttpClient, count: int) -> float:
    """Wait for `count` replicas. Returns the seconds."""
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while await num_engines(client) != count:  # noqa: ASYNC110 - the server is asked
            await asyncio.sleep(LOOK_S)
    return time.monotonic() - began_s


class Stream:
    """A streamed completion."""

    def __init__(self, number: int, length: int = LENGTH) -> None:
        self.body = json.dumps(
            {
                "prompt": f"{number} times Once upon a time",
                "max_tokens": length,
                "stream": True,
                "temperature": 0.8,
                "seed": number,
                "ignore_eos": True,
            }
        ).encode()
        self.texts: list[str] = []
        self.times_s: list[float] = []
        self.finished: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    async def run(self, client: HttpClient) -> "Stream":
        await client.stream("/v1/completions", self.body, self._take)
        return self

    def _take(self, events: list[bytes], now_s: float) -> None:
        self.times_s.append(now_s)
        for event in events:
            if event != b"[DONE]":
                (choice,) = json.loads(event)["choices"]
                self.texts.append(choice["text"])
                self.finished = choice["finish_reason"] or self.finished


async def texts(
    client: HttpClient, meanwhile: Callable[[list[Stream]], Awaitable[None]] | None = None
) -> tuple[list[str], float, float]:
    """Run all streams. Returns their texts, the seconds, and the longest pause of a stream. Raises HttpError."""
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    began_s = time.perf_counter()
    disturbing = asyncio.ensure_future(meanwhile(streams)) if meanwhile is not None else None
    await asyncio.gather(*(stream.run(client) for stream in streams))
    took_s = time.perf_counter() - began_s
    if disturbing is not None:
        await disturbing
    if any(stream.finished != "length" for stream in streams):
        raise SystemExit(f"FAILS: streams ended as {[stream.finished for stream in streams]}")
    longest_s = max(b - a for stream in streams for a, b in zip(stream.times_s, stream.times_s[1:], strict=False))
    return [stream.text for stream in streams], took_s, longest_s


async def all_run(streams: list[Stream]) -> None:
    """Wait until all streams have got some tokens."""
    while any(len(stream.times_s) < 50 for stream in streams):  # noqa: ASYNC110 - they say nothing when it comes
        await asyncio.sleep(0.01)


def replicas(kind: str = "EngineReplica") -> list[psutil.Process]:
    """The processes of the replicas, of the engine or of the HTTP application."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if kind in " ".join(process.cmdline())[:200]:
                found.append(process)
    return found
