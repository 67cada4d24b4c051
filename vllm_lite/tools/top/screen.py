"""Draws the engines of a server, and its models if it has several, within a number of lines and columns."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_lite.tools.top.watched import EngineLook, ServerLook, model_of

BARS = " ▁▂▃▄▅▆▇█"
ORDER = ("running", "swapped", "preempted", "waiting")
NO_CACHE = "no KV cache"
"""An encoder's cache, which has the null block alone."""
COLUMNS = ("request", "state", "prompt", "cached", "output", "blocks", "age", "waits for")
OPTIONAL = ("cached", "blocks", "prompt", "age", "output", "waits for")
"""Columns that are dropped, in this order, if the terminal is too narrow."""
OF_MODELS = ("model", "state", "memory", "requests", "swaps", "used", "problem")
NUMBERS = ("prompt", "cached", "output", "blocks", "age", "memory", "requests", "used")
ENGINE_LINES = 6
"""Lines of an engine without its requests."""
LEAST_ROWS = 2
"""An engine with room for fewer requests gets a single line."""
MIN_TABLE = 3
"""Minimum number of lines for a table of models."""
MAX_ID_CHARS = 40
MIN_CHARS = 6


def screen(watched: ServerLook, num_lines: int, num_columns: int) -> RenderableType:
    """Draw as much as fits."""
    num_engines = len(watched.engines)
    room = max(1, num_lines - 1)
    for_models = 0 if not watched.models else max(1, room // 3) if num_engines else room - 1
    models = _models(watched, for_models, num_columns) if watched.models else []
    if not num_engines:
        return Group(*models, _line("no model is loaded" if watched.models else "no engine answers"))
    used = len(models) and min(for_models, 2 + len(watched.models)) if for_models > MIN_TABLE else len(models)
    return Group(*models, *_engines(watched, max(1, room - used), num_columns))


def _engines(watched: ServerLook, num_lines: int, num_columns: int) -> Iterator[RenderableType]:
    """Draw each engine with its requests, or in one line if there is too little room."""
    engines = [(number, watched.engines[number]) for number in sorted(watched.engines, key=_order)]
    room = num_lines // len(engines) - ENGINE_LINES
    if room >= LEAST_ROWS:
        for number, engine in engines:
            yield from _engine(_name(number, engine, len(engines)), engine, room, num_columns)
        return
    shown = len(engines) if len(engines) <= num_lines else num_lines - 1
    for number, engine in engines[:shown]:
        yield _line(_summary(_name(number, engine, len(engines)), engine))
    if len(engines) > shown:
        yield _more(len(engines) - shown)


def plain(text: object) -> str:
    """A text without control characters, as it may come from others."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(text))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _more(count: int) -> Text:
    return _line(f"and {count} more" if count > 0 else "", "dim")


def _order(number: str) -> tuple[str, str]:
    model, _, own = number.rpartition("/")
    return model, own.rjust(8)


def _name(number: str, engine: EngineLook, num_engines: int) -> str:
    """The name of an engine: its model's name if there are several models, else its folder's, with the engine's number
    if there are several."""
    if model_of(number):
        return plain(number.removesuffix("/0"))
    name = plain(engine.head["model"].rstrip("/").rpartition("/")[2])
    return f"{name} [{number}]" if num_engines > 1 else name


def _summary(name: str, engine: EngineLook) -> str:
    running, waiting, used, total = (
        engine.counts(count) for count in ("num_running", "num_waiting", "num_used_blocks", "num_blocks")
    )
    cache = f"{used:,} of {total:,} KV blocks" if total > 1 else NO_CACHE
    return (
        f"{name}  {engine.head['state']}  {running:,} running, {waiting:,} waiting, "
        f"{engine.rate('generated_tokens'):,.0f} tokens/s, {cache}"
    )


def _models(watched: ServerLook, num_lines: int, num_columns: int) -> list[RenderableType]:
    """The models of a server with several, loaded ones first; only the title if there is no room for a table."""
    models = watched.models
    held = sum(model["memory_bytes"] for model in models.values())
    title = f"{len(models)} models, {_size(held)} of {_size(watched.memory_limit_bytes)} of memory"
    if num_lines <= MIN_TABLE:
        return [_line(title, "bold")]
    room = num_lines - 2  # below the title and the column names
    order = sorted(models, key=lambda name: (STATES.index(models[name]["state"]), name))
    shown = order if len(order) <= room else order[: room - 1]
    cells = [[plain(name), *_model_cells(models[name], watched.time_s)] for name in shown]
    table = _table(OF_MODELS, cells, num_columns, ("used", "swaps", "requests", "problem", "memory"))
    more = [_more(len(models) - len(shown))] if len(models) > len(shown) else []
    return [_line(title, "bold"), table, *more]


STATES = ("loaded", "loading", "unloading", "sleeping", "failed", "unloaded")


def _model_cells(model: dict[str, Any], now_s: float) -> Iterator[str]:
    counts = model["counts"]
    yield model["state"]
    yield _size(model["memory_bytes"])
    yield f"{model['active']}+{model['waiting']}" if model["waiting"] else str(model["active"])
    yield f"{counts['loads'] + counts['wakes']} in {counts['sleeps'] + counts['stops']} out"
    yield "never" if model["used"] is None else _ago(max(0.0, now_s - model["used"]))
    yield plain(model["error"] or model["hidden"] or "")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _ago(seconds: float) -> str:
    return (
        f"{seconds:.0f}s" if seconds < 100 else f"{seconds / 60:.0f}min" if seconds < 6000 else f"{seconds / 3600:.0f}h"
    )


def _engine(name: str, engine: EngineLook, room: int, num_columns: int) -> Iterator[RenderableType]:
    head, step = engine.head, engine.head["step"]
    title = Text.assemble((name, "bold"), f"  {plain(head['state'])}", f"  step {step['number']}: {_step(step)}")
    title.no_wrap, title.overflow = True, "ellipsis"
    yield title
    yield _line(_speeds(engine, num_columns))
    yield _line(_latencies(engine))
    yield _line(_blocks(engine, num_columns))
    rows = sorted(engine.requests.values(), key=lambda row: (ORDER.index(row["state"]), row["place"] or 0))
    yield _table(COLUMNS, [list(_cells(row, engine.time_s)) for row in rows[:room]], num_columns, OPTIONAL)
    yield _more(head["num_requests"] - min(room, len(rows)))


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
    if total <= 1:
        return ", ".join([NO_CACHE, *more])
    text = f" {used:,} of {total:,} KV blocks, {cached:,} cached" + "".join(f", {each}" for each in more)
    width = max(4, min(30, num_columns - len(text) - 2))
    filled = round(width * used / total) if total else 0
    return f"[{'#' * filled}{'.' * (width - filled)}]{text}"


def _table(columns: tuple[str, ...], rows: Iterable[list[str]], num_columns: int, optional: Iterable[str]) -> Table:
    """A table with a line per row. If it is too wide, the first and last columns are narrowed, then `optional` ones
    dropped."""
    cells = [list(columns), *rows]
    kept = list(range(len(columns)))
    for name in optional:
        if _least(cells, kept) <= num_columns:
            break
        kept.remove(columns.index(name))
    widths = [_width(cells, index) for index in kept]
    room = num_columns - sum(widths[1:-1]) - len(kept) + 1
    widths[-1] = min(widths[-1], max(MIN_CHARS, room - MAX_ID_CHARS, room // 2))
    widths[0] = min(widths[0], MAX_ID_CHARS, max(1, room - widths[-1]))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    for index, width in zip(kept, widths, strict=True):
        justify: JustifyMethod = "right" if columns[index] in NUMBERS else "left"
        table.add_column(width=width, justify=justify, no_wrap=True, overflow="ellipsis")
    for number, line in enumerate(cells):
        table.add_row(*(Text(line[index], style="" if number else "dim") for index in kept))
    return table


def _width(cells: list[list[str]], index: int) -> int:
    return max(cell_len(line[index]) for line in cells)


def _least(cells: list[list[str]], kept: list[int]) -> int:
    """The width of a table whose first and last columns are as narrow as allowed."""
    ends = sum(min(MIN_CHARS, _width(cells, index)) for index in {kept[0], kept[-1]})
    return ends + sum(_width(cells, index) for index in kept[1:-1]) + len(kept) - 1


def _cells(row: dict[str, Any], now_s: float) -> Iterator[str]:
    age_s = now_s - float(row["since"])
    host = f"+{row['host_blocks']}" if row["host_blocks"] else ""
    place = "" if row["place"] is None else f" ({row['place']} before it)"
    reason = "" if row["reason"] is None else row["reason"].removeprefix("waits_for_")
    named = (row["id"], row["state"], row["prompt"], row["cached"], row["output"], f"{row['blocks']}{host}")
    for each in (*named, _ago(max(0.0, age_s)), reason + place):
        yield plain(each)


def sparkline(values: list[float]) -> str:
    """A character per value; the largest value is a full block."""
    largest = max(values, default=0.0)
    return "".join(BARS[round((len(BARS) - 1) * value / largest)] if largest else BARS[0] for value in values)
