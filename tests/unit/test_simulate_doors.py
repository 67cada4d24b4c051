"""Doors to simulations beside `simulate` itself: `bench serve --simulated`, `plan --load`, shipped files."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.unit.test_bench_client import DEADLINE_S, HEAD, STREAM, Stub, answering, chunked
from tests.unit.test_simulate import load_at, made_up
from vllm_lite.tools.cli import main
from vllm_lite.tools.simulate import cost
from vllm_lite.tools.simulate.variants import RunOptions, simulate

SHORT = ["--num-prompts", "5", "--random-input-len", "20", "--random-output-len", "4"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("doors") / "trace")
    simulate(made_up(), {}, load_at(12.0, 60), RunOptions(record=path))
    return path


async def test_measured_figures_have_simulated_ones_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "times.json")
    cost.write(made_up(), file)
    async with Stub(answering(HEAD + chunked(STREAM) + chunked(b""))) as stub:
        words = ["bench", "serve", "--base-url", stub.url, "--model", "m", *SHORT, "--disable-tqdm"]
        done = asyncio.to_thread(main, [*words, "--simulated", file])
        assert await asyncio.wait_for(done, DEADLINE_S) == 0
        out = capsys.readouterr().out
        assert len([line for line in out.splitlines() if line.endswith("%") and "ttft p" in line]) == 2
        num_asked = len(stub.requests)
        for wrong in (["--simulated", "missing"], ["--simulated", file, "--metric-percentiles", "50"]):
            assert await asyncio.wait_for(asyncio.to_thread(main, [*words, *wrong]), DEADLINE_S) == 2
        assert len(stub.requests) == num_asked, "nothing is measured that cannot be compared"


def test_a_plan_simulates_a_recorded_load(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "8GiB", "--load", trace, "--json"]) == 0
    roomy = json.loads(capsys.readouterr().out)
    assert roomy["load"]["completed"] == 60
    few = ["--max-num-seqs", "1", "--num-gpu-blocks-override", "64"]
    assert main(["plan", "--memory", "8GiB", "--load", trace, "--json", *few]) == 0
    tight = json.loads(capsys.readouterr().out)["load"]
    assert tight["peak_kv_usage"] > 2 * roomy["load"]["peak_kv_usage"]
    assert tight["mean_ttft_ms"] > 1.2 * roomy["load"]["mean_ttft_ms"]
    assert main(["plan", "--memory", "8GiB", "--load", trace]) == 0
    assert "The recorded requests, with these sizes" in capsys.readouterr().out
    assert main(["plan", "--memory", "8GiB", "--load", trace, "--block-size", "32"]) == 2
    assert "give --block-size 16" in capsys.readouterr().err


def test_fitted_files_of_the_package_are_found_by_name_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "SHIPPED", tmp_path)
    cost.write(made_up(machine="another"), str(tmp_path / "tiny_other.json"))
    assert main(["simulate", *SHORT]) == 2
    assert main(["simulate", "tiny_other", *SHORT]) == 0
    assert main(["simulate", "tiny", *SHORT]) == 2
    error = capsys.readouterr().err
    assert "tiny cannot be read (No such file or directory); with the program come tiny_other" in error
    cost.write(made_up(machine=cost.this_machine(), model="tiny"), str(tmp_path / "tiny_this.json"))
    assert main(["simulate", *SHORT]) == 0
    assert "tiny: times of" in capsys.readouterr().out


def test_files_that_come_with_the_program_are_sound() -> None:
    for path in cost.shipped().values():
        times = cost.read(str(path))
        assert times.date
        assert "/" not in times.model
        assert simulate(times, {}, load_at(1.0, 5)).figures["completed"] == 5
