"""RayServeConfig: the settings of `vllm-lite ray-serve`: those of `serve`, and the replicas'."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from vllm_lite.runtime.nested_settings import Count
from vllm_lite.runtime.settings import Section
from vllm_lite.server.config import ServeConfig

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

ROUTERS: dict[str, str | None] = {"prefix": "vllm_lite.ray.router:PrefixRequestRouter", "least-loaded": None}
"""Routers by name; None is Serve's own."""


class RayServeConfig(ServeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Build it with `RayServeConfig.load(...)`. Each replica is one engine; `api_server_count` is the number of HTTP
    replicas in front of them."""

    replicas: Annotated[
        Count,
        Section("replicas"),
        Meta(description="engines, each with its own workers; the minimum with --max-replicas"),
    ] = 1
    max_replicas: Annotated[
        Count | None, Meta(description="let Ray Serve scale the engines between --replicas and this number")
    ] = None
    target_ongoing_requests: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="target number of requests per engine for scaling (default: half of --max-num-seqs)"),
    ] = None
    target_kv_cache_usage: Annotated[
        float, Meta(gt=0, le=1, description="target fraction of used KV blocks for scaling, if that needs more engines")
    ] = 0.8
    upscale_delay_s: Annotated[
        float, Meta(ge=0, description="how long the load is higher before an engine is added")
    ] = 10.0
    downscale_delay_s: Annotated[float, Meta(ge=0, description="how long the load is lower before one ends")] = 300.0
    drain_timeout_s: Annotated[
        float, Meta(ge=0, description="how long an engine that is to end may finish its requests; others then move")
    ] = 60.0
    max_ongoing_requests: Annotated[
        Count | None,
        Meta(description="concurrent requests of an engine; others wait for any engine (default: 2 x max_num_seqs)"),
    ] = None
    proxy_location: Annotated[
        Literal["EveryNode", "HeadOnly"],
        Meta(
            description="where the cluster listens on host and port: on each node with a replica, or on the head only"
        ),
    ] = "EveryNode"
    routing: Annotated[
        str,
        Meta(
            description="which engine gets a request: prefix is one with its prefix cached, least-loaded the less "
            "loaded of two; or module:Class of another RequestRouter of Ray Serve"
        ),
    ] = "prefix"
    routing_stats_period_s: Annotated[
        float, Meta(gt=0, description="interval of reports of the engines' cached blocks")
    ] = 10.0
    health_check_period_s: Annotated[float, Meta(gt=0, description="interval of health checks of the engines")] = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas must be at least replicas ({self.replicas}), got {self.max_replicas}")
        if self.routing not in ROUTERS and ":" not in self.routing:
            raise ValueError(f"routing must be {' or '.join(ROUTERS)}, or module:Class, got {self.routing!r}")
        if self.data_parallel_size > 1:
            raise ValueError(f"data_parallel_size is {self.data_parallel_size}; give replicas instead, Ray places them")
        if not self.port:
            raise ValueError("port must be above 0: all nodes of a cluster listen on the same one")
        taken = [name for name in ("uds", "address", "tcp_address") if getattr(self, name) is not None]
        taken += ["single_process"] * self.single_process
        if taken:
            raise ValueError(f"{taken[0]} is for one engine on this machine; leave it out")

    def server(self) -> ServeConfig:
        """The part that HTTP replicas need; it does not depend on the number of replicas."""
        return ServeConfig(**{name: getattr(self, name) for name in ServeConfig.__struct_fields__})


# ---- The wanted number of engines, for Serve's autoscaler: as the requests or the KV caches need, whichever is more
#
# Serve itself counts only requests; but a few long ones can fill a KV cache, and others then wait for blocks. Serve
# clamps the number between --replicas and --max-replicas, and applies it after its delays.


KV_CACHE_USAGE = "kv_cache_usage"
"""The name of the usage, a fraction, in the replicas' reports."""


class LoadPolicy:
    """Serve's autoscaling policy. Pickled by value into Serve's controller, so it keeps no state between calls."""

    def __init__(self, target_kv_cache_usage: float) -> None:
        """`target_kv_cache_usage`: the fraction of its KV blocks that each engine should use."""
        self._target = target_kv_cache_usage

    def __call__(self, context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
        """The wanted number of engines, which may be fractional, and an empty state."""
        for_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
        usage = (context.aggregated_metrics or {}).get(KV_CACHE_USAGE, {})
        return max(for_requests, sum(usage.values()) / self._target), {}
