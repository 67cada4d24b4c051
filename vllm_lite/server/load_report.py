"""Load reports in response headers, for load balancers that request them (ORCA), in vLLM's format."""

import msgspec
from starlette.requests import Request

from vllm_lite.protocol.stats import Stats
from vllm_lite.server.calls.registry import Calls
from vllm_lite.server.openai.errors import ApiError

ASKED, REPORT = "endpoint-load-metrics-format", "endpoint-load-metrics"
FORMS = ("TEXT", "JSON")


async def load_report(request: Request, calls: Calls) -> dict[str, str]:
    """Return the header with the engine's load if `request` asks for it in a known format; {} if not."""
    form = request.headers.get(ASKED, "").strip().upper()
    if form not in FORMS:
        return {}
    try:
        stats = await calls.stats()
    except ApiError:  # the response is sent without a report
        return {}
    return {REPORT: f"{form} {_written(form, stats)}"}


def _written(form: str, stats: Stats) -> str:
    used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
    named = {"kv_cache_usage_perc": used, "num_requests_waiting": float(stats.num_waiting)}
    if form == "JSON":
        return msgspec.json.encode({"named_metrics": named}).decode()
    return ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
