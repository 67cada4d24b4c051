"""Ours, vLLM's and llama.cpp's servers under the same load over HTTP: requests at random times, and chats in parallel.

    python benchmarks/http_peers.py --peers PEERS --model small --out benchmarks/results/http-peers-cpu.json

runners/setup.sh makes PEERS; llama-server is measured if it is in PEERS/llama-build/bin. All get the same token ids.
The capacity of a server is its rate when all requests arrive at once. Then all get the same two rates, shares of the
least capacity. A chat's next prompt is its last one, the answer and a new message, so all but the message can be
cached.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import peers_report as report

from vllm_lite.tools.bench.serve import arrivals, drive
from vllm_lite.tools.bench.serve_client import Endpoint
from vllm_lite.tools.bench.serve_datasets import LoadItem
from vllm_lite.tools.bench.serve_http import HttpClient, HttpError
from vllm_lite.tools.bench.serve_result import percentile, summarize

PORT = 8123
START_S = 300.0
REQUEST_S = 240.0
CONTEXT, SLOTS = 8192, 64
IDS = (5, 20_000)
PROMPT_LENGTHS, ANSWER = (64, 192), 64
CHATS, TURNS, SYSTEM, MESSAGE = 16, 6, 1000, 100
SHARES = (0.70, 0.95)

Figures = dict[str, Any]


# ---- the servers


def commands(peers: Path, model: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of every installed server."""
    allocator = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    preload = ":".join(map(str, [*allocator, *(peers / "venvs/vllm/lib").glob("libiomp5.so")]))
    common = ["--port", str(PORT), "--host", "127.0.0.1"]
    limits = ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)]
    llama = ["-np", str(SLOTS), "--kv-unified", "-c", str(SLOTS * 1024), "-t", "2", "-tb", "2", "-b", "2048"]
    vllm = str(peers / "venvs/vllm/bin/python")
    found = {
        "ours": (
            [sys.executable, "-m", "vllm_lite", "serve", str(model), *limits, *common, "--log-level", "error"],
            {},
        ),
        "vllm": (
            [vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *limits, *common],
            {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "LD_PRELOAD": preload},
        ),
        "llama": ([str(peers / "llama-build/bin/llama-server"), "-m", f"{model}-bf16.gguf", *llama, *common], {}),
    }
    return {name: entry for name, entry in found.items() if shutil.which(entry[0][0])}


@contextmanager
def serving(command: list[str], env: dict[str, str], log: Path, port: int = PORT) -> Iterator[str]:
    """The address of a server that answers /health, and that ends with the block or with this process, if SIGTERM ends
    it. Raises RuntimeError if it never answers."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output, ended_by_sigterm():
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            asyncio.run(ready(url, process))
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit in the block, once: `timeout` sends it a second time, to the whole group."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def ready(url: str, process: "subprocess.Popen[Any]") -> None:
    client = HttpClient(url, {})
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            await client.get("/health")
        except HttpError:
            await asyncio.sleep(0.2)
        else:
            return client.close()
    raise RuntimeError(f"no server at {url}: exit status {process.poll()}")


# ---- the loads


def single_requests(count: int, seed: int) -> list[LoadItem]:
    """Prompts without common prefixes; lengths are uniform in PROMPT_LENGTHS."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(*IDS) for _ in range(rng.randint(*PROMPT_LENGTHS))] for _ in range(count)]
    return [LoadItem(prompt, len(prompt), ANSWER) for prompt in prompts]


async def load(url: str, count: int, rate: float, seed: int) -> Figures:
    """Send `count` requests at `rate` a second (inf: at once, SLOTS at a time)."""
    client = HttpClient(url, {})
    settings = {"temperature": 0.0, "ignore_eos": True}
    try:
        api = Endpoint(client, "/v1/completions", settings | {"model": await served(client)}, timeout_s=REQUEST_S)
        await drive(api, single_requests(8, -1), [0.0] * 8, None, lambda _: None)
        times_s = arrivals(count, rate, 1.0, seed)
        outcomes, seconds = await drive(
            api, single_requests(count, seed), times_s, SLOTS if rate == float("inf") else None, lambda _: None
        )
    finally:
        client.close()
    result = summarize(outcomes, seconds, (50.0, 99.0), {})
    kept = ["failed", "request_throughput", "output_throughput"]
    kept += [f"p{share}_{name}_ms" for name in ("ttft", "itl", "tpot") for share in (50, 99)]
    return {name: round(result[name], 2) for name in kept}


class Chat:
    """A client that sends its whole history as token ids, each turn as soon as the last one is answered."""

    def __init__(self, client: HttpClient, model: str, number: int) -> None:
        self._client = client
        self._rng = random.Random(number)
        system = random.Random(-1)
        self._history = [system.randrange(*IDS) for _ in range(SYSTEM)]
        self._settings = {"model": model, "temperature": 0.0, "ignore_eos": True, "max_tokens": ANSWER, "stream": True}
        self.first_s: list[float] = []

    async def run(self) -> None:
        for _ in range(TURNS):
            self._history += [self._rng.randrange(*IDS) for _ in range(MESSAGE)]
            self._history += await self._answer()

    async def _answer(self) -> list[int]:
        """Ids of the answer; random ones if the server sends only the text."""
        begin_s, first_s, ids = time.perf_counter(), 0.0, list[int]()

        def take(events: list[bytes], now_s: float) -> None:
            nonlocal first_s
            first_s = first_s or now_s - begin_s
            for event in events:
                chunk = {} if event == b"[DONE]" else json.loads(event)
                if "error" in chunk:
                    raise HttpError(f"a turn failed: {chunk['error']}")
                for choice in chunk.get("choices", ()):
                    ids.extend(choice.get("token_ids") or ())

        body = self._settings | {"prompt": self._history, "return_token_ids": True}
        async with asyncio.timeout(REQUEST_S):
            await self._client.stream("/v1/completions", json.dumps(body).encode(), take)
        self.first_s.append(first_s)
        return ids or [self._rng.randrange(*IDS) for _ in range(ANSWER)]


async def chats(url: str) -> Figures:
    """Run CHATS chats at once, with the same system prompt."""
    client = HttpClient(url, {})
    try:
        model = await served(client)
        all_chats = [Chat(client, model, number) for number in range(CHATS)]
        begin_s = time.perf_counter()
        await asyncio.gather(*(chat.run() for chat in all_chats))
        seconds = time.perf_counter() - begin_s
    finally:
        client.close()
    later = sorted(first_s for chat in all_chats for first_s in chat.first_s[1:])
    first = sorted(chat.first_s[0] for chat in all_chats)
    return {
        "seconds": round(seconds, 2),
        "output_throughput": round(CHATS * TURNS * ANSWER / seconds, 1),
        "p50_first_turn_ttft_ms": round(1e3 * percentile(first, 50), 1),
        "p50_later_turn_ttft_ms": round(1e3 * percentile(later, 50), 1),
        "p99_later_turn_ttft_ms": round(1e3 * percentile(later, 99), 1),
    }


async def served(client: HttpClient) -> str:
    return await Endpoint(client, "/v1/completions", {}, timeout_s=REQUEST_S).model()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="the folder that runners/setup.sh made")
    parser.add_argument("--model", default="small", help="of PEERS/models [small]")
    parser.add_argument("--servers", help="some of ours,vllm,llama [all that are installed]")
    parser.add_argument("--count", type=int, default=256, help="requests of each load [256]")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    peers = args.peers.absolute()
    servers = commands(peers, peers / "models" / args.model)
    servers = {name: servers[name] for name in (args.servers or ",".join(servers)).split(",")}
    rows: list[Figures] = []

    def show(name: str, what: str, figures: Figures) -> None:
        rows.append({"server": name, "load": what, **figures})
        print(json.dumps(rows[-1]), flush=True)

    (peers / "runs").mkdir(exist_ok=True)
    for name, (command, env) in servers.items():
        with serving(command, env, peers / "runs" / f"http-{name}.log") as url:
            show(name, "capacity", asyncio.run(load(url, args.count, float("inf"), 1)))
            show(name, "chats", asyncio.run(chats(url)))
    least = min(row["request_throughput"] for row in rows if row["load"] == "capacity")
    for name, (command, env) in servers.items():
        with serving(command, env, peers / "runs" / f"http-{name}.log") as url:
            for share in SHARES:
                figures = asyncio.run(load(url, args.count, share * least, 2))
                show(name, f"{share:.0%} of {least:g}/s", figures)
    if args.out is not None:
        head = {"device": report.device(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": report.commit()}
        args.out.write_text(json.dumps({**head, "model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
