"""tcp beside the ipc socket: access, the errors of clients without access, and that no other client notices."""

import logging
import queue
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import zmq

from tests.fakes import DEADLINE_S, welcome
from tests.unit.test_protocol import MESSAGES
from vllm_lite import transport
from vllm_lite.client.engines.session import Session
from vllm_lite.engine.client_port import ClientPort
from vllm_lite.errors import ConfigError, EngineError
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.api import Abort, Finished, FromClient, Hello, OutputBatch, Welcome
from vllm_lite.protocol.codec import MAX_CLIENT_BYTES, client_to_engine, engine_to_client
from vllm_lite.transport import Delivery, Tcp, Wakeup
from vllm_lite.transport.authenticator import Complaints
from vllm_lite.transport.keys import load_client_keys, make_client_keys, make_engine_keys
from vllm_lite.transport.zmq import HIGH_WATER_MARK, ZmqConnection, ZmqListener

ANY = "tcp://127.0.0.1:*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of an engine with the clients alice and bob, where bob's key has been removed; and of another engine."""
    made = tmp_path_factory.mktemp("keys")
    for engine in ("mine", "other"):
        make_engine_keys(made / engine)
        make_client_keys(made / engine, "alice")
    make_client_keys(made / "mine", "bob")
    (made / "mine/clients/bob.key").unlink()
    return made


@pytest.fixture
def alice(folder: Path) -> Path:
    return folder / "mine/for/alice"


class Engine:
    """The part of an engine that shakes hands, on a thread of its own."""

    def __init__(self, path: Path, keys: Path | None) -> None:
        self.ipc_address = f"ipc://{path}/s"
        self.port = ClientPort(self.ipc_address, epoch=1, tcp=Tcp(ANY, keys))
        self.port.open(welcome())
        assert isinstance(self.port.listener, ZmqListener)
        self.address = str(self.port.listener.tcp_address)
        self.heard: queue.Queue[FromClient] = queue.Queue()
        self._stop = Wakeup()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            transport.wait(DEADLINE_S, self.port, self._stop)
            for _, message in self.port.receive():
                self.heard.put(message)
            self.port.flush(0.0, at_once=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self.port.close()


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(tmp_path, folder / "mine") as made:
        yield made


def hears(engine: Engine, session: Session) -> bool:
    """Whether a message of `session` arrives."""
    session._post(Abort("x"))
    return engine.heard.get(timeout=DEADLINE_S) == Abort("x")


def connect(engine: Engine, keys: "transport.KeysOption", address: str | None = None) -> Session:
    return Session.connect(address or engine.address, keys=keys, timeout_s=DEADLINE_S)


# ---- access


def test_a_client_with_keys_and_one_on_this_machine(engine: Engine, alice: Path) -> None:
    with closing(connect(engine, alice)) as far, closing(connect(engine, None, engine.ipc_address)) as near:
        assert far.welcome == near.welcome == welcome()
        assert hears(engine, far)
        assert hears(engine, near)


def test_without_keys_where_that_was_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tmp_path, None) as engine, closing(connect(engine, False)) as session:
        assert hears(engine, session)
    assert "insecure: anyone who can reach tcp://127.0.0.1" in caplog.text


def test_a_client_without_keys_must_ask_for_that(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LITE_KEYS", raising=False)
    with pytest.raises(ConfigError, match="needs keys"):
        connect(engine, None)


def mixed(folder: Path, tmp_path: Path) -> Path:
    """The keys of a client that the other engine knows, but with this engine's public key."""
    shutil.copytree(folder / "other/for/alice", tmp_path / "mixed")
    shutil.copy(folder / "mine/server.key", tmp_path / "mixed")
    return tmp_path / "mixed"


@pytest.mark.parametrize(
    ("whose", "reason"),
    [
        ("removed", "it does not know this client's key, which has to be among its clients' keys"),
        ("unknown", "it does not know this client's key, which has to be among its clients' keys"),
        ("of another engine", "it ends every handshake; perhaps its key differs from this client's server.key"),
        ("none", "it accepts only clients with keys"),
    ],
)
def test_refused_clients_get_a_reason_and_others_notice_nothing(
    engine: Engine, folder: Path, tmp_path: Path, whose: str, reason: str
) -> None:
    keys: dict[str, transport.KeysOption] = {
        "removed": folder / "mine/for/bob",
        "unknown": mixed(folder, tmp_path),
        "of another engine": folder / "other/for/alice",
        "none": False,
    }
    with closing(connect(engine, folder / "mine/for/alice")) as friend:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(EngineError) as caught:
                connect(engine, keys[whose])
            assert time.monotonic() - began < DEADLINE_S / 2, "it was refused, and did not wait for its own deadline"
            assert str(caught.value) == f"the engine at {engine.address} does not let this client in: {reason}"
        assert hears(engine, friend)
        assert engine.heard.empty()


def test_keys_for_an_engine_without_keys(alice: Path, tmp_path: Path) -> None:
    with Engine(tmp_path, None) as engine, pytest.raises(EngineError, match="let this client in: it uses no keys"):
        connect(engine, alice)


def test_a_removed_key_shuts_its_client_out_at_its_next_connection(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mine", tmp_path / "keys")
    alice = tmp_path / "keys/for/alice"
    with Engine(tmp_path, tmp_path / "keys") as engine:
        connect(engine, alice).close()
        (tmp_path / "keys/clients/alice.key").unlink()
        with pytest.raises(EngineError, match="does not know this client's key"):
            connect(engine, alice)
        shutil.copy(alice / "client.key", tmp_path / "keys/clients/alice.key")
        connect(engine, alice).close()


# ---- what is not a client


def test_refusals_are_logged_once_for_each_source(
    engine: Engine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm_lite.transport")
    for keys in (folder / "mine/for/bob", False):
        for _ in range(5):
            with pytest.raises(EngineError):
                connect(engine, keys)
    engine.end()  # all that happened has been said
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(said) == 2
    assert said[0] == "refused at 127.0.0.1: a client from there has a key that is not known here"
    assert said[1].startswith(f"refused at {engine.address}: something there does not shake hands")


def test_complaints_count_the_suppressed_repeats(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints = Complaints()
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for _ in range(3):
        complaints.add("a", "no")
    complaints.add("b", "no")
    now_s += 61
    complaints.add("a", "no")
    assert [record.getMessage() for record in caplog.records] == [
        "refused at a: no",
        "refused at b: no",
        "refused at a: no (2 times more since it was said)",
    ]
    for number in range(5000):
        complaints.add(str(number), "no")
    assert len(complaints._sources) <= 1024


def test_strangers_on_the_port_do_not_affect_clients(engine: Engine, alice: Path) -> None:
    """HTTP, half a greeting, random bytes, nothing at all."""
    host, port = engine.address.removeprefix("tcp://").split(":")
    rng = random.Random(1)
    with closing(connect(engine, alice)) as friend:
        strangers = [socket.create_connection((host, int(port)), DEADLINE_S) for _ in range(50)]
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE"
        for number, stranger in enumerate(strangers):
            stranger.sendall((b"GET / HTTP/1.1\r\n\r\n", greeting, rng.randbytes(500), b"")[number % 4])
        assert hears(engine, friend)
        with closing(connect(engine, alice)) as another:
            assert hears(engine, another)
        for stranger in strangers:
            stranger.close()
        assert hears(engine, friend)


def test_ten_thousand_malformed_messages(engine: Engine, alice: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Malformed messages of a client with access. They are dropped and counted, except for those that are valid by
    chance."""
    rng = random.Random(2)
    messages = [message for codec, message in MESSAGES if codec is client_to_engine]
    connection = transport.connect(engine.address, b"bad", alice)
    with closing(connect(engine, alice)) as friend:
        connection.send(client_to_engine.encode(Hello(PROTOCOL_VERSION)))
        for number in range(10_000):
            payload = bytearray(client_to_engine.encode(rng.choice(messages)))
            for _ in range(rng.randint(1, 4)):
                payload[rng.randrange(len(payload))] = rng.randrange(256)
            piece = bytes(payload[: rng.randint(0, len(payload))]) if number % 2 else rng.randbytes(rng.randint(0, 64))
            while connection.send(piece) is Delivery.BUSY:
                transport.wait(0.01, connection)
                connection.recv()
        connection.send(client_to_engine.encode(Abort("last")))
        while engine.heard.get(timeout=DEADLINE_S) != Abort("last"):
            pass
        assert 9_000 < engine.port.malformed <= 10_000
        assert 10 < caplog.text.count("dropped from a client") < 20
        assert hears(engine, friend)
    connection.close()


def test_a_malformed_request_ends(engine: Engine, alice: Path) -> None:
    """The client that waits for it gets the reason, as far as the id can be read."""
    connection = transport.connect(engine.address, b"me", alice)
    for message in (
        ["hello", PROTOCOL_VERSION],
        ["generate", "r", b"\1\0\0\0", {"temperature": -1}],
        ["fork", "parent", "child", "no number", {}],
        ["generate"],
        ["abort", 5],
    ):
        connection.send(client_to_engine.encode(message))
    ends: list[Finished] = []
    greeted = False
    while len(ends) < 2:
        assert transport.wait(DEADLINE_S, connection)
        while (payload := connection.recv()) is not None:
            answer = engine_to_client.decode(payload)
            greeted = greeted or isinstance(answer, Welcome)
            ends += answer.outputs if isinstance(answer, OutputBatch) else []  # type: ignore[arg-type]
    assert greeted
    assert [(end.request_id, end.reason) for end in ends] == [("r", "error"), ("child", "error")]
    assert "Expected `float` >= 0.0 - at `$[3].temperature`" in str(ends[0].error)
    connection.close()


def test_too_long_a_message_ends_its_own_connection(engine: Engine, alice: Path) -> None:
    connection = transport.connect(engine.address, b"long", alice)
    with closing(connect(engine, alice)) as friend:
        connection.send(bytes(MAX_CLIENT_BYTES + 1))
        deadline_s = time.monotonic() + DEADLINE_S
        while not connection.lost():
            assert time.monotonic() < deadline_s
            transport.wait(0.1, connection)
        assert hears(engine, friend)
    connection.close()


# ---- the channel


def test_every_limit_is_set(engine: Engine, alice: Path) -> None:
    connection = transport.connect(engine.address, b"me", alice)
    assert isinstance(connection, ZmqConnection)
    assert isinstance(engine.port.listener, ZmqListener)
    for channel in (connection, engine.port.listener):
        limits = (zmq.MAXMSGSIZE, zmq.SNDHWM, zmq.RCVHWM, zmq.HANDSHAKE_IVL, zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT)
        found = [channel._socket.getsockopt(limit) for limit in limits]
        assert found == [MAX_CLIENT_BYTES, HIGH_WATER_MARK, HIGH_WATER_MARK, 10_000, 5_000, 30_000]
    connection.close()


def test_both_ends_notice_the_others_end(folder: Path, alice: Path, tmp_path: Path) -> None:
    listener = transport.bind(f"ipc://{tmp_path}/s", Tcp(ANY, folder / "mine"))
    assert isinstance(listener, ZmqListener)
    leaver, stayer = (transport.connect(str(listener.tcp_address), name, alice) for name in (b"leaver", b"stayer"))
    for connection in (leaver, stayer):
        connection.send(b"x" * 1_000_000)
        while (item := listener.recv()) is None:
            assert transport.wait(DEADLINE_S, listener)
        assert item[1] == b"x" * 1_000_000
    leaver.close()
    deadline_s = time.monotonic() + DEADLINE_S
    while listener.send(b"leaver", b"x") is not Delivery.GONE:
        assert time.monotonic() < deadline_s
        listener.recv()  # as an engine does: ZeroMQ lets go of a peer only once all it sent has been read
    assert listener.send(b"stayer", b"x") is Delivery.SENT
    listener.close()
    while not stayer.lost():
        assert transport.wait(DEADLINE_S, stayer)
        stayer.recv()
    stayer.close()


def test_a_taken_port_leaves_nothing_behind(engine: Engine, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(EngineError, match=f"cannot listen on {engine.address}: Address already in use"):
        transport.bind(f"ipc://{other}", Tcp(engine.address, None))
    assert not other.exists()


def test_listeners_of_one_process_check_the_keys_of_their_own_clients(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    theirs = folder / "other/for/alice"
    mixed = shutil.copytree(theirs, tmp_path / "mixed")
    shutil.copy(folder / "mine/server.key", mixed)
    with closing(transport.bind(f"ipc://{tmp_path}/other", Tcp(ANY, folder / "other"))) as second:
        assert isinstance(second, ZmqListener)
        with closing(ZmqConnection(engine.address, b"x", load_client_keys(engine.address, mixed))) as stranger:
            while stranger.refused() is None:
                assert transport.wait(DEADLINE_S, stranger)
        engine.end()  # clients of the other engine still have access
        address = str(second.tcp_address)
        with closing(ZmqConnection(address, b"y", load_client_keys(address, theirs))) as client:
            client.send(b"hello")
            while (heard := second.recv()) is None:
                assert transport.wait(DEADLINE_S, second)
            assert heard == (b"y", b"hello")
