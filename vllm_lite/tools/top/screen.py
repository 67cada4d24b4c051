"""Draws the engines of a server within so many lines and columns."""

import time
from collections.abc import Iterable, Iterator

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_lite.tools.top.watched import EngineLook, ServerLook

BARS = " ▁▂▃▄▅▆▇█"
ORDER = ("running", "swapped", "preempted", "waiting")
COLUMNS = ("request", "state", "prompt", "cached", "output", "blocks", "age", "waits for")
NUMBERS = ("prompt", "cached", "output", "blocks", "age")
ENGINE_LINES = 6
"""Lines of an engine without its requests."""
MAX_ID_CHARS = 40
MIN_CHARS = 6


def screen(watched: ServerLook, num_lines: int, num_columns: int) -> RenderableType:
    """As much as fits."""
    engines = watched.engines
    if not engines:
        return Text("no engine answers")
    room = max(1, num_lines // len(engines) - ENGINE_LINES - 1)
    return Group(*[part for number in sorted(engines, key=int) for part in _engine(engines[number], room, num_columns)])


def _engine(engine: EngineLook, room: int, num_columns: int) -> Iterator[RenderableType]:
    head, step = engine.head, engine.head["step"]
    name = head["model"].rstrip("/").rpartition("/")[2]
    yield Text.assemble((name, "bold"), f"  {head['state']}", f"  step {step['number']}: {_step(step)}")
    yield Text(_speeds(engine, num_columns))
    yield Text(_latencies(engine))
    yield Text(_blocks(engine, num_columns))
    rows = sorted(engine.requests.values(), key=lambda row: (ORDER.index(row["state"]), row["place"] or 0))
    yield _table(rows[:room], num_columns)
    hidden = head["num_requests"] - min(room, len(rows))
    yield Text(f"and {hidden} more" if hidden > 0 else "", style="dim")


def _step(step: dict[str, int]) -> str:
    if not step["tokens"]:
        return "nothing to compute"
    return f"{step['sequences']} sequences, {step['tokens']} tokens, {step['prefill']} of prompts"


def _speeds(engine: EngineLook, num_columns: int) -> str:
    generated, computed = engine.rate("generated_tokens"), engine.rate("prompt_tokens") - engine.rate("cached_tokens")
    text = f"{generated:,.0f} tokens/s out, {max(0.0, computed):,.0f} in  "
    return text + sparkline(list(engine.speeds)[-max(0, num_columns - len(text)) :])


def _latencies(engine: EngineLook) -> str:
    times = {name: engine.mean_s(name) for name in ("first_token_s", "token_gap_s", "queue_s")}
    shown = {name: "-" if value is None else f"{value * 1e3:,.1f} ms" for name, value in times.items()}
    prompt, cached = engine.counts("prompt_tokens"), engine.counts("cached_tokens")
    hits = f"{cached / prompt:.0%}" if prompt else "-"
    means = f"first token {shown['first_token_s']}, next {shown['token_gap_s']}, queue {shown['queue_s']}"
    return f"means: {means}; {hits} of prompts cached"


def _blocks(engine: EngineLook, num_columns: int) -> str:
    used, total, cached = (engine.counts(name) for name in ("num_used_blocks", "num_blocks", "num_cached_blocks"))
    more = [
        f"{label} {engine.counts(name):,}"
        for label, name in (("host", "num_used_host_blocks"), ("disk", "num_stored_keys"), ("preempted", "preemptions"))
        if engine.counts(name)
    ]
    text = f" {used:,} of {total:,} KV blocks, {cached:,} cached" + "".join(f", {each}" for each in more)
    width = max(4, min(30, num_columns - len(text) - 2))
    filled = round(width * used / total) if total else 0
    return f"[{'#' * filled}{'.' * (width - filled)}]{text}"


def _table(rows: Iterable[dict[str, object]], num_columns: int) -> Table:
    """The requests; what has no room is taken from their ids and reasons."""
    cells = [[Text(name, style="dim") for name in COLUMNS], *(list(_cells(row)) for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(COLUMNS))]
    room = num_columns - sum(widths[1:-1]) - len(COLUMNS) + 1
    widths[-1] = min(widths[-1], max(MIN_CHARS, room - MAX_ID_CHARS, room // 2))
    widths[0] = min(widths[0], MAX_ID_CHARS, max(MIN_CHARS, room - widths[-1]))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    for name, width in zip(COLUMNS, widths, strict=True):
        justify: JustifyMethod = "right" if name in NUMBERS else "left"
        table.add_column(width=width, justify=justify, no_wrap=True, overflow="ellipsis")
    for line in cells:
        table.add_row(*line)
    return table


def _cells(row: dict[str, object]) -> Iterator[Text]:
    age_s = time.time() - float(str(row["since"]))
    host = f"+{row['host_blocks']}" if row["host_blocks"] else ""
    place = "" if row["place"] is None else f" ({row['place']} before it)"
    reason = "" if row["reason"] is None else str(row["reason"]).removeprefix("waits_for_")
    blocks = f"{row['blocks']}{host}"
    named = (row["id"], row["state"], row["prompt"], row["cached"], row["output"], blocks)
    for each in (*named, f"{max(0.0, age_s):.0f}s", reason + place):
        yield Text(str(each))


def sparkline(values: list[float]) -> str:
    """A character for each value, the largest as high as a line."""
    largest = max(values, default=0.0)
    return "".join(BARS[round((len(BARS) - 1) * value / largest)] if largest else BARS[0] for value in values)
