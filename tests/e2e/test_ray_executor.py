"""Workers on a Ray cluster, if ray is installed: the same tokens as without, from two nodes of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import scaled

ROOT = Path(__file__).parents[2]


def test_two_nodes_give_the_tokens_of_one_worker_and_the_death_of_one_is_survived() -> None:
    pytest.importorskip("ray.cluster_utils")
    command = [sys.executable, "-m", "tests.acceptance.ray_check", "--only", "executor"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(240), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
