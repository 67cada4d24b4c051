"""Servers that benchmarks start end with them, also if `timeout` ends the benchmark."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import scaled

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SERVER = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
BENCHMARK = """
import pathlib, socket, subprocess, sys, threading
sys.path.insert(0, sys.argv[1])
from http_peers import serving

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
with serving([sys.executable, "-c", sys.argv[2], str(port)], {}, pathlib.Path(sys.argv[3]), port) as url:
    print(url, flush=True)
    if sys.argv[4] == "child":
        subprocess.run([sys.executable, "-c", "import sys; sys.stdin.read()"], check=True)
    else:
        threading.Event().wait()
"""


def is_served(url: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url + "/health", timeout=scaled(10)):
            return True
    except urllib.error.URLError:
        return False


@pytest.mark.parametrize("waits_for", ["child", "event"])
def test_a_benchmark_that_sigterm_ends_leaves_no_server(waits_for: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(BENCHMARKS), SERVER, str(tmp_path / "log"), waits_for]
    benchmark = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert benchmark.stdout is not None
        url = benchmark.stdout.readline().strip()
        assert is_served(url)
        benchmark.send_signal(signal.SIGTERM)
        os.killpg(benchmark.pid, signal.SIGTERM)  # as `timeout` does it
        assert benchmark.wait(scaled(60)) == 143
        assert not is_served(url)
    finally:
        benchmark.kill()
        benchmark.wait(scaled(10))
        for stream in (benchmark.stdin, benchmark.stdout):
            assert stream is not None
            stream.close()
