"""One client process of chaos.py: many requests at once, over Python, HTTP and the raw client.

It prints a JSON line when a stream begins and one when it has ended, goes on until a line comes on stdin, then ends the
streams that it has and itself. What the streams got is judged by the process that started it.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.acceptance.chaos_specs import Answer, Fork, Spec
from vllm_lite import AsyncClient, RequestOutput, SamplingParams
from vllm_lite.errors import RequestError, VllmLiteError
from vllm_lite.protocol.params import RequestOutputKind

RAW_CLIENT = Path(__file__).parents[2] / "scripts" / "raw_client.py"
WEIGHTS = {"python": 6, "delta": 3, "fork": 2, "http": 2, "sse": 2, "resumed": 2, "raw": 1}
"""Ways in which requests are sent -> their weights."""
WAYS = list(WEIGHTS)
FORK_TOKENS = 120
FORKABLE = ("greedy", "seeded")
"""Kinds of requests that are forked: those with one sample; forks have no logprobs."""


class Settings(msgspec.Struct):
    """Arguments of a client: the server's addresses, the ways of sending, and the time limit of a stream."""

    address: str
    url: str
    specs: list[Spec]
    seed: int
    num_streams: int
    stream_s: float
    heartbeat_timeout_s: float
    ways: list[str]
    name: str


class Record(msgspec.Struct):
    """A line of the output: a stream has begun, and, if `ended`, what it got.

    `way` says how it was asked for, `intent` what its reader did, `faults` what it saw that must never be.
    """

    stream: str
    key: str
    way: str
    intent: str = "read"
    ended: bool = False
    answer: Answer | None = None
    error: str | None = None
    fork: Fork | None = None
    faults: list[str] = []


class Collected:
    """The tokens of a stream so far, from cumulative outputs or from deltas. A delivered token must never change."""

    def __init__(self, record: Record, *, is_delta: bool = False) -> None:
        self.record = record
        self.is_delta = is_delta
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str | None] = {}
        self.last: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        self.last = output
        for sample in output.outputs:
            self.add(sample.index, list(sample.token_ids), sample.finish_reason)

    def add(self, index: int, tokens: list[int], reason: str | None) -> None:
        had = self.tokens.setdefault(index, [])
        if self.reasons.get(index) is not None and (self.is_delta or tokens != had):
            self.record.faults.append(f"sample {index} got tokens behind its end")
        if self.is_delta:
            had += tokens
        elif tokens[: len(had)] != had:
            self.record.faults.append(f"sample {index} had {had[-3:]} at its end and was then shown {tokens[:99]}")
        else:
            had += tokens[len(had) :]
        self.reasons[index] = reason

    def answer(self) -> Answer:
        order = sorted(self.tokens)
        answer = Answer([self.tokens[index] for index in order], [self.reasons[index] for index in order])
        if self.last is not None and not self.is_delta and self.last.outputs:
            whole = Answer.of(self.last)
            answer.logprobs, answer.prompt_logprobs = whole.logprobs, whole.prompt_logprobs
        return answer


class Client:
    """Keeps `num_streams` requests going."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rng = random.Random(settings.seed)
        self.stopping = asyncio.Event()
        self.number = 0

    async def run(self) -> None:
        settings = self.settings
        engine = AsyncClient(settings.address, heartbeat_timeout_s=settings.heartbeat_timeout_s)
        async with engine, httpx.AsyncClient(base_url=settings.url, timeout=settings.stream_s) as http:
            ways: dict[str, Callable[..., Any]] = {
                "python": lambda *a: self.python(engine, *a),
                "delta": lambda *a: self.python(engine, *a),
                "fork": lambda *a: self.forked(engine, *a),
                "http": lambda *a: plain_http(http, *a),
                "sse": lambda *a: sse(http, *a),
                "resumed": lambda *a: resumed(http, self.rng, *a),
                "raw": lambda *a: raw(settings.address, *a),
            }
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, lambda: (sys.stdin.readline(), loop.call_soon_threadsafe(self.stopping.set)))
            await asyncio.gather(*(self.keep_asking(ways) for _ in range(settings.num_streams)))

    async def keep_asking(self, ways: dict[str, Callable[..., Any]]) -> None:
        while not self.stopping.is_set():
            way = self.rng.choice(self.settings.ways)
            spec = self.rng.choice([spec for spec in self.settings.specs if fits(way, spec)])
            self.number += 1
            record = Record(f"{self.settings.name}-{self.number}", spec.key, way)
            if way in ("python", "delta"):
                record.intent = self.rng.choices(["read", "abort", "deadline", "slow"], [6, 1, 1, 1])[0]
            say(record)
            collected = Collected(record, is_delta=way in ("delta", "sse", "resumed"))
            try:
                await asyncio.wait_for(ways[way](spec, record, collected), self.settings.stream_s)
            except TimeoutError:
                record.error = f"no end within {self.settings.stream_s:g} s"
            except (VllmLiteError, httpx.HTTPError, OSError, ValueError) as error:
                record.error = f"{type(error).__name__}: {error}"
            record.answer, record.ended = collected.answer(), True
            say(record)

    async def python(self, engine: AsyncClient, spec: Spec, record: Record, collected: Collected) -> None:
        changes: dict[str, Any] = {}
        if record.way == "delta":
            changes["output_kind"] = RequestOutputKind.DELTA
        if record.intent == "deadline":
            changes["deadline_ms"] = self.rng.randint(20, 4000)
        enough = self.rng.randint(1, 60) if record.intent == "abort" else None
        by_id = self.rng.random() < 0.5
        async with contextlib.aclosing(
            engine.generate(spec.prompt, spec.sampling(**changes), record.stream)
        ) as outputs:
            async for output in outputs:
                collected.take(output)
                if enough is not None and max(map(len, collected.tokens.values()), default=0) >= enough:
                    if not by_id:
                        return
                    await engine.abort(record.stream)  # it ends like any other stream
                    enough = None
                if record.intent == "slow":
                    await asyncio.sleep(0.05)

    async def forked(self, engine: AsyncClient, spec: Spec, record: Record, collected: Collected) -> None:
        """Read a request for a while, fork it, and read the fork; the parent is dropped, or read to its end at the same
        time."""
        wanted = Fork(spec.key, 0, self.rng.randrange(2**40), 2 * FORK_TOKENS)
        at, keeps_parent = self.rng.randint(1, FORK_TOKENS), self.rng.random() < 0.5
        async with contextlib.aclosing(engine.generate(spec.prompt, spec.sampling(), record.stream)) as parent:
            fork = None
            async for output in parent:
                if fork is not None:
                    continue
                collected.take(output)
                have = len(output.outputs[0].token_ids)
                if have < at or output.finished:
                    continue
                if have >= wanted.max_tokens:
                    break
                try:  # between the parent's output and the fork nothing is awaited: it begins with these tokens
                    fork = (await engine.fork(record.stream, 1, SamplingParams(**wanted.params)))[0]
                except RequestError:  # the parent ended meanwhile
                    break
                record.fork = msgspec.structs.replace(wanted, have=have)
                if not keeps_parent:
                    break
        if fork is None:
            record.intent = "abort"  # the tokens read of the parent are a prefix of the expected ones
            return
        collected.tokens, collected.reasons = {}, {}
        async with contextlib.aclosing(
            fork
        ) as branch:  # engine.fork() has taken its first output, the tokens it inherits
            async for output in branch:
                collected.take(output)


def body(spec: Spec, **fields: Any) -> dict[str, Any]:
    return {"prompt": spec.prompt, "return_token_ids": True, **spec.params, **fields}


async def plain_http(http: httpx.AsyncClient, spec: Spec, _: Record, collected: Collected) -> None:
    answer = await http.post("/v1/completions", json=body(spec))
    if answer.status_code != 200:
        raise ValueError(f"HTTP {answer.status_code}: {answer.text[:300]}")
    for choice in answer.json()["choices"]:
        collected.add(choice["index"], choice["token_ids"], choice["finish_reason"])


async def sse(http: httpx.AsyncClient, spec: Spec, record: Record, collected: Collected) -> None:
    async with http.stream("POST", "/v1/completions", json=body(spec, stream=True)) as answer:
        if not await read_events(answer, collected, None):
            record.faults.append("the stream ended without [DONE]")


async def resumed(
    http: httpx.AsyncClient, rng: random.Random, spec: Spec, record: Record, collected: Collected
) -> None:
    """Break the connection after a few events, several times, and resume the stream each time."""
    request_id = f"{record.stream}-{spec.key}"
    fields = body(spec, stream=True, resumable=True, request_id=request_id)
    last_id = State()
    async with http.stream("POST", "/v1/completions", json=fields) as answer:
        done = await read_events(answer, collected, rng.randint(1, 12), last_id)
    while not done:
        headers = {"Last-Event-ID": last_id.value} if last_id.value else {}
        async with http.stream("GET", f"/v1/requests/cmpl-{request_id}/stream", headers=headers) as answer:
            done = await read_events(answer, collected, rng.randint(1, 40), last_id)


class State:
    """The id of the last event that was read."""

    value = ""


async def read_events(
    answer: httpx.Response, collected: Collected, most: int | None, last_id: State | None = None
) -> bool:
    """Read at most `most` events. Returns True after the last one. Raises ValueError for an error."""
    if answer.status_code != 200:
        raise ValueError(f"HTTP {answer.status_code}: {(await answer.aread())[:300]!r}")
    event_id = None
    async for line in answer.aiter_lines():
        if line.startswith("id:"):
            event_id = line[3:].strip()
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return True
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"an error in the stream: {event['error']}")
        for choice in event["choices"]:
            collected.add(choice["index"], choice.get("token_ids") or [], choice["finish_reason"])
        if last_id is not None and event_id is not None:
            last_id.value = event_id
        if most is not None and (most := most - 1) == 0:
            return False
    return False


async def raw(address: str, spec: Spec, _: Record, collected: Collected) -> None:
    """Send by scripts/raw_client.py, which prints token ids."""
    words = [sys.executable, str(RAW_CLIENT), address, *map(str, spec.prompt)]
    command = [*words, "--max-tokens", str(spec.params["max_tokens"])]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    collected.add(0, [int(word) for word in output.split()], None)
    if process.returncode:
        raise ValueError(f"exit status {process.returncode}: {errors.decode()[-300:]}")


def fits(way: str, spec: Spec) -> bool:
    """Whether requests of `spec` can be sent in this way and their answers compared."""
    if way == "raw":
        return spec.kind == "ending"
    if way == "fork":
        return spec.kind in FORKABLE
    if way == "delta":
        return spec.kind != "beams"
    if way in ("http", "sse", "resumed"):
        return spec.kind not in ("logprobs", "scored") and not (way != "http" and spec.kind == "beams")
    return True


def say(record: Record) -> None:
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.readline(), type=Settings)

    async def run() -> None:
        await Client(settings).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
