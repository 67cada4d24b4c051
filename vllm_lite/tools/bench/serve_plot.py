"""The figure of `bench serve --plot`: distributions of latencies, and tokens and requests over time."""

from collections.abc import Sequence
from typing import Any

from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.bench.serve_result import METRICS, percentile, running_over_time, samples, tokens_over_time
from vllm_lite.tools.plotting import BLUE, DARK, save

NUM_BINS = 60


def plot(served: Sequence[Outcome], title: str, path: str) -> None:
    """Draw the completed requests. Raises ConfigError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for panel, (name, values_s) in zip(panels, samples(served).items(), strict=False):
        _distribution(panel, METRICS[name], [1000 * value for value in values_s])
    axes = list(figure.axes)
    end_s = max((outcome.chunks_s[-1] for outcome in served), default=1.0)
    width_s = max((end_s - min((outcome.start_s for outcome in served), default=0.0)) / NUM_BINS, 1e-3)
    rates = tokens_over_time(served, width_s)
    axes[4].stairs(rates, [place * width_s for place in range(len(rates) + 1)], fill=True, color=BLUE)
    axes[4].set(title="Output tokens per second", xlabel="seconds", ylim=(0, None))
    times = running_over_time(served)
    axes[5].step([time_s for time_s, _ in times], [count for _, count in times], where="post", color=BLUE)
    axes[5].set(title="Requests that run", xlabel="seconds", ylim=(0, None))
    for axis in axes:
        axis.grid(visible=True, alpha=0.25)
    figure.suptitle(title)
    save(figure, path)


def _distribution(axis: Any, title: str, values_ms: list[float]) -> None:
    axis.set(title=title, xlabel="ms", ylabel="count")
    if not values_ms:
        return
    values_ms.sort()
    axis.hist(values_ms, bins=NUM_BINS, color=BLUE)
    for wanted, style in ((50, "-"), (90, "--"), (99, ":")):
        value = percentile(values_ms, wanted)
        axis.axvline(value, color=DARK, linestyle=style, linewidth=1, label=f"p{wanted} {value:.4g} ms")
    axis.legend(fontsize="small", frameon=False)
