"""Checks and measures replicas on Ray Serve, on a cluster that it starts on this machine.

    python scripts/ray_serve_check.py [--only kill,...]

kill      kill -9 of a replica under load, then of a raylet alone: no stream is lost, all texts are the same
scale     1 -> 2 -> 1 replicas under load, by Serve's autoscaling: no error
cache     the same, where few requests fill the KV cache
routing   16 chats of 6 turns over two replicas: how much of their prompts is found in caches, by router
overhead  first token and time between tokens against the plain server, one after the other
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray_check import cluster  # isort: skip - it sets what ray reads when it is imported

import psutil
import ray
from named_checks import check, run

from vllm_lite.ray.app import FASTER
from vllm_lite.ray.config import RayServeConfig
from vllm_lite.ray.deploy import deployed
from vllm_lite.tools.bench.serve_http import HttpClient, HttpError

SCRIPTS = Path(__file__).parent
os.environ |= FASTER  # as where ray-serve starts Ray
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "cpu_threads": 1,
    "log_level": "warning",
    "proxy_location": "HeadOnly",  # all nodes are one machine here, where the proxies of all would share the port
}
LOOK_S = 0.2
PATIENCE_S, ORPHANS_S = 120.0, 45.0
NUM_STREAMS, LENGTH = 8, 800
SYSTEM, QUESTION, ANSWER, CHATS, TURNS, AT_ONCE = 64, 48, 32, 16, 6, 4
"""Tokens of the system prompt, which all chats share, of each question and of each answer; chats, and how many turns
run at a time."""


@contextmanager
def serving(num_nodes: int = 2, **settings: Any) -> Iterator[tuple[str, list[Any]]]:
    """An application on a cluster of its own, with a CPU on each node: its URL, and the nodes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = RayServeConfig.load({**SETTINGS, "port": port, **settings})
    with cluster(num_nodes) as (_, nodes):
        try:
            with deployed(config, "check") as url:
                yield url, nodes
        finally:
            ray.shutdown()


async def num_engines(client: HttpClient) -> int:
    """How many replicas answer."""
    with suppress(HttpError):
        text = (await client.get("/metrics")).decode()
        return len(re.findall(r"^vllm:num_requests_running\{", text, re.MULTILINE))
    return 0


async def until(client: HttpClient, count: int) -> float:
    """Wait for so many replicas. Returns the seconds that it took."""
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while await num_engines(client) != count:  # noqa: ASYNC110 - the server is asked
            await asyncio.sleep(LOOK_S)
    return time.monotonic() - began_s


class Stream:
    """A completion that is streamed."""

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
    """Wait until all have had some tokens."""
    while any(len(stream.times_s) < 50 for stream in streams):  # noqa: ASYNC110 - they say nothing when it comes
        await asyncio.sleep(0.01)


def replicas() -> list[psutil.Process]:
    """The processes of the engine's replicas."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "EngineReplica" in " ".join(process.cmdline())[:200]:
                found.append(process)
    return found


def check_kill() -> None:
    with serving(replicas=2, num_gpu_blocks_override=1024, max_num_seqs=16) as (url, nodes):
        asyncio.run(_kill(HttpClient(url, {}), nodes))


async def _kill(client: HttpClient, nodes: Sequence[Any]) -> None:
    await until(client, 2)
    expected, took_s, longest_s = await texts(client)
    print(f"{NUM_STREAMS} streams of {LENGTH} tokens: {took_s:.1f} s, longest pause {longest_s:.2f} s", flush=True)

    async def replica_dies(streams: list[Stream]) -> None:
        await all_run(streams)
        found = replicas()
        print(f"kill -9 of the replica {found[0].pid}, of {len(found)}", flush=True)
        found[0].kill()

    found, took_s, longest_s = await texts(client, replica_dies)
    check(found == expected, f"0 streams lost, the same texts, in {took_s:.1f} s; longest pause {longest_s:.2f} s")
    print(f"two replicas answer again {await until(client, 2):.1f} s later", flush=True)

    longest_s = await _raylet_dies(client, nodes, expected)
    print(f"the longest pause of a stream while a node died: {longest_s:.2f} s", flush=True)


async def _raylet_dies(client: HttpClient, nodes: Sequence[Any], expected: list[str]) -> float:
    """Kill a raylet alone, and run streams until what it had started has ended. Returns the longest pause of one. It is
    not that of the HTTP replica, whose connections end with it."""
    raylets = [psutil.Process(info.process.pid) for node in nodes for info in node.all_processes["raylet"]]
    trees = {raylet: raylet.children(recursive=True) for raylet in raylets}
    commands = {process: " ".join(process.cmdline())[:60] for below in trees.values() for process in below}
    raylet = next(each for each in raylets if not any("HttpReplica" in commands[process] for process in trees[each]))
    below, names = trees[raylet], {process.pid: command for process, command in commands.items()}
    print(f"kill -9 of the raylet {raylet.pid} alone", flush=True)
    began_s = time.monotonic()
    raylet.kill()

    def ended(process: psutil.Process) -> None:
        print(f"{time.monotonic() - began_s:.1f} s later ended: {names[process.pid]}", flush=True)

    ends = asyncio.ensure_future(asyncio.to_thread(psutil.wait_procs, below, ORPHANS_S, ended))
    longest_s = [0.0]
    while not ends.done():
        found, _, of_round_s = await texts(client)
        longest_s.append(of_round_s)
        if found != expected:
            check(condition=False, what="the texts are the same")
    check(condition=True, what=f"{len(longest_s) - 1} times {NUM_STREAMS} streams, 0 lost, the same texts")
    print("still there:", [names[process.pid] for process in ends.result()[1]], flush=True)
    return max(longest_s)


def check_scale() -> None:
    autoscaling = {"max_replicas": 2, "target_ongoing_requests": 4, "upscale_delay_s": 1, "downscale_delay_s": 3}
    with serving(replicas=1, num_gpu_blocks_override=1024, max_num_seqs=16, **autoscaling) as (url, _):
        print(asyncio.run(_scale(HttpClient(url, {}), 12, 200)), flush=True)


def check_cache() -> None:
    autoscaling: dict[str, Any] = {"max_replicas": 2, "target_ongoing_requests": 100, "target_kv_cache_usage": 0.5}
    autoscaling |= {"upscale_delay_s": 1, "downscale_delay_s": 3}
    with serving(replicas=1, num_gpu_blocks_override=128, max_num_seqs=16, **autoscaling) as (url, _):
        print(asyncio.run(_scale(HttpClient(url, {}), 4, LENGTH)), flush=True)


async def _scale(client: HttpClient, num_loops: int, length: int) -> str:
    """Load that makes two replicas of one, and then load that makes one of two; without a pause between them."""
    await until(client, 1)
    answers: dict[int, set[str]] = {}
    counts = {"requests": 0, "errors": 0}
    goal = 2

    async def again_and_again(number: int) -> None:
        while goal == 2 or (goal == 1 and number == 0):
            counts["requests"] += 1
            try:
                answers.setdefault(number, set()).add((await Stream(number, length).run(client)).text)
            except HttpError as error:
                counts["errors"] += 1
                print("error:", error, flush=True)

    loops = [asyncio.ensure_future(again_and_again(number)) for number in range(num_loops)]
    up_s = await until(client, 2)
    await asyncio.sleep(3)
    goal = 1
    down_s = await until(client, 1)
    goal = 0
    await asyncio.gather(*loops)
    check(counts["errors"] == 0, f"0 errors in {counts['requests']} requests")
    check(all(len(found) == 1 for found in answers.values()), "each prompt had one answer, wherever it ran")
    return f"two replicas after {up_s:.1f} s, one {down_s:.1f} s after the load had gone"


ROUTINGS = ("prefix", "least-loaded", "serve_routers:RoundRobin", "serve_routers:RaysPrefixRouter")


def check_routing() -> None:
    whole = SYSTEM + TURNS * (QUESTION + ANSWER)
    settings = {"num_gpu_blocks_override": CHATS * whole // 16 * 6 // 10, "max_num_seqs": 8}
    for routing in ROUTINGS:
        with serving(replicas=2, routing=routing, routing_stats_period_s=2.0, **settings) as (url, _):
            rate, took_s = asyncio.run(_chats(HttpClient(url, {})))
            print(f"{routing}: {rate:.2f} of the prompts' tokens were cached, {took_s:.1f} s", flush=True)


async def _chats(client: HttpClient) -> tuple[float, float]:
    """All chats to their ends. Returns the share of prompt tokens that caches had, and the seconds."""
    await until(client, 2)
    rng = random.Random(1)
    system = [rng.randrange(10, 1000) for _ in range(SYSTEM)]
    state = [list(system) for _ in range(CHATS)]
    turns = asyncio.Semaphore(AT_ONCE)
    cached = asked = 0

    async def turn(chat: int) -> None:
        nonlocal cached, asked
        async with turns:
            params = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
            body = {"token_ids": state[chat], "sampling_params": params}
            answer = json.loads(await client.post("/inference/v1/generate", json.dumps(body).encode()))
            state[chat] += answer["choices"][0]["token_ids"]
            usage = answer["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            asked += usage["prompt_tokens"]

    began_s = time.monotonic()
    for _ in range(TURNS):
        order = rng.sample(range(CHATS), CHATS)
        for chat in order:
            state[chat] += [rng.randrange(10, 1000) for _ in range(QUESTION)]
        await asyncio.gather(*map(turn, order))
    return cached / asked, time.monotonic() - began_s


LOADS = ((1, 8, 200), (16, 48, 100), (64, 128, 60), (256, 512, 30), (1000, 1000, 20))
"""Streams at once, requests, and tokens of each."""


def check_overhead() -> None:
    settings = {"max_num_seqs": 1024, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 8192}
    with serving(replicas=1, num_nodes=1, **settings) as (url, _), _plain(settings) as plain:
        for at_once, requests, length in LOADS:
            for _ in range(2):
                for name, address in (("plain", plain), ("Ray Serve", url)):
                    print(name, at_once, _bench(address, at_once, requests, length), flush=True)


@contextmanager
def _plain(settings: dict[str, Any]) -> Iterator[str]:
    """`vllm-lite serve` with the same settings."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/said"
        shared = {name: value for name, value in {**SETTINGS, **settings}.items() if name != "proxy_location"}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in shared.items()]
        command = [sys.executable, "-m", "vllm_lite", "serve", "--port=0", *flags]
        with open(path, "w+") as out:
            server = subprocess.Popen(command, stdout=out)
            try:
                deadline_s = time.monotonic() + PATIENCE_S
                while not (found := re.search(r"ready at (http\S+),", Path(path).read_text())):
                    if time.monotonic() > deadline_s or server.poll() is not None:
                        raise SystemExit("FAILS: the plain server did not start")
                    time.sleep(LOOK_S)
                yield found[1]
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(PATIENCE_S)


def _bench(url: str, at_once: int, requests: int, length: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vllm_lite", "bench", "serve", "--url", url, "--ignore-eos"]
        command += ["--num-prompts", str(requests), "--max-concurrency", str(at_once), "--random-input-len", "16"]
        command += ["--random-output-len", str(length), "--num-warmups", "1", "--save-result", "--result-dir", folder]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
        (file,) = Path(folder).glob("*.json")
        result = json.loads(file.read_text())
    names = ("completed", "failed", "median_ttft_ms", "mean_tpot_ms", "output_throughput")
    return ", ".join(f"{name} {result[name]:.5g}" for name in names if name in result)


CHECKS: dict[str, Callable[[], None]] = {
    "kill": check_kill,
    "scale": check_scale,
    "cache": check_cache,
    "routing": check_routing,
    "overhead": check_overhead,
}


def main(words: Sequence[str] | None = None) -> int:
    return run(__doc__, CHECKS, words)


if __name__ == "__main__":
    sys.exit(main())
