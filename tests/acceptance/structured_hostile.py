"""Send a server a thousand hostile grammars while eight plain streams run, and measure the effect on these.

    python -m tests.acceptance.structured_hostile --grammars 1000

Three phases follow each other: hostile grammars (tests/hostile_grammars.py), as many harmless requests, and quiet. The
gaps between the chunks of the plain streams are measured in each. Every hostile request has to be answered within
the limit: 400 with a sentence, or tokens; nothing may fail on the server's side. Exit status: 0 if so, 1 if not.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.hostile_grammars import hostile_forms

PROMPT = "Once upon a time there was a"
NUM_STREAMS = 8
AT_ONCE = 8
ROUNDS = 4
LIMIT_S = 20.0
"""Time limit of an answer, for a server that is busy with other requests."""
READY_S, END_S = 120.0, 30.0
MAX_TOKENS = 12
SHOWN = 10
DEEPEST = 50_000
"""Depth to which the forms are nested that are written as JSON here; the server has limits of its own."""


@dataclass
class Phase:
    """Measurements of all phases of one name."""

    gaps_s: list[float] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)
    answer_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0


@dataclass
class Siege:
    """One server, its plain streams, and the requests beside them."""

    base_url: str
    phases: dict[str, Phase] = field(default_factory=lambda: defaultdict(Phase))
    now: str = ""
    faults: list[str] = field(default_factory=list)

    async def run(self, forms: Sequence[tuple[str, Any]]) -> None:
        """Alternate the phases ROUNDS times, with a share of the forms in each."""
        async with httpx.AsyncClient(base_url=self.base_url, timeout=2 * LIMIT_S) as self.http:
            streams = [asyncio.create_task(self._stream(number)) for number in range(NUM_STREAMS)]
            for part in range(ROUNDS):
                share = forms[part::ROUNDS]
                hostile = await self._phase("hostile", share)
                await self._phase("harmless", [("harmless", None)] * len(share))
                await self._phase("quiet", [], least_s=hostile)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            for stream in streams:
                if stream.done() and not stream.cancelled() and (error := stream.exception()) is not None:
                    self.faults.append(f"a plain stream failed: {error!r}")

    async def _phase(self, name: str, forms: Sequence[tuple[str, Any]], least_s: float = 0.0) -> float:
        """Send all forms, AT_ONCE together, or wait. Returns the seconds."""
        self.now, started_s = name, time.monotonic()
        places = asyncio.Semaphore(AT_ONCE)

        async def one(attack: str, form: Any) -> None:
            async with places:
                await self._request(attack, form)

        await asyncio.gather(*(one(*form) for form in forms))
        await asyncio.sleep(least_s)
        took_s = time.monotonic() - started_s
        self.phases[name].seconds += took_s
        return took_s

    async def _request(self, attack: str, form: Any) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": MAX_TOKENS}
        if form is not None:
            body["structured_outputs"] = form
        started_s = time.monotonic()
        try:
            answer = await self.http.post(
                "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
            )
        except httpx.HTTPError as error:
            self.faults.append(f"{attack}: {error!r} after {time.monotonic() - started_s:.1f} s")
            return
        took_s = time.monotonic() - started_s
        phase = self.phases[self.now]
        phase.answers[answer.status_code] += 1
        phase.answer_s[answer.status_code].append(took_s)
        if took_s > LIMIT_S:
            self.faults.append(f"{attack}: {answer.status_code} after {took_s:.1f} s")
        if answer.status_code not in (200, 400, 413):
            self.faults.append(f"{attack}: {answer.status_code}: {answer.text[:200]}")

    async def _stream(self, number: int) -> None:
        """Read one plain stream after another, until cancelled."""
        while True:
            body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True, "seed": number}
            async with self.http.stream("POST", "/v1/completions", json=body) as answer:
                before_s = None
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        if before_s is not None:
                            self.phases[self.now].gaps_s.append(now_s - before_s)
                        before_s = now_s
                        if '"error"' in line:
                            self.faults.append(f"a plain stream ended: {line[:200]}")


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def show(siege: Siege) -> None:
    for name, phase in siege.phases.items():
        gaps = " ".join(f"{1e3 * quantile(phase.gaps_s, share):7.1f}" for share in (0.5, 0.9, 0.99, 0.999, 1.0))
        print(f"{name:10} {phase.seconds:6.1f} s {len(phase.gaps_s):7} gaps, ms at p50 p90 p99 p99.9 max: {gaps}")
        for status, times in sorted(phase.answer_s.items()):
            spread = " ".join(f"{1e3 * quantile(times, share):7.0f}" for share in (0.5, 0.99, 1.0))
            print(f"{'':10} {len(times):5} answers of {status}, ms at p50 p99 max: {spread}")
    for fault in siege.faults[:SHOWN]:
        print("   ", fault, file=sys.stderr)
    print(f"{len(siege.faults)} faults")


def memory_bytes(pid: int) -> dict[str, int]:
    """Resident memory of the server's processes, by module."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        words = process.cmdline()
        name = words[words.index("-m") + 1] if "-m" in words else words[0]
        found[f"{name} {process.pid}"] = process.memory_info().rss
    return found


def serve(flags: Sequence[str], besiege: Callable[[str, int], None]) -> None:
    """Start a server and call `besiege(url, pid)`."""
    command = [sys.executable, "-m", "vllm_lite", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline_s, url = time.monotonic() + READY_S, None
        for line in process.stdout or ():
            url = url or re.search(r"ready at (\S+),", line)
            if "Try:" in line or time.monotonic() > deadline_s:
                break
        if url is None:
            sys.exit("structured_hostile: the server did not start")
        besiege(url.group(1), process.pid)
        if process.poll() is not None:
            sys.exit(f"structured_hostile: the server ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait(END_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grammars", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attacks", default="", help="only these, as FUNCTION,FUNCTION of tests/hostile_grammars.py")
    args, flags = parser.parse_known_args()
    forms = [
        form for form in hostile_forms(args.grammars, args.seed) if form[0] in (args.attacks or form[0]).split(",")
    ]
    faults = []
    sys.setrecursionlimit(DEEPEST)

    def besiege(url: str, pid: int) -> None:
        siege = Siege(url)
        before = memory_bytes(pid)
        asyncio.run(siege.run(forms))
        show(siege)
        for name, now in memory_bytes(pid).items():
            print(f"{name}: {before.get(name, 0) / 2**20:.0f} MiB before, {now / 2**20:.0f} MiB after")
        faults.extend(siege.faults)

    serve(flags, besiege)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
