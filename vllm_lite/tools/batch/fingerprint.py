"""Digests of the settings that change answers, by which a journal checks whether a batch may be resumed."""

from hashlib import blake2b
from typing import Any

import msgspec

from vllm_lite.config import EngineConfig
from vllm_lite.server.config import ServeConfig
from vllm_lite.tools.batch.row_mapper import RowMapper

INDIFFERENT = frozenset(
    {
        *("max_loras", "max_lora_rank", "max_cpu_loras"),
        *("num_gpu_blocks_override", "cpu_kvcache_space", "gpu_memory_utilization", "kv_cache_memory_bytes"),
        *("kv_watermark", "swap_space", "state_cache_space", "enable_prefix_caching", "prefix_hash_seed"),
        *("kv_cache_dir", "kv_cache_dir_size", "kv_cache_preload", "kv_cache_metrics", "kv_cache_metrics_sample"),
        *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "max_itl_ms", "scheduling_policy"),
        *("preemption_mode", "max_swap_blocks_per_step", "async_scheduling", "jump_forward"),
        *("speculative_config", "disable_adaptive_drafts", "enforce_eager", "cudagraph_capture_sizes"),
        *("max_cudagraph_capture_size", "cudagraph_piece_sizes", "disable_cascade_attn"),
        *("cpu_threads", "cpu_bind", "data_parallel_size", "distributed_executor_backend", "single_process"),
        *("tensor_parallel_size", "tensor_parallel_backend", "enable_expert_parallel", "expert_load_metrics"),
        *("address", "tcp_address", "curve_keys", "insecure", "profiler_config", "ready_timeout_s"),
        *("heartbeat_timeout_s", "max_restarts", "recovery_timeout_s", "standby_workers"),
        *("log_level", "log_format", "log_config_file", "disable_log_stats", "log_stats_interval_s", "record"),
        *("kv_events_config", "weight_cache"),
    }
)
"""An engine's settings that change only where and how fast answers are computed, or the memory for it."""


def fingerprint(
    config: ServeConfig | None, defaults: tuple[str, ...], model_name: str | None, mapper: RowMapper
) -> dict[str, str]:
    """Digests of the settings with values other than the defaults. `defaults` are the names of the server's own
    settings that count. Without a `config`, the server is another's, and its settings are unknown."""
    given: dict[str, Any] = {} if config is None else msgspec.to_builtins(config)
    counting = ({*EngineConfig.__struct_fields__} - INDIFFERENT) | {*defaults}
    settings = {name: value for name, value in given.items() if name in counting}
    settings |= {"model": config.model} if config is not None else {}
    settings |= {"model_name": model_name} if model_name is not None else {}
    settings |= {name: value for name, value in mapper._asdict().items() if value}
    return {name: _digest(value) for name, value in sorted(settings.items())}


def _digest(value: Any) -> str:
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=8).hexdigest()
