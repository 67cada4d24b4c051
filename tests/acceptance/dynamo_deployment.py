"""A Dynamo deployment on the loopback interface of this machine: a frontend, and workers that are vllm_lite.dynamo.

Discovery is by files and requests go over tcp, so it needs neither etcd nor NATS.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from vllm_lite.client.engines import instances
from vllm_lite.protocol.stats import Stats

START_S = 120.0
POLL_S = 0.1
STOP_S = 20.0
LOOPBACK = "127.0.0.1"
ENGINE_FLAGS = ("--model", "demo", "--dtype", "float32", "--cpu-threads", "1")


@dataclass
class Deployment:
    """A running deployment. `url`: the address of the frontend; `workers`: the processes of its workers."""

    url: str
    workers: list[psutil.Popen]

    def stats(self, worker: psutil.Popen) -> Stats:
        """Ask the engine of a worker for its statistics."""
        stats = self.engine(worker).stats
        if stats is None:
            raise LookupError(f"the engine of worker {worker.pid} does not answer")
        return stats

    def engine(self, worker: psutil.Popen) -> instances.Instance:
        launched = {each.record.launcher.pid: each for each in instances.find() if each.record.launcher is not None}
        return launched[worker.pid]


def wait_for(what: str, is_there: Callable[[], bool], timeout_s: float = START_S) -> None:
    """Wait until `is_there` returns true. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} was not there after {timeout_s:g} s")
        time.sleep(POLL_S)


@contextmanager
def deployment(
    num_workers: int, router_mode: str, flags: Sequence[str] = (), router_flags: Sequence[str] = ()
) -> Iterator[Deployment]:
    """Start workers of the demo model with `flags`, and a frontend. Their output goes to files, which are printed if
    something fails."""
    with TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
        probe.close()
        env = {**os.environ, **_environment(folder)}
        worker = [sys.executable, "-m", "vllm_lite.dynamo", *ENGINE_FLAGS, *flags]
        router = ["--router-mode", router_mode, "--migration-limit", "3", *router_flags]
        frontend = [sys.executable, "-m", "dynamo.frontend", "--http-host", LOOPBACK, "--http-port", str(port), *router]
        started = [_start(command, env, Path(folder, f"log-{n}")) for n, command in enumerate([worker] * num_workers)]
        started.append(_start(frontend, env, Path(folder, "log-frontend")))
        made = Deployment(f"http://{LOOPBACK}:{port}", started[:-1])
        try:
            wait_for(f"a frontend with {num_workers} workers", lambda: _num_instances(made, started) == num_workers)
            wait_for("a model", lambda: _is_served(made.url))
            yield made
        except BaseException:
            for log in sorted(Path(folder).glob("log-*")):
                print(f"---- {log.name}", log.read_text()[-3000:], sep="\n", file=sys.stderr)
            raise
        finally:
            _stop(started)


def _environment(folder: str) -> dict[str, str]:
    hosts = dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), LOOPBACK)
    planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_FILE_KV": f"{folder}/discovery"}
    return {**hosts, **planes, "DYN_SELF_HOST_METADATA": "0", "HF_HUB_OFFLINE": "1", "DYN_LOG": "warn"}


def _start(command: list[str], env: dict[str, str], log: Path) -> psutil.Popen:
    with log.open("wb") as file:
        return psutil.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def _num_instances(made: Deployment, started: Sequence[psutil.Popen]) -> int:
    for process in started:
        if process.poll() is not None:
            raise ChildProcessError(f"{' '.join(process.args[:3])} ended with status {process.returncode}")
    with suppress(httpx.TransportError):
        found: list[dict[str, Any]] = httpx.get(f"{made.url}/health").json().get("instances", [])
        return sum(instance["endpoint"] == "generate" for instance in found)
    return 0


def _is_served(url: str) -> bool:
    return bool(httpx.get(f"{url}/v1/models").json()["data"])


def _stop(started: Sequence[psutil.Popen]) -> None:
    for process in reversed(started):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    for left in psutil.wait_procs(started, STOP_S)[1]:
        left.kill()
