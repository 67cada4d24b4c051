"""Replays of KV events: however many ask for however much, a pass of the engine's loop is short, memory is bounded."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.deadlines import scaled
from vllm_lite.transport import publisher
from vllm_lite.transport.publisher import END, MAX_REPLAYS, MAX_REQUESTS, SLICE_BATCHES, Publisher

PATIENCE_S = scaled(30.0)
NUM_BATCHES = 10_000
BATCH_BYTES = 1400


class Stage:
    """A publisher, and peers of its replay socket."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/again"
        self.publisher = Publisher(f"ipc://{folder}/events", self.endpoint, "", NUM_BATCHES, 100)
        self.peers: list[zmq.Socket[bytes]] = []
        self.longest_s = 0.0

    def publish(self, count: int, size: int = BATCH_BYTES) -> None:
        for number in range(count):
            self.publisher.publish(number.to_bytes(4, "big") + bytes(size - 4))

    def peer(self, start: int | None = 0) -> "zmq.Socket[bytes]":
        """Connect a peer that asks for the batches from `start` on, and whose buffers are small, so that unread replies
        queue up at the publisher."""
        made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, 1)
        made.setsockopt(zmq.RCVBUF, 4096)
        made.connect(self.endpoint)
        self.peers.append(made)
        if start is not None:
            ask(made, start)
        return made

    def serve(self) -> None:
        started_s = time.thread_time()
        self.publisher.serve()
        self.longest_s = max(self.longest_s, time.thread_time() - started_s)

    def until_asked(self, count: int) -> None:
        """Serve until `count` replays are under way."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(self.publisher.replays) < count:
            self.serve()
            assert time.monotonic() < deadline_s

    def read(self, *peers: "zmq.Socket[bytes]") -> list[list[int]]:
        """The numbers of the batches that each of `peers` gets, until all have their end marker."""
        found: dict[zmq.Socket[bytes], list[int]] = {peer: [] for peer in peers}
        open_peers = set(peers)
        deadline_s = time.monotonic() + PATIENCE_S
        while open_peers:
            self.serve()
            assert time.monotonic() < deadline_s, {len(each) for each in found.values()}
            for peer in list(open_peers):
                while peer.poll(0):
                    _, number, payload = peer.recv_multipart()
                    if number == END:
                        open_peers.remove(peer)
                        break
                    found[peer].append(int.from_bytes(number, "big"))
                    assert payload[:4] == number[4:]
        return list(found.values())

    def close(self) -> None:
        for peer in self.peers:
            peer.close(0)
        self.publisher.close()


def ask(peer: "zmq.Socket[bytes]", start: int) -> None:
    peer.send_multipart([b"", start.to_bytes(8, "big")])


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_peers_that_do_not_read_take_neither_time_nor_memory_and_one_that_reads_gets_all(stage: Stage) -> None:
    stage.publish(NUM_BATCHES)
    before = resident_bytes()
    for _ in range(MAX_REPLAYS - 1):
        stage.peer()
    stage.until_asked(MAX_REPLAYS - 1)
    for _ in range(100):
        stage.serve()
    assert stage.read(stage.peer()) == [[*range(NUM_BATCHES)]]
    assert stage.longest_s < scaled(0.1)
    assert resident_bytes() - before < 50 * 2**20
    assert len(stage.publisher.replays) == MAX_REPLAYS - 1


def test_peers_take_turns(stage: Stage) -> None:
    stage.publish(1000)
    peers = [stage.peer(start) for start in (0, 300, 999, 5000)]
    stage.until_asked(1)
    assert stage.read(*peers) == [[*range(1000)], [*range(300, 1000)], [999], []]
    assert stage.publisher.patience_ms is None


def test_batches_published_during_a_replay_are_not_part_of_it(stage: Stage) -> None:
    stage.publish(SLICE_BATCHES + 10)
    peer = stage.peer()
    stage.until_asked(1)
    stage.publish(50)
    assert stage.read(peer) == [[*range(SLICE_BATCHES + 10)]]


def test_a_pass_limits_the_batches_and_bytes_for_one_peer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.publish(3 * SLICE_BATCHES)
    sent: list[bytes] = []

    class Socket:
        """Takes all that it is given."""

        def recv_multipart(self, _flags: int) -> list[bytes]:
            raise zmq.Again

        def send_multipart(self, frames: tuple[bytes, ...], _flags: int, *, copy: bool = True) -> None:
            del copy
            sent.append(frames[0])

        def close(self) -> None: ...

    monkeypatch.setattr(stage.publisher, "_replay", Socket())
    for peer in (b"one", b"two"):
        stage.publisher.replays[peer] = publisher._Replay(0, 3 * SLICE_BATCHES)
    for turn in (b"one", b"two", b"one"):
        sent.clear()
        stage.publisher.serve()
        assert sent == [turn] * SLICE_BATCHES
    monkeypatch.setattr(publisher, "SLICE_BYTES", 2 * BATCH_BYTES)
    sent.clear()
    stage.publisher.serve()
    assert sent == [b"two"] * 3


def test_a_peer_that_asks_again_gets_its_last_range(stage: Stage) -> None:
    stage.publish(5000)
    peer = stage.peer()
    stage.until_asked(1)
    ask(peer, 4990)
    (found,) = stage.read(peer)
    assert found[-10:] == [*range(4990, 5000)]
    assert len(found) < 5000
    assert stage.publisher.replays == {}


def test_a_flood_of_requests_is_read_a_part_at_a_time(stage: Stage) -> None:
    peer = stage.peer(None)
    for _ in range(10 * MAX_REQUESTS):
        ask(peer, 0)
    num_answers = 0
    deadline_s = time.monotonic() + PATIENCE_S
    while num_answers < 5:
        stage.serve()
        while peer.poll(10):
            assert peer.recv_multipart()[1] == END
            num_answers += 1
        assert time.monotonic() < deadline_s


def test_more_replays_than_a_few_are_not_begun(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "STALL_S", PATIENCE_S)  # a busy machine may stop this process for ten seconds
    stage.publish(2000)
    slow = [stage.peer() for _ in range(MAX_REPLAYS)]
    stage.until_asked(MAX_REPLAYS)
    late = stage.peer()
    deadline_s = time.monotonic() + scaled(0.3)
    while time.monotonic() < deadline_s:
        stage.serve()
        time.sleep(0.001)
    assert len(stage.publisher.replays) == MAX_REPLAYS
    assert not late.poll(0)
    stage.read(slow[0])
    ask(late, 1500)
    assert stage.read(late) == [[*range(1500, 2000)]]


def test_a_peer_that_has_gone_is_forgotten(stage: Stage) -> None:
    stage.publish(5000)
    peer = stage.peer()
    stage.until_asked(1)
    peer.close(0)
    deadline_s = time.monotonic() + PATIENCE_S
    while stage.publisher.replays:
        stage.serve()
        assert time.monotonic() < deadline_s


def test_a_replay_ends_if_its_peer_reads_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.publish(5000)
    peer = stage.peer()
    stage.until_asked(1)
    assert stage.publisher.patience_ms == publisher.NEXT_SLICE_MS
    deadline_s = time.monotonic() + PATIENCE_S
    while stage.publisher.patience_ms != publisher.STALLED_MS:
        stage.serve()
        assert time.monotonic() < deadline_s
    now_s, give_up_s = time.monotonic(), time.perf_counter() + PATIENCE_S
    monkeypatch.setattr(time, "monotonic", lambda: now_s + publisher.STALL_S / 2)
    (replay,) = stage.publisher.replays.values()
    before = replay.number
    while replay.number == before:  # it reads a little
        if peer.poll(1):
            peer.recv_multipart()
        stage.serve()
        assert time.perf_counter() < give_up_s
    while stage.publisher.patience_ms != publisher.STALLED_MS:
        stage.serve()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + publisher.STALL_S + 1)
    stage.serve()
    assert stage.publisher.replays
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 2 * publisher.STALL_S)
    stage.serve()
    assert stage.publisher.replays == {}


def test_the_bytes_of_kept_batches_are_limited(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MAX_KEPT_BYTES", 10 * BATCH_BYTES)
    stage.publish(35)
    assert stage.read(stage.peer()) == [[*range(25, 35)]]
    stage.publish(1, 11 * BATCH_BYTES)
    stage.publish(2, BATCH_BYTES)
    assert [number for number, _ in stage.publisher.kept] == [36, 37]
    assert stage.publisher.kept_bytes == 2 * BATCH_BYTES


def test_bytes_of_batches_that_are_one_too_many_are_not_counted(tmp_path: Path) -> None:
    made = Publisher(f"ipc://{tmp_path}/events", None, "", 5, 100)
    for _ in range(20):
        made.publish(bytes(100))
    assert (len(made.kept), made.kept_bytes, made.patience_ms) == (5, 500, None)
    made.close()
