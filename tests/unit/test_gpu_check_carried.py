"""Files that gpu_check takes along to a machine without a network, and its first steps there: no GPU needed."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from tests.deadlines import scaled
from tests.kernels.cases import Recorder, needed_by
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cuda import compiler

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "tests" / "gpu" / "check"
sys.path.insert(0, str(CHECK))

import gpu_check_carry as carry  # noqa: E402
import gpu_check_kernels as kernels  # noqa: E402
import gpu_check_linear as linear  # noqa: E402
import gpu_check_main as main  # noqa: E402
import gpu_check_prepare as prepare  # noqa: E402
import gpu_check_rehearse as rehearse  # noqa: E402
import gpu_check_smoke as smoke  # noqa: E402
import gpu_check_stages as stages  # noqa: E402
import gpu_check_worker as worker_tests  # noqa: E402


def check_of(tmp_path: Path, *flags: str) -> stages.Check:
    check = stages.Check(main.parse(["--out", str(tmp_path), *flags]))
    check.found |= {"device": "none", "date": "today", "commit": "abc"}
    return check


# ---- wheels


def test_a_worker_that_cannot_be_imported_is_said_though_nothing_seems_to_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "IMPORTS", "import no_such_module")
    monkeypatch.setitem(stages.STAGES, "wheels", stages.Stage(scaled(60), ""))
    check = check_of(tmp_path)
    check.run(["wheels"])
    assert check.problems == ["wheels: a worker cannot be imported: No module named 'no_such_module'"] or (
        check.problems[0].endswith("ModuleNotFoundError: No module named 'no_such_module'")
    )


def test_carried_wheels_cover_every_needed_module() -> None:
    modules = {"pyzmq": "zmq"}
    for wheel in carry.WHEELS:
        name = wheel.partition(">")[0]
        assert modules.get(name, name) in stages.NEEDED
    assert "manylinux_2_31" in carry.PLATFORMS, "or pip takes a llguidance that is too old"


def test_the_packages_requirements_are_installed_or_carried() -> None:
    """Otherwise a new dependency would break every stage that imports a worker, on a machine without a network."""

    def names(wanted: Iterable[str]) -> set[str]:
        return {re.split("[<>=]", each)[0] for each in wanted}

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_servers_and_clients = {"pillow", "starlette", "httptools"}
    there = names(rehearse.IMAGE) | {"torch", "huggingface-hub"}
    assert names(project["dependencies"]) <= there | names(carry.WHEELS) | of_servers_and_clients


# ---- compiled kernels


class OneKernel:
    """A compiler that makes of every kernel its name."""

    version, arches = "13.0", (90,)

    def compile(self, program: compiler.CudaSource) -> compiler.Compiled:
        return compiler.Compiled(f"code of {program.name}".encode(), "symbol")


def test_kernels_that_were_compiled_ahead_are_found_by_the_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ahead = tmp_path / "checkout", tmp_path / "ahead"
    compiler.KernelCompiler(OneKernel(), "sm_90", ahead).compile("masks.cuh", "rule_out<4>")
    (root / prepare.CARRIED).mkdir(parents=True)
    assert carry.pack_kernels(ahead, root / prepare.CARRIED / prepare.KERNELS) == 1
    monkeypatch.setattr(stages, "ROOT", root)
    monkeypatch.setenv("VLLM_LITE_CACHE", str(tmp_path / "cache"))
    check = check_of(tmp_path / "out")
    check.run(["kernels"])
    assert (check.problems, check.found["kernels"]) == ([], 1)
    assert "compiled" not in check.found, "none of them was compiled there"
    there = compiler.KernelCompiler(OneKernel(), "sm_90")
    assert there.compile("masks.cuh", "rule_out<4>").cubin == b"code of rule_out<4>"
    assert there.num_compiled == 0


def test_kernels_that_a_stage_compiles_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LITE_CACHE", str(tmp_path / "cache"))
    compiled = compiler.KernelCompiler(OneKernel(), "sm_90")
    monkeypatch.setattr(stages.Check, "graphs", lambda _: compiled.compile("masks.cuh", "rule_out<1>"))
    check = check_of(tmp_path / "out")
    check.run(["graphs"])
    assert check.found["compiled"] == {"graphs": 1}


def test_a_cache_of_kernels_keeps_current_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of an older source are not carried."""
    monkeypatch.setattr(kernels, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(kernels, "compiler", lambda arch, folder: compilers.setdefault(arch, made(arch, folder)))
    compilers: dict[str, compiler.KernelCompiler] = {}

    def made(arch: str, folder: str) -> compiler.KernelCompiler:
        return compiler.KernelCompiler(OneKernel(), arch, Path(folder))

    wanted = [("masks.cuh", "rule_out<4>"), ("masks.cuh", "rule_out<1>")]
    assert kernels.fill(tmp_path, "sm_90", wanted) == 2
    assert kernels.fill(tmp_path, "sm_90", wanted) == 0
    (tmp_path / "older.cubin").touch()
    assert kernels.fill(tmp_path, "sm_90", wanted[:1]) == 0
    assert [path.name for path in tmp_path.glob("*.cubin")] == [compilers["sm_90"].path_of(*wanted[0]).name]


class InThisProcess:
    def __init__(self, *_: Any) -> None:
        self.map = map

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_measurements_and_layers_ask_for_kernels_that_the_sources_have() -> None:
    sources = {path.name for path in compiler.source_folder().glob("*.cuh")}
    names = [*kernels.of_measurements()]
    assert {source for source, _ in names} <= sources
    assert ("decode_attention.cuh", "decode_attention<__nv_bfloat16, __nv_bfloat16, 128, 1, false, 4>") in names


def test_kernels_measured_in_linear_layers_are_compiled_ahead() -> None:
    """All ways that a number of rows may go, also those that a bound of today leaves out."""
    recorder = Recorder()

    class Timer:
        @staticmethod
        def seconds(way: Callable[[int], None], count: int) -> float:
            for which in range(count):
                way(which)
            return 1.0

    bench = SimpleNamespace(small=True, cold_bytes=0, timer=Timer(), row=ignored, bytes_row=ignored)
    linear.measure(bench, recorder, torch.device("cpu"))
    assert {name.partition("<")[0] for _, name in recorder.names} >= {"packed_linear", "packed_tiles", "widen_weights"}
    assert set(recorder.names) <= set(kernels.of_linear_layers())


def ignored(*_: object, **__: object) -> None:
    pass


def test_a_list_of_kernels_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    available = cpu.available
    monkeypatch.setattr(kernels, "WORKERS", ())
    assert list(kernels.of_workers()) == []
    assert cpu.available is available


@pytest.mark.skipif(not cpu.available(), reason="needs the native library")
def test_the_native_library_is_carried_behind_a_real_list_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WORKERS", ())
    monkeypatch.setattr(kernels, "wanted", lambda: [*kernels.of_workers()])
    monkeypatch.setattr(kernels, "fill", lambda *_: 0)
    monkeypatch.setattr(carry, "download_wheels", lambda *_: None)
    monkeypatch.setenv("VLLM_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["gpu_check_carry.py", str(tmp_path / "carried")])
    assert carry.main() == 0
    assert (tmp_path / "carried" / prepare.LIBRARY.name).stat().st_size > 1 << 20


# ---- the smoke stage


def test_every_file_of_kernels_has_a_smoke_case_that_launches_it() -> None:
    sources = {path.name for path in compiler.source_folder().glob("*.cuh") if "__global__" in path.read_text()}
    assert set(smoke.CASES) == sources
    for source in sources:
        assert source in needed_by([smoke.case_of(source)]), source


def test_diverging_outputs_are_distinguished_from_near_ties() -> None:
    truth = smoke.Road([[1, 2, 3], [4, 5, 6]], [[1.0, 0.05, 1.0], [1.0, 1.0, 1.0]])
    tie = smoke.Road([[1, 9, 9], [4, 5, 6]], [])
    assert smoke.difference(truth, smoke.Road(truth.tokens, []), 0.0) is None
    assert smoke.difference(truth, tie, 0.1) is None
    assert "prompt 0: token 1 is 9 instead of 2" in str(smoke.difference(truth, tie, 0.0))
    wrong = smoke.Road([[1, 2, 3], [4, 5, 9]], [])
    assert "prompt 1: token 2" in str(smoke.difference(truth, wrong, 0.1))
    assert "2 tokens instead of 3" in str(smoke.difference(truth, smoke.Road([[1, 2], [4, 5, 6]], []), 0.1))


# ---- tests in processes of their own

SOME_TESTS = """
import pytest

def test_first():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_wrong(number):
    assert number == 2, "it is wrong"

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass

def test_wrong_too():
    assert False, "that too"

def test_last():
    pass
"""


def run_and_count(ran: list[list[str]], cwd: Path) -> worker_tests.Command:
    def run(command: list[str], seconds: float) -> dict[str, Any]:
        ran.append(command)
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing them takes seconds
        done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(seconds), cwd=cwd, env=env)
        return {"status": done.returncode, "out": done.stdout, "tail": done.stdout.splitlines()[-3:]}

    return run


def test_tests_continue_in_another_process_after_a_failed_one(tmp_path: Path) -> None:
    file, ran = tmp_path / "test_some.py", list[list[str]]()
    file.write_text(SOME_TESTS)
    found = worker_tests.run_tests(file.name, run_and_count(ran, tmp_path), 60, tmp_path)
    names = [test.partition("::")[2] for test in found.passed]
    assert names == ["test_first", "test_wrong[2]", "test_last"]
    assert len(found.skipped) == 1
    assert [problem.partition(":")[0] for problem in found.problems] == ["test_wrong[1]", "test_wrong_too"]
    assert "it is wrong" in found.problems[0]
    assert len(ran) == 3


def test_tests_that_end_their_process_are_one_problem(tmp_path: Path) -> None:
    file, ran = tmp_path / "test_some.py", list[list[str]]()
    file.write_text("import os\n\ndef test_crash():\n    os._exit(7)\n")
    found = worker_tests.run_tests(file.name, run_and_count(ran, tmp_path), 60, tmp_path)
    assert len(found.problems) == 1
    assert len(ran) == 1


# ---- what is printed


def test_a_summary_is_short_whatever_was_found(tmp_path: Path) -> None:
    check = check_of(tmp_path)
    check.found["rules"] = []
    check.rows = [{"kernel": "step, graphs", "shape": f"1b {n} x 2048", "us": 1.0} for n in range(300)]
    for number in range(400):
        check.problems.append(f"{number}: " + "what was wrong, at length " * 20)
    text = main.summary(check)
    assert len(text) < 12_000
    assert text.startswith("400 problems\nFAILED 0: what was wrong")
    check.problems.clear()
    text = main.summary(check)
    assert text.startswith("no problems\n")
    assert text.count("step, graphs") == main.MOST_ROWS


def test_rows_that_most_depends_on_are_made_by_the_stages() -> None:
    """A key that no script's rows fit would print nothing."""
    scripts = "".join(path.read_text() for path in CHECK.glob("gpu_check_*.py") if path.name != "gpu_check_main.py")
    for word in ("copy", "decode_attention", "step, ahead", "throughput, ", "linear, ", "experts", "sampler pick"):
        assert f'"{word}' in scripts, word
