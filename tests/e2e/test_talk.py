"""`vllm-lite chat` and `vllm-lite complete`, in a terminal and in pipes, against really running servers."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.deadlines import scaled
from tests.http_server import Server, children, client, serving, until
from tests.terminal import CTRL_C, CTRL_D, Typist, typing

LONG = ("/set ignore_eos true", "/set max_tokens 1900")
PROMPT = r"\n> $"
KEY = "a-secret-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", KEY) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_other_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LITE_API_KEY", raising=False)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "OPENAI_API_KEY": KEY}


def run(*words: str, text: str = "", env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_lite", *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        env={**os.environ, "OPENAI_API_KEY": KEY, **(env or {})},
    )
    return done.returncode, done.stdout, done.stderr


def load(server: Server) -> int:
    with client(server, headers={"Authorization": f"Bearer {KEY}"}) as http:
        count: int = http.get("/load").json()["server_load"]
        return count


# ---- a terminal


def test_a_chat(server: Server, env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with typing("chat", "--url", server.url, env=env) as user:
        user.wait_for(rf"demo_model at {server.url}.*\n.*temperature 0\.7, top_p 0\.95, min_p 0\.05; /set .*\n> $")
        user.say("/set temperature 0")
        user.wait_for(PROMPT)
        user.say("Tell me a story about a cat.")
        first = user.wait_for(r"(?s)(\w.+)\n\n> $").group(1)
        user.say("/retry")
        user.wait_for(rf"{re.escape(first[:200])}[^>]*\n> $")
        user.say("And another.")
        user.wait_for(r"(?s)\w.+\n\n> $")
        user.say("/stats")
        user.wait_for(r"prompt of \d+ tokens \(\d+ of them from the cache\), answer of \d+: first after \d+ ms")
        user.say(f"/save {file}")
        user.wait_for(r"2 questions with their answers.*\n> $")
        user.type(CTRL_D)
        assert user.wait() == 0
    said = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in said] == ["user", "assistant"] * 2
    assert said[1]["content"].split() == first.split()
    history = tmp_path / "state" / "vllm-lite" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "Tell me a story about a cat." in history.read_text().splitlines()


def interrupted(user: Typist) -> str:
    """Ask for a long answer and stop it after its first words. Returns the word that the program prints for it."""
    for _ in range(5):  # on a starved machine the whole answer may be there before the key is pressed
        user.say("Tell me a story.")
        user.wait_for(r"\w+ \w+")
        user.type(CTRL_C)
        if (end := user.wait_for(r"stopped|cut off").group()) == "stopped":
            return end
        user.wait_for(r"Ctrl-C again|\n> $")
    pytest.fail("every answer had ended before it could be stopped")


def test_ctrl_c_stops_the_answer_and_not_the_program(server: Server, env: dict[str, str]) -> None:
    with typing("chat", "--url", server.url, env=env) as user:
        user.wait_for(PROMPT)
        for line in LONG:
            user.say(line)
            user.wait_for(PROMPT)
        assert interrupted(user) == "stopped"
        user.wait_for(PROMPT)
        until(lambda: load(server) == 0, "the end of the request")
        user.say("/set max_tokens 3")
        user.wait_for(PROMPT)
        user.say("Go on.")
        user.wait_for("cut off")
        user.wait_for(PROMPT)
        user.type("half a line")
        user.wait_for("half a line")
        user.interrupt()
        user.wait_for("Ctrl-C again, or Ctrl-D, leaves\n> $")
        user.say("/undo")
        user.wait_for("forgotten: Go on")
        user.wait_for(PROMPT)
        user.interrupt()
        user.wait_for("Ctrl-C again.*\n> $")
        user.interrupt()
        assert user.wait() == 0
        assert "Traceback" not in user.shown


def test_ctrl_c_aborts_on_the_server(server: Server, env: dict[str, str]) -> None:
    """The worker is held meanwhile: only an abort can end the request."""
    worker = children(server.process.pid)["vllm_lite.worker.process"]
    with typing("chat", "--url", server.url, env=env) as user:
        user.wait_for(PROMPT)
        os.kill(worker, signal.SIGSTOP)
        try:
            user.say("Tell me a story.")
            until(lambda: load(server) == 1, "the request")
            user.type(CTRL_C)
            user.wait_for(r"stopped \(/retry asks again\)\n> $")
            until(lambda: load(server) == 0, "the abort")
        finally:
            os.kill(worker, signal.SIGCONT)
        user.say("/retry")
        user.wait_for(r"(?s)\w.+\n\n> $")
        user.type(CTRL_D)
        assert user.wait() == 0


def test_a_server_that_dies_in_the_middle(env: dict[str, str]) -> None:
    with serving(light=True) as server, typing("chat", "--url", server.url, env=env) as user:
        user.wait_for(PROMPT)
        user.say("/set max_tokens 3")
        user.wait_for(PROMPT)
        user.say("Tell me a story.")
        user.wait_for("cut off")
        user.wait_for(PROMPT)
        os.kill(children(server.process.pid)["vllm_lite.worker.process"], signal.SIGSTOP)
        user.say("And then?")
        until(lambda: load(server) == 1, "the request")
        below = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        server.process.wait(scaled(30))
        user.wait_for(r"the server at .* went away\n.*/retry asks again\n> $")
        user.say("/retry")
        user.wait_for(r"no server answers at .*vllm-lite serve")
        user.wait_for(PROMPT)
        user.say("/undo")
        user.wait_for("forgotten: And then")
        user.say("/undo")
        user.wait_for("forgotten: Tell me a story")
        for process in below:
            if process.is_running():
                process.kill()


def test_a_server_of_its_own_ends_with_the_chat(env: dict[str, str], tmp_path: Path) -> None:
    runs = tmp_path / "t"
    runs.mkdir()
    env = {**env, "TMPDIR": str(runs)}
    with typing("chat", "demo", "--max-tokens", "5", env=env) as user:
        user.wait_for(PROMPT)
        assert "INFO" not in user.shown
        user.say("Tell me a story.")
        user.wait_for(r"(?s)\w+.*cut off")
        user.wait_for(PROMPT)
        user.type(CTRL_D)
        assert user.wait() == 0
        assert list(runs.iterdir()) == []
    with typing("chat", "demo", env=env) as user:
        user.wait_for(PROMPT)
        below = psutil.Process(user.process.pid).children(recursive=True)
        assert len(below) >= 3
        user.process.kill()
        until(lambda: not any(process.is_running() for process in below), "the end of its server", scaled(30.0))
        until(lambda: not list(runs.iterdir()), "the end of its folders", scaled(30.0))


def test_lines_are_continued(server: Server, env: dict[str, str]) -> None:
    with typing("complete", "--url", server.url, "--max-tokens", "8", env=env) as user:
        for text in ("Once upon a time", "One windy day,"):
            user.wait_for("> $")
            user.say(text)
            user.wait_for(r"\w+ \w+.*\n\n(?=> $)")
        user.type(CTRL_D)
        assert user.wait() == 0


def test_ctrl_c_while_it_starts(env: dict[str, str], tmp_path: Path) -> None:
    runs = tmp_path / "t"
    runs.mkdir()
    with typing("chat", "demo", env={**env, "TMPDIR": str(runs)}) as user:
        user.wait_for("starting demo")
        user.type(CTRL_C)
        assert user.wait() == 130
        assert "Traceback" not in user.shown
    assert list(runs.iterdir()) == []


# ---- pipes


def test_lines_of_a_pipe_are_answered_and_nothing_else_is_printed(server: Server) -> None:
    text = "/set temperature 0\n/set max_tokens 8\nTell me a story.\n/undo\nTell me a story.\n"
    status, out, err = run("chat", "--url", server.url, text=text)
    assert status == 0, err
    first, second = out.splitlines()
    assert first == second != ""
    assert "\x1b" not in out + err
    assert "temperature" in err
    assert run("chat", "--url", server.url, "-q", "Tell me a story.", "--temperature", "0", "--max-tokens", "8") == (
        0,
        first + "\n",
        "the answer was cut off: it reached the greatest number of tokens\n",
    )


def test_errors_in_a_pipe_set_the_exit_status(server: Server) -> None:
    status, out, err = run("chat", "--url", server.url, text="/sett x\nHello\n")
    assert status == 1
    assert "did you mean /set" in err
    assert out
    status, out, err = run("chat", "--url", server.url, "--top-p", "7", "-q", "Hello")
    assert (status, out) == (1, "")
    assert "top_p" in err
    assert "/retry" not in err


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_an_unreachable_server(server: Server, command: str) -> None:
    status, out, err = run(command, "--url", "http://127.0.0.1:9", "-q", "x")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "vllm-lite serve" in err
    status, out, err = run(command, "--url", server.url, "-q", "x", env={"OPENAI_API_KEY": "wrong"})
    assert (status, out) == (2, "")
    assert "--api-key" in err
    assert run(command, "--url", server.url, "-q", "x", "--api-key", KEY, env={"OPENAI_API_KEY": "wrong"})[0] == 0
    status, _, err = run(command, "demo", "--url", server.url)
    assert status == 2
    assert "--url" in err


def test_complete(server: Server) -> None:
    flags = ("--url", server.url, "--temperature", "0", "--max-tokens", "12")
    status, out, err = run("complete", *flags, "-q", "Once upon a time")
    assert (status, err) == (0, "")
    assert len(out.split()) > 3
    assert run("complete", *flags, text="Once upon a time\n") == (0, out, "")
    word = out.split()[2]
    assert run("complete", *flags, "--stop", word, "-q", "Once upon a time")[1] == out[: out.index(word)] + "\n"


def test_complete_with_a_server_of_its_own(tmp_path: Path) -> None:
    words = ("demo", "Once upon a time", "--max-tokens", "5", "--temperature", "0")
    env = {"TMPDIR": str(tmp_path), "VLLM_LITE_API_KEY": "of another server", "VLLM_LITE_SHUTDOWN_TIMEOUT": "50"}
    status, out, err = run("complete", *words, env=env)
    assert (status, err) == (0, "")
    assert out.strip()
    assert list(tmp_path.iterdir()) == []
    status, out, err = run("complete", "/no/such/folder", "x", env={"TMPDIR": str(tmp_path)})
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "/no/such/folder" in err


def test_a_closed_pipe_is_no_error(server: Server) -> None:
    command = [sys.executable, "-m", "vllm_lite", "complete", "--url", server.url, "--api-key", KEY, "-q", "Once upon"]
    process = subprocess.Popen([*command, "--max-tokens", "1900"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(scaled(60)) == 141
    assert err == b""


def test_a_model_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_lite.tools.chat.terminal import Terminal

    terminal = Terminal()
    terminal._safe_out = True
    terminal.write("a\x1b[2Jb\x07c\x9bd\r\ne\tä")
    assert capsys.readouterr().out == "a\ufffd[2Jb\ufffdc\ufffdd\ne\tä"


def test_thoughts_are_shown_to_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_lite.tools.chat.terminal import Terminal

    for is_interactive, shown in ((False, "yes\n"), (True, "hm\nyes\n\n")):
        terminal = Terminal()
        terminal.is_interactive = is_interactive
        terminal.write("hm", dim=True)
        terminal.write("yes")
        terminal.end()
        assert capsys.readouterr().out == shown
