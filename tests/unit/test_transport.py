"""The contract that both transports keep."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.deadlines import scaled
from vllm_lite import transport
from vllm_lite.errors import EngineError
from vllm_lite.transport import Connection, Delivery, Listener, Wakeup, interface

DEADLINE_S = scaled(30.0)


@pytest.fixture(params=["inproc", "ipc"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"inproc://{tmp_path}" if request.param == "inproc" else f"ipc://{tmp_path}/s"


def receive(channel: Connection | Listener) -> bytes | tuple[bytes, bytes]:
    while (item := channel.recv()) is None:
        assert transport.wait(DEADLINE_S, channel), "nothing arrived before the deadline"
    return item


def test_messages_go_both_ways_in_order(address: str) -> None:
    listener = transport.bind(address)
    connection = transport.connect(address, b"me")
    for index in range(100):
        connection.send(b"%d" % index)
    assert [receive(listener) for _ in range(100)] == [(b"me", b"%d" % index) for index in range(100)]
    for index in range(100):
        assert listener.send(b"me", b"%d" % index) is Delivery.SENT
    assert [receive(connection) for _ in range(100)] == [b"%d" % index for index in range(100)]
    assert connection.recv() is None
    connection.close()
    listener.close()


def test_messages_sent_before_the_listener_arrive(address: str) -> None:
    connection = transport.connect(address, b"early")
    connection.send(b"hello")
    listener = transport.bind(address)
    assert receive(listener) == (b"early", b"hello")
    connection.close()
    listener.close()


def test_no_message_is_lost_while_the_listener_binds() -> None:
    """The threads of --single-process start at the same time, so they are made to meet in every possible place."""
    expected = [(b"early", b"%d" % number) for number in range(300)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(200):
            connection = transport.connect(f"inproc://race-{number}", b"early")
            sender = threading.Thread(target=lambda to=connection: [to.send(payload) for _, payload in expected])
            sender.start()
            listener = transport.bind(f"inproc://race-{number}")
            sender.join()
            assert [listener.recv() for _ in expected] == expected
            connection.close()
            listener.close()
    finally:
        sys.setswitchinterval(interval)


def test_unread_messages_end_the_next_wait(address: str) -> None:
    """A loop that reads a part of the messages must not sleep while others are left."""
    listener = transport.bind(address)
    connections = [transport.connect(address, name) for name in (b"me", b"other")]
    poller = interface.poller(listener)
    for number in range(100):
        connections[number % 2].send(b"x")
    for _ in range(100):
        assert poller.poll(int(1000 * DEADLINE_S)), "what is there is not seen"
        receive(listener)
    assert not poller.poll(0)
    for connection in connections:
        connection.close()
    listener.close()


def test_peers_are_read_in_turn(address: str) -> None:
    listener = transport.bind(address)
    many, few = transport.connect(address, b"many"), transport.connect(address, b"few")
    for channel in (many, few):
        channel.send(b"here")
    assert {receive(listener), receive(listener)} == {(b"many", b"here"), (b"few", b"here")}

    def last() -> int | bytes:
        """Who was read last. A message may take its time on the way, so that one round proves nothing."""
        for _ in range(900):
            many.send(b"x")
        few.send(b"y")
        return [receive(listener)[0] for _ in range(901)][-1]

    rounds = (last() for _ in range(10))
    assert b"many" in rounds, "the one with one message waited each time until the other had said all"
    many.close()
    few.close()
    listener.close()


def test_unknown_peer_is_gone(address: str) -> None:
    listener = transport.bind(address)
    assert listener.send(b"nobody", b"x") is Delivery.GONE
    listener.close()


def test_a_closed_peer_is_noticed_before_the_deadline(address: str) -> None:
    listener = transport.bind(address)
    connection = transport.connect(address, b"me")
    connection.send(b"hello")
    receive(listener)
    connection.close()
    wakeup = Wakeup()
    for _ in range(1000):
        if listener.send(b"me", b"x") is Delivery.GONE:
            break
        transport.wait(0.01, wakeup)
    else:
        pytest.fail("the peer never went")
    listener.close()


def test_connection_learns_that_its_peer_went(address: str) -> None:
    listener = transport.bind(address)
    connection = transport.connect(address, b"me")
    connection.send(b"hello")
    receive(listener)
    assert not connection.lost()
    listener.close()
    assert transport.wait(DEADLINE_S, connection)
    assert connection.lost()
    connection.close()


def test_an_idle_connection_ends_no_wait(address: str) -> None:
    listener = transport.bind(address)
    connection = transport.connect(address, b"me")
    connection.send(b"hello")
    receive(listener)
    listener.send(b"me", b"hello")
    receive(connection)
    assert connection.recv() is None
    assert not transport.wait(0, connection)
    connection.close()
    listener.close()


def test_address_in_use_is_refused(address: str) -> None:
    listener = transport.bind(address)
    with pytest.raises(EngineError, match="in use"):
        transport.bind(address)
    listener.close()
    transport.bind(address).close()


def test_socket_file_is_private_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = transport.bind(f"ipc://{path}")
    assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
    listener.close()
    assert not path.exists()


def test_socket_file_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    import socket

    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "s"))
    stale.close()
    transport.bind(f"ipc://{tmp_path}/s").close()


def test_wakeup_ends_a_wait_from_another_thread() -> None:
    wakeup = Wakeup()
    thread = threading.Thread(target=wakeup.set)
    thread.start()
    assert transport.wait(DEADLINE_S, wakeup)
    assert wakeup.is_set()
    wakeup.clear()
    assert not transport.wait(0, wakeup)
    thread.join()
    wakeup.close()
    wakeup.set()  # after close: nothing happens


def test_reader_that_does_not_read_makes_sends_busy(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    listener = transport.bind(address)
    connection = transport.connect(address, b"slow")
    connection.send(b"hello")
    receive(listener)
    payload = b"x" * 100_000
    deliveries = {listener.send(b"slow", payload) for _ in range(4000)}
    assert Delivery.BUSY in deliveries
    connection.close()
    listener.close()


LAST_WORDS = """
import os, sys
from vllm_lite import transport
listener = transport.bind(sys.argv[1])
while (hello := listener.recv()) is None:
    transport.wait(10, listener)
for _ in range(32):
    listener.send(hello[0], bytes(1 << 20))
listener.close()
transport.finish()
os._exit(0)
"""


def test_last_words_of_a_process_arrive(tmp_path: Path) -> None:
    """The messages exceed a socket's buffer; without the wait in finish() they would be lost."""
    address = f"ipc://{tmp_path}/s"
    connection = transport.connect(address, b"me")
    connection.send(b"hello")
    with subprocess.Popen([sys.executable, "-c", LAST_WORDS, address]) as process:
        assert [len(receive(connection)) for _ in range(32)] == [1 << 20] * 32
        assert process.wait(DEADLINE_S) == 0
    connection.close()


def test_finish_does_not_wait_for_an_open_channel(tmp_path: Path) -> None:
    code = f"from vllm_lite import transport; left = transport.bind('ipc://{tmp_path}/s'); transport.finish()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)


@pytest.mark.parametrize(("max_bytes", "arrives"), [(1000, False), (2000, True)])
def test_each_listener_has_its_own_limit_of_message_sizes(tmp_path: Path, max_bytes: int, arrives: bool) -> None:
    listener = transport.bind(f"ipc://{tmp_path}/s", max_bytes=max_bytes)
    connection = transport.connect(listener.address, b"me")
    connection.send(bytes(1500))
    if arrives:
        assert receive(listener) == (b"me", bytes(1500))
    else:
        while not connection.lost():  # a connection that has come about ends a wait as well
            assert transport.wait(DEADLINE_S, connection)
    connection.close()
    listener.close()
