"""tests/acceptance/try_agents.py without agents: the script that each request is played, a page of all agents."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest

from tests.acceptance import try_agents
from tests.acceptance.try_agents_recorder import Recorder
from tests.acceptance.try_agents_table import AGENTS
from tests.acceptance.try_agents_turns import CALLS, DONE, PROMPT, choice, scripts
from tests.deadlines import scaled

ROOT = Path(__file__).parents[2]

USER = {"role": "user", "content": PROMPT}
RESULT = {"role": "tool", "content": "written"}


def played(*messages: dict[str, Any], tools: tuple[str, ...] = ()) -> str:
    functions = [{"function": {"name": name}} for name in tools]
    return str(jinja2.Template(choice()).render(messages=messages, tools=functions)).strip()


@pytest.mark.parametrize(
    ("messages", "tools", "expected"),
    [
        ([USER], ("Read", "Bash", "bash"), "Bash"),
        ([USER], ("exec_command", "agents__spawn"), "exec_command"),
        ([USER, RESULT], ("Bash",), "done"),
        ([USER], (), "title"),
        ([USER], ("Read",), "title"),
        ([{"role": "system", "content": "Use this file listing."}, USER], (), "text 0"),
        ([{"role": "system", "content": "You are gptme."}, USER], (), "text 2"),
        ([{"role": "system", "content": "You are gptme."}, USER, {"role": "user", "content": "Ran."}], (), "done"),
        ([{"role": "system", "content": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}, USER], ("bash",), "bash"),
        ([{"role": "system", "content": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}, RESULT], ("bash",), "end 0"),
    ],
)
def test_a_request_has_a_script(messages: list[Any], tools: tuple[str, ...], expected: str) -> None:
    assert played(*messages, tools=tools) == expected
    assert expected in scripts()


def test_every_call_is_played() -> None:
    assert [played(USER, tools=(name,)) for name in CALLS] == [*CALLS]


def test_the_page_has_every_agent() -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    table = page.partition(try_agents.BEGIN)[2].partition(try_agents.END)[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert rows == [agent.name for agent in AGENTS]


class Upstream(BaseHTTPRequestHandler):
    """Echoes the request in two pieces, without a length."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("Warning", '299 vllm-lite "ignored: a", 299 vllm-lite "not shown: b"')
        self.end_headers()
        self.wfile.write(self.headers["x-key"].encode())
        self.wfile.write(body)


def test_the_recorder_forwards_what_it_records(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with Recorder(f"http://127.0.0.1:{server.server_port}").running() as recorder:
            for _ in range(2):
                url = recorder.url + "/v1/messages?beta=true"
                answer = httpx.post(url, content=b"{}", headers={"x-key": "k"}, timeout=scaled(10))
                assert (answer.status_code, answer.content) == (200, b"k{}")
    finally:
        server.shutdown()
        server.server_close()
    assert [(each.method, each.body, each.answer) for each in recorder.exchanges] == [("POST", b"{}", b"k{}")] * 2
    assert try_agents.seen(recorder) == (("/v1/messages",), ("ignored: a", "not shown: b"))
    recorder.write(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    for text in ("", "hello\n"):
        (tmp_path / "hello.txt").write_text(text)
        assert bool(try_agents.missing(DONE, tmp_path, recorder)) == (not text)
    assert try_agents.missing("", tmp_path, recorder) == "the text at the end was not shown"
    recorder.exchanges.append(recorder.exchanges[0]._replace(status=400))
    assert "answered 400" in try_agents.missing(DONE, tmp_path, recorder)
