"""Forked processes behave like new interpreters: towards the processes that start them, by themselves, and in how they
end."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests import fork_server
from tests.deadlines import scaled
from tests.e2e.test_processes import running
from tests.http_server import children, serving, until
from vllm_lite.client.engines import orphans

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="processes are forked on x86-64 only")

END_S = scaled(60.0)

SHOW = """
import ctypes, gc, json, os, random, signal, sys, tempfile
numbers = signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGHUP
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "path": sys.path, "cwd": os.getcwd(),
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "parent": os.getppid(), "leads a group": os.getpgrp() == os.getpid(), "session": os.getsid(0),
    "signals": [str(signal.getsignal(number)) for number in numbers],
    "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 500)[:-1],
    "inheritable": os.get_inheritable(int(sys.argv[1])), "given": os.read(int(sys.argv[1]), 9).decode(),
    "standard files": [[file.isatty(), file.seekable(), file.line_buffering, file.encoding, file.errors]
                       for file in (sys.stdin, sys.stdout, sys.stderr)],
    "command": open("/proc/self/cmdline").read().rstrip(chr(0)), "comm": open("/proc/self/comm").read(),
    "threads": len(os.listdir("/proc/self/task")), "collects": gc.isenabled(), "temporary": tempfile.gettempdir(),
}))
"""
RANDOM = "import random, secrets; print(random.random())"
ENDS = {
    "the last line": "",
    "a status": "import sys; sys.exit(7)",
    "a sentence": "import sys; sys.exit('it is no good')",
    "an exception": "raise ValueError('it is no good')",
    "a signal to itself": "import signal; signal.raise_signal(signal.SIGTERM)",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "an executor": "import concurrent.futures as f; f.ThreadPoolExecutor().submit(print, 'executor')",
}
FIRST = "import atexit; atexit.register(print, 'atexit'); print('begun', end='')\n"


def command(tmp_path: Path, program: str, *words: object) -> list[str]:
    """A module that is forked, and runs any program."""
    path = tmp_path / "program.py"
    path.write_text(program)
    return [sys.executable, "-m", "tests.e2e.light", str(path), *map(str, words)]


def run(kind: type, words: Sequence[str], **settings: object) -> tuple[int, str, str]:
    with kind(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings) as process:
        out, err = process.communicate(timeout=END_S)
        return process.returncode, out, err


def is_forked(pid: int | str) -> bool:
    """A forked process's command line is padded with zeros."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().endswith(bytes(9))


@pytest.mark.parametrize("group", [None, 0])
def test_a_fork_has_the_environment_of_a_new_interpreter(tmp_path: Path, group: int | None) -> None:
    shown = []
    for kind in (subprocess.Popen, fork_server.Popen):
        reads, writes = os.pipe()
        os.write(writes, b"from pipe")
        settings = {"pass_fds": [reads], "process_group": group, "stdin": subprocess.DEVNULL, "cwd": str(tmp_path)}
        env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": fork_server.ROOT}
        status, out, err = run(kind, command(tmp_path, SHOW, reads), env=env, **settings)
        os.close(reads)
        os.close(writes)
        assert (status, err) == (0, "")
        shown.append(json.loads(out))
        assert shown[-1]["parent"] == os.getpid()
    assert shown[0] == shown[1]


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_a_new_interpreter_does(tmp_path: Path, end: str) -> None:
    words = command(tmp_path, FIRST + ENDS[end])
    fresh, forked = (run(kind, words) for kind in (subprocess.Popen, fork_server.Popen))
    assert forked[:2] == fresh[:2]
    assert forked[2].splitlines()[-1:] == fresh[2].splitlines()[-1:]


def test_no_two_forks_draw_the_same(tmp_path: Path) -> None:
    words = command(tmp_path, RANDOM)
    assert run(fork_server.Popen, words)[1] != run(fork_server.Popen, words)[1]


@pytest.mark.parametrize("fresh", [False, True])
def test_children_of_forks_are_forks(*, fresh: bool) -> None:
    with serving(light=True, fresh=fresh) as server:
        found = children(server.process.pid)
        engine, worker = (psutil.Process(found[f"vllm_lite.{name}.process"]) for name in ("engine", "worker"))
        assert [engine.ppid(), worker.ppid()] == [server.process.pid, engine.pid]
        assert [is_forked(pid) for pid in (server.process.pid, engine.pid, worker.pid)] == [not fresh] * 3
        assert list(orphans.children_of(engine.pid)) == [worker.pid]
        everyone = [server.process.pid, *(each.pid for each in psutil.Process(server.process.pid).children(True))]
        server.process.kill()
        until(lambda: not any(map(running, everyone)), "their end", END_S)
    assert server.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["VLLM_LITE_ISA", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"])
def test_variables_read_by_imports_need_a_new_interpreter(tmp_path: Path, name: str) -> None:
    for env, forks in (({}, True), ({name: "3"}, False)):
        with fork_server.Popen(
            command(tmp_path, "input()"), stdin=subprocess.PIPE, env={**os.environ, **env}
        ) as process:
            until(lambda: b"light" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "its arguments", END_S)
            assert is_forked(process.pid) == forks
            process.communicate(b"\n", timeout=END_S)
        assert process.returncode == 0


def test_after_an_answer_that_never_came_children_are_new_interpreters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, silent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(0.01)
    monkeypatch.setattr(fork_server, "_wire", ours)
    words = command(tmp_path, "print('fresh')")
    with silent, pytest.raises(TimeoutError):
        run(fork_server.Popen, words)
    assert run(fork_server.Popen, words)[:2] == (0, "fresh\n")
