"""Clients over tcp, and clients that have only docs/protocol.md: all are given the same tokens."""

import ast
import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from subprocess import PIPE

import msgspec
import pytest
import zmq

from tests.deadlines import scaled
from tests.fakes import FakeEngine
from tests.http_server import client as http_client
from tests.http_server import serving, until
from vllm_lite import AsyncClient, EngineConfig, SamplingParams
from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import EngineError
from vllm_lite.protocol.api import Dying, Finished, Generate, OutputBatch, Ping, Welcome
from vllm_lite.protocol.codec import engine_to_client, pack_tokens
from vllm_lite.transport import KeysOption
from vllm_lite.transport.keys import make_client_keys, make_engine_keys

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import protocol_example  # noqa: E402 - found only once scripts/ is on the path

NODE_MODULES = Path(os.environ.get("VLLM_LITE_NODE_MODULES", SCRIPTS / "node" / "node_modules"))
"""Folder in which `make node-client` installs the JavaScript client's dependencies."""
DEADLINE_S = scaled(60.0)
PROMPT = [1, 40, 41, 42]
GREEDY = SamplingParams(temperature=0.0, max_tokens=50)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_engine_keys(folder)
    make_client_keys(folder, "alice")
    return folder


@pytest.fixture(scope="module")
def engine(keys: Path, tiny_checkpoint: Path) -> Iterator[LaunchedEngine]:
    settings = {
        "model": str(tiny_checkpoint),
        "device": "cpu",
        "num_gpu_blocks_override": 64,
        "tcp_address": f"tcp://127.0.0.1:{free_port()}",
        "curve_keys": str(keys),
    }
    launched = launch(EngineConfig.check(settings))
    yield launched
    launched.close()


def stream(address: str, keys: KeysOption = None, prompt: str | list[int] = PROMPT) -> tuple[list[int], str]:
    """Tokens and text of a greedy completion."""

    async def run() -> tuple[list[int], str]:
        async with AsyncClient(address, keys=keys, timeout_s=DEADLINE_S) as client:
            outputs = [output async for output in client.generate(prompt, GREEDY)]
            return list(outputs[-1].outputs[0].token_ids), outputs[-1].outputs[0].text

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(engine: LaunchedEngine) -> list[int]:
    tokens, _ = stream(engine.address)
    assert len(set(tokens)) > 3
    return tokens


def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def raw_client(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return run(sys.executable, SCRIPTS / "raw_client.py", *words)


def ends_of(engine: LaunchedEngine, keys: Path) -> dict[str, list[str]]:
    """The words that lead a script to the engine."""
    tcp = str(engine.config.tcp_address)
    return {"ipc": [engine.address], "tcp": [tcp, "--keys", str(keys / "for/alice")]}


def ids(words: list[int]) -> list[str]:
    return list(map(str, words))


# ---- tcp


def test_a_client_over_tcp_gets_the_same_tokens(engine: LaunchedEngine, keys: Path, expected: list[int]) -> None:
    assert stream(str(engine.config.tcp_address), keys / "for/alice")[0] == expected


def test_a_key_made_while_the_engine_runs(engine: LaunchedEngine, keys: Path, expected: list[int]) -> None:
    address = str(engine.config.tcp_address)
    bundle = make_client_keys(keys, "carol")
    assert stream(address, bundle)[0] == expected
    (keys / "clients/carol.key").unlink()
    with pytest.raises(EngineError, match=f"the engine at {address} does not let this client in: it does not know"):
        stream(address, bundle)


def test_a_server_has_an_engine_for_tcp_clients_too(keys: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with serving("--tcp-address", address, "--curve-keys", str(keys)) as server, http_client(server) as http:
        body = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "return_token_ids": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert stream(address, keys / "for/alice")[0] == answer.json()["choices"][0]["token_ids"]


# ---- without this package


@pytest.mark.parametrize("end", ["ipc", "tcp"])
def test_pyzmq_and_msgpack_alone(engine: LaunchedEngine, keys: Path, expected: list[int], end: str) -> None:
    done = raw_client(*ends_of(engine, keys)[end], *ids(PROMPT))
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == expected


def test_minimal_clients_import_only_pyzmq_and_msgpack() -> None:
    tree = ast.parse((SCRIPTS / "raw_client.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"msgpack", "zmq", "tokenizers"}


def test_a_text_where_there_is_a_tokenizer(engine: LaunchedEngine, tiny_checkpoint: Path) -> None:
    prompt = "The quick brown fox"
    done = raw_client(engine.address, *prompt.split())
    assert done.returncode == 0, done.stderr
    tokens, _ = stream(engine.address, prompt=prompt)
    whole = Tokenizer.load(tiny_checkpoint).decode(tokens)
    assert done.stdout == whole + "\n"
    assert whole.strip()


def documented_commands(program: str) -> list[list[str]]:
    """The words after `program` and the address, for each line of docs/connecting.md that runs the program."""
    page = (SCRIPTS.parent / "docs" / "connecting.md").read_text()
    lines = re.findall(rf"^    \S+ ?\S*{program} (.*)$", page, re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in lines]
    assert all(words.pop(0) == "ipc:///path/it/printed" for words in found)
    return found


def test_the_documented_command_lines(engine: LaunchedEngine, node_client: list[str]) -> None:
    text, token_ids = documented_commands("raw_client.py")
    [of_node] = documented_commands("raw_client.mjs")
    for words in (text, token_ids):
        done = raw_client(engine.address, *words)
        assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr
    assert run(*node_client, engine.address, *of_node).stdout.split() == done.stdout.split()


def test_the_documented_program_streams(engine: LaunchedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    page = (SCRIPTS.parent / "docs" / "connecting.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    assert "ipc:///path/it/printed" in program
    exec(
        compile(program.replace("ipc:///path/it/printed", engine.address), "connecting.md", "exec"),
        {"__name__": "docs"},
    )
    assert capsys.readouterr().out.strip()


def test_the_bytes_of_the_documentation(engine: LaunchedEngine) -> None:
    """The engine takes the two that a client sends, and answers as many tokens as they ask for."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(engine.address)
        dealer.send(msgspec.msgpack.encode(protocol_example.HELLO))
        assert dealer.poll(int(DEADLINE_S * 1000))
        assert isinstance(engine_to_client.decode(dealer.recv()), Welcome)
        dealer.send(msgspec.msgpack.encode(protocol_example.GENERATE))
        found: list[int] = []
        ends: list[str] = []
        while not ends:
            assert dealer.poll(int(DEADLINE_S * 1000))
            message = engine_to_client.decode(dealer.recv())
            if isinstance(message, OutputBatch):
                for output in message.outputs:
                    found += output.token_ids
                    ends += [output.reason] if isinstance(output, Finished) else []
    assert (len(found), ends) == (3, ["length"])
    assert found == stream(engine.address, prompt=list(protocol_example.PROMPT))[0][:3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1", "99999999"], "token ids must be below"),
        (["1", "2", "--temperature", "-1"], "Expected `float` >= 0.0"),
        (["1"] * 5000, "at least 5000 input tokens"),
    ],
)
def test_refusals_of_the_engine_are_reported(engine: LaunchedEngine, words: list[str], message: str) -> None:
    done = raw_client(engine.address, *words)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# ---- in another language


@pytest.fixture
def node_client(tmp_path: Path) -> list[str]:
    if shutil.which("node") is None:
        pytest.skip("there is no node here")
    if not (NODE_MODULES / "zeromq").is_dir():
        pytest.skip("what it imports is not here: make node-client")
    shutil.copy(SCRIPTS / "node/raw_client.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    return ["node", str(tmp_path / "raw_client.mjs")]


@pytest.mark.parametrize("end", ["ipc", "tcp"])
def test_node(engine: LaunchedEngine, keys: Path, expected: list[int], end: str, node_client: list[str]) -> None:
    client = [*node_client, *ends_of(engine, keys)[end]]
    done = run(*client, *ids(PROMPT))
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == expected
    done = run(*client, "99999999")
    assert done.returncode == 1
    assert done.stderr.startswith("raw_client: token ids must be below")


# ---- an engine that dies


@pytest.fixture
def raw_client_of(request: pytest.FixtureRequest) -> list[str]:
    """The command of a client in the language of the test's parameter."""
    if request.param == "python":
        return [sys.executable, str(SCRIPTS / "raw_client.py")]
    command: list[str] = request.getfixturevalue("node_client")
    return command


@pytest.mark.parametrize("raw_client_of", ["python", "node"], indirect=True)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["nonsense", "1"],
            "cannot connect to nonsense, which must be ipc://PATH or tcp://HOST:PORT: Invalid argument",
        ),
        (["tcp://localhost", "1"], "cannot connect to tcp://localhost, which must be"),
        (["http://127.0.0.1:8000", "1"], "cannot connect to http://127.0.0.1:8000, which must be"),
        (["ipc:///" + "x" * 200, "1"], "which must be ipc://PATH or tcp://HOST:PORT: "),
        (["ipc:///tmp/x", "1", "--keys", "/nowhere"], "cannot connect to ipc:///tmp/x, which must be"),
        (["ipc:///tmp/x", "99999999999"], ""),
        (["ipc:///tmp/x", "1", "--max-tokens", "many"], ""),
        (["ipc:///tmp/x", "1", "--such", "none"], ""),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_invalid_arguments_are_refused_in_one_line(raw_client_of: list[str], words: list[str], says: str) -> None:
    """The address has no listener, and the client does not wait for one."""
    done = run(*raw_client_of, *words)
    assert done.returncode in (1, 2), done.stderr
    assert says in done.stderr
    assert "nothing came within" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(("raw_client: ", "raw_client.py: error: "))
    assert "Traceback" not in done.stderr
    assert "    at " not in done.stderr, "of Node.js"


@pytest.mark.parametrize("raw_client_of", ["python", "node"], indirect=True)
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request", b"\x01"])
def test_another_service_at_the_address_is_one_line(raw_client_of: list[str], answer: bytes, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/other"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.LINGER, 0)
        other.bind(address)
        with subprocess.Popen([*raw_client_of, address, "1"], stderr=PIPE, text=True) as client:
            assert other.poll(int(DEADLINE_S * 1000))
            other.send_multipart([other.recv_multipart()[0], answer])
            said = client.communicate(timeout=DEADLINE_S)[1]
    assert (client.returncode, said) == (1, "raw_client: what answers there is no engine; is the address right?\n")


def next_generate(engine: FakeEngine) -> Generate:
    """Return the next Generate. In quiet seconds a client asks whether the engine is there."""
    while not isinstance(message := engine.heard.get(timeout=DEADLINE_S), Generate):
        assert isinstance(message, Ping), message
    return message


def say_dying(engine: FakeEngine) -> None:
    engine.send(Dying("worker 0 died", is_final=False))


@pytest.mark.parametrize("say", [None, say_dying])
@pytest.mark.parametrize("raw_client_of", ["python", "node"], indirect=True)
def test_a_raw_client_continues_in_the_next_engine(
    raw_client_of: list[str], say: Callable[[FakeEngine], None] | None, tmp_path: Path
) -> None:
    engine = FakeEngine(address=f"ipc://{tmp_path}/engine")
    with subprocess.Popen([*raw_client_of, engine.address, "1", "2"], stdout=PIPE, text=True) as client:
        try:
            first = next_generate(engine)
            engine.tokens(first.request_id, 0, 5, 6)
            assert client.stdout is not None
            assert client.stdout.read(3) == "5 6"
            if say is not None:
                say(engine)
            engine = engine.successor(answer=Dying("it died as it started", is_final=False))
            until(lambda: len(engine.hellos) > 0, "a Hello")
            engine = engine.successor()
            again = next_generate(engine)
            assert again == msgspec.structs.replace(first, have=2, output=pack_tokens([5, 6]))
            engine.finish(again.request_id, 1, 6, 7)
            assert client.stdout.read().split() == ["7"]
            assert client.wait(DEADLINE_S) == 0
        finally:
            client.kill()
            engine.die()


def test_a_minimal_clients_stream_continues_in_a_new_engine(tiny_checkpoint: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    settings = {"model": str(tiny_checkpoint), "device": "cpu", "num_gpu_blocks_override": 64, "address": address}
    config = EngineConfig.check({**settings, "dtype": "float32", "max_restarts": 0})
    words = [sys.executable, str(SCRIPTS / "raw_client.py"), address, "--max-tokens", "400", *ids(PROMPT)]
    dying = launch(config)
    try:
        whole = run(*words).stdout
        with subprocess.Popen(words, stdout=PIPE, text=True) as client:
            try:
                assert client.stdout is not None
                begun = client.stdout.read(8)
                os.kill(dying.pid, signal.SIGKILL)
                dying.close()
                with closing(launch(config)) as engine:
                    rest = client.stdout.read()
                    ended = engine.session.stats().ended_by["length"]
            finally:
                client.kill()
    finally:
        dying.close()
    assert begun + rest == whole
    assert ended == 1, "the second engine computed the rest"
