"""Replicas on Ray Serve, if ray is installed: a replica is killed under load, and no stream is lost."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import scaled

ROOT = Path(__file__).parents[2]


def test_no_stream_is_lost_when_a_replica_is_killed() -> None:
    pytest.importorskip("ray.serve")
    command = [sys.executable, "-m", "tests.acceptance.ray_serve_check", "--only", "kill"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(240), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
