"""Acceptance of run-batch: `python -m tests.acceptance.batch_check [ROWS] [KILLS] [SEED]`.

Answers ROWS short rows of the demo model, some of them bad, once undisturbed and once under KILLS times SIGKILL of the
command, its server, an engine or a worker, at moments drawn at random, on two engines. The command is called again
until nothing is open: then each row has one line, with the undisturbed text. Before that it counts the cached tokens of
shuffled rows with and without the order by prefix, in a cache too small for all of them.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.deadlines import scaled

KINDS = ("client", "server", "engine", "worker")
MODULES = {"server": "child_server", "engine": "vllm_lite.engine", "worker": "vllm_lite.worker"}
"""Parts of the command lines of processes."""
DEMO = ("--model", "demo", "--deterministic", "--max-model-len", "256")
TOPIC = "Once upon a time there was a {animal} that lived near a {place} with its {number} friends. "
ANIMALS = ["cat", "dog", "bird", "fish", "horse", "mouse", "bear", "fox", "owl", "frog", "duck", "lion"]
PLACES = ["river", "hill", "forest", "house", "lake", "road", "field", "town"]
DONE = (0, 1)


def write_rows(path: Path, count: int, draw: random.Random, sentences: int = 1) -> set[str | None]:
    """Write the rows in random order, every 500th of them bad. Returns the custom_ids of the good rows."""
    names: set[str | None] = set()
    with path.open("w") as file:
        for number in draw.sample(range(count), count):
            animal, place = ANIMALS[number % 12], PLACES[number // 12 % 8]
            topic = TOPIC.format(animal=animal, place=place, number=number // 96 % 7 + 2) * sentences
            body = {"prompt": f"{topic} The {number}th day", "max_tokens": 3 + number % 4, "temperature": 0}
            row = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write("{broken\n" if number % 500 == 499 else json.dumps(row) + "\n")
            names.add(None if number % 500 == 499 else f"r{number}")
    return names


def command(folder: Path, out: str, *flags: str) -> list[str]:
    files = ("-i", str(folder / "in"), "-o", str(folder / out), "--report", str(folder / f"{out}.report"))
    return [sys.executable, "-m", "vllm_lite", "run-batch", *files, *DEMO, *flags]


def run(folder: Path, out: str, *flags: str) -> dict[str, Any]:
    """Run the command to its end. Returns its report."""
    done = subprocess.run(command(folder, out, *flags), stderr=subprocess.PIPE, text=True, timeout=scaled(3600))
    print(f"  {out}:", done.stderr.strip().splitlines()[-1], flush=True)
    if done.returncode not in DONE:
        raise SystemExit(done.stderr)
    report: dict[str, Any] = json.loads((folder / f"{out}.report").read_text())
    return report


def texts(path: Path) -> Counter[tuple[str | None, str]]:
    """(custom_id, text or error code) of a row -> number of its lines in the output."""
    found = Counter[tuple[str | None, str]]()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        text = row["error"]["code"] if row["error"] else row["response"]["body"]["choices"][0]["text"]
        found[row["custom_id"], text] += 1
    return found


class Killer:
    """Calls the command repeatedly, and sometimes kills one of its processes."""

    def __init__(self, folder: Path, kills: int, rows: int, draw: random.Random) -> None:
        self.folder, self.rows, self.draw = folder, rows, draw
        self.counts = Counter[str]()
        self.kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
        draw.shuffle(self.kinds)
        self.step = rows // (kills + 1)

    def run(self, *flags: str) -> None:
        for _ in range(3 * len(self.kinds) + 3):
            with (self.folder / "errors").open("ab") as errors:
                process = subprocess.Popen(command(self.folder, "killed", *flags), stderr=errors)
            self.counts["calls"] += 1
            self.disturb(process)
            status = process.wait(scaled(3600))
            if status in DONE and not self.is_open():
                return
        raise SystemExit(f"the batch never came to its end: {(self.folder / 'errors').read_text()[-500:]}")

    def is_open(self) -> bool:
        """Whether rows are left, according to the report of the last call that completed."""
        with suppress(OSError, ValueError):
            return bool(json.loads((self.folder / "killed.report").read_text())["num_open"])
        return True

    def answered(self) -> int:
        path = self.folder / "killed.journal"
        return path.stat().st_size // 32 if path.exists() else 0

    def disturb(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process each time some more rows are answered, until the command ends."""
        while self.kinds:
            due = self.answered() + self.draw.randrange(1, max(2 * self.step // 3, 2))
            while self.answered() < due:
                if process.poll() is not None:
                    return
                time.sleep(0.01)
            if not (victims := self.victims(process.pid, self.kinds[-1])):
                continue
            with suppress(psutil.NoSuchProcess):
                self.draw.choice(victims).send_signal(signal.SIGKILL)
                self.counts[self.kinds.pop()] += 1

    def victims(self, pid: int, kind: str) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            client = psutil.Process(pid)
            if kind == "client":
                return [client]
            found = []
            for child in client.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if MODULES[kind] in " ".join(child.cmdline()):
                        found.append(child)
            return found
        return []


def order(folder: Path, draw: random.Random) -> bool:
    """Print the cached tokens with and without the order by prefix."""
    write_rows(folder / "in", 2000, draw, sentences=5)
    small = ("--num-gpu-blocks-override", "200", "--max-concurrency", "16")
    sorted_, unsorted = (run(folder, f"order{rows}", *small, "--prefix-window", rows) for rows in ("4096", "0"))
    shares: list[float] = [each["run"]["cached_tokens"] / each["run"]["prompt_tokens"] for each in (sorted_, unsorted)]
    print(f"cached: {shares[0]:.1%} of the prompt tokens with the order by prefix, {shares[1]:.1%} without", flush=True)
    return shares[0] > shares[1]


def main() -> int:
    given = [int(each) for each in sys.argv[1:]]
    rows, kills, seed = (*given, *(100_000, 20, 0)[len(given) :])
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        good = order(folder, draw)
        names = write_rows(folder / "in", rows, draw)
        run(folder, "calm", "-dp", "2")
        killer = Killer(folder, kills, rows, draw)
        began_s = time.monotonic()
        killer.run("-dp", "2")
        calm, killed = texts(folder / "calm"), texts(folder / "killed")
        once = len(killed) == sum(killed.values()) - killed[None, "invalid_json"] + bool(killed[None, "invalid_json"])
        print(f"{rows} rows with {kills} kills in {time.monotonic() - began_s:.0f} s: {dict(killer.counts)}")
        print(f"each row once: {once and {name for name, _ in killed} == names}; texts equal: {killed == calm}")
        good &= once and killed == calm and {name for name, _ in killed} == names and not killer.kinds
    print("PASSED" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
