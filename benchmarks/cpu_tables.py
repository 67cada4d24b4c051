"""Write the tables of the documents that come from results/: python benchmarks/cpu_tables.py [--check]

docs/quantization.md gets the distance of each way from the exact model (accuracy-cpu.json), docs/performance.md our
speed and that of the best peer (peers-MODEL-bf16-cpu.json, peers-MODEL-exact-cpu.json), and README.md the ratios, both
with each engine's own error. peers-cpu.json gets the comparisons of all these files in one list. With --check nothing
is written, and the exit status is 1 if a table or the list differs from the figures.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- (\w+): written by benchmarks/cpu_tables.py -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {"smollm2": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
FORMS = {
    "file": "the file as it is",
    "dense": "its blocks as floats, then quantized by each",
    "off-grid": "the same, moved off their grid",
}
Ways = dict[str, Any]
"""Figures of a form of a model by way."""


class Row(NamedTuple):
    """A row of docs/quantization.md: our figures, and those of comparable ways of the peers."""

    name: str
    ours: tuple[str, str, str]
    """Our ways: by default, with --exact-activations, and in float32; "" for none."""
    peers: dict[str, str]
    """Column title -> way of a peer."""


ROWS = {
    "file": [
        Row("as it is", ("bfloat16", "bfloat16, exact", "float32"), {"llama.cpp": "llama.cpp"}),
        Row("KV cache `int8`", ("bfloat16, KV int8", "", ""), {}),
    ],
    "dense": [
        Row(
            "as they are",
            ("bfloat16", "", "float32"),
            {"torch, bfloat16": "transformers bfloat16", "OpenVINO, bfloat16": "OpenVINO bfloat16"},
        ),
        Row("KV cache `int8`", ("bfloat16, KV int8", "", ""), {}),
    ],
}
QUANTIZED = [
    Row(
        "`int8`",
        ("int8", "int8, exact", "int8, float32"),
        {"Q8_0": "llama.cpp Q8_0", "OpenVINO int8": "OpenVINO int8", "in float32": "OpenVINO int8, exact"},
    ),
    Row("`fp8`", ("fp8", "fp8, exact", "fp8, float32"), {}),
    Row(
        "`int4_g32`",
        ("int4_g32", "int4_g32, exact", "int4_g32, float32"),
        {"Q4_K_M": "llama.cpp Q4_K_M", "Q4_1": "llama.cpp Q4_1"},
    ),
    Row(
        "`int4`",
        ("int4", "int4, exact", "int4, float32"),
        {"Q4_0": "llama.cpp Q4_0", "OpenVINO int4": "OpenVINO int4", "in float32": "OpenVINO int4, exact"},
    ),
]
ROWS["dense"] += QUANTIZED
ROWS["off-grid"] = QUANTIZED


def figure(ways: Ways, way: str) -> str:
    if not (found := ways.get(way)):
        return ""
    return f"{found['next_token']:.3f}, {100 * found['same_greedy']:.1f} %"


def accuracy_table(models: dict[str, dict[str, Ways]]) -> Iterator[str]:
    yield "| model | weights | ours, bfloat16 | `--exact-activations` | `--dtype float32` | others |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for model, forms in models.items():
        for form, title in FORMS.items():
            ways = forms.get(form, {})
            if ways:
                yield f"| **{NAMES[model]}** | *{title}* | | | | |"
            for row in ROWS[form] if ways else ():
                ours = [figure(ways, way) for way in row.ours]
                others = [f"{name}: {found}" for name, way in row.peers.items() if (found := figure(ways, way))]
                if any(ours):
                    yield f"| | {row.name} | {' | '.join(ours)} | {'; '.join(others)} |"


MODELS = {
    "small": "34 M",
    "smollm2": "SmolLM2-135M itself",
    "medium": "506 M",
    "llama1b": "Llama-3.2-1B's shape",
}
SPEEDS = {
    "W1": ("one stream", "decode_tok_s"),
    "W2": ("32 prompts of 16-512", "out_tok_s"),
    "W4": ("4 prompts of 2048", "out_tok_s"),
}
ENGINES = {"llama": "llama.cpp", "llama_k": "llama.cpp", "llama_file": "llama.cpp", "ov": "OpenVINO", "vllm": "vLLM"}
RACED = {
    "bfloat16": (
        "ours-bf16",
        {"vllm-bf16": "", "llama-bf16": "", "ov-bf16": "OpenVINO bfloat16"},
        "dense",
        "bfloat16",
    ),
    "int8": ("ours-int8", {"llama-int8": "llama.cpp Q8_0", "ov-int8": "OpenVINO int8"}, "off-grid", "int8"),
    "`int4_g32`": (
        "ours_g32-int4",
        {"llama-int4": "llama.cpp Q4_0", "llama_k-int4": "llama.cpp Q4_K_M", "ov-int4": "OpenVINO int4"},
        "off-grid",
        "int4_g32",
    ),
    "the same Q4_0 file": ("ours_gguf-int4", {"llama-int4": "llama.cpp"}, "file", "bfloat16"),
    "the same Q4_1 file": ("ours_file-int4", {"llama_file-int4": "llama.cpp"}, "file", "bfloat16"),
}
"""Ours, the peers that it is raced with and their ways in accuracy-cpu.json, the form there, and our way."""
SHORT = {
    "bfloat16": ("bfloat16", ("", "OpenVINO bfloat16")),
    "int8": ("int8", ("llama.cpp Q8_0", "OpenVINO int8")),
    "`int4_g32`": ("`int4_g32`", ("llama.cpp Q4_K_M", "OpenVINO int4")),
    "a 4-bit file": ("the same Q4_0 file", ("llama.cpp", "")),
}
"""Rows of README: the key in RACED, and the ways of llama.cpp and OpenVINO whose errors follow ours."""


def results_of(model: str) -> Iterator[dict[str, Any]]:
    """Contents of the files of a model's races."""
    for kind in ("bf16", "exact"):
        if (path := RESULTS / f"peers-{model}-{kind}-cpu.json").exists():
            yield json.loads(path.read_text())


def raced(model: str) -> dict[str, Any]:
    """Figures by workload and engine, {} if there are none."""
    found: dict[str, Any] = {}
    for result in results_of(model):
        for work, cells in result["all"][model].items():
            found.setdefault(work, {}).update(cells)
    return found


def comparisons() -> str:
    """Content of peers-cpu.json: the comparisons with the best peer of all models, with the oldest of their dates."""
    found = [result for model in MODELS for result in results_of(model)]
    whole = {
        "device": found[0]["device"],
        "date": min(result["date"] for result in found),
        "commit": ", ".join(sorted({result["commit"] for result in found})),
        "rows": [row for result in found for row in result["rows"]],
    }
    return json.dumps(whole, indent=1) + "\n"


def speed(cells: dict[str, Any], metric: str, engine: str, peers: dict[str, str], ways: Ways) -> str:
    """`100 : 68 llama.cpp (0.057), 1.47 x`: ours, the best peer with its error, how many times."""
    there = {peer: float(cells[peer][metric]) for peer in peers if peer in cells}
    if engine not in cells or not there:
        return ""
    best = max(there, key=lambda peer: there[peer])
    ours = float(cells[engine][metric])
    error = ways.get(peers[best])
    named = (
        f"{ENGINES[best.rpartition('-')[0]]} ({error['next_token']:.3f})" if error else ENGINES[best.rpartition("-")[0]]
    )
    times = f"{ours / there[best]:.2f} x"
    return f"{ours:.4g} : {there[best]:.4g} {named}, {times if ours >= there[best] else f'**{times}**'}"


def speed_table(models: dict[str, dict[str, Ways]]) -> Iterator[str]:
    yield f"| Llama of | weights | our error | {' | '.join(title for title, _ in SPEEDS.values())} |"
    yield "| --- " * (3 + len(SPEEDS)) + "|"
    for model, title in MODELS.items():
        cells = raced(model)
        for name, (engine, peers, form, way) in RACED.items():
            ways = models["smollm2"][form]
            found = [speed(cells.get(work, {}), metric, engine, peers, ways) for work, (_, metric) in SPEEDS.items()]
            if any(found):
                yield f"| {title} | {name} | {ways[way]['next_token']:.3f} | {' | '.join(found)} |"


def ratio(cells: dict[str, Any], metric: str, engine: str, peers: dict[str, str]) -> str:
    there = [float(cells[peer][metric]) for peer in peers if peer in cells]
    if engine not in cells or not there:
        return "-"
    found = float(cells[engine][metric]) / max(there)
    return f"{found:.2f}" if found >= 1 else f"**{found:.2f}**"


def ratio_table(models: dict[str, dict[str, Ways]]) -> Iterator[str]:
    """The table of README, for these shapes only, because README is short."""
    yield "| weights | one stream | 32 prompts | nats: ours/llama.cpp/OpenVINO |"
    yield "| --- | --- | --- | --- |"
    shapes = [raced(model) for model in ("small", "medium", "llama1b")]
    for name, (raced_as, others) in SHORT.items():
        engine, peers, form, way = RACED[raced_as]
        columns = [
            "/".join(ratio(cells.get(work, {}), SPEEDS[work][1], engine, peers) for cells in shapes)
            for work in ("W1", "W2")
        ]
        ways = models["smollm2"][form]
        errors = [f"{ways[each]['next_token']:.3f}" if each in ways else "-" for each in (way, *others)]
        yield f"| {name} | {' | '.join(columns)} | {'/'.join(errors)} |"


def with_tables(text: str, tables: dict[str, str]) -> str:
    return TABLE.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is out of date")
    check = parser.parse_args().check
    models = json.loads((RESULTS / "accuracy-cpu.json").read_text())["models"]
    made = {"accuracy": accuracy_table(models), "speed": speed_table(models), "ratios": ratio_table(models)}
    tables = {name: "\n".join(lines) for name, lines in made.items()}
    documents = (ROOT / "README.md", ROOT / "docs" / "quantization.md", ROOT / "docs" / "performance.md")
    made_texts = {path: with_tables(path.read_text(), tables) for path in documents}
    old = 0
    for path, after in (made_texts | {RESULTS / "peers-cpu.json": comparisons()}).items():
        if path.exists() and path.read_text() == after:
            continue
        old = 1
        if check:
            print(f"{path.name} is out of date; python benchmarks/cpu_tables.py writes it", file=sys.stderr)
        else:
            path.write_text(after)
    return old if check else 0


if __name__ == "__main__":
    sys.exit(main())
