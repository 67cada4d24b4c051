"""Checks and measures replicas on Ray Serve, on a cluster that it starts on this machine.

    python -m tests.acceptance.ray_serve_check [--only kill,...]

kill      kill -9 of a replica under load, then of a raylet alone: no stream is lost, all texts are the same
engine    SIGSTOP of a replica's engine under load: streams go on, others are served meanwhile, something replaces it
worker    the same of its worker
replica   the same of the replica with all of its processes
http      two HTTP replicas, of which one is killed: its streams break, those of the other go on, both serve again
late      replicas that start later have the adapters of the others, and their sleep
command   `serve run vllm_lite.ray:build_app` and `vllm-lite ray-serve` as commands
scale     1 -> 2 -> 1 replicas under load, by Serve's autoscaling: no error
cache     the same, where few requests fill the KV cache
routing   16 chats of 6 turns over two replicas: how much of their prompts is found in caches, by router
overhead  first token and time between tokens against the plain server, one after the other
"""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.acceptance.named_checks import check, run
from tests.acceptance.ray_serve_faults import FAULTS
from tests.acceptance.ray_serve_rig import LENGTH, LOOK_S, PATIENCE_S, SETTINGS, Stream, serving, until
from vllm_lite.tools.bench.serve_http import HttpClient, HttpError

SYSTEM, QUESTION, ANSWER, CHATS, TURNS, AT_ONCE = 64, 48, 32, 16, 6, 4
"""Tokens of the system prompt, which all chats share, of each question and of each answer; numbers of chats, of turns,
and of turns that run at a time."""


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
    """Generate load for which one replica becomes two, and then, without a pause, load for which two become one."""
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


ROUTERS = "tests.acceptance.serve_routers"
ROUTINGS = ("prefix", "least-loaded", f"{ROUTERS}:RoundRobin", f"{ROUTERS}:RaysPrefixRouter")


def check_routing() -> None:
    whole = SYSTEM + TURNS * (QUESTION + ANSWER)
    settings = {"num_gpu_blocks_override": CHATS * whole // 16 * 6 // 10, "max_num_seqs": 8}
    for routing in ROUTINGS:
        with serving(replicas=2, routing=routing, routing_stats_period_s=2.0, **settings) as (url, _):
            rate, took_s = asyncio.run(_chats(HttpClient(url, {})))
            print(f"{routing}: {rate:.2f} of the prompts' tokens were cached, {took_s:.1f} s", flush=True)


async def _chats(client: HttpClient) -> tuple[float, float]:
    """Run all chats to their ends. Returns the share of cached prompt tokens, and the seconds."""
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
"""Loads: concurrent streams, requests, and tokens of each."""


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
    **FAULTS,
    "scale": check_scale,
    "cache": check_cache,
    "routing": check_routing,
    "overhead": check_overhead,
}


def main(words: Sequence[str] | None = None) -> int:
    return run(__doc__, CHECKS, words)


if __name__ == "__main__":
    sys.exit(main())
