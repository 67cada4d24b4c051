"""Every file in configs/ loads, says what it is for, and names files and flags that exist."""

from pathlib import Path

import msgspec
import pytest

from vllm_lite.config import EngineConfig, ResolvedConfig
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
    resolved = engine.resolve(max_position_embeddings=4096, dtype="float32", model_path="/models/some")
    assert ResolvedConfig.check(msgspec.to_builtins(resolved)) == resolved


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_says_how_it_is_used(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# ")
    assert f"--config configs/{file.name}" in text
