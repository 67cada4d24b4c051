"""`vllm-lite serve` as a process: its start, its errors, its end."""

import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from tests.deadlines import scaled
from tests.http_server import READY_S, Server, children, client, serving, until
from vllm_lite.errors import ConfigError
from vllm_lite.server.processes.http_server import listen
from vllm_lite.tools.cli import main

BODY = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}


DEMO_FOLDER = str(files("vllm_lite") / "demo_model")


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_lite", *arguments],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        env={**os.environ, **(env or {})},
    )
    return done.returncode, done.stdout, done.stderr


# ---- what is refused at once


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-modl-len", "100"], ["--max-modl-len", "--max-model-len"]),
        (["--prot=1"], ["--prot", "--port"]),
        (["--port", "http"], ["port"]),
        (["--port", "70000"], ["port"]),
        (["--dtype", "int3"], ["dtype", "bfloat16"]),
        (["/no/such/folder"], ["/no/such/folder"]),
        (["--ssl-keyfile", "x"], ["ssl_certfile"]),
        (["--api-key-file", "/no/such/file"], ["api_key_file"]),
        (["--config", "/no/such/file.yaml"], ["/no/such/file.yaml"]),
        (["--chat-template", "/no/such/file"], ["/no/such/file"]),
        (["--log-config-file", "/no/such/file"], ["log_config_file", "/no/such/file"]),
        (["--served-model-name", "a", DEMO_FOLDER], [DEMO_FOLDER, "MODEL before the flags"]),
        (["-tp", "3"], ["tensor_parallel_size 3 does not fit this model", "fit 1, 2, 4 or 8"]),
        (["--cpu-kvcache-space", "10000"], ["--cpu-kvcache-space 10000 asks for 10000.0 GiB", "GiB of memory"]),
        (["--num-gpu-blocks-override", "100000000"], ["--num-gpu-blocks-override 100000000 asks for", "of memory"]),
        (["--kv-cache-memory-bytes", "20000G"], ["--kv-cache-memory-bytes 21474836480000 asks for", "of memory"]),
        (["--swap-space", "5000"], ["--swap-space 5000 asks for 5000.0 GiB", "GiB of memory"]),
    ],
)
def test_errors_are_one_line(flags: list[str], words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["serve", *flags])
    except SystemExit as end:
        status = end.code
    out, err = capfd.readouterr()
    check_one_line(status, out, err, words)


def check_one_line(status: object, out: str, err: str, words: list[str]) -> None:
    lines = [line for line in err.splitlines() if line.startswith("vllm-lite")]
    assert status == 2
    assert out == ""
    assert len(lines) == 1
    assert "Traceback" not in err
    assert all(word in lines[0] for word in words)


def test_errors_are_one_line_of_the_command() -> None:
    check_one_line(*run("serve", "--port", "70000"), words=["port"])


def test_a_taken_port_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, _, err = run("serve", "--port", str(port))
    assert status == 2
    assert err.count("\n") == 1
    assert str(port) in err


@pytest.mark.parametrize("count", ["1", "2"])
def test_of_two_that_start_at_once_one_starts_an_engine(count: str) -> None:
    """Both look for an engine before either listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
    flags = ["--port", port, "--api-server-count", count]
    servers = [Server(*flags, light=True, fresh=True) for _ in range(2)]
    try:
        until(lambda: any(server.process.poll() is not None for server in servers), "the end of one", READY_S)
        (loser,) = (server for server in servers if server.process.poll() is not None)
        (winner,) = (server for server in servers if server is not loser)
        assert loser.wait() == 2
        error = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
        assert loser.output == f"vllm-lite: {error}\n"
        winner.wait_for("Try:")
        with client(winner) as http:
            assert http.get("/health").status_code == 200
            assert winner.stop() == 0
        servers.append(Server(*flags, light=True, fresh=True))
        servers[-1].wait_for("Try:")  # though connections linger
    finally:
        for server in servers:
            server.close()


def test_an_address_that_is_taken_meanwhile_is_one_sentence() -> None:
    with socket.socket() as other, socket.socket() as mine:
        for each in (other, mine):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        mine.bind(other.getsockname())
        other.listen()
        with pytest.raises(ConfigError, match=r"on 127.0.0.1:\d+: Address already in use; choose another"):
            listen(mine)


def test_a_bad_checkpoint_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Unknown"]}')
    status, _, err = run("serve", str(tmp_path), "--port", "0")
    assert status == 2
    assert "Unknown" in err.splitlines()[-1]


def test_bad_tls_files_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    flags = ["--ssl-keyfile", str(tmp_path / "key"), "--ssl-certfile", str(tmp_path / "key")]
    status, _, err = run("serve", "--port", "0", *flags)
    assert status == 2
    assert "TLS" in err.splitlines()[-1]
    status, _, err = run("serve", "--port", "0", *flags, "--ssl-ciphers", "NONE-SUCH")
    assert status == 2
    assert "ssl_ciphers 'NONE-SUCH'" in err.splitlines()[-1]


def test_help_and_print_config(tmp_path: Path) -> None:
    status, out, _ = run("serve", "--help")
    assert status == 0
    assert "--max-model-len" in out
    assert "--shutdown-timeout" in out
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1111\nmax-model-len: 1k\nserved_model_name: [a, b]\n")
    env = {"VLLM_LITE_PORT": "2222", "VLLM_LITE_MAX_NUM_SEQS": "3", "VLLM_LITE_API_KEY": "secret"}
    status, out, err = run("serve", "--config", str(file), "--port", "3333", "--print-config", env=env)
    assert status == 0, err
    for line in ("port: 3333", "max_model_len: 1000", "max_num_seqs: 3", "served_model_name: a b"):
        assert line in out.splitlines()
    assert "secret" not in out
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert run("serve", "--config", str(again), "--print-config")[1] == out


# ---- how it ends


@pytest.mark.parametrize("text", ["", "worker 0"])
def test_sigterm_while_it_starts(text: str) -> None:
    with serving(ready=False, fresh=True) as server:
        server.wait_for(text)
        server.stop()
        assert "Traceback" not in server.output


def test_sigterm_drains_running_requests(tmp_path: Path) -> None:
    """SIGTERM: not ready at once, running requests finish, and the exit is clean and leaves nothing."""
    with serving(
        "--shutdown-timeout", str(scaled(30)), env={"TMPDIR": str(tmp_path)}, light=True, fresh=True
    ) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(server.url + "/v1/completions", json=BODY, timeout=scaled(60)))

        with client(server) as http:
            asking = threading.Thread(target=ask)
            asking.start()
            until(lambda: http.get("/load").json()["server_load"] == 1, "the request")
            server.process.send_signal(signal.SIGTERM)
            until(lambda: http.get("/health/ready").status_code == 503, "the end of readiness")
            assert not answers, "the request was over before the server was told to end"
            assert http.get("/health/live").status_code == 200
            refused = http.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
        asking.join(scaled(60))
        assert server.wait() == 0
        assert answers[0].json()["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert list(tmp_path.iterdir()) == []


def test_requests_are_aborted_after_the_shutdown_timeout() -> None:
    with serving("--shutdown-timeout", "0", light=True, fresh=True) as server:
        with client(server) as http, http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            text = "".join(lines)
        assert '"finish_reason":"abort"' in text
        assert text.endswith("data: [DONE]")
        assert server.wait() == 0


@pytest.mark.parametrize("module", ["vllm_lite.engine.process", "vllm_lite.worker.process"])
def test_a_dead_child_is_reported_and_ends_the_server(module: str) -> None:
    """Waiting callers are informed, and so is the exit status."""
    with serving("--max-restarts", "0", light=True, fresh=True) as server, client(server) as http:
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(children(server.process.pid)[module], signal.SIGKILL)
            text = "".join(lines)
        assert '{"error":{"message":' in text
        assert '"code":503}' in text
        assert "[DONE]" not in text
        assert server.wait() == 1
        assert "Traceback" not in server.output
        assert "SIGKILL" in server.output.splitlines()[-1]


def test_health_knows_of_a_dead_engine() -> None:
    with serving("--max-restarts", "0", light=True, fresh=True) as server, client(server) as http:
        assert http.get("/health").status_code == 200
        os.kill(children(server.process.pid)["vllm_lite.engine.process"], signal.SIGKILL)
        codes = []
        try:
            while True:
                codes.append(http.get("/health").status_code)
                assert len(codes) < 100_000
        except httpx.TransportError:
            pass  # it has ended
        assert 503 in codes
        assert codes[codes.index(503) :] == [503] * (len(codes) - codes.index(503))
        assert server.wait() == 1


# ---- where it listens


@pytest.mark.skipif(shutil.which("openssl") is None, reason="its certificate is made with openssl")
def test_https(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made = ["openssl", "req", "-x509", *curve, "-nodes", "-days", "2"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*made, *name], check=True, capture_output=True, timeout=scaled(60))
    cipher = "ECDHE-ECDSA-AES256-GCM-SHA384"
    flags = ["--ssl-keyfile", key, "--ssl-certfile", certificate, "--ssl-ciphers", cipher, "--disable-fastapi-docs"]
    with serving(*flags, light=True, fresh=True) as server:
        assert server.url.startswith("https://")
        trust = ssl.create_default_context(cafile=certificate)
        for path, status in {"/docs": 404, "/redoc": 404, "/openapi.json": 404, "/": 200}.items():
            assert httpx.get(server.url + path, verify=trust, timeout=scaled(30)).status_code == status, path
        trust.maximum_version = ssl.TLSVersion.TLSv1_2
        trust.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url, verify=trust, timeout=scaled(30))
        trust.set_ciphers(cipher)
        asked = {"prompt": "Once", "max_tokens": 3, "stream": True}
        answer = httpx.post(server.url + "/v1/completions", json=asked, verify=trust, timeout=scaled(30))
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-", "1>&-"])
def test_the_server_runs_with_standard_files_closed(tmp_path: Path, closed: str) -> None:
    """No socket takes their numbers, in none of its processes."""
    uds = str(tmp_path / "s")
    command = ["sh", "-c", f'exec "$0" -m vllm_lite serve --uds "$1" {closed}', sys.executable, uds]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_up() -> bool:
        assert process.poll() is None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(uds) == 0

    try:
        until(is_up, "a server", READY_S)
        with httpx.Client(transport=httpx.HTTPTransport(uds=uds), base_url="http://server", timeout=scaled(30)) as http:
            assert http.post("/v1/completions", json={**BODY, "max_tokens": 2}).status_code == 200
            found = children(process.pid)
            assert len(found) == 3  # engine, worker, chat template
            for pid in (process.pid, *found.values()):
                links = [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]
                assert set(links[1:]) == {"/dev/null"}
                assert not any(link.startswith("socket:") for link in links)
        process.terminate()
        assert process.wait(scaled(30)) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("left_out", ["tokenizer_config.json", "tokenizer*"])
def test_commands_of_the_greeting_work(tiny_checkpoint: Path, tmp_path: Path, left_out: str) -> None:
    """The greeting fits a model without a chat template, and of one that speaks token ids only."""
    model = tmp_path / "plain"
    shutil.copytree(tiny_checkpoint, model, ignore=shutil.ignore_patterns(left_out))
    with serving(str(model), fresh=True) as server:
        words = shlex.split(server.output.split("Try: ", 1)[1].splitlines()[0])
        name, _, kind = words[words.index("-H") + 1].partition(": ")
        answer = httpx.post(words[1], content=words[words.index("-d") + 1], headers={name: kind}, timeout=scaled(30))
        assert answer.status_code == 200, answer.text
        assert '"finish_reason":"' in answer.text


def test_a_unix_socket_and_a_model_path(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A model without a chat template, by its path."""
    uds = str(tmp_path / "s")
    model = tmp_path / "plain"
    shutil.copytree(tiny_checkpoint, model, ignore=shutil.ignore_patterns("tokenizer_config.json"))
    server = Server(str(model), "--uds", uds, fresh=True)
    try:
        server.wait_for("Try:")
        assert f"unix:{uds}" in server.output
        assert "/v1/completions" in server.output
        transport = httpx.HTTPTransport(uds=uds)
        with httpx.Client(transport=transport, base_url="http://server", timeout=scaled(30)) as http:
            asked = {"model": str(model), "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
            assert http.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 2
            chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
            assert chat.status_code == 400
            assert "--chat-template" in chat.json()["error"]["message"]
        assert server.stop(signal.SIGINT) == 0
        assert not Path(uds).exists()
    finally:
        server.close()
