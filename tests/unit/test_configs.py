"""Every file in configs/ loads, begins with its purpose, and names files and flags that exist."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fake_sys import make_sys
from vllm_lite.config import GIB, EngineConfig, ResolvedConfig
from vllm_lite.runtime.cpu_binding import plan_binding, read_topology
from vllm_lite.server.config import ServeConfig

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "configs").iterdir() if path.suffix in (".yaml", ".yml", ".toml"))


def test_there_are_some() -> None:
    assert len(FILES) >= 3


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_loads_and_resolves(file: Path) -> None:
    kind = ServeConfig if "vllm-lite serve" in file.read_text() else EngineConfig
    config = kind.load(file=file, env={})
    assert config != kind()
    engine = config.engine() if isinstance(config, ServeConfig) else config
    machine = ("cuda", 80 * GIB) if engine.device == "cuda" else None
    sizes: dict[str, Any] = {"max_position_embeddings": 4096, "dtype": "float32", "machine": machine}
    resolved = engine.resolve(model_path="/models/some", **sizes)
    assert ResolvedConfig.check(msgspec.to_builtins(resolved)) == resolved


@pytest.mark.parametrize("name", ["two-gpus.yaml", "two-sockets-cpu.toml"])
def test_files_for_two_ranks(name: str, tmp_path: Path) -> None:
    """The bindings that the comments name are valid on a machine with two sockets of 32 cores."""
    file = ROOT / "configs" / name
    config = ServeConfig.load(file=file, env={}).engine()
    assert config.tensor_parallel_size == 2
    topology = read_topology(make_sys(tmp_path, [32, 32], threads=2), range(128))
    plans = [plan_binding(config.cpu_bind, rank, 2, config.cpu_threads, topology) for rank in range(2)]
    assert [(plan.cpus, plan.node) for plan in plans] == [(tuple(range(32)), 0), (tuple(range(32, 64)), 1)]
    for by_hand in re.findall(r'"(\d[\d|-]+)"', file.read_text()):
        assert plan_binding(by_hand, 1, 2, None, topology) == plans[1]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_each_file_has_its_command(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# ")
    assert f"--config configs/{file.name}" in text
