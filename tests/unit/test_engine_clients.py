"""The engine process and its clients, stepped by hand: the owners and ends of streams, and the limits of a client."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.test_core import make_core
from vllm_lite.config import EngineConfig
from vllm_lite.engine.client_port import MAX_PASS_MESSAGES, MAX_PASS_S
from vllm_lite.engine.operations import Operations
from vllm_lite.engine.process import EngineProcess
from vllm_lite.engine.workers.groups import WorkerGroups
from vllm_lite.engine.workers.recovery import Recovery
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.api import (
    Abort,
    Finished,
    FromClient,
    Generate,
    GetStats,
    Heartbeat,
    Hello,
    OutputBatch,
    Ping,
    Refused,
    ToClient,
    Welcome,
)
from vllm_lite.protocol.codec import client_to_engine, engine_to_client, pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Delivery, connect, wait

_numbers = itertools.count()
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPT = pack_tokens([1, 2, 3])


class Client:
    def __init__(self, address: str, name: bytes) -> None:
        self.connection = connect(address, name)
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ends: list[Finished] = []
        self.other: list[ToClient] = []
        self.say(Hello(PROTOCOL_VERSION))

    def say(self, *messages: FromClient) -> None:
        for message in messages:
            self.connection.send(client_to_engine.encode(message))

    def read(self) -> None:
        while (payload := self.connection.recv()) is not None:
            message = engine_to_client.decode(payload)
            if not isinstance(message, OutputBatch):
                self.other.append(message)
                continue
            for output in message.outputs:
                tokens = self.got.setdefault((output.request_id, output.index), [])
                assert output.start <= len(tokens)
                tokens[output.start :] = output.token_ids
                if isinstance(output, Finished):
                    self.ends.append(output)


class Engine:
    """An engine process with a simulated worker, and a clock that only tests advance."""

    def __init__(self) -> None:
        self.stop = Wakeup()
        self.now_s = 0.0
        self.address = f"inproc://engine-clients-{next(_numbers)}"
        config = EngineConfig().resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
        self.process = EngineProcess(EngineSettings(config, self.address, "none"), self.stop)
        self.port = self.process.port
        self.port._clock = lambda: self.now_s
        self.port.open(Welcome(PROTOCOL_VERSION, 5, "model", 100, 50, (7,), 11, 4))
        self.core = make_core(num_blocks=41)
        self.groups = WorkerGroups(lambda _: self.core.executor, config)
        self.recovery = Recovery(self.core, self.groups, self.port, config)
        self.operations = Operations(self.core, self.groups, self.port, config)
        self.clients: list[Client] = []

    def client(self, name: bytes) -> Client:
        client = Client(self.address, name)
        self.clients.append(client)
        return client

    def loop(self, count: int = 1) -> None:
        for _ in range(count):
            self.process.serve_once(self.core, self.groups, self.recovery, self.operations)
            self.core.scheduler.check_integrity()
        self.process.abort_orphans(self.core, self.port.flush(0.0, at_once=True))
        for client in self.clients:
            client.read()

    def drain(self) -> None:
        for _ in range(200):
            self.loop()
            if not self.core.scheduler.requests:
                return
        raise AssertionError("the requests do not end")

    def close(self) -> None:
        for client in self.clients:
            client.connection.close()
        self.port.close()
        self.stop.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_first_tokens_are_sent_before_the_next_step_unless_workers_are_idle(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    order: list[str] = []
    results = deque[ModelOutput | None]([None])
    client, core, executor = engine.client(b"client"), engine.core, engine.core.executor
    core.max_in_flight = 2 if overlap else 1
    submit, send, poll = executor.submit, engine.port.listener.send, executor.poll

    def submits(*steps: SchedulerOutput) -> None:
        order.append("step")
        submit(*steps)

    def sends(peer: bytes, payload: bytes) -> Delivery:
        if isinstance(engine_to_client.decode(payload), OutputBatch):
            order.append("tokens")
        return send(peer, payload)

    monkeypatch.setattr(executor, "submit", submits)
    monkeypatch.setattr(executor, "poll", lambda: results.popleft() if results else None)
    monkeypatch.setattr(engine.port.listener, "send", sends)
    engine.loop()
    order.clear()
    client.say(Generate("r", PROMPT, PARAMS))
    engine.loop()
    assert order == (["step", "step"] if overlap else ["step"])
    order.clear()
    results.append(poll())  # of the first step
    engine.loop()
    assert client.got["r", 0]
    assert order == (["tokens", "step"] if overlap else ["step", "tokens"])


# ---- owners of streams


def test_a_stream_taken_over_by_another_client_ends_once_for_the_first(engine: Engine) -> None:
    first, second = engine.client(b"first"), engine.client(b"second")
    first.say(Generate("r", PROMPT, PARAMS))
    engine.loop(6)
    assert first.got["r", 0]
    second.say(Generate("r", PROMPT, PARAMS))
    engine.loop(2)
    (end,) = first.ends
    seen = len(first.got["r", 0])
    assert (end.reason, end.error) == ("error", "another client took over request 'r' by sending it again")
    first.say(Abort("r"))  # perhaps its user had just gone
    engine.drain()
    assert (len(first.ends), [end.reason for end in second.ends]) == (1, ["length"])
    assert (len(first.got["r", 0]), len(second.got["r", 0])) == (seen, 20)
    assert second.got["r", 0][: len(first.got["r", 0])] == first.got["r", 0]


def test_other_parameters_are_refused_and_the_stream_continues(engine: Engine) -> None:
    first, second = engine.client(b"first"), engine.client(b"second")
    first.say(Generate("r", PROMPT, PARAMS))
    engine.loop(3)
    second.say(Generate("r", PROMPT, PARAMS.clone(max_tokens=5)))
    engine.drain()
    (refusal,) = second.ends
    assert refusal.reason == "error"
    assert "another max_tokens (20, not 5)" in (refusal.error or "")
    assert ([end.reason for end in first.ends], len(first.got["r", 0])) == (["length"], 20)


def test_its_own_client_may_send_a_request_again(engine: Engine) -> None:
    client = engine.client(b"only")
    client.say(Generate("r", PROMPT, PARAMS))
    engine.loop(5)
    have = client.got["r", 0][:2]
    client.say(Generate("r", PROMPT, PARAMS, len(have), pack_tokens(have)))
    engine.drain()
    assert ([end.reason for end in client.ends], len(client.got["r", 0])) == (["length"], 20)


def test_named_samples_end_once_and_the_others_continue(engine: Engine) -> None:
    client, stranger = engine.client(b"client"), engine.client(b"stranger")
    client.say(Generate("r", PROMPT, PARAMS.clone(n=4)))
    engine.loop(5)
    stranger.say(Abort("r", samples=(2,)))
    client.say(Abort("r", stopped=True, samples=(1, 3)), Abort("r", samples=(1,)))
    engine.loop()
    assert [(end.index, end.reason, end.start) for end in client.ends] == [
        (sample, "abort", len(client.got["r", sample])) for sample in (1, 3)
    ]
    engine.drain()
    assert [(end.index, end.reason) for end in client.ends[2:]] == [(0, "length"), (2, "length")]
    assert sum(map(len, client.got.values())) == engine.core.stats().generated_tokens < 60


def test_samples_that_never_came_into_being_end_as_well(engine: Engine) -> None:
    engine.core = make_core(num_blocks=41, max_num_batched_tokens=16)
    client = engine.client(b"client")
    client.say(Generate("r", pack_tokens([1] * 60), PARAMS.clone(n=3)))
    engine.loop()
    assert engine.core.scheduler.requests["r"].unforked == [1, 2]
    client.say(Abort("r"))
    engine.loop()
    assert [(end.index, end.reason) for end in client.ends] == [(index, "abort") for index in range(3)]


# ---- limits of a client


def test_a_flood_is_read_in_turns_and_the_others_are_served_between(engine: Engine) -> None:
    flood, quiet = engine.client(b"flood"), engine.client(b"quiet")
    engine.loop()
    flood.say(*[Ping()] * 1000)
    quiet.say(Generate("r", PROMPT, PARAMS))
    engine.loop()
    answers = [message for message in flood.other if isinstance(message, Heartbeat)]
    assert len(answers) == MAX_PASS_MESSAGES - 1, "the other client's message was among the first"
    assert wait(0.0, engine.port), "what is left ends the wait for more"
    engine.loop(20)
    assert len(quiet.got["r", 0]) >= 19
    assert [type(message) for message in flood.other[1:]] == [Heartbeat] * 1000
    assert not wait(0.0, engine.port)


def test_messages_that_take_long_are_fewer_in_a_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = engine.client(b"flood")
    engine.loop()
    stats = engine.core.stats

    def slow(*args: Any) -> Stats:
        engine.now_s += 0.6 * MAX_PASS_S
        return stats(*args)

    monkeypatch.setattr(engine.core, "stats", slow)
    flood.say(*[GetStats()] * 20)
    for number in range(1, 11):
        engine.loop()
        assert len(flood.other) == 1 + 2 * number


def test_garbage_counts_as_well(engine: Engine) -> None:
    flood = engine.client(b"flood")
    engine.loop()
    for _ in range(200):
        flood.connection.send(b"\xc1")
    engine.loop()
    assert engine.port.malformed == MAX_PASS_MESSAGES


def test_a_message_nested_without_end_costs_its_sender_alone(engine: Engine) -> None:
    sender, other = engine.client(b"sender"), engine.client(b"other")
    other.say(Generate("r", PROMPT, PARAMS))
    engine.loop()
    nested = b"\x81\xaaextra_args\x81\xa1x" + b"\x91" * 100_000 + b"\x90"
    sender.connection.send(b"\x94\xa8generate\xa1x\xc4\x00" + nested)
    engine.drain()
    assert engine.port.malformed == 1
    assert (len(other.got["r", 0]), [end.reason for end in other.ends]) == (20, ["length"])


def test_a_client_that_reads_no_answer_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals cost it nothing; they must not fill the engine's memory until it has been slow for long."""
    monkeypatch.setattr("vllm_lite.engine.client_port.MAX_OWED", 100)
    flood, other = engine.client(b"flood"), engine.client(b"other")
    other.say(Generate("r", PROMPT, PARAMS))
    engine.loop()
    deliver = engine.port.listener.send
    monkeypatch.setattr(
        engine.port.listener, "send", lambda peer, data: Delivery.BUSY if peer == b"flood" else deliver(peer, data)
    )
    flood.say(*(Generate(f"r{number}", b"", PARAMS) for number in range(400)))
    owed = []
    for _ in range(10):
        engine.loop()
        owed.append(len(engine.port.clients.get(b"flood", ())))
    assert max(owed) <= 100 + MAX_PASS_MESSAGES
    assert b"flood" not in engine.port.clients
    engine.drain()
    assert [end.reason for end in other.ends] == ["length"]


def test_all_clients_of_an_engine_that_cannot_start_get_an_error(engine: Engine) -> None:
    engine.port._welcome = None
    for number in range(3 * MAX_PASS_MESSAGES):
        engine.client(b"%d" % number)
    assert engine.port.refuse_all(Refused("no model", bad_input=True))
    for client in engine.clients:
        client.read()
        assert len(client.other) == 1
