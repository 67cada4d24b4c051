"""A running server as `vllm-lite ps` shows it and `vllm-lite kill` ends it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.deadlines import scaled
from tests.http_server import client, serving, until
from vllm_lite.runtime.cpu_binding import plan_binding
from vllm_lite.runtime.machine import format_cpu_list


@pytest.fixture
def place() -> Iterator[dict[str, str]]:
    """The environment of a TMPDIR of its own."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield {"TMPDIR": folder}


def run(env: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "vllm_lite", *words]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_is_listed_and_ended(place: dict[str, str]) -> None:
    with serving(env=place, fresh=True) as server:
        (row,) = json.loads(run(place, "ps", "--json"))
        assert row["pid"] == server.process.pid
        assert (row["kind"], row["model"], row["state"]) == ("server", "demo_model", "serving")
        assert row["url"] == server.url
        assert (row["running"], row["waiting"]) == (0, 0)
        assert row["memory_bytes"] > 100 * 2**20, "torch in the worker is part of it"
        (worker,) = row["workers"]
        assert worker["rank"] == 0
        assert row["memory_bytes"] > worker["memory_bytes"] > 100 * 2**20
        assert psutil.Process(psutil.Process(worker["pid"]).ppid()).ppid() == row["pid"], (
            "a child of the engine, which is the server's"
        )
        body = {"prompt": "Once", "max_tokens": 2000, "n": 64, "stream": True, "ignore_eos": True}
        with client(server) as http, http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: json.loads(run(place, "ps", "--json"))[0]["running"] >= 1, "a running request")
        assert run(place, "kill", "demo_model") == f"{server.process.pid} demo_model: ended\n"
        assert server.wait() == 0
        assert list(Path(place["TMPDIR"]).iterdir()) == []
        assert run(place, "ps") == "no engine of yours is running\n"


def test_ranks_are_listed_and_have_cores_of_their_own(place: dict[str, str]) -> None:
    with serving("--tensor-parallel-size", "2", env=place, fresh=True) as server:
        (row,) = json.loads(run(place, "ps", "--json"))
        assert [worker["rank"] for worker in row["workers"]] == [0, 1]
        for rank, worker in enumerate(row["workers"]):
            status = Path(f"/proc/{worker['pid']}/status").read_text()
            expected = plan_binding("auto", rank, 2, None).cpus or os.sched_getaffinity(0)
            assert f"Cpus_allowed_list:\t{format_cpu_list(expected)}\n" in status
        with client(server) as http:
            assert re.search(r"^vllm_lite:workers\{.*\} 2.0$", http.get("/metrics").text, re.MULTILINE)
        assert run(place, "kill", "all") == f"{server.process.pid} demo_model: ended\n"
        assert server.wait() == 0
        assert not any(psutil.pid_exists(worker["pid"]) for worker in row["workers"])
        assert list(Path(place["TMPDIR"]).iterdir()) == []


def test_force_ends_a_server_that_is_stopped(place: dict[str, str]) -> None:
    with serving(env=place, light=True, fresh=True) as server:
        server.process.send_signal(signal.SIGSTOP)
        words = ("kill", "all", "--force", "--timeout", "0.2")
        assert run(place, *words) == f"{server.process.pid} demo_model: killed\n"
        assert server.wait() == -signal.SIGKILL
        assert list(Path(place["TMPDIR"]).iterdir()) == []
