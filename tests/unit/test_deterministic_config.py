"""`--deterministic` uses the native CPU kernels, or is refused with the reason."""

from typing import Any, Literal

import pytest

from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError


def resolved(machine: Literal["cpu", "cuda"] = "cpu", **settings: Any) -> ResolvedConfig:
    sizes: dict[str, Any] = {"max_position_embeddings": 100, "dtype": "bfloat16", "model_path": "/m"}
    return EngineConfig.check(settings).resolve(**sizes, machine=(machine, 1 << 30))


def test_no_other_attention_replaces_it() -> None:
    """A model that the native kernels cannot serve is refused by the worker."""
    assert resolved(deterministic=True).attention_backend == "cpu"
    assert resolved().attention_backend == "auto"


@pytest.mark.parametrize("name", ["reference", "paged", "cuda"])
def test_other_attention_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"deterministic needs attention_backend cpu or auto, got {name}"):
        resolved(deterministic=True, attention_backend=name)


def test_gloo_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs tensor_parallel_backend shared-memory or auto, got gloo"):
        resolved(deterministic=True, tensor_parallel_backend="gloo")


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"deterministic needs device cpu, got cuda"):
        resolved("cuda", deterministic=True)
