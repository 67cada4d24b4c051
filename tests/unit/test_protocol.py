"""The wire: round trips by declared type, limits, and garbage."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.errors import ProtocolError
from vllm_lite.protocol import api, codec, control, step
from vllm_lite.protocol.codec import Codec, pack_tokens, unpack_tokens
from vllm_lite.protocol.params import SamplingParams

SAMPLING = step.Sampling(0.5, 3, 0.9, 0.1, 2**64 - 1, 0, 5)
LOGPROBS = api.TokenLogprobs(-0.5, 1, ((3, -0.5), (4, -1.0)))
PARAMS = SamplingParams(temperature=0.7, seed=2**64 - 1, stop=["a", "b"], logprobs=2)

MESSAGES: list[tuple[Codec, msgspec.Struct]] = [  # type: ignore[type-arg]
    (codec.client_to_engine, api.Hello(1, "m")),
    (codec.client_to_engine, api.Generate("r", pack_tokens([1, 2]), PARAMS, 1, pack_tokens([3]))),
    (codec.client_to_engine, api.Abort("r")),
    (codec.client_to_engine, api.Ping()),
    (codec.client_to_engine, api.GetStats()),
    (codec.engine_to_client, api.Refused("no")),
    (codec.engine_to_client, api.Dying("why")),
    (codec.engine_to_client, api.Heartbeat(1, 2)),
    (
        codec.engine_to_client,
        api.OutputBatch(1, [api.Tokens("r", 0, [5], [LOGPROBS]), api.Finished("r", 1, [6], "stop", stop_token=6)]),
    ),
    (
        codec.engine_to_worker,
        step.SchedulerOutput(
            7,
            8,
            [(step.BlockOp.COPY, 1, 2)],
            [
                step.Finish(3),
                step.Preempt(4),
                step.NewRequest(0, pack_tokens([1]), 1, SAMPLING, 0, 0, 1, [[5]]),
                step.Continue(1, 1, []),
                step.Resume(2, 0, 0, 4, [[6, 7]]),
                step.Fork(1, 5, SAMPLING, 9, 8, 9),
                step.Draft(6, 4, [[9]]),
                step.ReplaceBlock(6, 0, 2, 11),
                step.SetToken(6, 12),
            ],
        ),
    ),
    (codec.engine_to_worker, step.Turn([step.SchedulerOutput(1, 2, [], [step.Continue(1, 1, [])])] * 2)),
    (codec.engine_to_worker, control.Start(1, 2, 0)),
    (codec.engine_to_worker, control.Shutdown()),
    (codec.worker_to_engine, step.ModelOutput(7, 8, pack_tokens([1]), None, [LOGPROBS], [(3, "nan")])),
    (codec.worker_to_engine, step.TurnOutput([step.ModelOutput(7, 8, b""), step.ModelOutput(7, 9, pack_tokens([1]))])),
    (codec.worker_to_engine, control.WorkerHello(1, "m", 0, 42)),
    (codec.worker_to_engine, control.Ready(0, 9, 64, (control.KVGroupInfo("full", 2),), 128, 100, (2,))),
    (codec.worker_to_engine, control.WorkerHeartbeat(0, 5)),
    (codec.worker_to_engine, control.Failed(0, "ModelError", "bad", True)),
]


@pytest.mark.parametrize(("wire", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_round_trip(wire: Codec, message: msgspec.Struct) -> None:  # type: ignore[type-arg]
    assert wire.decode(wire.encode(message)) == message


def test_a_message_of_another_direction_is_refused() -> None:
    with pytest.raises(ProtocolError, match="client to engine"):
        codec.client_to_engine.decode(codec.engine_to_worker.encode(control.Shutdown()))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,  # nesting
        msgspec.msgpack.encode(["generate", "r", b"", {"temperature": float("nan")}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"temperature": -1.0}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"top_k": 2**40}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"no_such_field": 1}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"stop": ["x"] * 1000}]),
        msgspec.msgpack.encode(["generate", "", b"", {}]),
        msgspec.msgpack.encode(["generate", "r" * 1000, b"", {}]),
        msgspec.msgpack.encode(["abort", "r", "one field too many"]),
        msgspec.msgpack.encode(["no such tag"]),
        b"\x92\xa5abort\xa2\xff\xff",  # not UTF-8
    ],
)
def test_malformed_payloads_are_protocol_errors(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.client_to_engine.decode(payload)


def test_ten_thousand_mutations_raise_nothing_but_protocol_errors() -> None:
    rng = random.Random(1)
    for _ in range(10_000):
        wire, message = rng.choice(MESSAGES)
        payload = bytearray(wire.encode(message))
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            wire.decode(bytes(payload[: rng.randint(0, len(payload))]))
        except ProtocolError:
            pass


def test_too_long_a_message_is_refused_unread() -> None:
    small: Codec[api.Abort] = Codec(api.Abort, "test", max_bytes=10)
    with pytest.raises(ProtocolError, match="at most 10"):
        small.decode(small.encode(api.Abort("a long request id")))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_u32(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_tokens(packed) == token_ids


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ProtocolError, match="multiple of 4"):
        unpack_tokens(b"12345")


def test_decode_step_stays_small() -> None:
    plan = step.SchedulerOutput(2**52, 10**6, [], [step.Continue(index, 1, []) for index in range(256)])
    assert len(codec.engine_to_worker.encode(plan)) < 4096


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature must be between 0.0 and 100.0, got -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": 0}, "top_p must be greater than 0"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be between 1"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"min_tokens": 20}, r"min_tokens must be at most max_tokens \(16\), got 20"),
        ({"seed": -1}, "seed must be between 0"),
        ({"stop": [""]}, "stop strings must not be empty"),
        ({"stop": [1]}, "stop must be a list of strings"),
        ({"stop": "x", "detokenize": False}, "need detokenize=True"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids"),
        ({"n": 0}, "n must be between 1 and 64"),
        ({"n": 3, "best_of": 2}, "best_of must be at least n"),
        ({"logprobs": 1000}, "logprobs must be between 0 and 64"),
    ],
)
def test_bad_sampling_params_name_the_field_and_the_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
