"""benchmarks/peers.py with engines that are a few lines of Python, and once with the real one on the bundled model."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from vllm_lite.config import demo_folder

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import limits  # noqa: E402 - found only once benchmarks/ is on the path
import peers  # noqa: E402
import peers_report as report  # noqa: E402
from runners import driver, machine  # noqa: E402

FAKE_RUNNER = """
import json, sys, time
speed, log = float(sys.argv[1]), sys.argv[2]
given = dict(argument[2:].split("=", 1) for argument in sys.argv[3:])
with open(log, "a") as file:
    print(speed, given["only"], given["reps"], file=file)
runs = [
    {"rep": int(rep), "busy": int(given["busy"]) * (turn % 2), "out_tok_s": speed / (1 + turn % 2),
     "decode_tok_s": speed,
     "ttft_s": 1 / speed, "first_at_s": time.monotonic(), "foreign_cores": 0.0, "clean": True, "tokens": [[1, 2]]}
    for turn, rep in enumerate(given["reps"].split(",")[:int(given["need"])])
]
names = given["only"].split(",")
json.dump({"info": {"name": "fake"}, "runs": {name: runs for name in names}, "done": True}, open(given["out"], "w"))
"""


def run_of(speed: float, foreign: float = 0.0, **more):
    figures = {"rep": 0, "busy": 0, "out_tok_s": speed, "decode_tok_s": speed, "ttft_s": 1 / speed, "tokens": [[7]]}
    return figures | {"foreign_cores": foreign, "clean": foreign <= 0.12, **more}


def make_peers(folder: Path, *, model: Path | None = None, prompt: int = 4, num_tokens: int = 2) -> Path:
    """A folder as setup.sh makes it, with a tiny workload."""
    (folder / "models").mkdir()
    (folder / "workloads").mkdir()
    if model is None:
        (folder / "models" / "tiny").mkdir()
    else:
        (folder / "models" / "tiny").symlink_to(model)
    request = {"id": 0, "prompt": list(range(5, 5 + prompt)), "n": num_tokens}
    workload = {"warmup": [request], "reps": [[request], [request | {"prompt": [9] * prompt}], [request], [request]]}
    (folder / "workloads" / "all.json").write_text(json.dumps({"workloads": {"W1": workload, "W2": workload}}))
    return folder


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Calls peers.py with two fake engines, of 100 and 50 tokens/s: bench(flags) -> (summary, the calls so far)."""
    folder = make_peers(tmp_path)
    (tmp_path / "fake.py").write_text(FAKE_RUNNER)
    log, out = tmp_path / "calls", tmp_path / "out.json"
    log.touch()
    monkeypatch.setattr(limits.Machine, "measured", lambda _: None)  # which takes seconds

    def call(*flags: str) -> tuple[dict[str, Any], list[str]]:
        speeds = {"ours-bf16": 100, "other-bf16": 50}
        engines = [
            f"--engine={name}={sys.executable} {tmp_path / 'fake.py'} {speed} {log}" for name, speed in speeds.items()
        ]
        common = ["--peers", str(folder), "--models", "tiny", "--workloads", "W1,W2", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["peers.py", *common, *engines, f"--engines={','.join(speeds)}", *flags])
        assert peers.main() == 0
        return json.loads(out.read_text()), log.read_text().splitlines()

    return call


# ---- medians, rows, tables


def test_median_is_of_clean_repeats():
    runs = [run_of(10), run_of(30), run_of(20), run_of(500, foreign=0.2)]
    assert report.median(runs, "out_tok_s") == (20, 3)


def test_median_without_a_clean_repeat_is_of_the_least_disturbed():
    runs = [run_of(1, foreign=0.9), run_of(20, foreign=0.3), run_of(10, foreign=0.2)]
    assert report.median(runs, "out_tok_s") == (15, 0)


def cell(speed: float, ttft_s: float):
    return {"decode_tok_s": speed, "out_tok_s": speed, "ttft_s": ttft_s}


def test_rows_compare_with_the_best_peer_of_the_same_type():
    engines = {
        "ours-bf16": cell(120, 0.2),
        "a-bf16": cell(100, 0.1),
        "b-bf16": cell(80, 0.4),
        "c-int8": cell(900, 0.01),
    }
    everything = {"small": {"W1": engines, "W2": {"a-bf16": cell(1, 1)}}}
    assert report.rows(everything, higher_is_better=True) == [
        {
            "model": "small",
            "dtype": "bf16",
            "workload": "W1",
            "metric": "decode_tok_s",
            "engine": "ours-bf16",
            "ours": 120,
            "peer": "a-bf16",
            "best_peer": 100,
            "ratio": 1.2,
        }
    ]
    (ttft,) = report.rows(everything, higher_is_better=False)
    assert (ttft["metric"], ttft["peer"], ttft["ratio"]) == ("ttft_s", "a-bf16", 0.5), "slower to the first token"


def test_each_of_ours_is_compared_with_peers_alone():
    engines = {"ours-int4": cell(90, 1), "ours_g32-int4": cell(60, 1), "a-int4": cell(50, 1), "ours-int8": cell(9, 1)}
    found = report.rows({"small": {"W1": engines}}, higher_is_better=True)
    expected = [("ours-int4", "a-int4", 1.8), ("ours_g32-int4", "a-int4", 1.2)]
    assert [(row["engine"], row["peer"], row["ratio"]) for row in found] == expected


def test_spread_pairs_repeats_with_the_same_prompts():
    ours = [run_of(12, rep=0), run_of(9, rep=1), run_of(99, rep=2)]
    theirs = [run_of(10, rep=1), run_of(10, rep=0)]
    runs = {("m", "W1", "ours-bf16"): ours, ("m", "W1", "a-bf16"): theirs}
    row = {"model": "m", "workload": "W1", "engine": "ours-bf16", "metric": "out_tok_s", "peer": "a-bf16"}
    assert report.spread(runs, row) == [0.9, 1.2]
    assert report.spread({**runs, ("m", "W1", "a-bf16"): []}, row) == []


def test_equality_is_counted_over_the_same_repeats():
    reference = [run_of(1, rep=0, tokens=[[1, 2, 3], [4, 5, 6]])]
    ours = [run_of(1, rep=0, tokens=[[1, 2, 3], [4, 9, 6]]), run_of(1, rep=1, tokens=[[0, 0, 0], [0, 0, 0]])]
    runs = {("m", "W1", "hf-bf16"): reference, ("m", "W1", "ours-bf16"): ours, ("m", "W1", "ours-int8"): ours}
    expected = {"requests": 2, "equal": 1, "first_differences": [1]}
    assert report.equality(runs) == {"m": {"W1": {"ours-bf16": expected}}}


# ---- the machine's limits


LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "intermediate_size": 5,
    "vocab_size": 10,
}
INSIDE = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 5)
OUTSIDE = 8 * 10


def test_a_limit_counts_every_product():
    shape = limits.Shape(LLAMA, "bf16", limits.Machine(bfloat16=1.0, integers=4.0, bandwidth=1e9))
    per_pair = 4 * 3 * 2 * 4
    assert shape.prompts_s([[1, 2, 3]]) == 3 * 2 * INSIDE + 4.5 * per_pair + 2 * OUTSIDE
    assert shape.decode_s([7, 9]) == 2 * 2 * (INSIDE + OUTSIDE) + 16 * per_pair
    fewer = limits.Shape(LLAMA, "int8", limits.Machine(bfloat16=1.0, integers=4.0, bandwidth=1e9))
    assert fewer.decode_s([7, 9]) == (INSIDE + OUTSIDE) + 16 * per_pair, "attention stays in bfloat16"


def test_a_limit_counts_every_byte():
    machine = limits.Machine(bfloat16=1e12, integers=1e12, bandwidth=1.0)
    for dtype, weight_bytes in (("bf16", 2), ("int8", 1), ("int4", 0.5)):
        shape = limits.Shape(LLAMA, dtype, machine)
        assert shape.decode_s([7, 9]) == (INSIDE + OUTSIDE) * weight_bytes + 16 * 2 * 3 * 4 * 2


def test_common_prefixes_of_prompts_count_once():
    shape = limits.Shape(LLAMA, "bf16", limits.Machine(1.0, 1.0, 1.0))
    prompt = list(range(40))
    again = shape.prompts_s([prompt, prompt]) - shape.prompts_s([prompt])
    assert again == 8 * 2 * INSIDE + (40**2 - 32**2) / 2 * 96 + 2 * OUTSIDE, "two blocks of 16 were there"
    other = [99, *prompt[1:]]
    assert shape.prompts_s([prompt, other]) == 2 * shape.prompts_s([prompt])


def test_a_limit_in_tokens_a_second(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    machine = limits.Machine(1e3, 1e3, 1e9)
    requests = [{"prompt": [1, 2], "n": 3}, {"prompt": [3], "n": 2}]
    shape = limits.Shape(LLAMA, "bf16", machine)
    decode = shape.decode_s([3, 2]) + shape.decode_s([4])
    prompts = shape.prompts_s([[1, 2], [3]])
    assert limits.least_seconds(shape, requests) == (prompts, decode)
    assert limits.limit(machine, tmp_path, "bf16", requests, alone=True) == 3 / decode
    assert limits.limit(machine, tmp_path, "bf16", requests, alone=False) == 5 / (prompts + decode)
    assert limits.limit(machine, tmp_path / "none", "bf16", requests, alone=True) is None
    assert limits.limit(machine, tmp_path, "bf16", [{"prompt": [1], "n": 1}], alone=True) is None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gemma"}))
    assert limits.limit(machine, tmp_path, "bf16", requests, alone=True) is None


@pytest.mark.parametrize("head_dim", [{}, {"head_dim": None}])
def test_heads_share_the_hidden_size_where_nothing_else_is_said(head_dim):
    config = {name: value for name, value in LLAMA.items() if name != "head_dim"} | head_dim
    shapes = [limits.Shape(each, "bf16", limits.Machine(1.0, 1.0, 1.0)) for each in (config, LLAMA)]
    assert shapes[0].decode_s([7]) == shapes[1].decode_s([7])


# ---- rounds, resuming, failures


def test_engines_take_turns_and_the_figures_are_written(bench):
    summary, calls = bench("--repeats", "2")
    turns = ["W1 0,1", "W1 1,2", "W2 0,1", "W2 1,2"]
    assert calls == [f"{speed} {turn}" for turn in turns for speed in ("100.0", "50.0")]
    assert summary["rows"][1] | {"ours": 0} == {
        "model": "tiny",
        "dtype": "bf16",
        "workload": "W2",
        "metric": "out_tok_s",
        "engine": "ours-bf16",
        "ours": 0,
        "peer": "other-bf16",
        "best_peer": 50,
        "ratio": 2.0,
        "spread": [2.0, 2.0],
    }
    assert summary["all"]["tiny"]["W1"]["other-bf16"] | {"ttft_s": 0} == {
        "decode_tok_s": 50,
        "ttft_s": 0,
        "clean": 2,
        "measured": 2,
    }
    assert set(summary) >= {"device", "date", "commit", "rows", "startup", "memory", "busy"}


def test_limits_stand_beside_the_figures(bench, tmp_path, monkeypatch, capsys):
    (tmp_path / "models" / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    machine = limits.Machine(1e6, 1e6, 1e6)
    monkeypatch.setattr(limits.Machine, "measured", lambda _: machine)
    summary, _ = bench("--repeats", "1")
    requests = [{"prompt": [5, 6, 7, 8], "n": 2}]
    expected = limits.limit(machine, tmp_path / "models" / "tiny", "bf16", requests, alone=True)
    assert expected is not None
    assert summary["limits"]["tiny"]["bf16"]["W1"] == pytest.approx(expected, rel=1e-3)
    assert f"| tiny | ours-bf16 | W1 | 100 | {100 / expected:.0%} |" in capsys.readouterr().out


def test_a_round_may_hold_several_repeats(bench):
    _, calls = bench("--repeats", "3", "--rounds", "2")
    assert [call.split()[2] for call in calls] == ["0,1,2", "0,1,2", "2,3", "2,3"] * 2


def test_an_engine_that_reads_a_file_runs_models_that_have_it(bench, tmp_path, monkeypatch):
    found = peers.installed_engines

    def with_a_file(folder: Path) -> dict[str, peers.EngineCommand]:
        given = [sys.executable, str(tmp_path / "fake.py"), "7", str(tmp_path / "calls")]
        return {**found(folder), "ours_file-int4": peers.EngineCommand(given, file="-q4_1.gguf")}

    monkeypatch.setattr(peers, "installed_engines", with_a_file)
    flags = ("--repeats", "1", "--startup", "--engines=ours_file-int4,other-bf16")
    _, calls = bench(*flags)
    assert {call.split()[0] for call in calls} == {"50.0"}
    (tmp_path / "models" / "tiny-q4_1.gguf").touch()
    _, calls = bench(*flags)
    assert {call.split()[0] for call in calls} == {"50.0", "7.0"}


def test_slow_engines_are_measured_once(bench, monkeypatch):
    monkeypatch.setitem(peers.BUSY_TOKENS, "tiny", {"W2": 1})
    _, calls = bench("--repeats", "2", "--once", "other-bf16", "--busy", "1")
    assert [call.split()[0] for call in calls] == ["100.0", "50.0", "100.0"] * 2 + ["100.0"]


def test_existing_results_are_not_measured_again(bench):
    first, calls = bench("--repeats", "1")
    again, more = bench("--repeats", "1")
    assert more == calls
    assert again == first
    summary, fewer = bench("--repeats", "1", "--workloads", "W2")
    assert fewer == calls
    assert set(summary["all"]["tiny"]) == {"W2"}
    _, fresh = bench("--repeats", "1", "--fresh", "other-bf16")
    assert len(fresh) == len(calls) + 2
    _, other = bench("--repeats", "1", "--threads", "1")
    assert len(other) == len(fresh) + 4, "other settings are another measurement"


def test_a_result_of_more_workloads_answers():
    known = {"done": True, "settings": {"need": 3, "only": "W2,W3"}}
    assert peers.covers(known, {"need": 3, "only": "W3"})
    assert not peers.covers(known, {"need": 3, "only": "W3,W4"})
    assert not peers.covers(known, {"need": 2, "only": "W3"})
    assert not peers.covers(known | {"done": False}, {"need": 3, "only": "W3"})


def test_startup_and_busy_passes(bench, monkeypatch, capsys):
    monkeypatch.setattr(peers, "STARTUP_ROUNDS", 2)
    monkeypatch.setitem(peers.BUSY_TOKENS, "tiny", {"W2": 1})
    summary, calls = bench("--repeats", "1", "--startup", "--busy", "1")
    assert [call.split(maxsplit=1)[1] for call in calls[4::2]] == ["start 0", "start 0", "W2 0,1,2,3,0,1"]
    assert 0 < summary["startup"]["tiny"]["ours-bf16"] < 60
    assert summary["busy"]["tiny"]["W2"]["ours-bf16"] == {"quiet": 100, "busy": 50, "share": 0.5, "failed": None}
    assert "| tiny | W2 | ours-bf16 | 100 | 50 | 0.5 |  |" in capsys.readouterr().out


def test_the_first_startup_only_warms_the_page_cache(bench, monkeypatch):
    monkeypatch.setattr(peers, "STARTUP_ROUNDS", 1)
    summary, calls = bench("--repeats", "1", "--startup")
    assert len(calls) == 6
    assert summary["startup"] == {}


def test_an_engine_that_fails_does_not_stop_the_others(bench, capsys):
    fail = f"bad-bf16={sys.executable} -c raise(SystemExit(3))"
    summary, calls = bench("--repeats", "1", "--engine", fail, "--engines", "bad-bf16,gone-bf16,ours-bf16",
                           "--engine", "gone-bf16=/nonexistent/python")  # fmt: skip
    assert len(calls) == 2
    assert set(summary["all"]["tiny"]["W1"]) == {"ours-bf16"}
    shown = capsys.readouterr().out
    assert "exit status 3" in shown
    assert "gone-bf16.W1.r0: 0 s, FAILED: exit status 127" in shown


def test_an_engine_that_is_too_slow_is_not_tried_again(bench, monkeypatch, capsys):
    monkeypatch.setattr(peers, "BUSY_LIMIT_S", 0.3)
    monkeypatch.setitem(peers.BUSY_TOKENS, "tiny", {"W2": 1})
    monkeypatch.setattr(peers, "quiet_passes", lambda *_: [])
    code = shlex.quote("import threading; threading.Event().wait(60)")
    flags = ["--busy=1", f"--engine=slow-bf16={sys.executable} -c {code}", "--engines=slow-bf16"]
    bench(*flags)
    assert "FAILED: not done after 0.3 s" in capsys.readouterr().out
    bench(*flags)
    shown = capsys.readouterr().out
    assert "FAILED" not in shown
    assert "| tiny | W2 | slow-bf16 | - | - | - | not done after 0.3 s |" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engines", "nobody"], "unknown engine nobody"),
        (["--engine", "x=y"], "NAME-TYPE=COMMAND"),
        (["--models", "huge"], "models/huge does not exist"),
        (["--repeats", "0"], "must be at least 1"),
        (["--workloads", "W9"], "unknown workload W9"),
    ],
)
def test_bad_flags_are_named(bench, capsys, flags, message):
    with pytest.raises(SystemExit):
        bench(*flags)
    assert message in capsys.readouterr().err


def test_the_time_limit_ends_a_runner_and_its_children(tmp_path):
    script = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).pid)"
    )
    command = [sys.executable, "-c", script + "; sys.stdout.flush(); import time; time.sleep(99)"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        assert peers.wait(child, 0.01, memory=True)[0] is None
        peers.kill(child)
        assert child.returncode == -signal.SIGKILL
        assert ended(grandchild)
    finally:
        child.stdout.close()


def ended(pid: int) -> bool:
    """Wait for the end of an orphan. Only init reaps it, so a zombie counts as ended."""
    end_s = time.monotonic() + scaled(30)
    while time.monotonic() < end_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
    return False


# ---- the driver


class FakeEngine:
    info: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def run(self, requests: list[driver.Request]) -> driver.Outcome:
        recorder = driver.Recorder(len(requests))
        for place in range(len(requests)):
            for at in range(self.num_tokens):
                recorder.add(place, [at], time.monotonic())
        return recorder.outcome()


def requests_of(*prompts: list[int], n: int = 3) -> list[driver.Request]:
    return [{"id": place, "prompt": prompt, "n": n} for place, prompt in enumerate(prompts)]


def test_measure_takes_speed_first_token_and_tokens():
    run = driver.measure(FakeEngine(3), requests_of([1], [2]))
    assert run["tokens"] == [[0, 1, 2]] * 2
    assert run["out_tok_s"] == pytest.approx(6 / run["wall_s"])
    assert 0 <= run["ttft_s"] <= run["wall_s"]
    assert "decode_tok_s" not in run, "only of one stream"
    assert driver.measure(FakeEngine(3), requests_of([1]))["decode_tok_s"] > 0


def test_measure_refuses_an_engine_that_stops_early():
    with pytest.raises(ValueError, match="request 0 got 2 tokens, not 3"):
        driver.measure(FakeEngine(2), requests_of([1]))


def test_shared_prefix_leaves_a_token_to_compute():
    prefix = list(range(100))
    assert driver.shared_prefix(requests_of([*prefix, 7], [*prefix, 8])) == 100
    assert driver.shared_prefix(requests_of(prefix, [*prefix, 8])) == 99
    assert driver.shared_prefix(requests_of([1, *prefix], [2, *prefix])) == 0
    assert driver.shared_prefix(requests_of(prefix)) == 0


def test_foreign_cores_count_other_processes_and_stolen_time():
    then = machine.CpuTimes(at_s=10, busy_s=5, steal_s=1, own_s=2)
    now = machine.CpuTimes(at_s=12, busy_s=8, steal_s=1.5, own_s=4)
    assert now.foreign_since(then) == pytest.approx((1 + 0.5) / 2)


def test_busy_processes_are_ours_and_end_with_the_block():
    before = set(machine.tree(os.getpid()))
    with machine.busy(2):
        spinning = set(machine.tree(os.getpid())) - before
        assert len(spinning) == 2
    assert not spinning & set(machine.tree(os.getpid()))


def test_peak_memory_sees_the_whole_tree():
    # A small root of its own: this process may hold gigabytes, beside which a child does not show.
    grandchild = "block = bytearray(b'x' * (64 << 20)); print(flush=True); input()"
    code = f"import subprocess, sys; print(flush=True); input(); subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdin is not None
        assert root.stdout is not None
        root.stdout.readline()
        peak = machine.PeakMemory(root.pid)
        peak.sample()
        alone = peak.bytes
        root.stdin.write(b"\n")
        root.stdin.flush()
        root.stdout.readline()
        peak.sample()
        root.communicate(b"\n")
    assert alone > 1 << 20
    assert peak.bytes > alone + (60 << 20)


# ---- the real engine


def test_our_runner_measures_the_bundled_model(tmp_path, monkeypatch):
    folder = make_peers(tmp_path, model=Path(demo_folder()), num_tokens=6)
    out = tmp_path / "out.json"
    flags = ["--models=tiny", "--engines=ours-bf16", "--workloads=W1", "--repeats=1", "--threads=1", "--quiet-wait=0"]
    monkeypatch.setattr(sys, "argv", ["peers.py", f"--peers={folder}", f"--out={out}", *flags])
    assert peers.main() == 0
    summary = json.loads(out.read_text())
    figures = summary["all"]["tiny"]["W1"]["ours-bf16"]
    assert figures["decode_tok_s"] > 0
    assert figures["ttft_s"] > 0
    assert summary["engines"]["ours-bf16"]["name"] == "vllm_lite"
    assert summary["memory"]["tiny"]["ours-bf16"] > 50, "client, engine and worker"
    (run, *_) = json.loads((folder / "runs" / "tiny.ours-bf16.W1.r0.json").read_text())["runs"]["W1"]
    assert [len(tokens) for tokens in run["tokens"]] == [6]
