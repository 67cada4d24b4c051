"""Batch files: what lines say, what an output file remembers, and many requests from one into the other."""

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_lite.errors import ConfigError, RemoteError
from vllm_lite.tools.chat import batch, batch_file
from vllm_lite.tools.chat.batch import BatchRun, Server
from vllm_lite.tools.chat.batch_file import Bad, BatchRequest, BatchResults
from vllm_lite.tools.chat.remote_server import Address, client_settings
from vllm_lite.tools.cli import main, run_batch

URL = "/v1/completions"


def line(custom_id: object = "a", **more: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": "x"}, **more})


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{text}\n" for text in lines))
    return str(path)


def answered(name: str, status: int = 200) -> dict[str, Any]:
    return batch_file.answer(name, status, "id", {"usage": {"prompt_tokens": 1, "completion_tokens": 2}})


def ids(path: Path) -> list[str]:
    return [json.loads(text)["custom_id"] for text in path.read_text().splitlines()]


# ---- input


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("{oops", "invalid_json", "not JSON"),
        ('"\udcff"', "invalid_json", "not JSON"),
        ("[" * 100_000, "invalid_json", "not JSON"),
        ("[]", "invalid_request", "custom_id"),
        (line(3), "invalid_request", "custom_id"),
        (line(""), "invalid_request", "custom_id"),
        (line(method="GET"), "invalid_method", "'GET'"),
        (line(url="/v1/moderations"), "invalid_url", "/v1/moderations"),
        (line(url=["/v1/completions"]), "invalid_url", "got"),
        (line(body=[1]), "invalid_request", "[1]"),
        (line(body={"stream": True}), "invalid_request", "stream"),
    ],
)
def test_bad_lines_say_which_and_why_and_stop_nothing(tmp_path: Path, text: str, code: str, words: str) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n" + text.encode(errors="surrogateescape") + b"\n" + line("good").encode())
    assert batch_file.count_lines(str(path)) == 2
    bad, good = batch_file.read(str(path))
    assert isinstance(bad, Bad)
    assert (bad.line, bad.code) == (2, code)
    assert words in bad.message
    assert good == BatchRequest(3, "good", URL, {"prompt": "x"})


def test_the_first_of_two_equal_ids_counts(tmp_path: Path) -> None:
    entries = list(batch_file.read(write(tmp_path / "in", line("a"), line("b", url="?"), line("a"), line("b"))))
    assert [type(entry) for entry in entries] == [BatchRequest, Bad, Bad, Bad]
    assert [entry.custom_id for entry in entries] == ["a", "b", None, None]


# ---- output


def test_a_torn_line_is_cut_and_the_rest_is_known(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchResults(str(path)) as results:
        results.append(answered("ä"))
        results.append(batch_file.failure("b", "invalid_url", "no"))
        assert results.done == {"ä", "b"}
    whole = path.read_bytes()
    for torn in (b'{"id"', json.dumps(answered("c")).encode(), b"\x00\x00"):
        path.write_bytes(whole + torn)
        with BatchResults(str(path)) as results:
            assert results.done == {"ä", "b"}
            assert results.num_failed == 1
            results.append(answered("c", 500))
            assert results.num_failed == 2
        assert ids(path) == ["ä", "b", "c"]


def test_failures_can_be_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchResults(str(path)) as results:
        for name, status in (("a", 200), ("b", 400), ("c", 200)):
            results.append(answered(name, status))
        results.append(batch_file.failure("d", "invalid_url", "no"))
    with BatchResults(str(path), retry_failed=True) as results:
        assert results.done == {"a", "c"}
        assert results.num_failed == 0
        results.append(answered("b"))
    assert ids(path) == ["a", "c", "b"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["hello\n", "{}\n", '{"custom_id": "a"}\n', '{"custom_id": "a", "error": null}\n'])
def test_another_file_is_not_written_to(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out"
    path.write_text(json.dumps(answered("a")) + "\n" + text)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="in line 2; choose another"):
        BatchResults(str(path))
    assert path.read_bytes() == before


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    with BatchResults(path), pytest.raises(ConfigError, match="another run-batch"):
        BatchResults(path)
    with BatchResults(path):
        pass


def test_a_lone_surrogate_is_still_a_line(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchResults(str(path)) as results:
        results.append(answered("\ud800"))
    with BatchResults(str(path)) as results:
        assert results.done == {"\ud800"}


# ---- runs

Handler = Callable[[httpx.Request], httpx.Response]


def run(tmp_path: Path, handler: Handler, max_concurrency: int = 3) -> tuple[BatchRun, list[Bad]]:
    async def work() -> None:
        address = Address.parse("http://server")
        server = Server(address, "key", 60.0)
        server._http = httpx.AsyncClient(
            transport=httpx.MockTransport(handler), **client_settings(address, "key", 60.0)
        )
        async with server as http:
            await made.run(batch_file.read(str(tmp_path / "in")), http, max_concurrency, "default")

    bad: list[Bad] = []
    with BatchResults(str(tmp_path / "out")) as results:
        made = BatchRun(results, complain=bad.append)
        asyncio.run(work())
    return made, bad


def test_its_own_server_takes_what_changes_answers() -> None:
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
        return httpx.Response(status, json={"usage": {"prompt_tokens": 1, "completion_tokens": 2}})

    lines = [line(f"r{place}", body={"prompt": "x", "model": "own"}) for place in range(10)]
    write(tmp_path / "in", *lines, line("f", body={"prompt": "bad"}), line("u", url="/v1/other"), "oops", line("r1"))
    made, bad = run(tmp_path, handler)
    assert (made.num_answered, made.num_failed, made.num_bad, made.num_lines) == (10, 1, 3, 14)
    assert (made.num_prompt_tokens, made.num_output_tokens) == (10, 20)
    assert [entry.line for entry in bad] == [12, 13, 14]
    assert sorted(ids(tmp_path / "out")) == sorted([*(f"r{place}" for place in range(10)), "f", "u"])
    assert {body["model"] for body in asked} == {"own", "default"}
    by_id = {entry["custom_id"]: entry for entry in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert set(by_id["f"]) == {"id", "custom_id", "response", "error"}
    assert by_id["f"]["response"]["status_code"] == 400
    assert by_id["f"]["error"] is None
    assert by_id["u"]["response"] is None
    assert by_id["u"]["error"]["code"] == "invalid_url"
    again, bad = run(tmp_path, handler)
    assert (again.num_answered, again.num_failed, again.num_bad, again.num_before) == (0, 0, 2, 12)
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
    assert made.num_answered == 40
    assert most == 4


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    statuses = [429, 503, 200]

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(statuses.pop(0), json={}, headers={"Retry-After": "0"})

    write(tmp_path / "in", line("a"))
    made, _ = run(tmp_path, handler)
    assert (made.num_answered, statuses) == (1, [])


def test_one_that_stays_busy_is_a_failure(tmp_path: Path) -> None:
    write(tmp_path / "in", line("a"))
    made, _ = run(tmp_path, lambda _: httpx.Response(503, text="busy", headers={"Retry-After": "0"}))
    assert made.num_failed == 1
    assert json.loads((tmp_path / "out").read_text())["response"]["body"]["error"]["message"] == "busy"


@pytest.mark.parametrize("answer", [httpx.ReadError("gone"), httpx.Response(401, json={})])
def test_what_would_fail_all_ends_the_run(tmp_path: Path, answer: httpx.Response | Exception) -> None:
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
    assert (made.num_before, made.num_answered) == (5, 15)
    assert sorted(map(int, ids(tmp_path / "out"))) == list(range(20))


def test_pauses_are_bounded() -> None:
    assert batch.pause_s(httpx.Response(429, headers={"Retry-After": "3"}), 0) == 3.0
    assert batch.pause_s(httpx.Response(429, headers={"Retry-After": "99999"}), 0) == batch.MAX_PAUSE_S
    assert batch.pause_s(httpx.Response(503), 1) == 1.0


# ---- the command


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-i", "https://host/in", "-o", "{}/out", "--model", "demo"], ["--input-file", "https://host/in"]),
        (["-i", "{}/in", "-o", "s3://host/out", "--model", "demo"], ["--output-file", "s3://host/out"]),
        (["-i", "{}/in", "-o", "{}/out"], ["--model", "--url"]),
        (["-i", "{}/in", "-o", "{}/out", "--model", "demo", "--url", "http://host"], ["--model", "--url"]),
        (["-i", "{}/in", "-o", "{}/in", "--model", "demo"], ["same file"]),
        (["-i", "{}/none", "-o", "{}/out", "--model", "demo"], ["/none"]),
        (["-i", "{}/in", "-o", "{}/none/out", "--model", "demo"], ["/none/out"]),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    write(tmp_path / "in", line("a"))
    assert main(["run-batch", *(flag.format(tmp_path) for flag in flags)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words)


def test_a_finished_batch_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "in", line("a"))
    out = tmp_path / "out"
    with BatchResults(str(out)) as results:
        results.append(answered("a"))
    assert main(["run-batch", "-i", file, "-o", str(out), "--model", "/no/such/folder"]) == 0
    assert "1 from earlier runs" in capsys.readouterr().err
