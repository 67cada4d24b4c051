"""Tables of README and docs/quantization.md that benchmarks/cpu_tables.py writes from benchmarks/results."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import cpu_tables  # noqa: E402 - found only once benchmarks/ is on the path


def way(next_token: float) -> dict[str, float]:
    return {"next_token": next_token, "same_greedy": 0.985}


def cells(**speeds: float) -> dict[str, dict[str, float]]:
    return {name.replace("__", "-"): {"out_tok_s": speed} for name, speed in speeds.items()}


def test_documents_have_the_measured_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu_tables.py", "--check"])
    assert cpu_tables.main() == 0, "run python benchmarks/cpu_tables.py"


def test_comparisons_of_all_models_are_in_one_file() -> None:
    """Tools read it, and rely on these keys."""
    found = json.loads((cpu_tables.RESULTS / "peers-cpu.json").read_text())
    assert {"device", "date", "commit", "rows"} <= found.keys()
    keys = {"model", "dtype", "workload", "metric", "ours", "peer", "best_peer", "ratio"}
    assert all(keys <= row.keys() for row in found["rows"])
    kinds = {(row["model"], row["dtype"]) for row in found["rows"]}
    assert {("small", "bf16"), ("small", "int8"), ("medium", "int4"), ("llama1b", "int8")} <= kinds


def test_a_model_has_a_row_for_each_of_our_ways_that_was_measured() -> None:
    ways = {"int8": way(0.0321), "llama.cpp Q8_0": way(0.0561), "OpenVINO int8": way(0.08), "llama.cpp Q4_0": way(0.5)}
    lines = list(cpu_tables.accuracy_table({"smollm2": {"dense": ways}}))
    assert len(lines) == 4
    assert lines[3] == "| | `int8` | 0.032, 98.5 % |  |  | Q8_0: 0.056, 98.5 %; OpenVINO int8: 0.080, 98.5 % |"


def test_speeds_stand_beside_the_error_of_the_best_peer() -> None:
    peers = {"llama-int8": "llama.cpp Q8_0", "ov-int8": "OpenVINO int8"}
    ways = {"llama.cpp Q8_0": way(0.0561)}
    raced = cells(ours__int8=150, llama__int8=100, ov__int8=50)
    ours = ("out_tok_s", "ours-int8", peers, ways)
    assert cpu_tables.speed(raced, *ours) == "150 : 100 llama.cpp (0.056), 1.50 x"
    assert cpu_tables.speed(raced | cells(ov__int8=200), *ours) == "150 : 200 OpenVINO, **0.75 x**"
    assert cpu_tables.speed(cells(ours__int8=150), *ours) == ""
    assert cpu_tables.speed(cells(ov__int8=150), *ours) == ""


def test_a_ratio_below_one_is_bold() -> None:
    raced = cells(ours__int8=150, llama__int8=100, ov__int8=50)
    ours = ("out_tok_s", "ours-int8", {"llama-int8": "", "ov-int8": ""})
    assert cpu_tables.ratio(raced, *ours) == "1.50"
    assert cpu_tables.ratio(raced | cells(ov__int8=200), *ours) == "**0.75**"
    assert cpu_tables.ratio(cells(ov__int8=200), *ours) == "-"


def test_text_around_a_table_stays() -> None:
    text = "a\n<!-- speed: written by benchmarks/cpu_tables.py -->\nold\n<!-- end -->\nb"
    made = text.replace("old", "new")
    assert cpu_tables.with_tables(text, {"speed": "new"}) == cpu_tables.with_tables(made, {"speed": "new"}) == made
