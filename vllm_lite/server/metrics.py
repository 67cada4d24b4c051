"""GET /metrics: counts of the engine and of this server, under vLLM's names if vLLM has one.

The engine measures, because it knows the requests of every client: all API servers show the same values, except for
metrics labelled `server`, which are one server's own. With several engines, each has its values, labelled `engine`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_lite.client.media.image_pool import ImagePool
from vllm_lite.config import GIB, EngineConfig
from vllm_lite.protocol.api import Welcome
from vllm_lite.protocol.stats import Histogram, RestartCause, Stats
from vllm_lite.server.calls.registry import Calls

PATH = "/metrics"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
"""Label of requests without a route."""
LABELS = ("model_name", "engine")
"""The labels of every metric."""
SERVER = "server"
"""Label of metrics that are one API server's own."""


@dataclass
class Scrape:
    """Data of one engine and of this server for one scrape."""

    stats: Stats
    config: EngineConfig
    engine: Welcome
    load: int
    responses: Mapping[tuple[str, str], int]
    server: str
    rejections: Mapping[str, int]
    """Number of rejections by limit, over all API servers."""
    number: int = 0
    """Number of the engine."""
    images: tuple[int, int] | None = None
    """Number of images requested from this server, and of those that it had preprocessed already; None for a model
    without images."""


@dataclass
class Exposition(Collector):
    """Metrics for prometheus_client from a scrape of each engine. There is no global registry: two servers share
    nothing."""

    scrapes: Sequence[Scrape]
    model_name: str

    def collect(self) -> Iterator[Metric]:
        for metric in METRICS:
            family = _FAMILIES[metric.kind](metric.name, metric.text, labels=(*LABELS, *metric.labels))
            for scrape in self.scrapes[:1] if metric.is_servers else self.scrapes:
                number = "0" if metric.is_servers else str(scrape.number)
                read = metric.read(scrape)
                of_scrape = read if isinstance(read, Mapping) else {} if read is None else {(): read}
                for own, value in of_scrape.items():
                    labels = (self.model_name, number, *own)
                    if isinstance(family, HistogramMetricFamily) and isinstance(value, Histogram):
                        family.add_metric(labels, _buckets(value), value.sum)
                    else:
                        family.add_metric(labels, value)
            if family.samples:
                yield family


Values = Mapping[tuple[str, ...], float | Histogram]
"""Maps label values of a metric to its value."""


class Definition(NamedTuple):
    """One metric. Counters get `_total` appended to their name; `labels` are those beside LABELS.

    `read` returns None if this engine does not measure it; the metric is then absent.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    read: Callable[[Scrape], float | Histogram | Values | None]
    labels: tuple[str, ...] = ()
    is_servers: bool = False
    """Whether the metric belongs to the API servers instead of an engine; `engine` is then 0."""


_GAUGES = (  # name, field of Stats, text
    ("vllm:num_requests_running", "num_running", "Sequences in the batch."),
    ("vllm:num_requests_waiting", "num_waiting", "Sequences that wait for admission to the batch."),
    ("vllm_lite:kv_blocks", "num_blocks", "KV blocks on the device."),
    ("vllm_lite:kv_blocks_used", "num_used_blocks", "KV blocks that live sequences hold."),
    ("vllm_lite:kv_blocks_used_peak", "peak_used_blocks", "Maximum KV blocks that live sequences have held at once."),
    ("vllm_lite:kv_blocks_cached", "num_cached_blocks", "KV blocks that later prompts can reuse, in use or not."),
    ("vllm_lite:host_blocks", "num_host_blocks", "KV blocks in host memory."),
    ("vllm_lite:host_blocks_used", "num_used_host_blocks", "KV blocks in host memory of preempted sequences."),
    ("vllm_lite:state_slots", "num_state_slots", "Slots for the states of recurrent layers."),
    ("vllm_lite:state_slots_used", "num_used_state_slots", "State slots that live sequences hold."),
    ("vllm_lite:host_states", "num_host_states", "Slots for states of recurrent layers in host memory."),
    ("vllm_lite:host_states_used", "num_used_host_states", "States in host memory of preempted sequences."),
    ("vllm_lite:states_cached", "num_cached_states", "States from which later prompts can continue."),
    ("vllm_lite:disk_keys", "num_stored_keys", "KV blocks and states that can be loaded from disk."),
    ("vllm_lite:disk_writing", "num_writing_blocks", "KV blocks and states that are being written to disk."),
    ("vllm_lite:engine_life", "life", "Number of this engine at its address; 1 is the first."),
    ("vllm_lite:worker_generation", "generation", "Number of the engine's current group of workers."),
)
_DRAFTS = (  # name, field of DraftCounts, text
    ("vllm:spec_decode_num_drafts", "drafts", "Drafts made for a sequence in a step, by drafter."),
    ("vllm:spec_decode_num_draft_tokens", "tokens", "Draft tokens, by drafter; forced: tokens that a grammar forces."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted", "Accepted draft tokens, by drafter."),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
    ("vllm:generation_tokens", "generated_tokens", "Tokens generated."),
    ("vllm:prompt_tokens_cached", "cached_tokens", "Prompt tokens found in a cache, on the device or on the host."),
    ("vllm:corrupted_requests", "corrupted_requests", "Requests ended because logits were not finite."),
    ("vllm:num_preemptions", "preemptions", "Sequences preempted."),
    ("vllm:prefix_cache_queries", "cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:external_prefix_cache_queries", "host_queries", "Other prompt tokens, looked up in host memory."),
    ("vllm:external_prefix_cache_hits", "host_hits", "Prompt tokens found in host memory."),
    ("vllm_lite:steps", "steps", "Steps scheduled."),
    ("vllm_lite:demoted_blocks", "demoted_blocks", "Evicted cached KV blocks moved to host memory."),
    ("vllm_lite:promoted_blocks", "promoted_blocks", "Cached KV blocks loaded from host memory."),
    ("vllm_lite:saved_states", "saved_states", "States of recurrent layers saved for later prompts."),
    ("vllm_lite:evicted_states", "evicted_states", "Saved states evicted from the device."),
    ("vllm_lite:demoted_states", "demoted_states", "Saved states moved to host memory when they were evicted."),
    ("vllm_lite:promoted_states", "promoted_states", "Saved states loaded from host memory."),
    ("vllm_lite:disk_loaded_tokens", "loaded_tokens", "Prompt tokens whose KV was loaded from disk."),
    ("vllm_lite:disk_failed_loads", "failed_loads", "Blocks and states computed because loading failed."),
    ("vllm_lite:disk_dropped_writes", "dropped_writes", "Chains of blocks not, or not fully, written to disk."),
    ("vllm_lite:encoded_media", "encoded_media", "Images, or tiles of images, whose vectors were computed by a tower."),
    ("vllm_lite:loaded_media", "loaded_media", "Images, or tiles of images, whose vectors were loaded from disk."),
    (
        "vllm_lite:state_missing_tokens",
        "state_missing_tokens",
        "Prompt tokens computed, despite cached KV, for lack of a recurrent state.",
    ),
    ("vllm_lite:copied_blocks", "copied_blocks", "Shared KV blocks copied before they were written."),
    ("vllm_lite:rejected_requests", "rejected_requests", "Requests refused by the engine; not counted elsewhere."),
    ("vllm_lite:corrupted_requests", "corrupted_requests", "Requests ended because logits were not finite."),
    ("vllm_lite:recovered_requests", "recovered_requests", "Requests continued on new workers, each time."),
    ("vllm_lite:poisoned_requests", "poisoned_requests", "Requests ended because they killed their workers."),
    ("vllm_lite:recovery_seconds", "lost_s", "Seconds without workers, after losses of workers."),
    ("vllm_lite:malformed_messages", "malformed_messages", "Invalid messages on the engine's socket."),
)
_HISTOGRAMS = (  # name, field of RequestHistograms, text
    ("vllm:time_to_first_token_seconds", "first_token_s", "From a request's arrival to its first token."),
    ("vllm:inter_token_latency_seconds", "token_gap_s", "From a sample's tokens of one step to its next ones."),
    ("vllm:time_per_output_token_seconds", "token_gap_s", "Deprecated: vllm:inter_token_latency_seconds."),
    ("vllm:request_time_per_output_token_seconds", "mean_token_s", "Mean time between the tokens of each request."),
    ("vllm:e2e_request_latency_seconds", "whole_s", "From a request's arrival to its end."),
    (
        "vllm:request_queue_time_seconds",
        "queue_s",
        "From a request's arrival to its admission, or to its end if it was never admitted.",
    ),
    ("vllm:request_prefill_time_seconds", "prefill_s", "From a request's admission to its first token."),
    ("vllm:request_decode_time_seconds", "decode_s", "From a request's first token to its end."),
    ("vllm:request_inference_time_seconds", "inference_s", "From a request's admission to its end."),
    ("vllm:request_prompt_tokens", "prompt_tokens", "Prompt tokens of each ended request."),
    ("vllm:request_generation_tokens", "output_tokens", "Tokens generated for each request, all samples together."),
    ("vllm:request_params_n", "samples", "Samples per request (n)."),
    ("vllm:request_max_num_generation_tokens", "longest_output", "Tokens of the longest sample of each request."),
    ("vllm:request_num_preemptions", "preemptions", "Number of preemptions of each request's sequences."),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "computed_prompt_tokens",
        "Prompt tokens of each request that were computed, because no cache had them.",
    ),
    ("vllm:request_params_max_tokens", "max_tokens", "Maximum tokens per sample that each request allowed."),
    (
        "vllm:iteration_tokens_total",
        "gained_tokens",
        "Tokens generated in each step, plus the prompt tokens of requests that got their first token in it.",
    ),
    ("vllm_lite:iteration_tokens", "step_tokens", "Tokens scheduled in each step."),
)
_BLOCK_HISTOGRAMS = (  # name, field of BlockHistograms, text
    ("vllm:kv_block_lifetime_seconds", "lifetime_s", "From a KV block's allocation to its eviction."),
    ("vllm:kv_block_idle_before_evict_seconds", "idle_before_evict_s", "From a KV block's last use to its eviction."),
    ("vllm:kv_block_reuse_gap_seconds", "reuse_gap_s", "From one use of a cached KV block to the next."),
)
_LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


def _adapters(at: Scrape) -> dict[tuple[str, ...], float]:
    """One series for each set of adapters, in vLLM's format, which routers read; a monitor keeps each set that it has
    seen. So the label has at most as many adapters as one step, sorted. Only an admin loads adapters, so clients cannot
    create or lengthen labels."""
    most = at.engine.max_loras
    names = at.stats.running_adapters, at.stats.waiting_adapters
    return {(str(most), *(",".join(sorted(each)[:most]) for each in names)): 1}


def _usage(at: Scrape) -> float:
    return at.stats.num_used_blocks / at.stats.num_blocks if at.stats.num_blocks else 0.0


def _of_blocks(field: str) -> Callable[[Scrape], Histogram | None]:
    return lambda at: getattr(at.stats.blocks, field, None)


def _space_bytes(config: EngineConfig) -> int | None:
    space = config.cpu_kvcache_space if config.device == "cpu" else None
    return None if space is None else int(space * GIB)


_CACHE_CONFIG: dict[str, Callable[[Scrape], object]] = {
    "block_size": lambda at: at.engine.block_size,
    "cache_dtype": lambda at: at.config.kv_cache_dtype,
    "cpu_kvcache_space_bytes": lambda at: _space_bytes(at.config),
    "enable_prefix_caching": lambda at: at.config.enable_prefix_caching,
    "gpu_memory_utilization": lambda at: at.config.gpu_memory_utilization,
    "kv_cache_max_concurrency": lambda at: f"{at.engine.kv_requests:.2f}",
    "kv_cache_size_tokens": lambda at: at.engine.kv_tokens,
    "num_cpu_blocks": lambda at: at.stats.num_host_blocks,
    "num_gpu_blocks": lambda at: at.engine.num_blocks,
    "num_gpu_blocks_override": lambda at: at.config.num_gpu_blocks_override,
    "swap_space": lambda at: at.config.swap_space,
}
"""The labels of vllm:cache_config_info."""


def _cache_config(at: Scrape) -> Values:
    return {tuple(str(read(at)) for read in _CACHE_CONFIG.values()): 1}


def _ended(at: Scrape) -> Values:
    return {(reason,): count for reason, count in at.stats.ended_by.items()}


def _preemptions(at: Scrape) -> Values:
    return {("recompute",): at.stats.preemptions - at.stats.swaps, ("swap",): at.stats.swaps}


def _swapped(at: Scrape) -> Values:
    return {("in",): at.stats.swapped_in_blocks, ("out",): at.stats.swapped_out_blocks}


def _restarts(at: Scrape) -> Values:
    """Number of restarts of workers by cause, and of the engine itself."""
    counts = {**dict.fromkeys(get_args(RestartCause), 0), **at.stats.restarts, "engine": at.stats.life - 1}
    return {(cause,): count for cause, count in counts.items()}


def _sleep_state(at: Scrape) -> Values:
    """The sleep state by vLLM's names; at level 0 nothing is offloaded."""
    level = at.stats.sleep_level or 0
    return {("awake",): level == 0, ("weights_offloaded",): level == 1, ("discard_all",): level == 2}


def _responses(at: Scrape) -> Values:
    return {(at.server, *key): count for key, count in at.responses.items()}


def _expert_tokens(at: Scrape) -> Values | None:
    if at.stats.expert_tokens is None:
        return None
    by_layer = enumerate(at.stats.expert_tokens)
    return {(str(layer), str(expert)): count for layer, row in by_layer for expert, count in enumerate(row)}


def _sources(at: Scrape) -> Values:
    """Number of prompt tokens by the source of their KV, by vLLM's names."""
    computed = at.stats.prompt_tokens - at.stats.cached_tokens
    return {
        ("local_compute",): computed,
        ("local_cache_hit",): _device_hits(at),
        ("external_kv_transfer",): at.stats.host_hits,
    }


def _tiers(at: Scrape) -> Values:
    """Number of cached prompt tokens by tier, by vLLM's names; the last two tiers do not exist here. A token loaded
    from disk is then found on the device, and counts for the disk."""
    on_disk = min(at.stats.loaded_tokens, _device_hits(at))
    found = {"device": _device_hits(at) - on_disk, "host": at.stats.host_hits, "disk": on_disk}
    return {(tier,): found.get(tier, 0) for tier in ("device", "host", "disk", "p2p", "external_unspecified")}


def _disk(*fields: str) -> Callable[[Scrape], Values | None]:
    """Values of the workers' disk counters `fields`, labelled by the field's name before its unit."""

    def read(at: Scrape) -> Values | None:
        disk = at.stats.disk
        return None if disk is None else {(field.split("_")[0],): getattr(disk, field) for field in fields}

    return read


def _disk_errors(at: Scrape) -> Values | None:
    return {(reason,): count for reason, count in at.stats.disk.errors.items()} or None if at.stats.disk else None


def _waiting(at: Scrape) -> Values:
    """Number of waiting sequences by reason, by vLLM's names."""
    deferred = at.stats.num_deferred
    return {("capacity",): at.stats.num_waiting - deferred, ("deferred",): deferred}


def _drafts(field: str) -> Callable[[Scrape], Values]:
    return lambda at: {(method,): getattr(counts, field) for method, counts in at.stats.drafts_by.items()}


def _accepted(at: Scrape) -> Values | None:
    return {
        (method, str(place)): count
        for method, counts in at.stats.drafts_by.items()
        for place, count in enumerate(counts.accepted_at)
    } or None


def _rejections(at: Scrape) -> Values:
    return {(limit,): count for limit, count in at.rejections.items()}


def _device_hits(at: Scrape) -> float:
    return at.stats.cached_tokens - at.stats.host_hits


def _images(place: int) -> Callable[[Scrape], Values | None]:
    return lambda at: None if at.images is None else {(at.server,): at.images[place]}


_USAGE = "Share of KV blocks that live sequences hold, 0 to 1."
_SOURCES = "Prompt tokens by the source of their KV: computed, cached on the device, or loaded from host memory."
_TIERS = "Cached prompt tokens by the tier that had them: device, host or disk."
_WAITING = "Waiting sequences: capacity: they wait for room; deferred: for an adapter, workers or the end of a pause."
_ACCEPTED = "Accepted draft tokens, by drafter and by position among the drafts of a step."
_REJECTED = "Requests refused because the queue was full, by the limit that they exceeded; all API servers together."
_IMAGES = "Images in prompts; an image counts each time."
_IMAGES_FOUND = "Images in prompts that this server still had preprocessed from an earlier request."
_REASONS = "Ended requests by finish reason; a stop string counts as stop."
_PREEMPTED = "Sequences preempted, by mode: their KV was swapped out, or is recomputed."
_SWAPPED = "KV blocks of preempted sequences moved to host memory (out) and back (in)."
_WORKERS = "Ranks that share the model; each has a part of every KV block."
_RESTARTS = "Worker groups that were replaced, by the failure of the worker that caused it; engine: replaced engines."
_SLEEP = "1 for the current state of the engine: awake, weights_offloaded (level 1) or discard_all (level 2)."
_PAUSED = "1 while the engine is paused."
_RECOVERING = "1 while workers are being replaced."
_ADAPTERS = "Always 1; the labels have the adapters of running and of waiting requests."
_EXPERTS = "Tokens routed to each expert; with --expert-load-metrics."
_DISK_HELD = "Bytes of KV on disk, of all engines that share the directory."
_DISK_MOVED = "Bytes of KV that rank 0 has loaded from disk (loaded) and written to it (stored)."
_DISK_TIME = "Seconds that rank 0's threads spent loading from disk (load) and storing to it (store)."
_DISK_QUEUE = "Loads and stores of rank 0 that are still queued or running."
_DISK_ERRORS = "Failed reads and writes of the disk cache, and removed files, by reason: damaged, foreign, evicted, ..."
_LOAD = "Running HTTP requests that generate."
_RESPONSES = "HTTP responses."


def _fields(
    kind: Literal["gauge", "counter", "histogram"], source: str, rows: Iterable[tuple[str, str, str]]
) -> Iterator[Definition]:
    """Metrics that are fields of `source`, a dotted name in a Scrape, as rows of name, field and text."""
    return (Definition(name, kind, text, attrgetter(f"{source}.{field}")) for name, field, text in rows)


METRICS: tuple[Definition, ...] = (
    *_fields("gauge", "stats", _GAUGES),
    Definition("vllm:kv_cache_usage_perc", "gauge", _USAGE, _usage),
    Definition("vllm:gpu_cache_usage_perc", "gauge", "Deprecated: vllm:kv_cache_usage_perc.", _usage),
    Definition(
        "vllm:cache_config_info",
        "gauge",
        "Always 1; the labels have the settings of the KV cache.",
        _cache_config,
        tuple(_CACHE_CONFIG),
    ),
    Definition("vllm_lite:workers", "gauge", _WORKERS, attrgetter("config.tensor_parallel_size")),
    Definition("vllm:lora_requests_info", "gauge", _ADAPTERS, _adapters, _LORA_LABELS),
    *_fields("counter", "stats", _COUNTERS),
    Definition(
        "vllm:prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache, on the device.", _device_hits
    ),
    Definition("vllm:prompt_tokens_by_source", "counter", _SOURCES, _sources, ("source",)),
    Definition("vllm:prompt_tokens_cached_by_source", "counter", _TIERS, _tiers, ("source",)),
    Definition("vllm:num_requests_waiting_by_reason", "gauge", _WAITING, _waiting, ("reason",)),
    *(Definition(name, "counter", text, _drafts(field), ("method",)) for name, field, text in _DRAFTS),
    Definition("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", _ACCEPTED, _accepted, ("method", "position")),
    Definition("vllm:admission_rejections", "counter", _REJECTED, _rejections, ("reason",), is_servers=True),
    Definition("vllm:mm_cache_queries", "counter", _IMAGES, _images(0), (SERVER,), is_servers=True),
    Definition("vllm:mm_cache_hits", "counter", _IMAGES_FOUND, _images(1), (SERVER,), is_servers=True),
    Definition("vllm:request_success", "counter", _REASONS, _ended, ("finished_reason",)),
    Definition("vllm_lite:restarts", "counter", _RESTARTS, _restarts, ("cause",)),
    Definition("vllm_lite:recovering", "gauge", _RECOVERING, lambda at: float(bool(at.stats.recovering))),
    Definition("vllm:engine_sleep_state", "gauge", _SLEEP, _sleep_state, ("sleep_state",)),
    Definition("vllm_lite:paused", "gauge", _PAUSED, lambda at: float(at.stats.is_paused)),
    Definition("vllm_lite:preemptions", "counter", _PREEMPTED, _preemptions, ("mode",)),
    Definition("vllm_lite:swapped_blocks", "counter", _SWAPPED, _swapped, ("direction",)),
    Definition("vllm_lite:disk_bytes", "gauge", _DISK_HELD, _disk("num_bytes"), ("what",)),
    Definition("vllm_lite:disk_moved_bytes", "counter", _DISK_MOVED, _disk("loaded_bytes", "stored_bytes"), ("what",)),
    Definition("vllm_lite:disk_seconds", "counter", _DISK_TIME, _disk("load_s", "store_s"), ("what",)),
    Definition("vllm_lite:disk_queue", "gauge", _DISK_QUEUE, _disk("num_queued"), ("what",)),
    Definition("vllm_lite:disk_errors", "counter", _DISK_ERRORS, _disk_errors, ("reason",)),
    Definition("vllm_lite:expert_tokens", "counter", _EXPERTS, _expert_tokens, ("layer", "expert")),
    *_fields("histogram", "stats.requests", _HISTOGRAMS),
    *(Definition(name, "histogram", text, _of_blocks(field)) for name, field, text in _BLOCK_HISTOGRAMS),
    Definition("vllm_lite:server_load", "gauge", _LOAD, lambda at: {(at.server,): at.load}, (SERVER,), is_servers=True),
    Definition(
        "vllm_lite:http_responses", "counter", _RESPONSES, _responses, (SERVER, "route", "status"), is_servers=True
    ),
)
_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class Metrics:
    """Answers GET /metrics, and counts responses."""

    def __init__(
        self, calls: Calls, config: EngineConfig, model_name: str, server: str = "0", images: ImagePool | None = None
    ) -> None:
        """`config` is resolved; `server` is the label of this API server; `images` preprocesses images, if the model
        takes any."""
        self._images = images
        self._calls = calls
        self._config = config
        self._model_name = model_name
        self._server = server
        self._paths: set[str] = set()
        self._endpoints: dict[object, str] = {}
        self._responses = Counter[tuple[str, str]]()

    async def get(self, _: Request) -> Response:
        """Answer in Prometheus' text format. Raises ApiError (503) if the engine is dead."""
        found = await self._calls.stats_of_engines()
        responses, load, rejections = dict(self._responses), len(self._calls), self._calls.scoreboard.rejections()
        images = None if self._images is None else (self._images.num_asked, self._images.num_found)
        scrape = Exposition(
            [
                Scrape(stats, self._config, engine, load, responses, self._server, rejections, number, images)
                for number, stats, engine in found
            ],
            self._model_name,
        )
        # Clients that prefer OpenMetrics get this format too: for OpenMetrics the library writes `vllm_` instead of
        # `vllm:`. In a thread, because 6,144 experts take 0.1 s, for which streams would stall.
        text = await asyncio.to_thread(generate_latest, scrape)
        return Response(text, headers={"Content-Type": MEDIA_TYPE})

    def know(self, routes: Iterable[BaseRoute]) -> None:
        """Count responses of these routes by their paths from now on."""
        for route in routes:
            if isinstance(route, Route):
                if route.param_convertors:
                    self._endpoints[route.endpoint] = route.path
                else:
                    self._paths.add(route.path)

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Wrap `app`, so that every response is counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_and_count(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"]
                    route = path if path in self._paths else self._endpoints.get(scope.get("endpoint"), OTHER)
                    self._responses[route, str(message["status"])] += 1
                await send(message)

            await app(scope, receive, send_and_count)

        return counted


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return pairs (bound, number of values up to it), in Prometheus' format."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def table() -> str:
    """Format all metrics as a Markdown table, for docs/metrics.md."""
    rows = ["| name | kind | labels | what it is |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        name = metric.name + "_total" * (metric.kind == "counter")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(rows) + "\n"
