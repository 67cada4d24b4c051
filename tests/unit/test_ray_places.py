"""Places: a Ray Serve router's knowledge of the replicas' caches, from sent requests and from reports."""

import pickle
import socket
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from tests.deadlines import scaled
from vllm_lite.engine.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm_lite.ray.messages import HASH_BYTES, Route, Routed, Summary
from vllm_lite.ray.places import Places
from vllm_lite.ray.reported_blocks import MAX_REPORTED, SOCKET, ReportedBlocks, private_endpoint
from vllm_lite.transport.publisher import Publisher
from vllm_lite.transport.subscriber import Subscriber

NUM_BLOCKS = 64
IDLE = {"a": 0, "b": 0, "c": 0}


def blocks(name: str, count: int = 8) -> tuple[bytes, ...]:
    return tuple(f"{name}{number:07}".encode()[:HASH_BYTES] for number in range(count))


def report(*names: str, is_complete: bool = True) -> Summary:
    return Summary(NUM_BLOCKS, b"".join(block for name in names for block in blocks(name)), is_complete)


def places() -> Places:
    made = Places()
    made.update(dict.fromkeys(IDLE, report()))
    return made


def test_a_prompt_is_sent_to_its_previous_replica() -> None:
    made = places()
    for name in "abc":
        made.sent(name, Route(blocks(name)))
    assert [made.order(Route(blocks(name)), IDLE)[0] for name in "abc"] == ["a", "b", "c"]


def test_a_prompt_is_sent_to_the_replica_that_reports_it() -> None:
    made = places()
    made.update({**dict.fromkeys(IDLE, report()), "b": report("x")})
    assert made.order(Route(blocks("x")), IDLE)[0] == "b"


def test_blocks_missing_in_a_complete_report_are_forgotten() -> None:
    made = places()
    made.update({**dict.fromkeys(IDLE, report()), "b": report("x")})
    made.sent("c", Route(blocks("x", 4)))
    made.update(dict.fromkeys(IDLE, report()))
    assert made.order(Route(blocks("x")), IDLE)[0] == "c"  # it was sent there only now


def test_sent_blocks_are_kept_for_two_reports() -> None:
    made = places()
    made.sent("b", Route(blocks("x")))
    for number, expected in enumerate((8, 8, 8, 0)):
        assert made.router.num_cached("b", blocks("x")) == expected
        for _ in range(3):  # Serve says it again whenever there is news of any replica
            made.update({**dict.fromkeys(IDLE, report()), "b": report(f"other{number}")})


def test_blocks_missing_in_an_incomplete_report_stay() -> None:
    made = places()
    made.sent("b", Route(blocks("x")))
    for number in range(3):
        made.update({**dict.fromkeys(IDLE, report()), "b": report(f"other{number}", is_complete=False)})
    assert made.router.num_cached("b", blocks("x")) == 8


def test_the_others_follow_by_their_loads() -> None:
    made = places()
    made.sent("a", Route(blocks("x")))
    assert made.order(Route(blocks("x")), {"a": 1, "b": 3, "c": 2}) == ["a", "c", "b"]


def test_a_session_stays_where_it_is() -> None:
    made = places()
    chosen = {made.order(Route(blocks(f"{number}"), "alice"), IDLE)[0] for number in range(20)}
    assert len(chosen) == 1
    (home,) = chosen
    made.update({name: report() for name in IDLE if name != home})
    assert made.order(Route((), "alice"), {name: 0 for name in IDLE if name != home})[0] != home


def test_a_replica_that_has_gone_is_forgotten() -> None:
    made = places()
    made.sent("a", Route(blocks("x")))
    made.update({"b": report(), "c": report()})
    assert set(made.router.engines) == {"b", "c"}
    made.update({**dict.fromkeys(IDLE, report()), "d": None})
    assert made.router.num_cached("a", blocks("x")) == 0
    made.router.check_integrity()


def test_only_the_payload_of_a_request_travels() -> None:
    routed = Routed(b"payload", Route(blocks("x"), "alice"))
    assert pickle.loads(pickle.dumps(routed)) == b"payload"


def test_a_summary_survives_its_way() -> None:
    sent = report("x", "y")
    assert Summary.from_stats(sent.to_stats()) == sent
    assert sent.blocks() == [*blocks("x"), *blocks("y")]
    assert Summary.from_stats({}) is None


# ---- reports of replicas


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])


def stored(*names: bytes) -> BlockStored:
    return BlockStored([name.ljust(32, b"-") for name in names], None, [], 16)


def cached(*batches: bytes) -> ReportedBlocks:
    made = ReportedBlocks(NUM_BLOCKS)
    for number, payload in enumerate(batches):
        made.apply(number, payload)
    return made


def test_a_summary_of_cached_blocks_from_events() -> None:
    removed = BlockRemoved([b"first".ljust(32, b"-")])
    summary = cached(batch(stored(b"first", b"second")), batch(removed, stored(b"third"))).summary()
    assert summary.is_complete
    assert summary.blocks() == [b"third---", b"second--"]
    assert cached(batch(stored(b"first"), AllBlocksCleared())).summary() == Summary(NUM_BLOCKS, b"", is_complete=True)


def test_after_a_gap_the_report_is_incomplete_until_the_cache_is_cleared() -> None:
    made = cached(batch(stored(b"first")))
    made.apply(2, batch(stored(b"third")))
    assert made.summary() == Summary(NUM_BLOCKS, b"third---", is_complete=False)
    made.apply(0, batch(stored(b"new")))  # another engine
    assert made.summary() == Summary(NUM_BLOCKS, b"new-----", is_complete=True)
    made.apply(1, batch(AllBlocksCleared()))
    assert made.summary().is_complete


def test_reports_are_bounded() -> None:
    made = cached(*(batch(stored(f"{number}".encode())) for number in range(MAX_REPORTED + 1)))
    summary = made.summary()
    assert len(summary.blocks()) == MAX_REPORTED
    assert not summary.is_complete
    assert summary.blocks()[0] == f"{MAX_REPORTED}".encode().ljust(HASH_BYTES, b"-")


@pytest.mark.parametrize("payload", [b"", b"\x93\xcb"])
def test_events_that_make_no_sense_are_an_error(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        ReportedBlocks(NUM_BLOCKS).apply(0, payload)


def test_the_events_of_a_publisher_arrive(tmp_path: Path) -> None:
    publisher = Publisher(f"ipc://{tmp_path}/kv", None, "", 1, 100)
    subscriber = Subscriber(f"ipc://{tmp_path}/kv")
    deadline_s = time.monotonic() + scaled(10)
    while subscriber.recv(0.02) is None:  # until the two are connected
        publisher.publish(batch(AllBlocksCleared()))
        assert time.monotonic() < deadline_s
    made = ReportedBlocks(NUM_BLOCKS)
    made.follow(subscriber)
    publisher.publish(batch(AllBlocksCleared(), stored(b"first")))
    while not made.summary().hashes:
        time.sleep(0.005)
        assert time.monotonic() < deadline_s
    made.close()
    publisher.close()
    assert made.summary().blocks() == [b"first---"]


def test_sockets_of_engines_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live = Publisher(private_endpoint(), None, "", 1, 100)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/{SOCKET}left")
    assert len(list(tmp_path.iterdir())) == 2
    private_endpoint()
    assert [path.name for path in tmp_path.iterdir()] != [f"{SOCKET}left"]
    assert len(list(tmp_path.iterdir())) == 1
    live.close()


def test_batches_that_make_no_sense_end_the_reports(tmp_path: Path) -> None:
    publisher = Publisher(f"ipc://{tmp_path}/kv", None, "", 1, 100)
    made = ReportedBlocks(NUM_BLOCKS)
    made.follow(Subscriber(f"ipc://{tmp_path}/kv"))
    deadline_s = time.monotonic() + scaled(10)
    while made.summary().is_complete:
        publisher.publish(b"\xc1")
        time.sleep(0.005)
        assert time.monotonic() < deadline_s
    made.close()
    publisher.close()
