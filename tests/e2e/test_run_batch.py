"""`vllm-lite run-batch`: killed in the middle and run again, and with a server that it starts itself."""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.deadlines import scaled
from tests.http_server import serving, until

NUM = 400


def write(path: Path, num: int) -> None:
    with path.open("w") as file:
        for place in range(num):
            body: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
            if place % 2:
                url = "/v1/completions"
                body["prompt"] = "Once upon a time"
            else:
                url = "/v1/chat/completions"
                body["messages"] = [{"role": "user", "content": "Tell me a story."}]
            file.write(json.dumps({"custom_id": f"r{place}", "method": "POST", "url": url, "body": body}) + "\n")


def command(tmp_path: Path, *flags: str) -> list[str]:
    files = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    return [sys.executable, "-m", "vllm_lite", "run-batch", *files, *flags]


def run(tmp_path: Path, *flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        command(tmp_path, *flags), capture_output=True, text=True, timeout=scaled(90), env={**os.environ, **(env or {})}
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def answers(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "out"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def num_lines(tmp_path: Path) -> int:
    path = tmp_path / "out"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class _Gate(ThreadingHTTPServer):
    """Passes requests on to the server at `url`, but no more than `num_passed`; the others wait until it is closed, so
    that a run cannot end before it is killed."""

    daemon_threads = True
    num_passed = 10

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passed)
        self.server_url, self.closed, self.places = url, threading.Event(), itertools.count()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Passed(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Gate

    def do_GET(self) -> None:
        self.answer(httpx.get(self.server.server_url + self.path, timeout=scaled(60)))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if next(self.server.places) >= self.server.num_passed:
            self.server.closed.wait(scaled(120))
            self.close_connection = True
            return
        headers = {"Content-Type": self.headers["Content-Type"]}
        self.answer(httpx.post(self.server.server_url + self.path, content=body, headers=headers, timeout=scaled(60)))

    def answer(self, found: httpx.Response) -> None:
        self.send_response(found.status_code)
        self.send_header("Content-Type", found.headers["content-type"])
        self.send_header("Content-Length", str(len(found.content)))
        self.end_headers()
        self.wfile.write(found.content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def gate(url: str) -> Iterator[_Gate]:
    with _Gate(url) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield opened
        finally:
            opened.closed.set()
            opened.shutdown()
            thread.join(scaled(20))


def test_killed_in_the_middle_and_resumed(tmp_path: Path) -> None:
    write(tmp_path / "in", NUM)
    with serving() as server, gate(server.url) as gated:
        flags = ("--url", gated.url, "--max-concurrency", "2")
        process = subprocess.Popen(command(tmp_path, *flags), stderr=subprocess.DEVNULL)
        until(lambda: num_lines(tmp_path) >= 5, "five answers", scaled(60.0))
        process.kill()
        process.wait(scaled(30))
        before = num_lines(tmp_path)
        assert 5 <= before <= gated.num_passed
        with (tmp_path / "out").open("ab") as file:
            file.write(b'{"id": "batch_req_torn", "custom_id": "r')
        with (tmp_path / "out.journal").open("ab") as file:
            file.write(b"torn")
        status, err = run(tmp_path, "--url", server.url)
    assert status == 0, err
    assert f"{before} from earlier runs" in err
    lines = answers(tmp_path)
    assert Counter(line["custom_id"] for line in lines) == Counter(f"r{place}" for place in range(NUM))
    for line in lines:
        choice = line["response"]["body"]["choices"][0]
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["usage"]["completion_tokens"] == 20
        text = choice["text"] if int(line["custom_id"][1:]) % 2 else choice["message"]["content"]
        assert text.strip()


def test_a_server_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "in", 8)
    with (tmp_path / "in").open("a") as file:
        file.write('{"custom_id": "e", "method": "POST", "url": "/v1/moderations", "body": {}}\n{oops\n')
        body = {"prompt": "x", "temperature": -1}
        file.write(json.dumps({"custom_id": "hot", "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    runs = tmp_path / "t"
    runs.mkdir()
    status, err = run(tmp_path, "--model", "demo", "--max-model-len", "256", "-dp", "2", env={"TMPDIR": str(runs)})
    assert status == 1
    assert "line 9: url" in err
    assert "line 10: this is not JSON" in err
    assert "8 answered, 1 failed, 2 bad lines" in err
    assert "INFO" not in err
    assert list(runs.iterdir()) == []
    by_id = {line["custom_id"]: line for line in answers(tmp_path)}
    assert len(by_id) == 11
    assert by_id[None]["error"] == {**by_id[None]["error"], "code": "invalid_json", "line": 10}
    assert by_id["e"]["error"]["code"] == "invalid_url"
    assert by_id["hot"]["response"]["status_code"] == 400
    assert "temperature" in by_id["hot"]["response"]["body"]["error"]["message"]


def test_answers_before_the_servers_end_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "in", NUM)
    with serving("--shutdown-timeout", "0") as server, gate(server.url) as gated:
        process = subprocess.Popen(
            command(tmp_path, "--url", gated.url, "--max-concurrency", "1"), stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        until(lambda: num_lines(tmp_path) >= 3, "three answers", scaled(60.0))
        server.process.kill()
        gated.closed.set()
        err = process.stderr.read()
        process.stderr.close()
        assert process.wait(scaled(60)) == 1
    assert "run the same command again" in err
    assert "open" in err
    lines = answers(tmp_path)
    assert 3 <= len(lines) < NUM
    assert all(line["response"]["status_code"] == 200 for line in lines)
