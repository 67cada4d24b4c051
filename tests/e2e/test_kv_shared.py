"""One KV directory shared by several engines behind one address, and by engines on the nodes of a Ray cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.e2e.test_data_parallel import engines_of, values
from tests.http_server import client, serving, until

ROOT = Path(__file__).parents[2]
PROMPT = [5 + 7 * index % 2000 for index in range(300)]
FLAGS = ("-dp", "2", "--dtype", "float32", "--num-gpu-blocks-override", "256")


def test_a_replica_loads_blocks_written_by_another(tmp_path: Path) -> None:
    """One of two engines computes a prompt and is killed. The other one loads its KV, and gives the same answer."""
    with serving(*FLAGS, "--kv-cache-dir", str(tmp_path / "kv")) as server, client(server) as http:

        def ask() -> tuple[str, int]:
            body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body, timeout=scaled(60.0))
            assert answer.status_code == 200, answer.text
            found = answer.json()
            return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

        text, cached = ask()
        assert cached == 0
        served = values(http, "vllm:generation_tokens_total")
        assert sorted(served.values()) == [0, 20], "one of them computes it"
        until(lambda: min(values(http, "vllm_lite:disk_keys").values()) >= 18, "what lies on disk, at both")
        (other,) = [engine for engine, count in served.items() if not count]
        os.kill(sorted(engines_of(server))[1 - int(other)], signal.SIGKILL)
        until(lambda: len(values(http, "vllm_lite:engine_life")) < 2, "the death of the one")
        assert ask() == (text, 288)
        assert values(http, "vllm_lite:disk_loaded_tokens_total")[other] == 288
        assert server.stop() == 0


def test_engines_on_two_nodes_of_a_cluster_share_a_directory() -> None:
    pytest.importorskip("ray.cluster_utils")
    command = [sys.executable, "-m", "tests.acceptance.ray_check", "--only", "disk"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(240), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
