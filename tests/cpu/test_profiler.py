"""Profiles of a worker's steps with torch's profiler on a CPU: the steps that they contain, and the written files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.driver import Driver, make_prompt, new_request
from vllm_lite import LLM, SamplingParams
from vllm_lite.errors import RequestError
from vllm_lite.protocol.control import BeginProfile, EndProfile
from vllm_lite.runtime.nested_settings import ProfilerConfig
from vllm_lite.worker import profiler as profiler_module
from vllm_lite.worker.profiler import Profiler, StepRanges

PARTS = ("inputs", "model", "sample", "answer")


def config_of(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_use_gzip": False, **fields}


def driver_of(checkpoint: Path, folder: Path, **fields: Any) -> Driver:
    driver = Driver(checkpoint, device="cpu", profiler_config=config_of(folder, **fields))
    driver.run(new_request(0, make_prompt(5), [1, 2, 3]))
    return driver


def counts(folder: Path) -> dict[str, int]:
    """Count each part of a step in the only trace."""
    (path,) = folder.glob("*.pt.trace.json*")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    names = [event.get("name") for event in json.loads(data)["traceEvents"]]
    return {part: names.count(part) for part in PARTS}


def begin(driver: Driver) -> str | None:
    return driver.worker.profile(BeginProfile()).error


def end(driver: Driver) -> str | None:
    return driver.worker.profile(EndProfile()).error


def test_the_steps_between_begin_and_end(tiny_checkpoint: Path, tmp_path: Path) -> None:
    driver = driver_of(tiny_checkpoint, tmp_path / "new" / "traces")
    assert begin(driver) is None
    driver.decode(0, count=3)
    assert end(driver) is None
    driver.decode(0, count=2)
    assert counts(tmp_path / "new" / "traces") == dict.fromkeys(PARTS, 3)
    table = (tmp_path / "new" / "traces" / "profiler_out_0.txt").read_text()
    assert "model" in table
    assert not driver.worker.runner.ranges.is_on


def test_a_second_profile_has_steps_of_its_own(tiny_checkpoint: Path, tmp_path: Path) -> None:
    driver = driver_of(tiny_checkpoint, tmp_path)
    for count in (1, 2):
        assert begin(driver) is None
        driver.decode(0, count=count)
        assert end(driver) is None
        assert counts(tmp_path)["model"] == count
        next(tmp_path.glob("*.json")).unlink()


@pytest.mark.parametrize(
    ("fields", "steps", "wanted"),
    [
        ({"max_iterations": 2}, 5, 2),
        ({"delay_iterations": 3}, 5, 2),
        ({"delay_iterations": 1, "max_iterations": 2}, 6, 2),
    ],
)
def test_steps_that_are_waited_for_and_the_most(
    tiny_checkpoint: Path, tmp_path: Path, fields: dict[str, int], steps: int, wanted: int
) -> None:
    driver = driver_of(tiny_checkpoint, tmp_path, **fields)
    begin(driver)
    driver.decode(0, count=steps)
    assert end(driver) is None
    assert counts(tmp_path)["model"] == wanted


def test_a_profile_without_an_end_is_bounded(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_module, "MOST_STEPS", 2)
    driver = driver_of(tiny_checkpoint, tmp_path)
    begin(driver)
    driver.decode(0, count=5)
    end(driver)
    assert counts(tmp_path)["model"] == 2


def test_an_impossible_profile_is_an_error_and_steps_continue(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    driver = driver_of(tiny_checkpoint, tmp_path / "file" / "traces", delay_iterations=2)
    assert end(driver) == "no profile is on: start one first"
    assert begin(driver) is None
    assert begin(driver) == "a profile is on already: stop it first"
    assert end(driver) == "no step has come since the profile was to begin"
    assert begin(driver) is None
    driver.decode(0, count=3)
    assert "cannot be written to" in str(end(driver))
    driver.decode(0, count=1)
    ranges = StepRanges()
    for fields, said in (({}, "without a profiler"), ({"profiler": "cuda"}, "needs a GPU, this worker runs on cpu")):
        config = ProfilerConfig(**fields)  # type: ignore[arg-type]
        made = Profiler(config, 0, torch.device("cpu"), ranges, driver.progress)
        assert said in str(made.begin())
        assert not ranges.is_on


def test_names_that_torch_cannot_read_cost_the_table_alone(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise UnicodeDecodeError("utf-8", b"\x94", 0, 1, "invalid start byte")

    monkeypatch.setattr(torch.profiler.profile, "key_averages", breaks)
    driver = driver_of(tiny_checkpoint, tmp_path)
    begin(driver)
    driver.decode(0, count=2)
    assert end(driver) is None
    assert counts(tmp_path)["model"] == 2
    assert not (tmp_path / "profiler_out_0.txt").exists()
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", breaks)
    begin(driver)
    driver.decode(0, count=1)
    assert "cannot be written" in str(end(driver))
    driver.decode(0, count=1)


def test_through_an_engine(tmp_path: Path) -> None:
    config = config_of(tmp_path, torch_profiler_use_gzip=True)
    with LLM("demo", device="cpu", single_process=True, cpu_kvcache_space=0.05, profiler_config=config) as llm:
        llm.start_profile()
        llm.generate(["Once"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.stop_profile()
        with pytest.raises(RequestError, match="start one first"):
            llm.stop_profile()
    assert counts(tmp_path) == dict.fromkeys(PARTS, 4)
