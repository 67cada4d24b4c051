"""A whole engine process, with a worker that has no model: --record and --kv-events-config from configuration to file
and socket, and what is left when the process ends."""

import time
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from tests.deadlines import scaled
from vllm_lite import transport
from vllm_lite.config import EngineConfig
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.api import Finished, Generate, Heartbeat, Hello, OutputBatch, Ping, Welcome
from vllm_lite.protocol.codec import client_to_engine, engine_to_client, pack_tokens
from vllm_lite.protocol.external import AbortExternal, ExternalAborted, ExternalFound, FindExternal
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime import supervise
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.segments import segment_paths
from vllm_lite.trace.story import story
from vllm_lite.transport import Connection
from vllm_lite.transport.publisher import MAX_REPLAYS, SLICE_BATCHES

PATIENCE_S = scaled(60.0)
STUB_WORKER = "vllm_lite.tools.bench.stub_worker"


def ask(
    connection: Connection, message: Hello | Generate | Ping | FindExternal | AbortExternal, answer: type
) -> object:
    connection.send(client_to_engine.encode(message))
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        transport.wait(0.1, connection)
        while (payload := connection.recv()) is not None:
            heard = engine_to_client.decode(payload)
            for item in heard.outputs if isinstance(heard, OutputBatch) else [heard]:
                if isinstance(item, answer):
                    return item
    raise AssertionError(f"no {answer.__name__} came")


def started(settings: EngineSettings, request: pytest.FixtureRequest) -> tuple[supervise.Child, Connection]:
    """An engine process that serves, and a client of it."""
    Path(settings.run_dir).mkdir()
    child = supervise.spawn("vllm_lite.engine.process", settings, "engine", lambda _reason: None)
    request.addfinalizer(lambda: child.stop(5.0))
    connection = transport.connect(settings.address, b"tester")
    request.addfinalizer(connection.close)
    ask(connection, Hello(PROTOCOL_VERSION), Welcome)
    return child, connection


def stop_worker(engine: supervise.Child) -> psutil.Process:
    """Suspend an engine's worker, so that new requests are in flight until it dies."""
    (worker,) = psutil.Process(engine.pid).children()
    worker.suspend()
    return worker


def test_a_trace_continues_when_processes_die(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A worker is killed under one request, the engine under another, which is sent again to the next engine."""
    trace, launch = str(tmp_path / "trace"), "0123abcd"
    config = EngineConfig.check({"record": trace, "log_level": "error"})
    config = config.resolve(max_position_embeddings=4096, dtype="float32", model_path="stub")
    lives = [
        EngineSettings(config, f"ipc://{tmp_path}/{life}/c", f"{tmp_path}/{life}", STUB_WORKER, life, launch)
        for life in (1, 2)
    ]
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=0)
    one, two = (Generate(name, pack_tokens(range(40)), params) for name in ("one", "two"))

    engine, connection = started(lives[0], request)
    worker = stop_worker(engine)
    connection.send(client_to_engine.encode(one))
    ask(connection, Ping(), Heartbeat)  # it has been read, and scheduled
    ask(connection, Ping(), Heartbeat)
    worker.kill()
    ended = ask(connection, Ping(), Finished)
    assert isinstance(ended, Finished)
    assert (ended.request_id, ended.reason, ended.start + len(ended.token_ids)) == ("one", "length", 9)
    stop_worker(engine)
    connection.send(client_to_engine.encode(two))
    deadline_s = time.monotonic() + PATIENCE_S
    while b"two" not in Path(trace).read_bytes():  # at most a second's worth of it is lost
        ask(connection, Ping(), Heartbeat)
        assert time.monotonic() < deadline_s
    psutil.Process(engine.pid).kill()

    engine, connection = started(lives[1], request)
    ended = ask(connection, two, Finished)
    assert isinstance(ended, Finished)
    assert (ended.request_id, ended.reason) == ("two", "length")
    engine.stop(10.0)
    paths = segment_paths(trace)
    assert paths == [trace, f"{trace}.2"]
    assert [Replay(path).run().divergence for path in paths] == [None, None]
    lines = story("one", *map(TraceReader, paths))
    assert any("The workers died (worker 0" in line and "it had no output yet" in line for line in lines)
    assert any("Workers of generation 2 took over after" in line for line in lines)
    lines = story("two", *map(TraceReader, paths))
    assert any("The engine died and was replaced; it came back with no tokens of output." in line for line in lines)
    assert lines[-1].endswith("after 9 tokens of output.")


def test_an_engine_process_records_and_publishes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_dir = tmp_path / "run"  # goes with the process
    run_dir.mkdir()
    replays, trace = f"ipc://{tmp_path}/events-again", tmp_path / "trace"
    events = {"enable_kv_cache_events": True, "replay_endpoint": replays}
    config = EngineConfig.check({"record": str(trace), "kv_events_config": events, "log_level": "error"})
    config = config.resolve(max_position_embeddings=4096, dtype="float32", model_path="stub")
    settings = EngineSettings(config, f"ipc://{run_dir}/c", str(run_dir), STUB_WORKER)
    child = supervise.spawn("vllm_lite.engine.process", settings, "engine", lambda _reason: None)
    request.addfinalizer(lambda: child.stop(5.0))
    connection = transport.connect(settings.address, b"tester")
    request.addfinalizer(connection.close)
    ask(connection, Hello(PROTOCOL_VERSION), Welcome)
    generate = Generate("mine", pack_tokens(range(40)), SamplingParams(max_tokens=9, ignore_eos=True, seed=0))
    ended = ask(connection, generate, Finished)
    assert isinstance(ended, Finished)
    assert ended.reason == "length"
    assert (run_dir / "kv-events").is_socket(), "where no other user comes"

    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    request.addfinalizer(lambda: client.close(0))
    client.connect(replays)
    client.send_multipart([b"", bytes(8)])
    batches = []
    while client.poll(int(1000 * PATIENCE_S)):
        _, _, payload = client.recv_multipart()
        if not payload:
            break
        batches.append(msgspec.msgpack.decode(payload))
    stored = [token for batch in batches for event in batch[1] for token in event[3]]
    assert stored == [*range(40), *[1] * 8], "48 tokens of 49 fill three blocks"
    assert abs(batches[0][0] - time.time()) < 60

    for number in range(3 * SLICE_BATCHES):
        ask(
            connection,
            msgspec.structs.replace(generate, request_id=f"{number}", prompt=pack_tokens([number] * 16)),
            Finished,
        )
    clients: list[zmq.Socket[bytes]] = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(MAX_REPLAYS)]
    started_s, num_batches = time.monotonic(), 0
    for each in clients:
        request.addfinalizer(partial(each.close, 0))
        each.connect(replays)
        each.send_multipart([b"", bytes(8)])
    for each in clients:
        while each.poll(int(1000 * PATIENCE_S)) and each.recv_multipart()[2]:
            num_batches += 1
    assert num_batches > MAX_REPLAYS * 3 * SLICE_BATCHES
    assert time.monotonic() - started_s < scaled(3.0), "an idle engine sends one part after the other"

    child.stop(10.0)
    replay = Replay(str(trace)).run()
    assert replay.divergence is None
    assert not replay.reader.cut_off
    assert replay.scheduler.counters.generated_tokens == 9 * (1 + 3 * SLICE_BATCHES)
    assert story("mine", TraceReader(str(trace)))[-1].endswith("after 9 tokens of output.")
    assert not list(tmp_path.glob("events*"))


def test_an_engine_process_finds_live_requests_by_their_external_ids(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = EngineConfig.check({"log_level": "error"})
    config = config.resolve(max_position_embeddings=4096, dtype="float32", model_path="stub")
    settings = EngineSettings(config, f"ipc://{tmp_path}/run/c", f"{tmp_path}/run", STUB_WORKER)
    engine, connection = started(settings, request)
    stop_worker(engine)
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=0)
    generate = Generate("mine", pack_tokens(range(40)), params, external_id="cmpl-mine")
    connection.send(client_to_engine.encode(generate))
    asked = FindExternal(("", "mine", "cmpl-mine", "gen-mine"))
    assert ask(connection, asked, ExternalFound) == ExternalFound(["cmpl-mine"])
    assert ask(connection, AbortExternal("cmpl-mine"), ExternalAborted) == ExternalAborted(1)
    assert ask(connection, asked, ExternalFound) == ExternalFound([])
