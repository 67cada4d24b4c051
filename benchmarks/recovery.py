"""Pause of streams when a worker or the engine is killed: seconds from SIGKILL to the next token.

    python benchmarks/recovery.py --rounds 10 --out benchmarks/results/recovery-cpu.json

One stream of the demo model runs, with default settings except for those given. After some tokens, a process is killed
at a random moment of a step. The next token is the first one to arrive after SENT_BEFORE_S, when tokens that were sent
before have arrived. Every stream must complete; tests/acceptance/chaos.py checks its tokens.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peers_report

from vllm_lite import AsyncClient, EngineConfig, SamplingParams
from vllm_lite.client.engines import instances
from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.config import DEMO_MODEL

SENT_BEFORE_S = 0.05
TOKENS_BEFORE = 20
STREAM_S = 60.0
PROMPT = list(range(20, 60))
PARAMS = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True, detokenize=False)
MAX_RESTARTS = 1000
SETTLE_S = 2.0
"""The pause between two rounds, in which a new standby worker gets ready."""


def victim(launched: LaunchedEngine, role: str) -> int:
    """The process to kill."""
    if role == "engine":
        return launched.pid
    own = [instance for instance in instances.find() if instance.record.address == launched.address]
    return own[0].workers[0].pid


async def stream(launched: LaunchedEngine, client: AsyncClient, role: str) -> tuple[list[int], float]:
    """Run a stream. Returns its tokens, and the seconds from the kill to the next token, 0 without a `role`. Raises
    RuntimeError if the stream ends too early."""
    died_s, resumed_s, tokens = 0.0, 0.0, []
    pid = victim(launched, role) if role else 0
    async for output in client.generate(PROMPT, PARAMS):
        now_s = time.perf_counter()
        if died_s and not resumed_s and now_s - died_s > SENT_BEFORE_S:
            resumed_s = now_s
        tokens = list(output.outputs[0].token_ids)
        if role and not died_s and len(tokens) > TOKENS_BEFORE:
            await asyncio.sleep(random.random() / 100)
            died_s = time.perf_counter()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if died_s and not resumed_s:
        raise RuntimeError(f"the stream had ended when the {role} died; make it longer")
    return tokens, resumed_s - died_s


async def measure(launched: LaunchedEngine, role: str, rounds: int) -> list[float]:
    """Measure `rounds` kills. Raises RuntimeError for an incomplete stream."""
    async with AsyncClient(launched.address) as client:
        await stream(launched, client, "")  # warms up
        found = []
        for _ in range(rounds):
            await asyncio.sleep(SETTLE_S)
            tokens, pause_s = await asyncio.wait_for(stream(launched, client, role), STREAM_S)
            if len(tokens) != PARAMS.max_tokens:
                raise RuntimeError(f"a stream through the death of the {role} ended after {len(tokens)} tokens")
            found.append(pause_s)
        return found


def row(role: str, rounds: int, settings: dict[str, Any]) -> dict[str, Any]:
    config = EngineConfig.check({"max_restarts": MAX_RESTARTS, "log_level": "error"} | settings)
    with closing(launch(config)) as launched:
        found = sorted(asyncio.run(measure(launched, role, rounds)))
    figures = {"median_s": statistics.median(found), "least_s": found[0], "most_s": found[-1]}
    rounded = {name: round(value, 3) for name, value in figures.items()}
    return {"killed": role, "settings": settings, "rounds": rounds} | rounded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument(
        "--note", default="", help="a sentence about the machine for the file, such as that it was busy"
    )
    parser.add_argument("--out", help="write a JSON file")
    arguments = parser.parse_args()
    rows = []
    for role in ("worker", "engine"):
        for standby in (False, True):
            settings = {"model": arguments.model, "standby_workers": standby}
            rows.append(row(role, arguments.rounds, settings))
            print("{killed:<8} {settings}  {median_s:.2f} s ({least_s:.2f} to {most_s:.2f})".format(**rows[-1]))
    if arguments.out:
        head = {"device": peers_report.device(), "date": f"{datetime.now(UTC):%F}", "commit": peers_report.commit()}
        command = f"python benchmarks/recovery.py --rounds {arguments.rounds} --out {arguments.out}"
        report = {**head, "command": command, "note": arguments.note, "rows": rows}
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
