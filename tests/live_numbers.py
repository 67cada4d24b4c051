"""Numbers of an engine as /metrics has them, by the names that /v1/live, the page and `top` use."""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

COUNTS = {
    "num_running": "vllm:num_requests_running",
    "num_waiting": "vllm:num_requests_waiting",
    "num_blocks": "vllm_lite:kv_blocks",
    "num_used_blocks": "vllm_lite:kv_blocks_used",
    "num_cached_blocks": "vllm_lite:kv_blocks_cached",
    "num_host_blocks": "vllm_lite:host_blocks",
    "num_used_host_blocks": "vllm_lite:host_blocks_used",
    "num_stored_keys": "vllm_lite:disk_keys",
    "num_writing_blocks": "vllm_lite:disk_writing",
    "steps": "vllm_lite:steps_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prompt_tokens_cached_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "swaps": "vllm_lite:preemptions_total swap",
    "host_hits": "vllm:external_prefix_cache_hits_total",
    "loaded_tokens": "vllm_lite:disk_loaded_tokens_total",
    "copied_blocks": "vllm_lite:copied_blocks_total",
    "swapped_out_blocks": "vllm_lite:swapped_blocks_total out",
    "swapped_in_blocks": "vllm_lite:swapped_blocks_total in",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "life": "vllm_lite:engine_life",
    "generation": "vllm_lite:worker_generation",
}
TIMES = {
    "first_token_s": "vllm:time_to_first_token_seconds",
    "token_gap_s": "vllm:inter_token_latency_seconds",
    "queue_s": "vllm:request_queue_time_seconds",
}


def metrics_of(text: str, engine: str = "0") -> dict[str, float]:
    """Values by their names, summed over labels, and by name and label where there is one."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            if sample.labels.get("engine", engine) != engine or "le" in labels:
                continue
            for name in {sample.name, " ".join((sample.name, *labels.values()))}:
                found[name] = found.get(name, 0.0) + sample.value
    return found


def counts_of(text: str, names: Iterable[str] = COUNTS, engine: str = "0") -> dict[str, float]:
    """The counts of these names."""
    values = metrics_of(text, engine)
    return {name: values.get(COUNTS[name], 0.0) for name in names}


def mean_ms(text: str, name: str) -> float:
    """The mean of a measured time, in milliseconds."""
    values = metrics_of(text)
    return 1e3 * values[f"{TIMES[name]}_sum"] / values[f"{TIMES[name]}_count"]
