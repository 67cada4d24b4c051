"""The wire: round trips by declared type, limits, and garbage."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from enum import Enum
from typing import Any

import msgspec
import msgspec.inspect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.errors import ProtocolError
from vllm_lite.protocol import api, codec, control, operations, step
from vllm_lite.protocol.codec import Codec, pack_tokens, unpack_tokens
from vllm_lite.protocol.external import AbortExternal, ExternalAborted, ExternalFound, FindExternal
from vllm_lite.protocol.params import MAX_SEED, LogitRules, Sampling, SamplingParams
from vllm_lite.protocol.stats import Histogram, RequestHistograms, Stats

SAMPLING = Sampling(0.5, 3, 0.9, 0.1, 2**64 - 1, 0, 5)
RULES = LogitRules(1.5, -0.5, 1.25, ((5, 2.5), (6, -100.0)), pack_tokens([5, 6, 7]), ((5,), (6, 7)))
RULED = Sampling(0.5, 3, 0.9, 0.1, 1, min_tokens_until=9, stop_ids=(2,), rules=RULES, prompt_logprobs=3)
LOGPROBS = api.TokenLogprobs(-0.5, 1, ((3, -0.5), (4, -1.0)))
SCORES = api.PromptLogprobs(1, [LOGPROBS, LOGPROBS])
PARAMS = SamplingParams(
    temperature=0.7,
    seed=2**64 - 1,
    stop=["a", "b"],
    logprobs=2,
    prompt_logprobs=0,
    presence_penalty=0.5,
    frequency_penalty=-1,
    repetition_penalty=1.5,
    logit_bias={5: 1.5, 6: -100},
    allowed_token_ids=[5, 6, 7],
    bad_words_token_ids=[[5, 6], [7]],
)

MEASURED = RequestHistograms(*[Histogram((1.0, 2.5), [1, 0, 2], 9.5)] * 17)
STATE = api.RequestState(
    "r",
    api.AdmissionState("LATER", "waits_for_blocks", 1, 2, 3, 4),
    [api.SampleState(0, "waiting", 5, 0, 0, 0, 0)],
    *(0, 7, 8, 9, -1),
    0.5,
    None,
)

MESSAGES: list[tuple[Codec, msgspec.Struct]] = [  # type: ignore[type-arg]
    (codec.client_to_engine, api.Hello(1, "m")),
    (codec.client_to_engine, api.Generate("r", pack_tokens([1, 2]), PARAMS, 1, pack_tokens([3]))),
    (codec.client_to_engine, api.Abort("r")),
    (codec.client_to_engine, api.Abort("r", stopped=True)),
    (codec.client_to_engine, api.Ping()),
    (codec.client_to_engine, api.GetStats()),
    (codec.client_to_engine, api.Describe(("a", "b"))),
    (codec.client_to_engine, api.Generate("r", b"", PARAMS, external_id="cmpl-r", context=b"any")),
    (codec.client_to_engine, api.ForkRequest("r", "s", 1, PARAMS, "cmpl-s", b"any")),
    (codec.client_to_engine, api.Describe(external_id="cmpl-r", with_content=True)),
    (codec.client_to_engine, FindExternal(("cmpl-r", "gen-r"))),
    (codec.client_to_engine, AbortExternal("cmpl-r")),
    (codec.client_to_engine, api.ResetPrefixCache()),
    (codec.client_to_engine, operations.PauseGeneration("wait", clear_cache=False)),
    (codec.client_to_engine, operations.ResumeGeneration()),
    (codec.client_to_engine, operations.Sleep(2, "keep")),
    (codec.client_to_engine, operations.WakeUp(("weights", "scheduling"))),
    (codec.client_to_engine, operations.UpdateWeights("/folder")),
    (codec.engine_to_client, operations.OperationDone("no", bad_input=True)),
    (codec.engine_to_client, ExternalFound(["cmpl-r"])),
    (codec.engine_to_client, ExternalAborted(2)),
    (
        codec.engine_to_client,
        api.Descriptions(
            [msgspec.structs.replace(STATE, content=api.RequestContent(PARAMS, b"1234", b"5678", [LOGPROBS]))],
            [api.EndedRequest(b"any", 1, 2, 3)],
        ),
    ),
    (codec.engine_to_client, api.PrefixCacheReset(1, 2, 3)),
    (codec.engine_to_client, api.Descriptions([STATE])),
    (codec.engine_to_client, api.Refused("no")),
    (codec.engine_to_client, api.Dying("why")),
    (codec.engine_to_client, api.Heartbeat(1, 2)),
    (
        codec.engine_to_client,
        Stats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ended_by={"stop": 3, "error": 1}, requests=MEASURED),
    ),
    (
        codec.engine_to_client,
        api.OutputBatch(
            1,
            [
                api.Tokens("r", 0, [], prompt=SCORES),
                api.Tokens("r", 0, [5], [LOGPROBS]),
                api.Finished("r", 1, [6], "stop", stop_token=6, prompt=SCORES),
            ],
        ),
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
                step.NewRequest(7, pack_tokens([1]), 1, RULED, 0, 0, 1, [[5]]),
                step.Continue(1, 1, []),
                step.Resume(2, 0, 0, 4, [[6, 7]]),
                step.Fork(1, 5, SAMPLING, 9, 8, 9),
                step.Draft(6, 4, [[9]]),
                step.ReplaceBlock(6, 0, 2, 11),
                step.SetToken(6, 12),
            ],
        ),
    ),
    (codec.engine_to_worker, step.Steps([step.SchedulerOutput(1, 2, [], [step.Continue(1, 1, [])])] * 2)),
    (codec.engine_to_worker, control.Start(1, 2, 0)),
    (codec.engine_to_worker, control.Load(1)),
    (codec.engine_to_worker, control.Load(1, "/folder")),
    (codec.engine_to_worker, control.Shutdown()),
    (codec.worker_to_engine, step.ModelOutput(7, 8, pack_tokens([1]), None, [LOGPROBS], [(3, "nan")])),
    (codec.worker_to_engine, step.ModelOutput(7, 8, b"", prompts=[(3, SCORES), (4, SCORES)], drafted=[0, 4])),
    (codec.worker_to_engine, step.StepOutputs([step.ModelOutput(7, 8, b""), step.ModelOutput(7, 9, pack_tokens([1]))])),
    (codec.worker_to_engine, control.WorkerHello(1, "m", 0, 1, 42)),
    (codec.worker_to_engine, control.Imported(0, 2)),
    (codec.worker_to_engine, control.Ready(0, 1, 9, 64, (control.KVGroupInfo("full", 2),), 128, 100, (2,))),
    (codec.worker_to_engine, control.WorkerHeartbeat(0, 1, 5, True)),
    (codec.worker_to_engine, control.Failed(0, 1, "ModelError", "bad", True, 3)),
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
        b"\x94\xa8generate\xa1r\xc4\x00\x81\xaaextra_args\x81\xa1x" + b"\x91" * 100_000 + b"\x90",  # where it counts
        msgspec.msgpack.encode(["generate", "r", b"", {"temperature": float("nan")}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"temperature": -1.0}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"top_k": 2**40}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"no_such_field": 1}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"stop": ["x"] * 1000}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"presence_penalty": 2.5}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"repetition_penalty": 0.0}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"logit_bias": {1: 101.0}}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"logit_bias": dict.fromkeys(range(5000), 0.0)}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"allowed_token_ids": []}]),
        msgspec.msgpack.encode(["generate", "r", b"", {"bad_words_token_ids": [[]]}]),
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


@pytest.mark.parametrize(
    ("external_id", "num_context", "is_refused"),
    [("x" * 256, api.MAX_CONTEXT_BYTES, False), ("x" * 257, 0, True), ("", api.MAX_CONTEXT_BYTES + 1, True)],
)
def test_external_ids_and_contexts_are_limited(external_id: str, num_context: int, is_refused: bool) -> None:
    named = external_id, bytes(num_context)
    for message in (api.Generate("r", b"", PARAMS, 0, b"", *named), api.ForkRequest("r", "s", 0, PARAMS, *named)):
        payload = codec.client_to_engine.encode(message)
        with pytest.raises(ProtocolError, match="length <=") if is_refused else nullcontext():
            assert codec.client_to_engine.decode(payload) == message


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
        ({"seed": -2}, "seed must be between 0"),
        ({"stop": [""]}, "stop strings must not be empty"),
        ({"stop": [1]}, "stop must be a list of strings"),
        ({"stop": ["x" * 1025]}, "stop takes texts of at most 1024 characters, got one of 1025"),
        ({"bad_words": ["x", "y" * 1025]}, "bad_words takes texts of at most 1024 characters, got one of 1025"),
        ({"stop": "x", "detokenize": False}, "need detokenize=True"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids"),
        ({"n": 0}, "n must be between 1 and 64"),
        ({"n": 3, "best_of": 2}, "best_of must be at least n"),
        ({"logprobs": 1000}, "logprobs must be between 0 and 64"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be between 0 and 64, got -1"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2.0 and 2.0, got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be between -2.0 and 2.0, got nan"),
        ({"frequency_penalty": None}, "frequency_penalty must be a number, got None"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 100.0, got 0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be between 0.01 and 100.0, got -1"),
        (
            {"logprob_token_ids": [5, 6], "logprobs": 3},
            r"logprobs must be the number of logprob_token_ids \(2\), got 3",
        ),
        ({"logprob_token_ids": [5], "use_beam_search": True}, "logprob_token_ids have no meaning with use_beam_search"),
        ({"logprob_token_ids": range(65)}, "logprob_token_ids must be a list of token ids"),
        ({"logit_bias": [1]}, "logit_bias must be a dict of token ids and numbers"),
        ({"logit_bias": {"one": 1}}, "logit_bias must have token ids as keys, got 'one'"),
        ({"logit_bias": dict.fromkeys("abcdefg", 1)}, "as keys, got 'a', 'b', 'c', 'd', 'e' and 2 others"),
        ({"logit_bias": {True: 1}}, "logit_bias must have token ids as keys, got True"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 must be between -100.0 and 100.0, got 101"),
        ({"logit_bias": {5: "much"}}, "logit_bias of token 5 must be a number, got 'much'"),
        ({"logit_bias": dict.fromkeys(range(5000), 1)}, "logit_bias takes at most 4096 entries, got 5000"),
        ({"allowed_token_ids": []}, "allowed_token_ids must name at least one token"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of token ids, got 5"),
        ({"bad_words": "word"}, "bad_words must be a list of strings, got 'word'"),
        ({"bad_words": ["word", " "]}, "bad_words must not be empty or blank"),
        ({"bad_words_token_ids": [1, 2]}, "bad_words_token_ids must be a list of token ids, got 1"),
        ({"bad_words_token_ids": [[1], []]}, "bad_words_token_ids must not hold empty lists"),
        ({"bad_words_token_ids": [[1]] * 1000}, "bad_words_token_ids takes at most 512 entries, got 1000"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be between -1 and"),
        ({"use_beam_search": True, "presence_penalty": 1}, "use_beam_search follows the model's own logprobs"),
        ({"use_beam_search": True, "logit_bias": {1: 1}}, "use_beam_search follows the model's own logprobs"),
        ({"use_beam_search": True, "allowed_token_ids": [1 << 80]}, "use_beam_search follows the model's own logprobs"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "use_beam_search follows the model's own logprobs"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False, got 'yes'"),
        ({"use_beam_search": 1}, "use_beam_search must be True or False, got 1"),
        ({"user": 5}, "user must be a text of at most 256 characters, got 5"),
        ({"cache_salt": "s" * 257}, "cache_salt must be a text of at most 256 characters, got 'sss"),
        ({"cache_salt": "\ud800"}, "cache_salt must be valid Unicode, got .*: surrogates not allowed"),
        ({"stop": ["a", "\ud800"]}, "stop must be valid Unicode"),
        ({"bad_words": ["\ud800"]}, "bad_words must be valid Unicode"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "exactly one of .* got regex and choice"),
        ({"structured_outputs": {"choices": ["a"]}}, "unknown field `choices`"),
        ({"structured_outputs": "a"}, "structured_outputs must be a StructuredOutputsParams, got 'a'"),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind, got 1"),
        ({"extra_args": [1]}, r"extra_args must be a dict with names as keys, got \[1\]"),
        ({"extra_args": {1: 2}}, "extra_args must be a dict with names as keys, got {1: 2}"),
        ({"extra_args": dict.fromkeys(map(str, range(65)))}, "extra_args takes at most 64 entries, got 65"),
        (
            {"allowed_token_ids": [0.5] * 1000},
            r"allowed_token_ids must be a list of token ids, got \[0.5.{0,200}\.\.\.$",
        ),
    ],
)
def test_bad_sampling_params_name_the_field_and_the_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**settings)  # type: ignore[arg-type]


class Text(str):
    """As a text of NumPy is."""

    __slots__ = ()


class Side(str, Enum):  # noqa: UP042 (str() of a StrEnum is its value)
    """A text with its name as str()."""

    RIGHT = "right"


class Number(float):
    """As a number of NumPy is."""


class Count(int):
    """As a member of an enumeration is."""


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": Number(0.5)},
        {"temperature": Number(1.0)},  # equal to the default
        {"logit_bias": {5: Number(2.0)}},
        {"max_tokens": Count(3)},
        {"cache_salt": Text("s")},
        {"truncation_side": Text("right")},
        {"truncation_side": Side.RIGHT},
        {"cache_salt": Side.RIGHT},
    ],
)
def test_subclasses_of_plain_types_become_these(settings: dict[str, Any]) -> None:
    """The wire takes no others: `for temperature in numpy.arange(0, 1, 0.1)`."""
    params = SamplingParams(**settings)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert all(getattr(params, name) == value for name, value in settings.items())


def outside() -> Iterator[tuple[str, float]]:
    """Values just outside the ranges of numbers, as msgspec reads the annotations."""
    struct = msgspec.inspect.type_info(SamplingParams)
    assert isinstance(struct, msgspec.inspect.StructType)
    for field in struct.fields:
        for kind in field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,):
            if isinstance(kind, (msgspec.inspect.IntType, msgspec.inspect.FloatType)):
                near = 1 if isinstance(kind, msgspec.inspect.IntType) else 0.001
                yield field.name, kind.gt if kind.ge is None else kind.ge - near  # type: ignore[misc]
                yield field.name, MAX_SEED + 1 if kind.le is None else kind.le + near


@pytest.mark.parametrize(("name", "value"), [pair for pair in outside() if pair != ("seed", -1)])
def test_the_annotations_are_the_ranges(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}$"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_none_and_minus_one_are_defaults_where_vllm_has_them() -> None:
    none: Any = None
    given = SamplingParams(stop=none, stop_token_ids=none, bad_words=none, bad_words_token_ids=none, seed=-1)
    assert given == SamplingParams()
    assert SamplingParams.from_optional(temperature=None, top_p=0.5, stop=None) == SamplingParams(top_p=0.5)


def test_a_clone_may_differ_and_is_checked() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert params.clone() == params
    assert params.clone(max_tokens=3) == SamplingParams(temperature=0.5, stop=["a"], max_tokens=3)
    assert params.max_tokens == 16
    with pytest.raises(ValueError, match="max_tokens must be between"):
        params.clone(max_tokens=0)


def test_a_bias_may_be_spelled_as_in_json_and_is_copied() -> None:
    given = {"5": 1, 6: -2.5}
    params = SamplingParams(logit_bias=given)  # type: ignore[arg-type]
    given["7"] = 3
    assert params.logit_bias == {5: 1.0, 6: -2.5}
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


def test_params_that_change_logits() -> None:
    neutral = SamplingParams(temperature=0.3, top_k=5, min_p=0.1, min_tokens=3, logprobs=2, prompt_logprobs=2)
    assert not neutral.changes_logits
    changing: list[dict[str, object]] = [
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 0.5},
        {"logit_bias": {1: 1}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"bad_words_token_ids": [[1]]},
    ]
    for fields in changing:
        assert SamplingParams(**fields).changes_logits  # type: ignore[arg-type]


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_params_that_are_sent_to_workers() -> None:
    params = SamplingParams(temperature=1e-6, top_k=-1, top_p=0.5, seed=7, min_tokens=3, logprobs=2, prompt_logprobs=1)
    sampling = params.for_worker(4, 10, {9, 8}, None, unscored=True)
    assert sampling == Sampling(0.0, 0, 0.5, 0.0, 7, 4, 2, 13, (8, 9), None, 1)
    assert params.for_worker(0, 10, (), None, unscored=False) == Sampling(0.0, 0, 0.5, 0.0, 7, 0, 2)
    beam = SamplingParams(use_beam_search=True, n=2).for_worker(1, 10, {9}, 4, unscored=False)
    assert beam == Sampling(0.0, 0, 1.0, 0.0, 0, 1, logprobs=4)
    ruled = SamplingParams(presence_penalty=1, logit_bias={5: 2}, allowed_token_ids=[6, 5], bad_words_token_ids=[[7]])
    rules = LogitRules(1, 0.0, 1.0, ((5, 2.0),), pack_tokens([6, 5]), ((7,),))
    assert ruled.for_worker(0, 10, {9}, None, unscored=False).rules == ruled.logit_rules() == rules
    assert (rules.penalises, LogitRules(bad_words=((7,),)).penalises) == (True, False)
