"""The result of `bench serve`: vLLM's metrics under vLLM's names, and its table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from vllm_lite.tools.bench.serve_client import Outcome

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Lists with one entry per request, written only with --save-detailed."""
_WIDTH = 50


def tpot_s(outcome: Outcome) -> float:
    """Seconds per token after the first; 0 if there is only one."""
    behind = outcome.output_len - 1
    return (outcome.latency_s - outcome.ttft_s) / behind if behind > 0 else 0.0


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    percentiles: Sequence[float],
    goodput: Mapping[str, float],  # metric -> maximum milliseconds of a good request
) -> dict[str, Any]:
    """All metrics, and the lists of DETAILS. Failed requests count only in `failed`."""
    served = [outcome for outcome in outcomes if not outcome.error]
    input_len, output_len = sum(outcome.input_len for outcome in served), sum(outcome.output_len for outcome in served)
    duration_s = max(duration_s, 1e-9)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(served),
        "failed": len(outcomes) - len(served),
        "total_input_tokens": input_len,
        "total_output_tokens": output_len,
        "request_throughput": len(served) / duration_s,
        "request_goodput": sum(_is_good(one, goodput) for one in served) / duration_s if goodput else None,
        "output_throughput": output_len / duration_s,
        "total_token_throughput": (input_len + output_len) / duration_s,
        "max_output_tokens_per_s": max(tokens_over_time(served, min(1.0, duration_s)), default=0.0),
        "max_concurrent_requests": max((count for _, count in running_over_time(served)), default=0),
        "input_lens": [outcome.input_len for outcome in outcomes],
        "output_lens": [outcome.output_len if not outcome.error else 0 for outcome in outcomes],
        "start_times": [outcome.start_s for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
    for name, values_s in samples(served).items():
        values = sorted(1000 * value for value in values_s)
        figures[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        figures[f"median_{name}_ms"] = percentile(values, 50)
        figures[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        figures |= {f"p{wanted:g}_{name}_ms": percentile(values, wanted) for wanted in percentiles}
    return figures


def samples(served: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds by metric; a request with one output token has no TPOT."""
    return {
        "ttft": [outcome.ttft_s for outcome in served],
        "tpot": [tpot_s(outcome) for outcome in served if outcome.output_len > 1],
        "itl": [gap_s for outcome in served for gap_s in outcome.itls_s],
        "e2el": [outcome.latency_s for outcome in served],
    }


def percentile(ordered: Sequence[float], wanted: float) -> float:
    """A percentile of sorted values, by linear interpolation; 0 if there are none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * wanted / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def _is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    taken_s = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome), "e2el": outcome.latency_s}
    return all(1000 * taken_s[name] <= limit_ms for name, limit_ms in goodput.items())


def tokens_over_time(served: Sequence[Outcome], width_s: float) -> list[float]:
    """Output tokens per second in each interval of `width_s` since the first request; a request's tokens are divided
    evenly over its chunks."""
    if not served:
        return []
    begin_s = min(outcome.start_s for outcome in served)
    end_s = max(outcome.chunks_s[-1] for outcome in served)
    rates = [0.0] * (int((end_s - begin_s) / width_s) + 1)
    for outcome in served:
        each = outcome.output_len / len(outcome.chunks_s) / width_s
        for time_s in outcome.chunks_s:
            rates[int((time_s - begin_s) / width_s)] += each
    return rates


def running_over_time(served: Sequence[Outcome]) -> list[tuple[float, int]]:
    """(seconds since the first request, number of requests that run from then on)."""
    if not served:
        return []
    begin_s = min(outcome.start_s for outcome in served)
    changes = sorted(
        change
        for outcome in served
        for change in ((outcome.start_s - begin_s, 1), (outcome.chunks_s[-1] - begin_s, -1))
    )  # at equal times, ends come before starts
    counts = accumulate(change for _, change in changes)
    return [(time_s, count) for (time_s, _), count in zip(changes, counts, strict=True)]


def table(figures: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Format the result as vLLM's table, with the latencies of `metrics`."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
        ("Maximum request concurrency:", figures.get("max_concurrency")),
        ("Request rate configured (RPS):", None if figures["request_rate"] == "inf" else figures["request_rate"]),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Request goodput (req/s):", figures["request_goodput"]),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", figures["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_row(name, value) for name, value in rows if value is not None]
    for name in metrics:
        lines.append(METRICS[name].center(_WIDTH, "-"))
        kinds = [("Mean", "mean"), ("Median", "median"), *((f"P{wanted:g}", f"p{wanted:g}") for wanted in percentiles)]
        lines += [_row(f"{title} {name.upper()} (ms):", figures[f"{key}_{name}_ms"]) for title, key in kinds]
    return "\n".join([*lines, "=" * _WIDTH])


def _row(name: str, value: float) -> str:
    return f"{name:<39} {value:<10.2f}" if isinstance(value, float) else f"{name:<39} {value:<10}"
