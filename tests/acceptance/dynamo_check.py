"""Checks workers of Dynamo on this machine: two of them, the demo model, and Dynamo's own frontend before them.

    python -m tests.acceptance.dynamo_check [--only tokens,...]

tokens    greedy and seeded requests give the texts and log-probabilities of the plain server
kill      a worker is killed under load: every stream ends, with the same text
events    what the router thinks is cached is what the engine then finds, whatever was evicted, salted, or lost when the
          engine was killed, and with two workers that have beginnings in common
ranks     a worker with -tp 2 gives the texts of one with one rank; its workers are killed under load
engine    the engine of a worker is killed: its streams go on, there or elsewhere
cancel    a client that hangs up frees what its request held
prefix    share of prompt tokens found in the cache, of 16 chats of 6 turns: Dynamo's KV router with its defaults and
          with more weight on prompts, its round robin, -dp 2
cost      first token and time between tokens beside the plain server, in turn
"""

import json
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import httpx
import psutil

from tests.acceptance.dynamo_deployment import ENGINE_FLAGS, LOOPBACK, deployment, wait_for
from tests.acceptance.named_checks import check, run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from prefix_routing import ANSWER, cache_blocks, converse

from vllm_lite.engine.blocks.events import REJOIN_S

MODEL = "demo_model"
NUM_STREAMS, MAX_TOKENS = 8, 1200
PAIRS = 12
TIMEOUT_S = 120.0
EVENTS_S = 0.2
"""Seconds in which the router receives the events of blocks that an engine stored."""
AS_IDS = {"logprobs": 0, "return_tokens_as_token_ids": True}
"""Fields that ask Dynamo's frontend for tokens by their ids."""
CLIENT = httpx.Client(timeout=TIMEOUT_S)
ROOMY = ("--num-gpu-blocks-override", "2048")


@dataclass
class Answer:
    """Result of one request; `times_s`: the seconds from the request to each of its chunks."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    error: str = ""
    thought: float = 0.0
    """The share of the prompt that the router expected to be cached."""

    def take(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", ()):
            self.text += choice.get("text") or ""
            found = choice.get("logprobs") or {}
            self.logprobs += found.get("token_logprobs", ())
            self.tokens += found.get("tokens", ())
            self.token_ids += choice.get("token_ids") or ()
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.usage = event.get("usage") or self.usage
        self.thought = event.get("nvext", {}).get("timing", {}).get("kv_hit_rate", self.thought)
        self.error = str(event.get("error") or self.error)


def ask(url: str, body: dict[str, Any], on_chunk: Callable[[Answer], None] = lambda _: None) -> Answer:
    """Send one streamed completion."""
    answer, began_s = Answer(), time.perf_counter()
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **body}
    with CLIENT.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = response.read().decode()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data not in (line, "[DONE]"):
                answer.take(json.loads(data))
                answer.times_s.append(time.perf_counter() - began_s)
                on_chunk(answer)
    return answer


@contextmanager
def plain_server(*flags: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm_lite", "serve", "--port", str(port), *ENGINE_FLAGS, *flags]
    process, url = psutil.Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL), f"http://{LOOPBACK}:{port}"

    def serves() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    try:
        wait_for("the plain server", serves)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def prompt(number: int, length: int = 40) -> list[int]:
    return [0, *((7 * number + 11 * place) % 990 + 10 for place in range(length))]


def bodies(max_tokens: int, **more: Any) -> list[dict[str, Any]]:
    """Bodies of requests, half of them greedy, half with a seed."""
    sampled = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.05}
    kinds = [{"temperature": 0.0}, sampled]
    common = {"max_tokens": max_tokens, "ignore_eos": True, **more}
    return [{"prompt": prompt(n), "seed": n, **kinds[n % 2], **common} for n in range(NUM_STREAMS)]


def all_at_once(url: str, wanted: list[dict[str, Any]], on_chunk: Callable[[Answer], None]) -> list[Answer]:
    with ThreadPoolExecutor(len(wanted)) as threads:
        return list(threads.map(lambda body: ask(url, body, on_chunk), wanted))


def check_tokens() -> None:
    wanted = bodies(60, logprobs=2)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    stopped = {"temperature": 0.9, **penalties, "max_tokens": 200, "min_tokens": 5, "stop": [" the"]}
    wanted += [{"prompt": prompt(n), "seed": -n - 2, **stopped} for n in range(4)]
    with plain_server(*ROOMY) as plain, deployment(2, "kv", ROOMY) as made:
        for n, body in enumerate(wanted):
            expected, found = ask(plain, body), ask(made.url, body)
            same = (expected.text, expected.finish_reason) == (found.text, found.finish_reason)
            far = [abs(a - b) for a, b in zip(expected.logprobs, found.logprobs, strict=True)]
            check(same and max(far, default=0.0) < 1e-4, f"request {n}: {found.text[:40]!r}, {found.finish_reason}")
        refused = ask(made.url, {"prompt": prompt(0, 3000)})
        check("maximum context length" in refused.error, f"a prompt that is too long: {refused.error}")


def kill_when_busy(pid: int, after: int) -> Callable[[Answer], None]:
    """Kill a process when all streams together have got `after` chunks."""
    count, lock = iter(range(after)), threading.Lock()
    done = threading.Event()

    def on_chunk(_: Answer) -> None:
        with lock:
            if next(count, None) is None and not done.is_set():
                done.set()
                os.kill(pid, signal.SIGKILL)

    return on_chunk


def longest_pause(answers: list[Answer]) -> float:
    return max(b - a for answer in answers for a, b in zip(answer.times_s, answer.times_s[1:], strict=False))


def compare(found: list[Answer], expected: list[Answer], what: str) -> None:
    lost = [answer.error or "no end" for answer in found if answer.error or answer.finish_reason is None]
    check(not lost, f"{what}: 0 of {len(found)} streams lost {lost}")
    same = sum(a.text == b.text for a, b in zip(found, expected, strict=True))
    pause = f"longest pause {longest_pause(found):.2f} s"
    check(same == len(found), f"{what}: {same} of {len(found)} texts are the plain server's; {pause}")


def check_kill() -> None:
    wanted = bodies(MAX_TOKENS)
    with plain_server(*ROOMY) as plain, deployment(2, "kv", ROOMY) as made:
        expected = all_at_once(plain, wanted, lambda _: None)
        compare(all_at_once(made.url, wanted, lambda _: None), expected, "undisturbed")
        victim = max(made.workers, key=lambda worker: made.stats(worker).generated_tokens)
        below = psutil.Process(victim.pid).children(recursive=True)
        found = all_at_once(made.url, wanted, kill_when_busy(victim.pid, after=NUM_STREAMS * 40))
        compare(found, expected, "kill -9 of a worker")
        _, left = psutil.wait_procs(below, 20)
        check(not left, f"its engine and workers have ended with it ({len(below)} processes)")


def check_engine() -> None:
    wanted = bodies(MAX_TOKENS)
    with plain_server(*ROOMY) as plain, deployment(2, "kv", ROOMY) as made:
        expected = all_at_once(plain, wanted, lambda _: None)
        all_at_once(made.url, wanted, lambda _: None)  # both caches have something
        victim = max(made.workers, key=lambda worker: made.stats(worker).generated_tokens)
        engine = made.engine(victim).record.engine.pid
        found = all_at_once(made.url, wanted, kill_when_busy(engine, after=NUM_STREAMS * 40))
        compare(found, expected, "kill -9 of an engine")
        check(victim.is_running(), "its worker has started another")
    with deployment(2, "kv", (*ROOMY, "--recovery-timeout-s", "0")) as made:
        all_at_once(made.url, wanted, lambda _: None)
        victim = max(made.workers, key=lambda worker: made.stats(worker).generated_tokens)
        engine = made.engine(victim).record.engine.pid
        found = all_at_once(made.url, wanted, kill_when_busy(engine, after=NUM_STREAMS * 40))
        compare(found, expected, "kill -9 of an engine that nobody waits for")
        wait_for("the worker's end", lambda: victim.poll() is not None, 30.0)
        check(victim.returncode == 0, f"its worker has ended, with status {victim.returncode}")


def check_events() -> None:
    """Check the router's knowledge of the cache, with prompts that have common prefixes and a cache that holds some of
    them."""
    rng = random.Random(2)
    with deployment(1, "kv", ("--num-gpu-blocks-override", "96")) as made:
        blocks = partial(_thought_and_found, made.url)
        found = [blocks(rng.randrange(9)) for _ in range(40)]
        hits = sum(cached for _, cached in found)
        check(all(thought == cached for thought, cached in found), f"40 prompts, {hits} blocks found: as was thought")
        salted = [blocks(20, salt) for salt in (None, "a", None, "a", "b")]
        check([thought for thought, _ in salted] == [cached for _, cached in salted], f"with cache salts: {salted}")
        os.kill(made.engine(made.workers[0]).record.engine.pid, signal.SIGKILL)
        blocks(30)
        time.sleep(2 * EVENTS_S + REJOIN_S)
        after = [blocks(20), blocks(20)]
        check(all(thought == cached for thought, cached in after), f"behind the engine's end: {after}")
    with deployment(2, "kv", ROOMY) as made:
        blocks = partial(_thought_and_found, made.url)
        numbers = range(0, 3 * NUM_STREAMS, 3)  # of prompts that begin alike
        with ThreadPoolExecutor(NUM_STREAMS) as threads:  # so that both workers have some
            list(threads.map(blocks, numbers))
        both = [made.stats(worker).num_cached_blocks for worker in made.workers]
        found = [blocks(number, length=300) for number in numbers]
        hits = sum(cached for _, cached in found)
        check(
            min(both) > 0 and all(thought == cached for thought, cached in found), f"two workers: {hits} blocks found"
        )


def _thought_and_found(url: str, number: int, salt: str | None = None, length: int = 200) -> tuple[int, int]:
    """Return the numbers of a prompt's blocks that the router expected to be cached, and that were."""
    time.sleep(EVENTS_S)
    tokens = [*prompt(number % 3, 47), *prompt(number, length)]
    extra = {"extra_fields": ["timing"], **({} if salt is None else {"cache_salt": salt})}
    answer = ask(url, {"prompt": tokens, "max_tokens": 2, "nvext": extra})
    if answer.error:
        raise RuntimeError(answer.error)
    cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return round(answer.thought * -(-len(tokens) // 16)), cached // 16


def check_ranks() -> None:
    wanted = bodies(300)
    with plain_server(*ROOMY) as plain, deployment(1, "kv", (*ROOMY, "-tp", "2")) as made:
        expected = all_at_once(plain, wanted, lambda _: None)
        compare(all_at_once(made.url, wanted, lambda _: None), expected, "two ranks")
        (worker,) = made.workers
        ranks = [
            each
            for each in psutil.Process(worker.pid).children(recursive=True)
            if "vllm_lite.worker" in " ".join(each.cmdline())
        ]
        check(len(ranks) == 2, f"the worker has {len(ranks)} ranks")
        found = all_at_once(made.url, wanted, kill_when_busy(ranks[1].pid, after=NUM_STREAMS * 40))
        compare(found, expected, "kill -9 of a rank")


def check_cancel() -> None:
    with deployment(1, "kv", ROOMY) as made:
        (worker,) = made.workers
        ask(made.url, {"prompt": prompt(0), "max_tokens": 4})
        idle = made.stats(worker)
        for body in bodies(MAX_TOKENS):
            body |= {"model": MODEL, "stream": True}
            with CLIENT.stream("POST", f"{made.url}/v1/completions", json=body) as stream:
                next(stream.iter_lines())
        wait_for("an idle engine", lambda: made.stats(worker).num_running == 0, 10.0)
        stats = made.stats(worker)
        used, spent = stats.num_used_blocks, stats.generated_tokens - idle.generated_tokens
        check(used == idle.num_used_blocks, f"{NUM_STREAMS} clients hung up: {used} blocks are held")
        check(spent < NUM_STREAMS * MAX_TOKENS / 2, f"{spent} of {NUM_STREAMS * MAX_TOKENS} tokens were computed")
        check(stats.ended_by["abort"] >= NUM_STREAMS, f"ended by: {stats.ended_by}")


def hit_rate(url: str, as_ids: dict[str, Any], chats: int = 16, turns: int = 6) -> float:
    """The share of prompt tokens found in the cache; with `as_ids` a body asks for tokens by their ids."""
    counts: list[tuple[int, int]] = []

    def asked(_: str, token_ids: list[int]) -> list[int]:
        body = {"prompt": token_ids, "temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True}
        answer = ask(url, {**body, **as_ids})
        if answer.error:
            raise RuntimeError(answer.error)
        counts.append((answer.usage["prompt_tokens_details"]["cached_tokens"], answer.usage["prompt_tokens"]))
        return answer.token_ids or [int(token.removeprefix("token_id:")) for token in answer.tokens]

    converse(asked, chats, turns)
    cached, prompts = map(sum, zip(*counts, strict=True))
    return cached / prompts


def check_prefix() -> None:
    small = ("--num-gpu-blocks-override", str(cache_blocks(16, 6)), "--max-num-seqs", "8")
    rates: dict[str, list[float]] = {}
    for _ in range(3):
        for mode, *more in (("kv",), ("kv", "--router-prefill-load-scale", "4"), ("round-robin",)):
            with deployment(2, mode, small, more) as made:
                rates.setdefault(" ".join(("Dynamo", mode, *more)), []).append(hit_rate(made.url, AS_IDS))
        with plain_server("-dp", "2", *small) as url:
            rates.setdefault("-dp 2", []).append(hit_rate(url, {"return_token_ids": True}))
    for name, found in rates.items():
        print(f"{name}: {', '.join(f'{rate:.3f}' for rate in found)} of prompt tokens were cached", flush=True)


def measure(url: str, num_streams: int) -> tuple[float, float]:
    """Median time to the first token and median time between tokens, in ms, for `num_streams` streams at once."""
    new = time.monotonic_ns() % 9973
    body = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}
    answers = all_at_once(url, [{"prompt": prompt(new + n), **body} for n in range(num_streams)], lambda _: None)
    first = statistics.median(answer.times_s[0] for answer in answers)
    between = statistics.median((answer.times_s[-1] - answer.times_s[0]) / 99 for answer in answers)
    return 1e3 * first, 1e3 * between


def check_cost() -> None:
    with plain_server(*ROOMY) as plain, deployment(1, "kv", ROOMY) as made:
        for num_streams in (1, 16):
            found: dict[str, list[tuple[float, float]]] = {"plain": [], "Dynamo": []}
            for _ in range(PAIRS):
                for name, url in (("plain", plain), ("Dynamo", made.url)):
                    found[name].append(measure(url, num_streams))
            for name, times in found.items():
                first, between = (statistics.median(column) for column in zip(*times[1:], strict=True))
                what = f"first token {first:.1f} ms, between tokens {between:.2f} ms"
                print(f"{num_streams} streams, {name}: {what}", flush=True)


CHECKS: dict[str, Callable[[], None]] = {
    "tokens": check_tokens,
    "kill": check_kill,
    "events": check_events,
    "ranks": check_ranks,
    "engine": check_engine,
    "cancel": check_cancel,
    "prefix": check_prefix,
    "cost": check_cost,
}


if __name__ == "__main__":
    sys.exit(run(__doc__, CHECKS))
