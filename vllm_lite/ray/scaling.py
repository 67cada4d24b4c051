"""The wanted number of engines, for Serve's autoscaler: as many as the requests need, or as their KV caches do.

Requests are what Serve itself counts; but a few long ones fill a KV cache, and then others wait for blocks. Serve keeps
what this says between the fewest and the most replicas, and follows it only after its delays.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

KV_CACHE_USAGE = "kv_cache_usage"
"""The name under which replicas report it, as a share."""


class LoadPolicy:
    """Pickled by value into Serve's controller, so it keeps no state between calls."""

    def __init__(self, target_kv_cache_usage: float) -> None:
        """The share of its KV blocks that each engine should use."""
        self._target = target_kv_cache_usage

    def __call__(self, context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
        """The number of engines wanted, which need not be whole, and an empty state."""
        for_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
        usage = (context.aggregated_metrics or {}).get(KV_CACHE_USAGE, {})
        return max(for_requests, sum(usage.values()) / self._target), {}
