"""`python benchmarks step|startup` on the demo model: their figures exist and add up; the values are not checked."""

import json
from pathlib import Path

import pytest
from micro import commands, startup, step
from micro.step_worker import call_names

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint
from vllm_lite.client.engines.launch import SPAWNS_ENGINE, resolve
from vllm_lite.config import DEMO_MODEL, EngineConfig
from vllm_lite.kernels import cpu


@pytest.mark.skipif(not cpu.available(), reason="no native library")
@pytest.mark.parametrize("tp", [1, 2])
def test_the_parts_of_a_step_add_up(tp: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of several workers is shown. It answers and samples like the others. There are so many steps
    that the streams decode together for most of them, even if their requests arrive at different times on a busy
    machine."""
    arguments = ["step", "--streams", "3", "--context", "140", "--steps", "200"]
    assert commands.main([*arguments, "-tp", str(tp), "--cpu-threads", str(2 // tp), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["streams"], figures["context"], figures["threads"]) == (3, 140, 2)
    for process in ("worker", "engine"):
        parts = dict(figures[process])
        whole = parts.pop("step")
        assert parts.pop("cpu") > 0
        assert sum(parts.values()) == pytest.approx(whole, rel=1e-3)
        assert all(value >= 0 for value in parts.values())
    assert {"batch", "graph", "program", "sampler", "send", "receive", "wait", "rest"} <= figures["worker"].keys()
    assert min(figures["worker"]["sampler"], figures["worker"]["send"]) > 0
    assert ("all_reduce" in figures["kernels"]) == (tp > 1)
    assert {"schedule", "update", "publish", "send", "receive", "wait", "rest"} <= figures["engine"].keys()
    kernels = figures["kernels"]
    assert kernels["linear LM head"]["calls"] == pytest.approx(1, abs=0.05)  # streams come apart on a busy machine
    assert kernels["linear qkv"]["calls"] == kernels["linear down"]["calls"] == kernels["attend"]["calls"] > 1
    assert 0 < sum(kernel["us"] for kernel in kernels.values()) <= figures["worker"]["program"]
    assert figures["bound"]["bytes"] > 2_000_000
    assert figures["bound"]["us"] == pytest.approx(figures["bound"]["bytes"] / figures["bound"]["gb_s"] / 1e3)
    text = step.table(figures)
    assert "linear gate-up" in text
    assert "of the step" in text


@pytest.mark.parametrize("numbers", [["--streams", "0"], ["--steps", "3"], ["--context", "64", "--steps", "128"]])
def test_numbers_that_cannot_be_measured(numbers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["step", *numbers]) == 2
    assert "at least 1 stream and 4 steps" in capsys.readouterr().err


def test_linear_layers_are_named_by_their_order() -> None:
    layer = ["vllm_lite_linear", "vllm_lite_attend", *["vllm_lite_linear"] * 3]
    functions = ["vllm_lite_look_up", *layer, *layer, "vllm_lite_linear"]
    names = call_names(functions, [0] * len(functions))
    one = ["linear qkv", "attend", "linear output", "linear gate-up", "linear down"]
    assert names == ["look_up", *one, *one, "linear LM head"]


def test_random_weights_count_as_those_of_the_file() -> None:
    of_file, drawn = (
        resolve(EngineConfig.check({"model": DEMO_MODEL, "load_format": form})) for form in ("auto", "dummy")
    )
    spec = load_spec(of_file.model)
    sizes = [step.step_bytes(of_file, Checkpoint(spec, step.tensors(each, spec)), 2, 30) for each in (of_file, drawn)]
    assert sizes[0] == sizes[1] > 2_000_000


@pytest.mark.parametrize("llm", [False, True])
def test_startup(capsys: pytest.CaptureFixture[str], llm: bool) -> None:
    flags = ["--num-iters", "1", "--idle-s", "0.01", "--disable-tqdm", "--json", *["--llm"] * llm]
    assert commands.main(["startup", *flags, "--", "--max-model-len", "256"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["command"] == [*(["LLM"] if llm else ["vllm-lite", "serve"]), "--max-model-len", "256"]
    assert 0 < figures["ready_s"] < figures["first_token_s"]
    parts = figures["parts"]
    assert [part["process"] for part in parts].count("worker") == 5
    assert {part["process"] for part in parts} == {"engine", "worker"} | ({"script"} if llm else {"server", "client"})
    started = {part["what"]: part["end_s"] for part in parts}
    assert started[SPAWNS_ENGINE] < started["tokenizer, template"], "a tokenizer is loaded while the engine starts"
    assert all(part["took_s"] >= 0 for part in parts)
    assert [part["end_s"] for part in parts] == sorted(part["end_s"] for part in parts)
    assert parts[-1]["end_s"] == figures["first_token_s"]
    table = startup.table(figures)
    assert "imports torch" in table
    assert "1 starts after 0.01 s of nothing each" in table


@pytest.mark.parametrize(
    ("words", "text"),
    [(["--", "/no/such"], "/no/such"), (["--", "--uds", "x"], "no --uds"), (["--llm", "--", "/no/such"], "/no/such")],
)
def test_a_start_that_fails(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where a server makes its socket
    assert commands.main(["startup", "--num-iters", "1", "--disable-tqdm", *words]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1
