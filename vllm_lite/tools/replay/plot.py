"""The figure of `replay --plot`: running and waiting requests, KV blocks, and tokens, over the time of a trace."""

from typing import Any

from vllm_lite.tools.plotting import BLUE, GREEN, ORANGE, VIOLET, save
from vllm_lite.tools.replay.timeline import Timeline

MOST_ENTRIES = 1 << 16
"""Maximum number of entries of a trace: a figure has only some hundreds of columns."""
NUM_COLUMNS = 1200


def plot(timeline: Timeline, num_blocks: int, title: str, path: str) -> None:
    """Draw a timeline. Raises ConfigError if the file cannot be written."""
    from matplotlib.figure import Figure

    found = timeline.overview(NUM_COLUMNS)
    began_s = found["times_s"][0] if found["times_s"] else 0.0
    times_s = [each - began_s for each in found["times_s"]]
    figure = Figure(figsize=(11, 8), layout="constrained")
    requests, blocks, speed = figure.subplots(3, 1, sharex=True)
    _line(requests, times_s, found["num_running"], "running", BLUE)
    _line(requests, times_s, found["num_waiting"], "waiting", ORANGE)
    requests.set(title="Requests", ylim=(0, None))
    _line(blocks, times_s, found["num_used_blocks"], "held by requests", VIOLET)
    _line(blocks, times_s, found["num_cached_blocks"], "cached, held or free", GREEN)
    blocks.axhline(num_blocks, color="black", linewidth=1, linestyle=":", label=f"all {num_blocks:,}")
    blocks.set(title="KV blocks", ylim=(0, None))
    _line(speed, times_s, found["tokens_per_s"], "generated", BLUE, where="pre")
    speed.set(title="Tokens per second", xlabel="seconds", ylim=(0, None))
    for axis in (requests, blocks, speed):
        axis.grid(visible=True, alpha=0.25)
        axis.legend(fontsize="small", frameon=False, loc="upper left")
    figure.suptitle(title, parse_math=False)
    save(figure, path)


def _line(
    axis: Any, times_s: list[float], values: list[float], label: str, colour: str, *, where: str = "post"
) -> None:
    """Draw values that are valid from their time on, or up to it with `where` "pre"."""
    axis.step(times_s, values, where=where, color=colour, linewidth=1.2, label=label)
