"""`python benchmarks beside`: two checkouts in turn, here ones whose benchmark prints what a file says."""

import json
from pathlib import Path

import pytest
from micro import beside, commands

PROGRAM = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent
runs = json.loads((here / "runs.json").read_text())
with (here.parent.parent / "order").open("a") as order:
    order.write(here.parent.name + " " + " ".join(sys.argv[1:]) + "\\n")
(here / "runs.json").write_text(json.dumps(runs[1:]))
if runs[0] is None:
    sys.exit("the library has another ABI")
print(json.dumps(runs[0]))
"""


def checkout(root: Path, name: str, *runs: object) -> Path:
    folder = root / name / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text(PROGRAM)
    (folder / "runs.json").write_text(json.dumps(runs))
    return root / name


def rows(us: float, **more: float) -> dict[str, object]:
    return {"commit": "abc", "same": True, "rows": [{"kernel": "norm", "threads": 1, "us": us, "best": 0} | more, [7]]}


def test_ratios_of_neighbouring_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine gets slower from round to round; the ratio stays. What a run lacks, or is 0, is not compared."""
    old = checkout(tmp_path, "old", rows(10, gb_s=5), rows(20), rows(40))
    monkeypatch.setattr(beside, "HERE", checkout(tmp_path, "new", rows(5), rows(10), rows(30)))
    assert commands.main(["beside", str(old), "--rounds", "3", "--json", "--", "kernels", "--rows", "1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ratios"] == {
        "rows 1 norm us": {"ratio": 0.5, "smallest": 0.5, "largest": 0.75, "other": 20, "here": 10}
    }
    assert (tmp_path / "order").read_text().splitlines() == [
        f"{name} kernels --rows 1 --json" for name in ("old", "new", "new", "old", "old", "new")
    ]
    assert "rows 1 norm us" in beside.table(figures)


def test_a_run_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside, "HERE", checkout(tmp_path, "new", rows(5)))
    assert commands.main(["beside", str(checkout(tmp_path, "old", None)), "--", "step"]) == 2
    assert "failed in" in (said := capsys.readouterr().err)
    assert "the library has another ABI" in said
    assert commands.main(["beside", str(tmp_path), "--", "step"]) == 2
    assert "must be a checkout" in capsys.readouterr().err
