"""`vllm-lite` itself: --help, and the one sentence that wrong words are answered with."""

import argparse
import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Meta

from tests.deadlines import scaled
from vllm_lite.runtime.settings import Section, Settings, add_flags
from vllm_lite.server.config import ServeConfig
from vllm_lite.tools.cli import CLOSED_PIPE, COMMANDS, INTERRUPTED, main, run_command
from vllm_lite.tools.cli.ps import COLUMNS, NUMBERS
from vllm_lite.tools.cli.ps import run as ps
from vllm_lite.tools.plan import PlanConfig


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """Exit status and stderr of one that fails before anything is started."""
    try:
        status: object = main(words)
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("serve --print-config --port abc", "port: must be a whole number, got 'abc'"),
        ("serve --print-config --port 65536", "port: must be at most 65535, got '65536'"),
        ("serve --print-config --port=-1", "port: must be at least 0, got '-1'"),
        ("serve --print-config --gpu-memory-utilization 0", "gpu_memory_utilization: must be above 0, got '0'"),
        ("serve --print-config --cpu-threads 100000", "cpu_threads: must be at most 4096, got '100000'"),
        ("serve --print-config --kv-watermark 1", "kv_watermark: must be below 1, got '1'"),
        ("serve --print-config --body-timeout-s soon", "body_timeout_s: must be a number, got 'soon'"),
        ("serve --print-config --dtype fp7", "dtype: must be one of auto, float32, bfloat16, float16, got 'fp7'"),
        ("serve --print-config --speculative-config ngram", "speculative_config: must be a JSON object, got 'ngram'"),
        (
            'serve --print-config --speculative-config {"method":"draft"}',
            (
                "speculative_config.method: must be one of ngram, suffix, self, draft_model, mtp, eagle3, "
                "deepseek_mtp, "
                """glm4_moe_mtp, glm4_moe_lite_mtp, qwen3_next_mtp, qwen3_5_mtp, got '{"method":"draft"}'"""
            ),
        ),
        (
            'serve --print-config --kv-events-config {"hwm":0}',
            """kv_events_config.hwm: must be at least 1, got '{"hwm":0}'""",
        ),
        ("serve --print-config --api-key=", "api_key is empty; give a value, or leave it out"),
        (
            "complete --url http://127.0.0.1:1 Once",
            "the server at --url has its model; give the text as -q, got 'Once'",
        ),
        ("complete --url http://127.0.0.1:1 -q a --temperature nan", "--temperature must be a finite number, got nan"),
        ("complete --url http://127.0.0.1:1 -q a --top-p=-inf", "--top-p must be a finite number, got -inf"),
        (
            "sreve",
            f"argument COMMAND: must be one of {', '.join(COMMANDS)}, got 'sreve'; did you mean serve?",
        ),
    ],
)
def test_wrong_words(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *words.split(" ")) == (2, f"vllm-lite: {error}\n")


def test_a_relative_path_where_the_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in ("plan m.gguf", "serve m.gguf", "run-batch -i a -o b --model demo"):
        sentence = "the current folder is there no longer; change to another one\n"
        assert said(capsys, *words.split(" ")) == (2, f"vllm-lite: {sentence}")
    # In a process of its own, which torch's libraries would end.
    command = [sys.executable, "-P", "-m", "vllm_lite", "quantize", "demo", "--out", "/none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert (done.returncode, done.stderr) == (2, f"vllm-lite: {sentence}")


def test_json_of_a_flag_has_no_number_that_a_request_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("complete", "--url", "http://127.0.0.1:1", "-q", "a", "--structured-outputs", '{"json": {"const": NaN}}')
    status, error = said(capsys, *words)
    assert (status, error.endswith("NaN is no number of JSON\n"), error.count("\n")) == (2, True, 1)


def test_flags_stand_in_groups_and_show_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    class Example(Settings, frozen=True, kw_only=True):
        color: Annotated[str, Section("looks"), Meta(description="of the door")] = "red"
        hinges: Annotated[int, Meta(description="on one side")] = 3
        locked: Annotated[bool, Section("state"), Meta(description="needs a key")] = True
        keys: Annotated[tuple[str, ...], Meta(description="that open it")] = ()
        disable_bell: Annotated[bool, Meta(description="it does not ring")] = False

    parser = argparse.ArgumentParser(prog="door")
    add_flags(parser, Example)
    parser.print_help()
    assert capsys.readouterr().out.partition("\n\n")[2].split("\n\n")[1:] == [
        "looks:\n  --color COLOR         of the door [red]\n  --hinges N            on one side [3]",
        (
            f"state:\n  --locked, --no-locked\n{' ' * 24}needs a key [on]\n  --keys KEYS           that open it\n"
            "  --disable-bell        it does not ring [off]\n"
        ),
    ]
    for word, is_disabled in (("--disable-bell", True), ("--no-disable-bell", False)):
        assert parser.parse_args([word]).disable_bell is is_disabled
    assert parser.parse_args([]).disable_bell is None


@pytest.mark.parametrize(
    ("kind", "last"), [(ServeConfig, ("answers", "enable_log_requests")), (PlanConfig, ("machine", "concurrency"))]
)
def test_every_flag_has_a_group(kind: type[Settings], last: tuple[str, str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, kind)
    groups = {group.title: [a.dest for a in group._group_actions] for group in parser._action_groups}
    assert groups["options"] == ["help"]
    assert groups["processes"][0] == "cpu_threads"
    assert last[1] in groups[last[0]]


def test_usage_of_many_flags_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: vllm-lite serve [MODEL] [flag ...]\n\n")
    assert "--preemption-mode {auto,recompute,swap}" in shown


PRINTING = ["plan demo", "plan demo --json", "serve --print-config", "serve --help", "--version"]


def printed_to(writer: int, command: str, *, buffered: bool) -> tuple[int, str]:
    """Exit status and stderr of a command whose standard output is `writer`, which is closed."""
    with open(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_lite", *command.split()],
            env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=scaled(60),
            check=False,
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", PRINTING)
def test_a_reader_that_has_gone(command: str, buffered: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before the command can write anything
    assert printed_to(writer, command, buffered=buffered) == (CLOSED_PIPE, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", PRINTING)
def test_a_full_disk_under_the_output(command: str, buffered: bool) -> None:
    said = "vllm-lite: standard output cannot be written: No space left on device\n"
    assert printed_to(os.open("/dev/full", os.O_WRONLY), command, buffered=buffered) == (1, said)


def test_an_error_of_another_file_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "somewhere")

    monkeypatch.setattr("vllm_lite.tools.cli.plan.run", fails)
    with pytest.raises(PermissionError):
        main(["plan", "demo"])
    assert capsys.readouterr() == ("", "")


def test_a_table_of_instances_has_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values: dict[str, Any] = {
        "pid": 7,
        "kind": "server",
        "model": "m" * 40,
        "state": "serving",
        "uptime_s": 61.0,
        "memory_bytes": None,
    }
    values["workers"] = [{"rank": 0}, {"rank": 1}]
    server = {
        **values,
        "running": 3,
        "waiting": None,
        "restarts": 4,
        "url": "http://127.0.0.1:8000",
        "address": "ipc:///x",
    }
    monkeypatch.setattr("vllm_lite.tools.cli.ps.find", lambda: [server, {**server, "url": None, "pid": 12345}])
    monkeypatch.setattr("vllm_lite.tools.cli.ps.row", lambda instance: instance)
    monkeypatch.setenv("COLUMNS", "20")
    assert ps(argparse.Namespace(clean=False, json=False)) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == list(COLUMNS)
    assert set(NUMBERS) < set(COLUMNS)
    assert [line.split() for line in lines] == [
        ["7", "server", "m" * 40, "serving", "1m", "2", "3", "4", "http://127.0.0.1:8000"],
        ["12345", "server", "m" * 40, "serving", "1m", "2", "3", "4", "ipc:///x"],
    ]
    assert lines[0].startswith("    7  server")


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_ctrl_c_before_the_command_runs_prints_nothing(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_lite.runtime.supervise.spawn_early", interrupted)
    monkeypatch.setattr("vllm_lite.tools.cli.import_module", interrupted)
    assert main([command]) == INTERRUPTED


def test_ctrl_c_while_a_benchmark_runs_prints_nothing() -> None:
    """`python benchmarks` has a parser of its own, and main() is not around it."""

    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=interrupted)
    assert run_command(parser, []) == INTERRUPTED


def test_bytes_that_are_no_text_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    given, shown = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"), io.BytesIO()
    monkeypatch.setattr("sys.stdin", given)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="latin-1", write_through=True))
    assert main([]) == 2
    assert given.read() == "caf\ufffd\n"
    print("\u00e9\U0001f98a")
    assert shown.getvalue() == b"\xe9?\n"


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "", "--print-config"),
        ("plan", ""),
        ("plan", "--model", " "),
        ("bench", "latency", "--model", ""),
        ("bench", "throughput", "--model="),
    ],
)
def test_an_empty_model_is_not_the_bundled_one(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """`serve "$MODEL"` passes an empty name if the variable is not set."""
    assert main(words) == 2
    assert capsys.readouterr().err == "vllm-lite: model is empty; give a value, or leave it out\n"
