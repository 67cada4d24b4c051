"""Figures of `vllm-lite plan` equal those of an engine started with the same settings."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from vllm_lite import LLM
from vllm_lite.tools.plan import PlanConfig, make_plan
from vllm_lite.tools.plan_checkpoint import load

WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 40,
    "max_window_layers": 2,
    "num_hidden_layers": 4,
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (None, {}),
        (None, {"block_size": 32, "quantization": "int8", "cpu_kvcache_space": 0.1}),
        (None, {"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": 1_000_000, "dtype": "float32"}),
        (None, {"num_gpu_blocks_override": 50, "kv_watermark": 0.1, "max_num_batched_tokens": 64}),
        (None, {"tensor_parallel_size": 2, "single_process": True, "cpu_kvcache_space": 0.01, "swap_space": 0.001}),
        (None, {"tensor_parallel_size": 4, "single_process": True, "kv_cache_memory_bytes": 500_000}),
        ("qwen3", {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 32}),
    ],
)
def test_blocks_and_length_are_the_engines(tmp_path: Path, family: str | None, settings: dict[str, Any]) -> None:
    model = "demo" if family is None else str(make_checkpoint(tmp_path, family, **WINDOWS))
    config = PlanConfig.load({"model": model, "device": "cpu", **settings})
    plan = make_plan(config, load(config))
    with LLM(model, device="cpu", **settings) as llm:
        assert (plan.num_blocks, plan.max_model_len) == (llm.engine.num_blocks, llm.engine.max_model_len)
        assert llm.config.max_num_seqs == plan.max_num_seqs
        assert llm.engine.kv_tokens == plan.kv_tokens
        assert int(llm.engine.kv_requests) >= plan.concurrent_requests  # which leaves the watermark free
