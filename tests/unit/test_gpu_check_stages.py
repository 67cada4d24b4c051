"""The frame of gpu_check around its parts, without a GPU: wheels, the native library, NVIDIA's tools, rules."""

import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.kernels import emulator

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "tests" / "gpu" / "check"
sys.path.insert(0, str(CHECK))

import gpu_check_main as main  # noqa: E402
import gpu_check_parts as parts  # noqa: E402
import gpu_check_prepare as prepare  # noqa: E402
import gpu_check_rules as rules  # noqa: E402
import gpu_check_stages as stages  # noqa: E402
import gpu_check_tools as tools  # noqa: E402


def put_tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport os, sys\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that precedes all others in PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "bin"


def check_of(tmp_path: Path, *flags: str) -> stages.Check:
    check = stages.Check(main.parse(["--out", str(tmp_path), *flags]))
    check.found |= {"device": "none", "date": "today", "commit": "abc"}
    return check


# ---- the stages


def test_every_stage_is_there_and_has_a_time_limit() -> None:
    for name, stage in stages.STAGES.items():
        assert callable(getattr(stages.Check, name))
        assert 10 < stage.seconds <= main.LIMIT_S / 3
    assert set(stages.EMULATED) < set(stages.STAGES)


def test_a_stage_that_breaks_is_a_problem_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def breaks(_: stages.Check) -> None:
        raise KeyError("missing")

    monkeypatch.setattr(stages.Check, "cases", breaks)
    monkeypatch.setattr(stages.Check, "graphs", lambda _: ran.append("graphs"))
    check = check_of(tmp_path)
    check.run(["cases", "graphs"])
    assert ran == ["graphs"]
    assert check.problems == ["cases: the script itself: KeyError: 'missing'"]
    lines = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines if "stage" in line] == ["cases", "graphs"]
    assert "FAILED cases" in capsys.readouterr().out


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_runs_behind_a_smoke_stage_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(stages.Check, "smoke", lambda check: check.problem("smoke: wrong") if fails else None)
    monkeypatch.setattr(stages.Check, "graphs", lambda _: ran.append("graphs"))
    check = check_of(tmp_path)
    check.run(["smoke", "graphs"])
    assert ran == ([] if fails else ["graphs"])
    assert check.found.get("left out") == (["graphs"] if fails else None)


def test_a_problem_before_the_smoke_stage_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(stages.Check, "smoke", lambda _: None)
    monkeypatch.setattr(stages.Check, "graphs", lambda _: ran.append("graphs"))
    monkeypatch.setattr(stages.Check, "smoke", lambda check: check.problem("native: it was not built"))
    check = check_of(tmp_path)
    check.problem("wheels: one lacks")
    check.run(["smoke", "graphs"])
    assert ran == ["graphs"]


def test_calls_begin_with_preparations_and_the_smoke_test() -> None:
    for names in stages.CALLS.values():
        assert names[:4] == (*stages.PREPARING, stages.SMOKE)
    assert stages.CALLS["first"][4] == "worker"
    assert {name for names in stages.CALLS.values() for name in names} == set(stages.STAGES)
    work = [name for name in stages.CALLS["first"] if name not in stages.PREPARING]
    assert sum(stages.STAGES[name].seconds for name in work) <= main.LIMIT_S
    assert main.parse(["--call", "first"]).parts == list(stages.CALLS["first"])
    assert "native" in main.parse(["--call", "second", "--emulate"]).parts
    assert "profile" not in main.parse(["--call", "third", "--emulate"]).parts


@pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")
def test_emulated_steps_engines_and_prefill(tmp_path: Path) -> None:
    """vLLM is a module that has the parts of its interface which are used."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "vllm.py").write_text(FAKE_VLLM)
    flags = ["--emulate", "--parts", "step_1b,prefill,engines", "--out", str(tmp_path), "--limit-s", str(scaled(150))]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "unit" / "gpu_check_forked.py"), *flags],
        capture_output=True,
        text=True,
        timeout=scaled(160),
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "emulator-kernels.json").read_text())["rows"]
    found = {row["kernel"]: row for row in rows}
    steps = {f"step, {way}" for way in ("graphs", "eager", "random", "ahead", "mixed", "prompt")}
    steps.add("memory in use of allowed")
    ways = {
        "whole prompts: ours",
        "whole prompts: flash",
        "chunks: ours",
        "chunks: varlen",
        "prefill_attention, paged",
        "torch sdpa, flash",
        "torch varlen, contiguous",
        "gather_kv",
    }
    assert steps | ways | {"engine: ours", "engine: vllm"} <= set(found)
    assert found["step, graphs"]["launches"] > 0
    assert found["engine: vllm"]["tokens_s"] > 0
    assert "-> memory in use" not in done.stdout
    written = (tmp_path / "emulator-table.txt").read_text()
    assert "our tokens per second over vLLM's, 256 requests: not measured" in written, "there are no 256 here"


FAKE_VLLM = """
from types import SimpleNamespace as Some


def SamplingParams(temperature, max_tokens, ignore_eos, detokenize):
    return max_tokens


class LLM:
    def __init__(self, folder, load_format, dtype, skip_tokenizer_init, max_model_len, gpu_memory_utilization):
        assert load_format == "dummy"

    def generate(self, prompts, count, use_tqdm):
        assert all(isinstance(token, int) for prompt in prompts for token in prompt["prompt_token_ids"])
        return [Some(outputs=[Some(token_ids=[0] * count)]) for _ in prompts]
"""


# ---- before the stages


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("msgspec-0.1-cp{v}-cp{v}-manylinux_2_17_{m}.manylinux2014_{m}.whl", True),
        ("msgspec-0.1-cp36-cp36m-manylinux_2_17_{m}.whl", False),
        ("pyzmq-27-cp36-abi3-manylinux_2_28_{m}.whl", True),
        ("tqdm-4.0-py3-none-any.whl", True),
        ("tqdm-4.0-1-py2.py3-none-any.whl", True),
        ("msgspec-0.1-cp{v}-cp{v}-win_amd64.whl", False),
        ("msgspec-0.1-cp{v}-cp{v}-manylinux_2_17_riscv64.whl", False),
        ("no-wheel.whl", False),
    ],
)
def test_wheels_for_this_python_and_machine(name: str, fits: bool) -> None:
    own = name.format(v=f"3{sys.version_info[1]}", m=os.uname().machine)
    assert prepare.fits(own) == fits


def test_wheels_are_unpacked_where_every_part_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(stages, "NEEDED", ("in_a_wheel",))
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "some-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("in_a_wheel.py", "ANSWER = 42\n")
    monkeypatch.setattr(stages, "IMPORTS", "import in_a_wheel")
    check = check_of(tmp_path, "--wheels", str(folder))
    assert check._lacking() == "in_a_wheel"
    check.run(["wheels"])
    assert (check.problems, check._lacking()) == ([], "")
    script = tmp_path / "part.py"
    script.write_text("import in_a_wheel\nfrom gpu_check_parts import emit\nemit(finished=in_a_wheel.ANSWER)\n")
    assert list(parts.run_part(parts.Part("part", [str(script)]), check.deadline_s)) == [{"finished": 42}]
    check.close()
    assert not Path(check.site).exists()


def test_nothing_is_unpacked_where_nothing_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "IMPORTS", "import msgspec")
    check = check_of(tmp_path)
    check.run(["wheels"])
    assert check.found["wheels"] == {"skipped": "nothing is lacking"}


CMAKE = """
if sys.argv[1] == "-S":
    print("configured")
elif os.environ.get("FAILS"):
    print("error: no such file")
    sys.exit(2)
else:
    open(os.path.join(sys.argv[2], "libvllm_lite_cpu.so"), "w").write("built")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_native_library_is_built_beside_and_put_into_place(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    if fails:
        monkeypatch.setenv("FAILS", "1")
    put_tool(on_path, "cmake", CMAKE)
    (tmp_path / "vllm_lite").mkdir()
    monkeypatch.setattr(prepare, "ASK", "print(False)")
    build = prepare.NativeBuild(tmp_path)
    assert build.start(scaled(30)) == "the native library is being built"
    failed = build.wait()
    placed = tmp_path / prepare.LIBRARY
    assert placed.exists() != fails
    assert ("no such file" in failed) == fails


def test_a_library_that_is_there_is_not_built() -> None:
    from vllm_lite.kernels import cpu

    if not cpu.available():
        pytest.skip("there is none")
    build = prepare.NativeBuild()
    assert build.start(1) == "the native library is there"
    assert build.wait() == ""


# ---- NVIDIA's tools

SANITIZER = """
tool = sys.argv[sys.argv.index("--tool") + 1]
print("========= COMPUTE-SANITIZER")
if tool == "memcheck":
    print("========= Invalid __global__ read of size 4 bytes")
    print("=========     at decode_attention+0x40")
    print("========= ERROR SUMMARY: 1 error")
    sys.exit(9)
assert sys.argv[-2:] == ["--only", "1,3"], sys.argv
print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
"""
NCU = """
print("==PROF== Connected to process 7")
print('"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"')
for number, name in enumerate(("decode_attention<__nv_bfloat16>(int)", "pick")):
    print(f'"{number}","7","{name}","SpeedOfLight","Duration","ns","12,345"')
    print(f'"{number}","7","{name}","SpeedOfLight","DRAM Throughput","%","81.5"')
    print(f'"{number}","7","{name}","Occupancy","Theoretical Occupancy","%","n/a"')
"""


def test_the_sanitizers_report_of_failed_cases(on_path: Path, tmp_path: Path) -> None:
    put_tool(on_path, "compute-sanitizer", SANITIZER)
    check = check_of(tmp_path, "--emulate")
    check.results = [parts.CaseResults("some_cases", failures={"b": "", "d": ""}, numbers={"d": 3, "b": 1})]
    check.run(["sanitize"])
    assert len(check.problems) == 1
    assert "memcheck of some_cases [1, 3]: Invalid __global__ read" in check.problems[0]
    assert check.found["sanitize"] == {"racecheck of some_cases [1, 3]": "clean"}


def test_a_sanitizer_that_refuses_the_device_is_no_failure(on_path: Path, tmp_path: Path) -> None:
    put_tool(on_path, "compute-sanitizer", "print('========= Error: Device not supported')\nsys.exit(1)")
    check = check_of(tmp_path, "--emulate")
    check.results = [parts.CaseResults("some_cases", failures={"b": ""}, numbers={"b": 1})]
    check.run(["sanitize"])
    assert check.problems == []
    assert "Device not supported" in check.found["sanitize"]["memcheck of some_cases [1]"]


def test_a_case_is_run_alone_as_the_sanitizer_does(tmp_path: Path) -> None:
    command = [str(CHECK / "gpu_check_cases.py"), "masks_cases", "--emulate", "--only", "1"]
    found = list(parts.run_part(parts.Part("cases", command), check_of(tmp_path).deadline_s))
    assert [event["begin"] for event in found if "begin" in event] == [1]


def test_the_profilers_figures(on_path: Path, tmp_path: Path) -> None:
    put_tool(on_path, "ncu", NCU)
    check = check_of(tmp_path)
    check.run(["profile"])
    assert check.problems == []
    assert [row["kernel"] for row in check.rows] == ["ncu: decode_attention", "ncu: pick"]
    assert check.rows[0] | {"us": 12.345, "dram %": 81.5} == check.rows[0]
    assert main.table(check.rows)


def test_a_tool_that_hangs_is_stopped(on_path: Path, tmp_path: Path) -> None:
    put_tool(on_path, "ncu", "import time\nprint('==PROF== waiting', flush=True)\ntime.sleep(1000)")
    (event,) = tools.profile(1.5, [])
    assert event["failed"].startswith("ncu: status None, 0 launches seen: ==PROF== waiting")


# ---- the rules


def row(kernel: str, shape: str, **figures: Any) -> dict[str, Any]:
    return {"kernel": kernel, "shape": shape, **figures}


def test_rules_that_hold_are_listed_first() -> None:
    found = [
        row("decode_attention", "batch 64 ctx 8192 gqa 4 HND", us=10.0, share=0.7),
        row("decode, 1 layers in a block", "batch 8 ctx 8192 gqa 4 HND", us=100.0),
        row("decode, 32 layers in a block", "batch 8 ctx 8192 gqa 4 HND", us=103.0),
        row("step, graphs", "1b 1 x 2048", us=1500.0, device_us=1200.0, share=0.8),
    ]
    said = rules.said(found)
    assert len(said) == len(rules.RULES)
    assert [text[:2] for text in said[:3]] == ["->", "->", "ok"]
    assert "reads below 0.8 of the copy bandwidth: 0.70. FETCH of" in said[0]
    assert "at batch 1 waits for the host, us: 300.00. The gap" in said[1]
    assert "over that over one layer: no, 1.03" in said[2].replace("of that", "over that")
    assert all("not measured" in text for text in said[3:])


def test_rules_look_at_rows_that_the_stages_make() -> None:
    """A kernel that no script names would never be measured."""
    scripts = "".join(path.read_text() for path in CHECK.glob("gpu_check_*.py") if "rules" not in path.name)
    asked: set[str] = set()

    class Asked(rules.Rows):
        def get(self, figure: str, kernel: str, shape: str = "") -> float | None:
            asked.add(kernel)
            return super().get(figure, kernel, shape)

    for rule in rules.RULES:
        rule.measure(Asked([]))
    numbered = {"decode, 32 layers in a block": "decode, {", "decode, 1 layers in a block": "decode, {"}
    numbered |= {f"decode_attention split {n}": "decode_attention split {" for n in (256, 1024)}
    numbered |= {f"throughput, {name}": "throughput, {" for name in ("eager", "graphs")}
    numbered |= {f"engine: {name}": "engine: {" for name in ("ours", "vllm")}
    numbered |= {"decode, list room for 131072": "room for 131072", "decode, list exact": '"exact"'}
    numbered |= {"step, graphs": '"graphs"'}
    numbered |= {f"recurrent, {way}: delta rule": f'"recurrent, {way}: ' for way in ("by token", "in chunks")}
    ways = ("", ", codes", ", widened")
    numbered |= {f"linear, int4 g128{way}": f"linear, {{kind.name}}{way}" for way in ways}
    ways = ("read once", "each by itself", "nothing shared")
    numbered |= {f"decode, {n} in common: {way}": f'"{way}"' for n in (1024, 4096) for way in ways}
    for kernel in asked:
        assert numbered.get(kernel, kernel) in scripts, kernel
