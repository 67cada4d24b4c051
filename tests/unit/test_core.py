"""EngineCore: validation, idempotent Generate, clamping, stop conditions; and the client port's books."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.simulated_worker import SimulatedWorker, next_token
from vllm_lite.config import EngineConfig
from vllm_lite.engine import core as core_module
from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.client_port import GATHER_S, SLOW_READER_S, ClientPort, Outbox
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.request import Produced
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.errors import RequestError
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.api import (
    Abort,
    Dying,
    Finished,
    ForkRequest,
    Generate,
    Heartbeat,
    Hello,
    OutputBatch,
    Ping,
    Refused,
    ToClient,
    Tokens,
    Welcome,
)
from vllm_lite.protocol.codec import client_to_engine, engine_to_client, pack_tokens
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.transfers import LoadBlocks
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.records import PolicyFault
from vllm_lite.transport import Delivery, connect

VOCAB = 50
EOS = 7


def make_core(num_blocks: int = 11, num_stages: int = 1, **settings: object) -> EngineCore:
    config = EngineConfig.check({"block_size": 4, **settings})
    resolved = config.resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
    resolved = msgspec.structs.replace(resolved, num_stages=num_stages)
    ready = Ready(0, 1, num_blocks, 64, (KVGroupInfo("full", 1),), 1000, VOCAB, (EOS,))
    worker = SimulatedWorker(num_blocks, 4, vocab_size=VOCAB)
    return EngineCore(resolved, ready, worker, PoolSizes(num_blocks), Lives(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("events", [None, {"enable_kv_cache_events": True, "endpoint": "ipc:///nowhere"}])
def test_the_first_stored_keys_are_loaded_unless_kv_events_are_published(
    tmp_path: Path, events: dict[str, Any] | None
) -> None:
    core = make_core(kv_cache_dir=str(tmp_path), kv_events_config=events)
    core.scheduler.stored_keys([bytes((number,)) * 32 + b"\0" for number in range(4)], [])
    loads = core.kv.part(DiskTier).take_messages()
    assert [len(load.keys) for load in loads if isinstance(load, LoadBlocks)] == ([4] if events is None else [])


def generate(core: EngineCore, prompt: list[int], name: str = "r", **params: object) -> list[Produced]:
    core.add(b"client", Generate(name, pack_tokens(prompt), SamplingParams(**params)))  # type: ignore[arg-type]
    return drain(core)


def drain(core: EngineCore) -> list[Produced]:
    produced: list[Produced] = []
    for _ in range(1000):
        if not core.begin():
            core.scheduler.check_integrity()
            return produced
        output = core.executor.poll()
        assert output is not None
        produced += core.finish(output)
    raise AssertionError("the requests do not end")


def tokens_of(produced: list[Produced]) -> list[int]:
    return [token for item in produced for token in item.token_ids]


def continuation(prompt: list[int], count: int, sample: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB, sample))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("num_stages", "overlap", "most"), [(1, True, 2), (1, False, 1), (3, True, 4), (3, False, 1)])
def test_every_stage_may_have_a_step_beside_the_one_that_is_made(num_stages: int, overlap: bool, most: int) -> None:
    core = make_core(num_stages=num_stages, async_scheduling=overlap)
    assert core.max_in_flight == most
    for index in range(num_stages):
        core.add(b"client", Generate(f"r{index}", pack_tokens([1, 2]), SamplingParams(max_tokens=3)))
    assert len(tokens_of(drain(core))) <= 3 * num_stages


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Generate("r", b"", SamplingParams()), "the prompt is empty"),
        (Generate("r", b"123", SamplingParams()), "3 bytes, which is not a multiple of 4"),
        (Generate("r", pack_tokens([1, 50]), SamplingParams()), "token ids must be below 50, the prompt holds 50"),
        (
            Generate("r", pack_tokens([1] * 40), SamplingParams()),
            "context length is 40 tokens, .* requested 16 output .* at least 40 input tokens; .* shorten it to 39",
        ),
        (Generate("r", pack_tokens([1]), SamplingParams(), have=2, output=pack_tokens([1])), "2 tokens the client has"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_with_numbers(message: Generate, error: str) -> None:
    core = make_core()
    with pytest.raises(RequestError, match=error):
        core.add(b"client", message)
    assert not core.scheduler.requests


def test_the_default_of_max_tokens_is_the_remaining_context() -> None:
    produced = generate(make_core(), [1] * 30, max_tokens=None, ignore_eos=True)
    assert len(tokens_of(produced)) == 10
    assert produced[-1].reason == "length"


@pytest.mark.parametrize("max_tokens", [10, 11, 16, 40, 1000])
def test_max_tokens_is_cut_to_the_remaining_context(max_tokens: int) -> None:
    produced = generate(make_core(), [1] * 30, max_tokens=max_tokens, ignore_eos=True)
    assert len(tokens_of(produced)) == 10
    assert produced[-1].reason == "length"


def test_the_max_tokens_of_a_fork_is_cut_so_too() -> None:
    core = make_core()
    core.add(b"client", Generate("r", pack_tokens([1] * 30), SamplingParams(max_tokens=9, ignore_eos=True)))
    for _ in range(2):
        core.begin()
        core.finish(core.executor.poll())  # type: ignore[arg-type]
    core.fork(b"client", ForkRequest("r", "fork", 1, SamplingParams(max_tokens=1000, ignore_eos=True)))
    last = [item for item in drain(core) if item.request.request_id == "fork"][-1]
    assert (last.reason, last.start + len(last.token_ids)) == ("length", 10)


def prompt_that_ends_at(position: int) -> list[int]:
    """A prompt whose continuation has its first EOS at `position`."""
    for start in range(10_000):
        prompt = [start % VOCAB, start // VOCAB % VOCAB, 1]
        if EOS in (tokens := continuation(prompt, 12)) and tokens.index(EOS) == position:
            return prompt
    raise AssertionError("no such prompt")


def test_end_of_sequence_token_ends() -> None:
    produced = generate(make_core(), prompt_that_ends_at(3), max_tokens=12)
    assert (len(tokens_of(produced)), produced[-1].reason) == (4, "stop")


def test_ignore_eos_continues() -> None:
    produced = generate(make_core(), prompt_that_ends_at(3), max_tokens=12, ignore_eos=True)
    assert (len(tokens_of(produced)), produced[-1].reason) == (12, "length")


def test_min_tokens_postpones_the_end() -> None:
    produced = generate(make_core(), prompt_that_ends_at(3), max_tokens=12, min_tokens=5)
    assert len(tokens_of(produced)) >= 5


def test_generate_again_attaches_and_resends_from_have() -> None:
    core = make_core()
    message = Generate("r", pack_tokens([1, 2, 3]), SamplingParams(max_tokens=8, ignore_eos=True))
    core.add(b"first", message)
    for _ in range(4):
        core.begin()
        output = core.executor.poll()
        assert output is not None
        core.finish(output)
    again = Generate("r", message.prompt, message.params, have=1, output=pack_tokens(continuation([1, 2, 3], 1)))
    accepted = core.add(b"second", again)
    assert accepted.resend == continuation([1, 2, 3], 4)[1:]
    assert accepted.request.client == b"second"
    assert accepted.replaced == b"first"
    assert core.add(b"second", again).replaced is None, "a client that sends it again goes on with its own stream"
    with pytest.raises(RequestError, match="in use for another prompt"):
        core.add(b"thief", Generate("r", pack_tokens([9]), SamplingParams()))
    with pytest.raises(RequestError, match="9 tokens were claimed, but only 4"):
        core.add(b"second", Generate("r", message.prompt, message.params, have=9, output=pack_tokens([1] * 9)))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_tokens": 5}, r"with another max_tokens \(8, not 5\); send the same parameters"),
        ({"max_tokens": None}, r"another max_tokens \(8, not None\)"),
        ({"seed": 4}, r"another seed \(\d+, not 4\)"),
        ({"cache_salt": "secret"}, "with another cache_salt; send"),
        ({"allowed_token_ids": tuple(range(40))}, "with another allowed_token_ids; send"),
    ],
)
def test_an_id_in_use_with_other_parameters_is_refused(changes: dict[str, Any], error: str) -> None:
    core = make_core()
    message = Generate("r", pack_tokens([1, 2, 3]), SamplingParams(max_tokens=8, ignore_eos=True))
    accepted = core.add(b"first", message)
    with pytest.raises(RequestError, match=error):
        core.add(b"second", Generate("r", message.prompt, message.params.clone(**changes)))
    assert accepted.request.client == b"first"
    assert len(tokens_of(drain(core))) == 8


@pytest.mark.parametrize("what", ["prompt", "output"])
def test_tokens_that_cannot_fit_are_refused_by_their_number(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading four million of them would hold up everybody else for 0.2 s."""
    monkeypatch.setattr("vllm_lite.engine.intake.unpack_tokens", lambda _data: pytest.fail("the tokens were read"))
    core, many = make_core(), bytes(1 << 24)
    message = Generate("r", many, SamplingParams())
    if what == "output":
        message = Generate("r", pack_tokens([1]), SamplingParams(), have=1 << 22, output=many)
    with pytest.raises(RequestError, match=r"4194304.* (39|40) "):
        core.add(b"client", message)


def test_an_unknown_request_continues_after_the_clients_tokens() -> None:
    core = make_core()
    whole = continuation([1, 2, 3], 8)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    core.add(b"c", Generate("r", pack_tokens([1, 2, 3]), params, have=5, output=pack_tokens(whole[:5])))
    produced = drain(core)
    assert [item.start for item in produced] == [5, 6, 7]
    assert tokens_of(produced) == whole[5:]


def test_a_resubmitted_request_that_had_ended_ends_at_once() -> None:
    core = make_core()
    have = pack_tokens(continuation([1, 2, 3], 4))
    accepted = core.add(
        b"c", Generate("r", pack_tokens([1, 2, 3]), SamplingParams(max_tokens=4, ignore_eos=True), have=4, output=have)
    )
    assert [item.reason for item in accepted.done] == ["length"]
    assert not core.scheduler.requests


@pytest.mark.parametrize("recorded", [False, True])
def test_a_failing_policy_is_logged_once(recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(core_module.logger, "error", lambda text, *values: said.append(text % values))
    trace = str(tmp_path / "trace") if recorded else None
    core = make_core(scheduling_policy="tests.recorded:OddPolicy", record=trace)
    for number in range(60):
        generate(core, [1, 2, 3], name=f"r{number}", max_tokens=5, ignore_eos=True)
    core.close()
    why = "first come, first served: budget() raised RuntimeError('enough')"
    assert said == [f"scheduling policy 'tests.recorded:OddPolicy' failed, from here on it is {why}"]
    if trace is not None:
        faults = [record for record in TraceReader(trace) if isinstance(record, PolicyFault)]
        assert faults == [PolicyFault("budget() raised RuntimeError('enough')")]


# ---- the client port, over the in-process transport


class Wire:
    """A port and one client of it."""

    def __init__(self, name: str) -> None:
        self.address = f"inproc://{name}"
        self.port = ClientPort(self.address, epoch=5)
        self.connection = connect(self.address, b"peer")

    def say(self, message: object) -> list[object]:
        self.connection.send(client_to_engine.encode(message))
        return [received for _, received in self.port.receive(max_s=60.0)]

    def heard(self) -> list[ToClient]:
        messages = []
        while (payload := self.connection.recv()) is not None:
            messages.append(engine_to_client.decode(payload))
        return messages

    def welcome(self) -> None:
        self.port.open(Welcome(PROTOCOL_VERSION, 5, "model", 100, VOCAB, (EOS,), 11, 4))

    def greet(self) -> None:
        """Serve the client, which has read its Welcome."""
        self.welcome()
        self.say(Hello(PROTOCOL_VERSION))
        self.heard()

    def close(self) -> None:
        self.connection.close()
        self.port.close()


@pytest.fixture
def wire(request: pytest.FixtureRequest):
    made = Wire(request.node.name)
    yield made
    made.close()


def test_hello_is_answered_once_the_engine_serves(wire: Wire) -> None:
    wire.say(Hello(PROTOCOL_VERSION))
    assert wire.heard() == []
    wire.welcome()
    assert [type(message) for message in wire.heard()] == [Welcome]


def test_clients_that_came_and_went_are_not_remembered(wire: Wire) -> None:
    """The clients ask for the engine's state, say, and want nothing else. One of them stays."""
    wire.welcome()
    wire.say(Hello(PROTOCOL_VERSION))
    for number in range(1000):
        connection = connect(wire.address, f"visitor {number}".encode())
        connection.send(client_to_engine.encode(Hello(PROTOCOL_VERSION)))
        assert list(wire.port.receive()) == []
        connection.close()
    assert len(wire.port.clients) < 100
    assert wire.say(Ping()) == [Ping()]


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(PROTOCOL_VERSION + 1), f"speaks protocol version {PROTOCOL_VERSION}, the client {PROTOCOL_VERSION + 1}"),
        (Hello(PROTOCOL_VERSION, "other"), "serves 'model', not 'other'"),
    ],
)
def test_another_version_or_model_is_refused_by_name(wire: Wire, hello: Hello, reason: str) -> None:
    wire.welcome()
    wire.say(hello)
    (refused,) = wire.heard()
    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_nothing_is_taken_before_hello(wire: Wire) -> None:
    wire.welcome()
    assert wire.say(Abort("r")) == []
    assert wire.heard() == [Refused("say Hello first")]


def test_garbage_is_dropped_and_counted(wire: Wire) -> None:
    wire.welcome()
    wire.say(Hello(PROTOCOL_VERSION))
    wire.connection.send(b"\xc1garbage")
    assert wire.say(Abort("r")) == [Abort("r")]
    assert wire.port.malformed == 1


def test_a_failed_start_is_sent_to_all_clients(wire: Wire) -> None:
    assert not wire.port.refuse_all(Refused("no model", bad_input=True))
    wire.say(Hello(PROTOCOL_VERSION))
    assert wire.port.refuse_all(Refused("no model", bad_input=True))
    assert wire.heard() == [Refused("no model", True)]


def test_outputs_of_one_step_travel_in_one_message(wire: Wire) -> None:
    wire.greet()
    wire.port.push(b"peer", Tokens("a", 0, [1]))
    wire.port.push(b"peer", Tokens("b", 0, [2]))
    assert wire.port.flush(0.0) == []
    assert wire.heard() == [OutputBatch(5, [Tokens("a", 0, [1]), Tokens("b", 0, [2])])]


@pytest.mark.parametrize("num_sent", [0, 1, 2, 9])
def test_large_outputs_are_sent_in_several_messages(wire: Wire, monkeypatch: pytest.MonkeyPatch, num_sent: int) -> None:
    """Vectors of several requests, say. After `num_sent` messages the client does not read for a while."""
    wire.greet()
    ends = [Finished(name, 0, [], "stop", pooled=bytes(300)) for name in "abcde"]
    for end in ends:
        wire.port.push(b"peer", end)
    monkeypatch.setattr(engine_to_client, "max_bytes", 1000)
    deliver, left = wire.port.listener.send, num_sent

    def send(peer: bytes, payload: bytes) -> Delivery:
        nonlocal left
        left -= 1
        return deliver(peer, payload) if left >= 0 else Delivery.BUSY

    monkeypatch.setattr(wire.port.listener, "send", send)
    assert wire.port.flush(1.0) == []
    left = 9
    wire.port.push(b"peer", Tokens("f", 0, [1]))
    assert wire.port.flush(2.0) == []
    batches = [message.outputs for message in wire.heard() if isinstance(message, OutputBatch)]
    assert [output for batch in batches for output in batch] == [*ends, Tokens("f", 0, [1])]
    assert 1 < len(batches) < 6
    assert not wire.port.owes()


def test_tokens_that_come_fast_travel_together(wire: Wire) -> None:
    """All but a first one and an end, which do not wait for others."""
    wire.greet()

    def flush(now_s: float, output: Tokens | Finished | None = None) -> object:
        if output is not None:
            wire.port.push(b"peer", output)
        assert wire.port.flush(now_s) == []
        return wire.heard()

    assert flush(1.0, Tokens("a", 0, [1])) == [OutputBatch(5, [Tokens("a", 0, [1])])]
    assert not wire.port.gathers()
    assert flush(1.001, Tokens("a", 1, [2])) == []
    assert wire.port.gathers()
    assert flush(1.0 + GATHER_S - 1e-4, Tokens("a", 2, [3])) == []
    assert flush(1.0 + GATHER_S + 1e-4) == [OutputBatch(5, [Tokens("a", 1, [2, 3])])]
    assert flush(1.005, Tokens("a", 3, [4])) == []
    assert flush(1.005, Tokens("b", 0, [9])) == [OutputBatch(5, [Tokens("a", 3, [4]), Tokens("b", 0, [9])])]
    assert flush(1.005, Tokens("b", 1, [8])) == []
    assert flush(1.005, Finished("b", 2, [], "stop")) == [OutputBatch(5, [Finished("b", 1, [8], "stop")])]
    assert flush(1.005, Tokens("a", 4, [5])) == []
    wire.port.say_dying("the end", is_final=True)
    assert wire.heard() == [OutputBatch(5, [Tokens("a", 4, [5])]), Dying("the end")]


def test_a_slow_reader_gets_merged_tokens_and_in_the_end_none(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    wire.greet()
    deliver = wire.port.listener.send
    monkeypatch.setattr(wire.port.listener, "send", lambda *_: Delivery.BUSY)
    for index in range(3):
        wire.port.push(b"peer", Tokens("a", index, [index]))
        assert wire.port.flush(float(index)) == []
    wire.port.push(b"peer", Finished("a", 3, [3], "stop"))
    monkeypatch.setattr(wire.port.listener, "send", deliver)
    wire.port.flush(3.0)
    assert wire.heard() == [OutputBatch(5, [Finished("a", 0, [0, 1, 2, 3], "stop")])]
    monkeypatch.setattr(wire.port.listener, "send", lambda *_: Delivery.BUSY)
    wire.port.push(b"peer", Tokens("b", 0, [1]))
    assert wire.port.flush(10.0) == []
    assert wire.port.flush(11.0 + SLOW_READER_S) == [b"peer"]


def test_a_client_that_went_is_found_by_its_heartbeat(wire: Wire) -> None:
    wire.greet()
    assert wire.port.beat(10.0, 1, {b"peer"}) == []
    assert wire.heard() == [Heartbeat(5, 1)]
    assert wire.port.beat(10.1, 1, {b"peer"}) == []
    assert wire.heard() == []
    wire.connection.close()
    assert wire.port.beat(10.6, 1, {b"peer"}) == [b"peer"]


def test_resent_tokens_replace_pending_ones() -> None:
    outbox = Outbox()
    outbox.add(Tokens("a", 4, [4]))
    outbox.add(Tokens("a", 2, [2, 3, 4]))
    outbox.add(Tokens("a", 5, [5]))
    assert outbox.take() == [Tokens("a", 2, [2, 3, 4, 5])]


def test_an_id_used_again_does_not_swallow_the_end_that_is_still_owed() -> None:
    outbox = Outbox()
    outbox.add(Finished("a", 0, [1], "stop"))
    outbox.add(Tokens("a", 0, [2]))
    outbox.add(Tokens("a", 1, [3]))
    assert outbox.take() == [Finished("a", 0, [1], "stop"), Tokens("a", 0, [2, 3])]


@pytest.mark.parametrize(
    ("allowed", "drafted", "learned"),
    [((), None, [(2, 0)]), ((1,), [1, 0], [(3, 1)]), ((1,), None, []), ((1,), [0, 0], [])],
    ids=["none allowed", "one made", "none found", "none made"],
)
def test_a_step_that_found_no_drafts_is_like_no_other(
    allowed: tuple[int, ...], drafted: list[int] | None, learned: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a step took time for a search for drafts, so it must not count as a step without drafts, unless it took less
    time than one is expected to."""
    core, seen = make_core(speculative_config={"method": "suffix"}), list[tuple[int, int]]()
    monkeypatch.setattr(core._step_cost, "measure", lambda rows, drafts, _: seen.append((rows, drafts)))
    step: Any = SimpleNamespace(drafted=allowed, sampling=[0, 1], message=SimpleNamespace(num_steps=1))
    core.scheduler.rates = Rates(step_s=0.010, row_s=0.001)
    core._prefill_rate.took_s = 0.013
    core._learn_cost(step, SimpleNamespace(drafted=drafted))  # type: ignore[arg-type]
    assert seen == learned
    core._prefill_rate.took_s = 0.011
    core._learn_cost(step, SimpleNamespace(drafted=drafted))  # type: ignore[arg-type]
    assert seen[len(learned) :] == (learned or [(2, 0)])
