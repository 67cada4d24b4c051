"""Runs of a batch: many requests at once from a file into another, and the command that makes them."""

import argparse
import asyncio
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.batch_files import URL, answered, ids, line, write
from vllm_lite.config import EngineConfig
from vllm_lite.errors import RemoteError
from vllm_lite.tools.batch import batch_report, batch_results, batch_run
from vllm_lite.tools.batch.batch_input import open_source
from vllm_lite.tools.batch.batch_results import BatchResults
from vllm_lite.tools.batch.batch_run import BatchRun, Server
from vllm_lite.tools.batch.batch_source import entries_of
from vllm_lite.tools.batch.fingerprint import INDIFFERENT, fingerprint
from vllm_lite.tools.batch.journal import BatchHeader, RecordKind
from vllm_lite.tools.batch.row_mapper import RowMapper
from vllm_lite.tools.batch.rows import Bad
from vllm_lite.tools.chat.remote_server import Address, client_settings
from vllm_lite.tools.cli import main, run_batch

HEADER = BatchHeader("input")
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}

# ---- runs

Handler = Callable[[httpx.Request], httpx.Response]


def run(tmp_path: Path, handler: Handler, max_concurrency: int = 3) -> tuple[BatchRun, list[Bad]]:
    async def work() -> None:
        address = Address.parse("http://server")
        server = Server(address, "key", 60.0)
        server._http = httpx.AsyncClient(
            transport=httpx.MockTransport(handler), **client_settings(address, "key", 60.0)
        )
        source = open_source(str(tmp_path / "in"), RowMapper())
        survey = source.survey()
        left = (entry for entry in entries_of(source, survey) if entry.line not in results.done)
        async with server as http:
            await made.run(left, http, max_concurrency, "default")

    bad: list[Bad] = []
    with BatchResults(str(tmp_path / "out"), HEADER) as results:
        made = BatchRun(results, complain=bad.append)
        asyncio.run(work())
    return made, bad


def test_flags_that_change_answers_are_passed_to_its_own_server() -> None:
    parser = argparse.ArgumentParser()
    run_batch.add_flags(parser)
    flags = ["-i", "in", "-o", "out", "--model", "demo", "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    config = run_batch._config(parser.parse_args(flags))
    assert (config.reasoning_parser, config.tool_call_parser) == ("qwen3", "hermes")


def test_every_line_is_answered_once(tmp_path: Path) -> None:
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append(body)
        status = 400 if body["prompt"] == "bad" else 200
        return httpx.Response(status, json={"usage": USAGE})

    lines = [line(f"r{place}", body={"prompt": "x", "model": "own"}) for place in range(10)]
    write(tmp_path / "in", *lines, line("f", body={"prompt": "bad"}), line("u", url="/v1/other"), "oops", line("r1"))
    made, bad = run(tmp_path, handler)
    assert (made.own.num_answered, made.own.num_failed, made.own.num_bad, made.num_done) == (10, 1, 3, 14)
    assert (made.own.prompt_tokens, made.own.cached_tokens, made.own.output_tokens) == (20, 10, 20)
    assert [entry.line for entry in bad] == [12, 13, 14]
    names = [*(f"r{place}" for place in range(10)), "f", "u"]
    assert sorted(map(str, ids(tmp_path / "out"))) == sorted([*names, "None", "None"])
    assert {body["model"] for body in asked} == {"own", "default"}
    by_id = {entry["custom_id"]: entry for entry in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert set(by_id["f"]) == {"id", "custom_id", "response", "error"}
    assert by_id["f"]["response"]["status_code"] == 400
    assert by_id["f"]["error"] is None
    assert by_id["u"]["response"] is None
    assert by_id["u"]["error"]["code"] == "invalid_url"
    again, bad = run(tmp_path, handler)
    assert (again.own.num_answered, again.own.num_failed, again.own.num_bad, again.before.num_rows) == (0, 0, 0, 14)
    assert len(asked) == 11


def test_no_more_than_allowed_at_once(tmp_path: Path) -> None:
    running = most = 0

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return httpx.Response(200, json={})

    write(tmp_path / "in", *(line(str(place)) for place in range(40)))
    made, _ = run(tmp_path, handler, max_concurrency=4)  # type: ignore[arg-type]
    assert made.own.num_answered == 40
    assert most == 4


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    statuses = [429, 503, 200]

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(statuses.pop(0), json={}, headers={"Retry-After": "0"})

    write(tmp_path / "in", line("a"))
    made, _ = run(tmp_path, handler)
    assert (made.own.num_answered, statuses) == (1, [])


def test_a_server_that_stays_busy_is_a_failure(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a"))
    made, _ = run(tmp_path, lambda _: httpx.Response(503, text="busy", headers={"Retry-After": "0"}))
    assert made.own.num_failed == 1
    assert json.loads((tmp_path / "out").read_text())["response"]["body"]["error"]["message"] == "busy"


@pytest.mark.parametrize("answer", [httpx.ReadError("gone"), httpx.Response(401, json={})])
def test_an_error_that_all_rows_would_have_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: httpx.Response | Exception
) -> None:
    monkeypatch.setattr(batch_run, "RECONNECT_S", (0.0,))
    count = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        if count <= 5:
            return httpx.Response(200, json={})
        if isinstance(answer, Exception):
            raise answer
        return answer

    write(tmp_path / "in", *(line(str(place)) for place in range(20)))
    with pytest.raises(RemoteError):
        run(tmp_path, handler, max_concurrency=1)
    assert ids(tmp_path / "out") == ["0", "1", "2", "3", "4"]
    count = -100
    made, _ = run(tmp_path, handler)
    assert (made.before.num_rows, made.own.num_answered) == (5, 15)
    assert sorted(map(int, ids(tmp_path / "out"))) == list(range(20))


def test_pauses_are_bounded() -> None:
    assert batch_run.pause_s(httpx.Response(429, headers={"Retry-After": "3"}), 0) == 3.0
    assert batch_run.pause_s(httpx.Response(429, headers={"Retry-After": "99999"}), 0) == batch_run.MAX_PAUSE_S
    assert batch_run.pause_s(httpx.Response(503), 1) == 1.0


# ---- the command


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-i", "https://host/in", "-o", "{}/out", "--model", "demo"], ["--input-file", "https://host/in"]),
        (["-i", "{}/in", "-o", "s3://host/out", "--model", "demo"], ["--output-file", "s3://host/out"]),
        (["-i", "{}/in", "-o", "{}/out"], ["--model", "--url"]),
        (["-i", "{}/in", "-o", "{}/out", "--model", "demo", "--url", "http://host"], ["--model", "--url"]),
        (
            ["-i", "{}/in", "-o", "{}/out", "--url", "ftp://host"],
            ["--url must look like http://HOST:PORT", "ftp://host'\n"],
        ),
        (["-i", "{}/in", "-o", "{}/in", "--model", "demo"], ["same file"]),
        (["-i", "{}/none", "-o", "{}/out", "--model", "demo"], ["/none"]),
        (["-i", "{}/in", "-o", "{}/none/out", "--model", "demo"], ["/none/out"]),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    write(tmp_path / "in", line("a"))
    assert main(["run-batch", *(flag.format(tmp_path) for flag in flags)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Has the command ask a server that answers all; returns the bodies that it gets."""
    bodies: list[dict[str, Any]] = []

    async def post(_: object, url: str, content: bytes) -> httpx.Response:
        bodies.append(json.loads(content))
        bad = bodies[-1]["prompt"] == "bad" and len(bodies) < 10
        return httpx.Response(400 if bad else 200, json={"usage": USAGE, "url": url})

    monkeypatch.setattr(Server, "_post", post)
    return bodies


def command(tmp_path: Path, *flags: str, out: str = "out") -> int:
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / out), "--url", "http://server"]
    return main(["run-batch", *files, *flags])


def test_a_finished_batch_asks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answering: list[dict[str, Any]]
) -> None:
    write(tmp_path / "in", line("a"), line("b"))
    assert command(tmp_path) == 0
    assert command(tmp_path, "--report", str(tmp_path / "report")) == 0
    assert "0 answered, 2 from earlier runs" in capsys.readouterr().err
    assert len(answering) == 2
    report = json.loads((tmp_path / "report").read_text())
    assert (report["num_rows"], report["num_open"]) == (2, 0)
    assert report["run"]["num_answered"] == 0
    whole = {"num_answered": 2, "num_failed": 0, "num_bad": 0}
    tokens = {"prompt_tokens": 4, "cached_tokens": 2, "output_tokens": 4}
    assert {name: report["batch"][name] for name in (*whole, *tokens)} == {**whole, **tokens}


def test_a_finished_batch_starts_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in")
    flags = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "/no/such/folder"]
    assert main(["run-batch", *flags]) == 0
    assert "0 answered in" in capsys.readouterr().err


def test_another_input_or_other_settings_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answering: list[dict[str, Any]]
) -> None:
    write(tmp_path / "in", line("a"))
    assert command(tmp_path, "--model-name", "one") == 0
    assert command(tmp_path, "--model-name", "two") == 2
    assert "was begun with other values of --model-name; " in capsys.readouterr().err
    write(tmp_path / "in", line("a"), line("b"))
    assert command(tmp_path, "--model-name", "one") == 2
    err = capsys.readouterr().err
    assert "was begun with other values of --input-file; " in err
    assert err.count("\n") == 1
    assert ids(tmp_path / "out") == ["a"]
    assert command(tmp_path, "--model-name", "one", "--no-resume") == 0
    assert sorted(ids(tmp_path / "out")) == ["a", "b"]
    assert len(answering) == 3


def test_settings_of_its_own_server_count_where_they_change_answers(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    run_batch.add_flags(parser)

    def settings(*flags: str) -> dict[str, str]:
        given = parser.parse_args(["-i", "in", "-o", "out", "--model", "demo", *flags])
        return fingerprint(run_batch._config(given), run_batch.DEFAULTS, None, RowMapper())

    usual = settings()
    assert usual.keys() == {"model"}
    assert settings("-dp", "2", "--max-num-seqs", "3", "--no-enable-prefix-caching") == usual
    assert settings("--dtype", "float32").keys() == {"model", "dtype"}
    assert settings("--reasoning-parser", "qwen3").keys() == {"model", "reasoning_parser"}
    assert settings("--dtype", "float32")["dtype"] != settings("--dtype", "bfloat16")["dtype"]
    assert set(EngineConfig.__struct_fields__) >= INDIFFERENT


def test_answers_as_parquet(
    tmp_path: Path, answering: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "in", line("a"), line("b", body={"prompt": "bad"}), "oops")
    assert command(tmp_path, out="out.parquet") == 1
    found = {row["custom_id"]: row for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()}
    assert json.loads(found["a"]["body"]) == {"usage": USAGE, "url": URL}
    assert (found["a"]["status_code"], found["b"]["status_code"], found["a"]["error"]) == (200, 400, None)
    assert found[None]["body"] is None
    assert json.loads(found[None]["error"])["line"] == 3
    names = {"in", "out.parquet", "out.parquet.journal", "out.parquet.partial"}
    assert {path.name for path in tmp_path.iterdir()} == names
    answering.extend([{}] * 10)
    assert command(tmp_path, "--retry-failed", out="out.parquet") == 1  # a bad line stays one
    found = {row["custom_id"]: row for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()}
    assert {name: row["status_code"] for name, row in found.items()} == {"a": 200, "b": 200, None: None}
    assert {path.name for path in tmp_path.iterdir()} == names - {"out.parquet.partial"}
    assert command(tmp_path, out="out.parquet") == 1
    (tmp_path / "out.parquet").unlink()
    capsys.readouterr()
    assert command(tmp_path, out="out.parquet") == 2
    assert "begin anew by --no-resume" in capsys.readouterr().err


def test_a_table_from_in_to_out(tmp_path: Path, answering: list[dict[str, Any]]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"question": ["why?", "how?"]}), tmp_path / "in.parquet")
    flags = ["--prompt-column", "question", "--body", '{"max_tokens": 3}', "--url", "http://server"]
    files = ["-i", str(tmp_path / "in.parquet"), "-o", str(tmp_path / "out")]
    assert main(["run-batch", *files, *flags]) == 0
    assert sorted(body["prompt"] for body in answering) == ["how?", "why?"]
    assert {body["max_tokens"] for body in answering} == {3}
    assert sorted(ids(tmp_path / "out")) == ["row-1", "row-2"]


def test_a_server_of_its_own_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A private server that dies without having answered anything is not started again."""
    started, left = 0, 0

    class Remote:
        address, api_key = Address.parse("http://server"), None

        def why(self) -> str | None:
            return "the server ended: killed" if left < 0 else None

    @contextmanager
    def server(*_: object) -> Iterator[Remote]:
        nonlocal started, left
        started += 1
        left = 3 if started < 4 else 0
        yield Remote()

    async def ask(*_: object) -> tuple[int, str, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise RemoteError("the server ended: killed")
        return 200, "id", {"usage": USAGE}

    monkeypatch.setattr(run_batch, "server", server)
    monkeypatch.setattr(Server, "ask", ask)
    write(tmp_path / "in", *(line(f"r{place}") for place in range(20)))
    flags = ["--model", "demo", "--max-concurrency", "2"]
    assert main(["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *flags]) == 1
    err = capsys.readouterr().err
    assert err.count("another server takes over") == 3
    assert "9 answered, 11 open" in err
    assert started == 4


def test_progress_has_the_remaining_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answering: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(batch_report, "PLAIN_S", 0.0)
    write(tmp_path / "in", *(line(f"r{place}") for place in range(5)))
    assert command(tmp_path) == 0
    lines = [text for text in capsys.readouterr().err.splitlines() if " left" in text]
    assert [text.split(" rows")[0] for text in lines] == ["1 of 5", "2 of 5", "3 of 5", "4 of 5"]
    assert all(re.fullmatch(r"\d of 5 rows, [\d.]+ a second, \d+:\d\d:\d\d left", text) for text in lines)
    with BatchResults(str(tmp_path / "other"), HEADER) as results:
        results.append(1, RecordKind.ANSWERED, answered("a"))
        made = BatchRun(results)
        assert batch_report.progress_line(made, 4001, 1.0).endswith("left")
        for number in (2, 3):
            results.append(number, RecordKind.ANSWERED, answered("a"))
        assert batch_report.progress_line(made, 4003, 2.0) == "3 of 4003 rows, 1.0 a second, 1:06:40 left"


def test_a_broken_connection_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "RECONNECT_S", (0.0, 0.0))
    failures = [httpx.ReadError("gone"), httpx.ConnectError("gone")]

    def handler(request: httpx.Request) -> httpx.Response:
        if failures:
            raise failures.pop()
        return httpx.Response(200, json={})

    write(tmp_path / "in", line("a"))
    made, _ = run(tmp_path, handler)
    assert made.own.num_answered == 1


def test_a_full_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answering: list[dict[str, Any]]
) -> None:
    write(tmp_path / "in", line("a"), line("b"))

    def write_whole(fd: int, data: bytes) -> None:
        os.write(fd, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(batch_results, "write_whole", write_whole)
        assert command(tmp_path) == 1
    err = capsys.readouterr().err
    assert "No space left on device; what was answered stays; run the same command again" in err
    assert command(tmp_path) == 0
    assert sorted(ids(tmp_path / "out")) == ["a", "b"]


@pytest.mark.parametrize("name", ["in", "out", "out.journal"])
def test_a_report_cannot_be_a_file_of_the_batch(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], answering: list[dict[str, Any]]
) -> None:
    write(tmp_path / "in", line("a"))
    assert command(tmp_path, "--report", str(tmp_path / name)) == 2
    assert "is a file of the batch; a report needs one of its own" in capsys.readouterr().err
    assert answering == []
