"""scripts/gpu_check without a GPU: with the emulator on a few cases, and with parts that crash, hang or say nothing."""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from tests.deadlines import scaled
from tests.kernels import emulator
from tests.ranks import connected, in_threads
from vllm_lite.parallel.gloo import GlooCommunicator

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "gpu_check_forked.py"
CPU = torch.device("cpu")
CHECK = ROOT / "tests" / "gpu" / "check"
sys.path.insert(0, str(CHECK))

import gpu_check_cases as cases  # noqa: E402
import gpu_check_linear as linear  # noqa: E402
import gpu_check_main as main  # noqa: E402
import gpu_check_parallel as parallel  # noqa: E402
import gpu_check_parts as parts  # noqa: E402
import gpu_check_stages as stages  # noqa: E402


def run(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=scaled(110))


# ---- as a whole


PARTS = "cases,graphs,speed,bench"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the parts that no other test runs without a GPU, in one process, and return the folder of files and the
    output. Ranks and killed processes are tested in tests/e2e; gpu_check_rehearse.py runs these parts as well."""
    if emulator.available() is None:
        pytest.skip("no C++ compiler for the emulator")
    folder = tmp_path_factory.mktemp("emulated")
    flags = ["--emulate", "--parts", PARTS, "--cases", "paged_attention", "--max-cases", "1"]
    done = run(*flags, "--out", str(folder), "--limit-s", str(scaled(100)))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture
def found(emulated: tuple[Path, str]) -> dict[str, Any]:
    everything: dict[str, Any] = json.loads((emulated[0] / "emulator-check.json").read_text())
    return everything


def test_emulated_cases_and_graphs(emulated: tuple[Path, str], found: dict[str, Any]) -> None:
    assert found["cases"] == {"paged_attention_cases": {"passed": 1, "failed": {}}}
    assert len(found["graphs"]) == 10
    assert set(found["graphs"].values()) == {"equal"}
    assert found["problems"] == []
    assert {"device", "date", "commit", "versions"} <= set(found)
    assert "no problems" in emulated[1]


def test_emulated_measurements_have_the_form_that_others_read(
    emulated: tuple[Path, str], found: dict[str, Any]
) -> None:
    folder, _ = emulated
    figures = json.loads((folder / "emulator-kernels.json").read_text())
    lines = [json.loads(line) for line in (folder / "gpu_check.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "kernel" in line]
    assert [line["kernel"] for line in rows] == [row["kernel"] for row in figures["rows"]]
    assert {"date", "commit", "device", "part"} < set(rows[0])
    assert set(figures) == {"device", "date", "commit", "rows"}
    for row in figures["rows"]:
        assert {"kernel", "shape", "limit", "share"} < set(row)
        assert ("gb_s" in row) != ("tflop_s" in row)
    kernels = {row["kernel"] for row in figures["rows"]}
    assert {
        "copy",
        "decode_attention",
        "few rows: decode",
        "few rows: prefill",
        "decode, list room for 131072",
        "decode, 2 layers in a block",
        "rope_and_cache",
        "sampler pick",
        "rule_out",
        "experts",
        "experts, loop",
        "MXFP4 experts",
        "recurrent, by token: delta rule",
        "recurrent, in chunks: mamba",
        linear.DENSE,
        *(f"linear, {kind.name}" for kind in linear.KINDS),
    } < kernels
    assert "launch: decode_attention, us" in found["speed"]


@pytest.mark.parametrize("call", ["all_reduce", "gather_columns", "broadcast"])
def test_a_call_of_a_rank_that_does_nothing_is_named(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlooCommunicator, call, lambda *_: None)
    with connected(lambda shard, group: GlooCommunicator(shard, group, CPU, scaled(20)), 2, tmp_path) as ranks:
        problems = in_threads(2, lambda rank: parallel.check_calls(ranks[rank], CPU))
    assert problems[0] is not None
    assert problems[0].startswith(call)


def test_no_gpu_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--out", str(tmp_path)]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_time_parts_are_skipped_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["--emulate", "--parts", "graphs,bench,worker", "--limit-s", "0", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    for part in ("graphs", "bench", "worker"):
        assert f"skipped {part}: no time left" in said
    assert not (tmp_path / "emulator-kernels.json").exists()


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["--parts", "kernel"])
    assert f"there are {', '.join(stages.STAGES)}" in capsys.readouterr().err


def test_the_kernel_parts_need_neither_messages_nor_sockets_nor_pytest() -> None:
    """Kernels run on a machine with only python3, numpy, torch and cupy, and without cupy until one is launched."""
    cases = [path.stem for path in (ROOT / "tests" / "kernels").glob("*_cases.py")]
    code = f"""
        import importlib, sys
        for name in ("msgspec", "zmq", "pytest", "safetensors", "tokenizers", "transformers", "yaml", "tqdm"):
            sys.modules[name] = None
        for name in ("gpu_check_bench", "gpu_check_graphs", "gpu_check_prefill", "gpu_check_once", "gpu_check_main"):
            importlib.import_module(name)
        for name in {cases!r}:
            try:
                assert importlib.import_module("tests.kernels." + name).CASES
            except ModuleNotFoundError as error:
                print(name, error.name)
    """
    path = os.pathsep.join([str(ROOT), str(CHECK)])
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    with_messages = {"sampler_cases", "routing_cases", "recurrent_cases", "recurrent_chunks_cases"}
    assert {line.split()[0] for line in done.stdout.splitlines()} <= with_messages, (
        "the sampler's twin is the worker's; rules of a router and sizes of a recurrent layer are a message's structs"
    )


def test_cases_with_missing_packages_are_skipped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_msgspec(_: str) -> NoReturn:
        raise ModuleNotFoundError("no msgspec", name="msgspec")

    said: list[dict[str, Any]] = []
    monkeypatch.setattr(sys, "argv", ["gpu_check_cases.py", "sampler_cases", "--emulate"])
    monkeypatch.setattr(cases, "importlib", SimpleNamespace(import_module=without_msgspec))
    monkeypatch.setattr(cases, "emit", lambda **event: said.append(event))
    cases.main()
    assert said == [{"skipped": "its cases need msgspec, which is not installed", "finished": True}]


# ---- parts


def part_of(folder: Path, code: str, quiet_s: float = 60) -> parts.Part:
    script = folder / "part.py"
    script.write_text("from gpu_check_parts import emit\n" + textwrap.dedent(code))
    return parts.Part("part", [str(script)], scaled(quiet_s))


def events(part: parts.Part, seconds: float = 60) -> list[dict[str, Any]]:
    return list(parts.run_part(part, time.monotonic() + scaled(seconds)))


def test_packages_in_a_folder_of_their_own_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "found_here.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    assert events(part_of(tmp_path, "import found_here\nemit(finished=True)")) == [{"finished": True}]
    monkeypatch.delenv("PYTHONPATH")
    assert parts.python_path(tmp_path) == str(tmp_path)


def test_events_and_other_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = part_of(tmp_path, "emit(fact={'a': 1}, say='hello')\nprint('plain', flush=True)\nemit(finished=True)")
    assert events(part) == [{"fact": {"a": 1}, "say": "hello"}, {"finished": True}]
    assert capsys.readouterr().out == "part: hello\nplain\n"
    assert (part.finished, part.problems) == (True, [])


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("emit(row={})\nraise SystemError('broken')", "status 1: .*SystemError: broken"),
        (
            "import os, signal\nemit(row={})\nos.kill(os.getpid(), signal.SIGSEGV)",
            "status -11: Fatal Python error: Segmentation fault .*line 4",
        ),
        ("emit(row={})", "status 0: it said nothing"),
    ],
    ids=["error", "signal", "without an end"],
)
def test_a_part_that_ends_early(tmp_path: Path, code: str, note: str) -> None:
    part = part_of(tmp_path, code)
    assert events(part) == [{"row": {}}]
    assert not part.finished
    assert len(part.problems) == 1
    assert re.search(note, part.problems[0])


@pytest.mark.parametrize(("seconds", "quiet_s", "note"), [(0.5, 60, "out of time"), (60, 0.5, "nothing heard")])
def test_a_part_that_hangs(tmp_path: Path, seconds: float, quiet_s: float, note: str) -> None:
    part = part_of(tmp_path, "emit(row={})\nimport time\ntime.sleep(1000)", quiet_s)
    assert events(part, seconds) == [{"row": {}}]
    assert re.search(rf'{note}.* \| File ".*part.py", line \d+', part.problems[0]), "and where"


CASES = """
    import os, sys, time
    first = int(sys.argv[sys.argv.index("--first") + 1])
    behaviour = ["ok", "wrong", "crash", "ok", "poison", "ok"]
    for index in range(first, len(behaviour)):
        name = f"{index} {behaviour[index]}"
        emit(begin=index, case=name)
        if behaviour[index] == "crash":
            os._exit(9)
        elif behaviour[index] == "ok":
            emit(passed=name)
        else:
            emit(case=name, failed="it is wrong", usable=behaviour[index] == "wrong")
            if behaviour[index] == "poison":
                sys.exit(0)
    emit(finished=True)
"""


def test_cases_continue_after_one_that_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_check_parts.py").write_text((CHECK / "gpu_check_parts.py").read_text())
    script = tmp_path / "gpu_check_cases.py"
    script.write_text("from gpu_check_parts import emit\n" + textwrap.dedent(CASES))
    monkeypatch.setattr(parts, "FOLDER", tmp_path)
    results = parts.run_cases("some", [], time.monotonic() + scaled(60))
    assert results.passed == 3
    assert list(results.failures) == ["1 wrong", "2 crash", "4 poison"]
    assert "status 9" in results.failures["2 crash"]
    assert results.failures["4 poison"] == "it is wrong"
    assert results.problems == []


def test_cases_that_get_no_time(tmp_path: Path) -> None:
    results = parts.run_cases("no_such_cases", [], time.monotonic() + scaled(60))
    assert results.passed == 0
    assert "no_such_cases" in results.problems[0]


# ---- the result


def test_the_table_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = main.parse(["--out", str(tmp_path / "new"), "--emulate"])
    check = stages.Check(arguments)
    check.found |= {"device": "NVIDIA H200", "date": "today", "commit": "abc", "worker": {"out": "long", "status": 0}}
    rows = [
        {"kernel": "decode", "shape": "s", "us": 12.3, "gb_s": 4000.0, "limit": 4500.0, "share": 0.89},
        {"kernel": "prefill", "shape": "p", "us": 5.0, "tflop_s": 600.0, "limit": 650.0, "share": 0.92},
    ]
    check.rows += rows
    main.report(check)
    kernels = json.loads((tmp_path / "new" / "nvidia-h200-kernels.json").read_text())
    assert kernels == {"device": "NVIDIA H200", "date": "today", "commit": "abc", "rows": rows}
    everything = json.loads((tmp_path / "new" / "nvidia-h200-check.json").read_text())
    assert everything["worker"] == {"status": 0}
    lines = capsys.readouterr().out.splitlines()
    assert any("4000.0" in line and "89%" in line and "4500.0" in line for line in lines)
    assert any("600.0" in line and "92%" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('log\n{"a": 1}\n', {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ("no json", None),
        ('{"a": 1}\nlog', None),
        ('{"b": 1}\nlog\n{\n "a": 2\n}', {"a": 2}),
    ],
)
def test_figures_at_the_end_of_an_output(text: str, found: dict[str, int] | None) -> None:
    assert stages.last_json(text) == found
