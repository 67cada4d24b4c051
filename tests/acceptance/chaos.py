"""Kill, stop and slow down a server's processes under load, and check every token.

    python -m tests.acceptance.chaos --seconds 120 --seed 1 --tensor-parallel-size 2

1. An engine that nobody disturbs computes what every request has to get (chaos_specs.py).
2. `vllm-lite serve` gets a mixed load of several client processes (chaos_client.py), while faults hit its engine and
   workers at random moments, also in the middle of a recovery, and its clients (chaos_faults.py).
3. Every stream has to end once, with exactly those tokens; at the end nothing may be in use or left (chaos_check.py).

All is drawn from --seed, but for the moments at which things meet. Exit status: 0 if every promise was kept, 1 if one
was broken, 2 for a flag that cannot be. The folder with the server's log is printed if something was broken, otherwise
it is removed.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tests.acceptance.chaos_check import Ledger, Watch
from tests.acceptance.chaos_client import WEIGHTS, Record, Settings
from tests.acceptance.chaos_faults import EARLIEST_S, IN_RECOVERY, KINDS, LATEST_S, Fault, draw, inject
from tests.acceptance.chaos_report import Options, Report, quantiles, show
from tests.acceptance.chaos_specs import Answer, References, branches, make_references
from vllm_lite import AsyncClient
from vllm_lite.errors import VllmLiteError
from vllm_lite.protocol.stats import Stats

READY_S, DRAIN_S, END_S = 60.0, 90.0, 15.0
PROGRESS_EVERY_S, LOOK_EVERY_S = 5.0, 0.5
RESUMED_AFTER_S = 0.1
"""Tokens that arrive sooner after a death had been sent before it."""
NUM_CLIENTS = 3
CLIENT = "tests.acceptance.chaos_client"


class Chaos:
    """One server under load and faults."""

    def __init__(self, options: Options, folder: Path, references: References) -> None:
        self.options = options
        self.folder = folder
        self.rng = random.Random(options.seed)
        self.ledger = Ledger(references.answers)
        self.specs = references.specs
        self.clients: dict[str, asyncio.subprocess.Process] = {}
        self.killed: set[str] = set()
        self.faults: list[Fault] = []
        self.recoveries: dict[str, list[float]] = {"worker": [], "engine": []}
        self.probe_times: list[float] = []
        self.probed = asyncio.Event()
        self.stats: dict[int, Stats] = {}
        """Life of the engine -> its latest statistics."""
        self.stopping = False
        self.broken: Counter[str] = Counter()
        self.examples: list[str] = []

    # ---- the server

    def serve(self) -> None:
        """Start the server and wait until it is ready."""
        self.run_folder = self.folder / "t"
        self.run_folder.mkdir()
        self.address = f"ipc://{self.folder}/e"
        options = self.options
        flags = ["--address", self.address, "--port", "0", "--dtype", "float32"]
        flags += ["--num-gpu-blocks-override", "160", "--swap-space", "0.004", "--max-num-seqs", "24"]
        flags += ["--max-num-batched-tokens", "128", "--cpu-threads", "1"]
        flags += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
        flags += ["--max-restarts", str(options.max_restarts)]
        flags += ["--heartbeat-timeout-s", str(options.heartbeat_timeout_s), *options.flags]
        command = [sys.executable, "-m", "vllm_lite", "serve", str(options.model), *flags]
        self.log = self.folder / "server.log"
        environment = {**os.environ, "TMPDIR": str(self.run_folder), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as output:
            self.server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self.watch = Watch(self.server.pid, self.run_folder)
        deadline_s = time.monotonic() + READY_S
        while (match := re.search(r"ready at (\S+),", self.log.read_text())) is None:
            if self.server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        self.url = match.group(1)

    def end_server(self) -> None:
        self.watch.look()
        self.server.send_signal(signal.SIGTERM)
        try:
            status = self.server.wait(END_S)
            self.check("bad end", [f"the server ended with status {status}"] if status else [])
        except subprocess.TimeoutExpired:
            self.check("bad end", [f"the server did not end within {END_S:g} s of SIGTERM"])
            self.server.kill()
            self.server.wait()
        deadline_s = time.monotonic() + END_S
        while (left := self.watch.left()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        if os.path.exists(self.address.removeprefix("ipc://")):
            left.append(f"socket {self.address}")
        self.check("orphans", [what for what in left if what.startswith("process")])
        self.check("files left", [what for what in left if not what.startswith("process")])

    def check(self, what: str, found: Sequence[str]) -> None:
        self.broken[what] += len(found)
        self.examples += [f"{what}: {one}" for one in found]

    # ---- while it runs

    async def run(self) -> None:
        """Run load and faults for the given time, then wait for every stream's end."""
        began_s = time.monotonic()
        background = [asyncio.ensure_future(part()) for part in (self.follow, self.progress)]
        clients = [asyncio.ensure_future(self.keep_client(number)) for number in range(NUM_CLIENTS)]
        clients.append(asyncio.ensure_future(self.probe()))
        try:
            await self.fire(began_s + self.options.seconds)
            self.stopping = True
            _, late = await asyncio.wait(clients, timeout=self.options.stream_s + DRAIN_S)
            for client in late:
                client.cancel()
            self.ledger.lose_open()
            await self.at_rest()
        finally:
            for task in (*background, *clients):
                task.cancel()
            ended = await asyncio.gather(*background, *clients, return_exceptions=True)
            for process in self.clients.values():
                if process.returncode is None:
                    process.kill()
        for one in ended:
            if isinstance(one, Exception):
                self.check("bad end", [f"a part of this script failed: {one!r}"])

    async def fire(self, until_s: float) -> None:
        """Inject one fault after another until `until_s`."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1.0)
        while time.monotonic() < until_s:
            kind = draw(self.rng, self.options.kinds)
            if kind == "kill-client":
                self.kill_client()
            else:
                found = self.watch.look()
                pause_s = self.options.heartbeat_timeout_s / 2
                fault = await loop.run_in_executor(None, inject, kind, self.rng, found, pause_s)
                if fault is not None:
                    self.faults.append(fault)
                    await self.wait_after(fault)
            if self.server.poll() is not None:
                self.check("bad end", [f"the server ended by itself with status {self.server.returncode}"])
                return

    async def wait_after(self, fault: Fault) -> None:
        """Wait until the streams continue and some time longer; or only for a moment, so that the next fault hits the
        recovery."""
        if self.rng.random() < IN_RECOVERY:
            await asyncio.sleep(self.rng.uniform(EARLIEST_S, LATEST_S))
            return
        if fault.is_deadly:
            took_s = await self.next_token_after(fault)
            if took_s is None:
                self.check("not recovered", [f"{fault.kind}: no token in {self.options.stream_s:g} s"])
            elif fault.kind in ("kill-worker", "kill-engine") and self.was_calm(fault):
                self.recoveries[fault.role].append(took_s)
        await asyncio.sleep(self.rng.expovariate(1 / self.options.every_s))

    async def next_token_after(self, fault: Fault) -> float | None:
        """Seconds from a death to the next token of the probe; None if there is none within the maximum time."""
        limit_s = time.monotonic() + self.options.stream_s
        while time.monotonic() < limit_s:
            later = [at_s for at_s in self.probe_times[-1000:] if at_s > fault.at_s + RESUMED_AFTER_S]
            if later:
                return later[0] - fault.at_s
            with suppress(TimeoutError):
                self.probed.clear()
                await asyncio.wait_for(self.probed.wait(), 1.0)
        return None

    def was_calm(self, fault: Fault) -> bool:
        """Whether the probe got a token within half a second before the fault."""
        return any(fault.at_s - 0.5 < at_s < fault.at_s for at_s in self.probe_times[-1000:])

    def kill_client(self) -> None:
        living = [name for name, process in self.clients.items() if process.returncode is None]
        if living:
            name = self.rng.choice(living)
            self.killed.add(name)
            with suppress(ProcessLookupError):
                self.clients[name].kill()

    async def keep_client(self, number: int) -> None:
        """Run a client process, and a new one whenever it is killed, until the load ends."""
        life = 0
        while not self.stopping:
            life += 1
            await self.client(f"client{number}.{life}")

    async def client(self, name: str) -> None:
        options = self.options
        ways = [way for way in options.ways for _ in range(WEIGHTS[way])]
        seed = self.rng.randrange(2**32)
        limits = options.num_streams, options.stream_s, max(30.0, 4 * options.heartbeat_timeout_s)
        settings = Settings(self.address, self.url, self.specs, seed, *limits, ways, name)
        pipe = asyncio.subprocess.PIPE
        with (self.folder / f"{name}.log").open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", CLIENT, stdin=pipe, stdout=pipe, stderr=errors, limit=1 << 24
            )
        self.clients[name] = process
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("a client without pipes")
        asked = False
        try:
            stdin.write(msgspec.json.encode(settings) + b"\n")
            while True:
                if self.stopping and not asked:
                    asked = True
                    with suppress(ConnectionError):
                        stdin.write(b"stop\n")
                try:
                    line = await asyncio.wait_for(stdout.readline(), 0.5)
                except TimeoutError:
                    continue
                if not line:
                    break
                self.ledger.take(msgspec.json.decode(line, type=Record))
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if name in self.killed:
            self.ledger.vanished(name)
        elif status:
            text = (self.folder / f"{name}.log").read_text()[-1500:]
            self.check("bad end", [f"{name} ended with status {status}: {text}"])

    async def probe(self) -> None:
        """Run a stream all the time, to time recoveries. Its tokens are checked as well."""
        rng = random.Random(self.options.seed + 1)
        specs = [spec for spec in self.specs if spec.kind == "greedy"]
        heartbeat_s = max(30.0, 4 * self.options.heartbeat_timeout_s)
        async with AsyncClient(self.address, heartbeat_timeout_s=heartbeat_s) as client:
            number = 0
            while not self.stopping:
                spec, number = rng.choice(specs), number + 1
                record = Record(f"probe-{number}", spec.key, "python")
                self.ledger.take(record)
                last, error = None, None
                try:
                    async for output in client.generate(spec.prompt, spec.sampling(priority=-1)):
                        self.probe_times.append(time.monotonic())
                        self.probed.set()
                        last = output
                except VllmLiteError as failed:
                    error = f"{type(failed).__name__}: {failed}"
                    await asyncio.sleep(0.5)
                except asyncio.CancelledError:
                    self.ledger.vanished("probe")
                    raise
                answer = Answer([], []) if last is None else Answer.of(last)
                self.ledger.take(msgspec.structs.replace(record, ended=True, answer=answer, error=error))
                if len(self.probe_times) > 100_000:
                    del self.probe_times[:50_000]

    async def follow(self) -> None:
        """Collect the statistics of every engine, and the resources of processes."""
        async with AsyncClient(self.address) as client:
            while True:
                with suppress(VllmLiteError):  # one that is being replaced does not answer
                    stats = await client.stats()
                    self.stats[stats.life] = stats
                self.watch.look()
                await asyncio.sleep(LOOK_EVERY_S)

    async def progress(self) -> None:
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            ledger, counts = self.ledger, Counter(fault.kind for fault in self.faults)
            ended = sum(ledger.streams.values())
            broken = {what: count for what, count in (ledger.broken + self.broken).items() if count}
            print(
                f"{time.monotonic() - began_s:6.0f} s  {ended} streams ended, {len(ledger.open)} run; "
                f"{sum(counts.values())} faults, {sum(self.restarts().values())} recoveries; "
                f"broken: {broken or 'none'}",
                flush=True,
            )

    async def at_rest(self) -> None:
        """Check that nothing is in use when everything has ended."""
        async with AsyncClient(self.address) as client:
            deadline_s = time.monotonic() + END_S
            while True:
                try:
                    stats = await client.stats()
                except VllmLiteError as error:
                    if time.monotonic() > deadline_s:
                        self.check("bad end", [f"no statistics at the end: {error}"])
                        return
                    continue
                self.stats[stats.life] = stats
                if not (stats.num_running + stats.num_waiting + stats.num_used_blocks):
                    break
                if time.monotonic() > deadline_s:
                    rest = stats.num_running, stats.num_waiting, stats.num_used_blocks
                    self.broken["blocks leaked"] += stats.num_used_blocks
                    self.examples.append(f"at rest: running, waiting, blocks in use: {rest}")
                    break
                await asyncio.sleep(0.1)
        self.watch.look()
        self.check("grown", self.watch.growth())

    # ---- after it

    def restarts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for stats in self.stats.values():
            total.update({cause: count for cause, count in stats.restarts.items() if cause != "engine"})
        total["engine"] = max(self.stats, default=1) - 1
        return total

    def report(self) -> Report:
        broken = Counter(dict.fromkeys(("blocks leaked", "orphans", "files left", "grown", "bad end"), 0))
        broken.update(self.broken)
        return Report(
            options=self.options,
            broken=dict(self.ledger.broken) | dict(broken),
            streams=dict(self.ledger.streams),
            faults=dict(Counter(fault.kind for fault in self.faults)),
            restarts=dict(self.restarts()),
            recovery_s={who: quantiles(times) for who, times in self.recoveries.items() if times},
            num_specs=len(self.specs),
            seconds=self.options.seconds,
            examples=self.ledger.examples + self.examples,
        )


def judge_forks(ledger: Ledger, references: References, model: str) -> None:
    forks = {record.fork for record in ledger.forks if record.fork is not None}
    if forks:
        found = branches(model, references, forks)
        for record in ledger.forks:
            if record.fork is not None:
                ledger.judge(record, found[record.fork])


def run(options: Options, folder: Path, references: References | None = None) -> Report:
    """Make a whole run. `folder` has a short path, and contains only logs afterwards."""
    if references is None:
        sizes = options.per_kind, options.longest, options.tensor_parallel_size
        references = make_references(str(options.model), options.seed, *sizes)
    chaos = Chaos(options, folder, references)
    chaos.serve()
    try:
        asyncio.run(chaos.run())
    finally:
        chaos.end_server()
    judge_forks(chaos.ledger, references, str(options.model))
    return chaos.report()


def parse_args(arguments: Sequence[str] | None = None) -> tuple[Options, str | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Options()
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=defaults.kinds, help="faults to inject")
    parser.add_argument("--ways", nargs="+", choices=WEIGHTS, default=defaults.ways, help="how requests are sent")
    parser.add_argument("--model", help="a folder; its tokens must have no near ties. Default: a random one is made")
    parser.add_argument("--max-restarts", type=int, default=defaults.max_restarts, help="passed to the engine")
    parser.add_argument("--heartbeat-timeout-s", type=float, default=defaults.heartbeat_timeout_s)
    parser.add_argument("--every-s", type=float, default=defaults.every_s, help="mean pause before the next fault")
    parser.add_argument("--num-streams", type=int, default=defaults.num_streams, help="of each client process")
    parser.add_argument("--stream-s", type=float, default=defaults.stream_s, help="longest time for one stream")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="the rest goes to the server")
    parser.add_argument("--json", metavar="FILE", help="write the report")
    parsed = vars(parser.parse_args(arguments))
    file = parsed.pop("json")
    if parsed["seconds"] <= 0 or parsed["tensor_parallel_size"] < 1:
        parser.error("--seconds must be more than 0 and --tensor-parallel-size at least 1")
    return Options(**parsed), file


def main() -> int:
    options, file = parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vc", dir="/tmp"))
    if options.model is None:
        from tests.checkpoints import make_checkpoint

        options.model = str(make_checkpoint(folder / "model"))
    report = run(options, folder)
    show(report)
    if file is not None:
        Path(file).write_text(json.dumps(msgspec.to_builtins(report), indent=1) + "\n")
    if report.is_good:
        shutil.rmtree(folder)
        return 0
    print(f"\nlogs: {folder}; run again with --seed {options.seed}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
