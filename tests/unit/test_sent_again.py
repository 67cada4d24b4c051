"""Requests that a client sends again, to an engine that has the request and to one that never had it: the same tokens,
once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import Recorded
from tests.unit.test_core import continuation, make_core
from tests.unit.test_engine_clients import PARAMS, PROMPT, Client, Engine
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Finished, Generate, SampleSoFar
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.story import story

WHOLE = [continuation([1, 2, 3], 20, sample) for sample in range(5)]
"""Tokens that the simulated model generates after PROMPT, for each sample."""
SEVERAL = PARAMS.clone(n=3, seed=4)
BEAMS = SamplingParams(n=3, use_beam_search=True, max_tokens=6, temperature=0.0, seed=1)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def so_far(client: Client, *, without: int = 0) -> tuple[SampleSoFar, ...]:
    """The samples of "r" that have not ended, as `client` has them, less their last tokens."""
    ended = {end.index for end in client.ends}
    return tuple(
        SampleSoFar(index, pack_tokens(tokens[: max(0, len(tokens) - without)]))
        for (name, index), tokens in sorted(client.got.items())
        if name == "r" and index not in ended
    )


def told_once(client: Client, num_samples: int) -> None:
    assert sorted((end.index, end.reason) for end in client.ends) == [(i, "length") for i in range(num_samples)]


# ---- to the engine that has it


@pytest.mark.parametrize("without", [0, 1, 9])
def test_samples_continue_behind_the_tokens_of_each(engine: Engine, without: int) -> None:
    first, again = engine.client(b"first"), engine.client(b"again")
    first.say(Generate("r", PROMPT, SEVERAL))
    engine.loop(7)
    samples = so_far(first, without=without)
    assert [sample.index for sample in samples] == [0, 1, 2]
    for sample in samples:  # its own earlier tokens
        again.got["r", sample.index] = WHOLE[sample.index][: len(sample.output) // 4]
    again.say(Generate("r", PROMPT, SEVERAL, samples=samples))
    engine.drain()
    assert [(end.reason, end.error) for end in first.ends] == [
        ("error", "another client took over request 'r' by sending it again")
    ]
    told_once(again, 3)
    assert again.got == {("r", index): WHOLE[index] for index in range(3)}


def test_a_resent_request_does_not_count_as_ended(engine: Engine) -> None:
    first, again = engine.client(b"first"), engine.client(b"again")
    for name in ("r", "other"):
        first.say(Generate(name, PROMPT, SEVERAL, external_id="call", context=name.encode()))
    engine.loop(5)
    again.got = {("r", index): list(first.got["r", index]) for index in range(3)}
    again.say(Generate("r", PROMPT, SEVERAL, samples=so_far(first), external_id="call", context=b"r"))
    engine.loop()
    assert again.ends == []
    assert [end.request_id for end in first.ends] == ["r"]
    assert sum(engine.core.stats().ended_by.values()) == 0
    assert engine.core.describe((), "call").ended == []
    assert len(engine.core.describe((), "call").requests) == 2
    engine.drain()
    assert engine.core.stats().ended_by == {"stop": 0, "length": 2, "abort": 0, "error": 0}


def test_ended_requests_of_the_same_external_id_stay_listed(engine: Engine) -> None:
    first, again = engine.client(b"first"), engine.client(b"again")
    first.say(Generate("short", PROMPT, PARAMS.clone(max_tokens=2), external_id="call", context=b"short"))
    first.say(Generate("r", PROMPT, SEVERAL, external_id="call", context=b"r"))
    engine.loop(5)
    (ended,) = engine.core.describe((), "call").ended
    again.got = {("r", index): list(first.got["r", index]) for index in range(3)}
    again.say(Generate("r", PROMPT, SEVERAL, samples=so_far(first), external_id="call", context=b"r"))
    engine.loop()
    assert engine.core.describe((), "call").ended == [ended]
    engine.core.abort("r")
    assert engine.core.describe((), "call").ended == []


def test_a_request_that_lacked_only_its_ends_leaves_no_state(engine: Engine) -> None:
    first, again = engine.client(b"first"), engine.client(b"again")
    first.say(Generate("short", PROMPT, PARAMS.clone(max_tokens=2), external_id="call", context=b"short"))
    first.say(Generate("r", PROMPT, SEVERAL, external_id="call", context=b"r"))
    engine.loop(5)
    samples = tuple(SampleSoFar(index, pack_tokens(WHOLE[index])) for index in range(3))
    again.got = {("r", index): WHOLE[index] for index in range(3)}
    again.say(Generate("r", PROMPT, SEVERAL, samples=samples, external_id="call", context=b"r"))
    engine.drain()
    told_once(again, 3)
    assert engine.core.describe((), "call").ended == []


def test_the_kv_of_a_resent_request_is_found_in_the_cache() -> None:
    core = make_core(num_blocks=41)
    prompt = [1] * 16
    message = Generate("r", pack_tokens(prompt), SamplingParams(max_tokens=9, ignore_eos=True, logprobs=0))
    core.add(b"client", message)
    for _ in range(6):
        core.begin()
        core.finish(core.executor.poll())  # type: ignore[arg-type]
    have = continuation(prompt, 5)
    again = Generate("r", message.prompt, message.params, 5, pack_tokens(have))
    assert core.add(b"client", again).resend == []
    core.begin()
    assert core.scheduler.num_scheduled_tokens == 1


@pytest.mark.parametrize("params", [BEAMS, PARAMS.clone(logprobs=1), PARAMS.clone(prompt_logprobs=1)])
def test_requests_that_cannot_be_attached_to_begin_again(engine: Engine, params: SamplingParams) -> None:
    whole, first, again = (engine.client(name) for name in (b"whole", b"first", b"again"))
    whole.say(Generate("reference", PROMPT, params))
    engine.drain()
    first.say(Generate("r", PROMPT, params))
    engine.loop(4)
    have = [] if params.use_beam_search else first.got["r", 0][:2]
    again.got["r", 0] = list(have)
    again.say(Generate("r", PROMPT, params, len(have), pack_tokens(have)))
    engine.drain()
    assert {("reference", index): tokens for (_, index), tokens in again.got.items()} == whole.got
    assert len(again.ends) == len(whole.ends) == params.n
    if params.logprobs is not None:
        assert len(again.ends[0].logprobs or ()) == len(again.ends[0].token_ids)


def test_a_shorter_deadline_is_the_same_request(engine: Engine) -> None:
    first, again = engine.client(b"first"), engine.client(b"again")
    for name, params in (("r", PARAMS), ("several", SEVERAL)):
        first.say(Generate(name, PROMPT, params.clone(deadline_ms=10**6)))
        engine.loop(2)
        again.say(Generate(name, PROMPT, params.clone(deadline_ms=10**5)))
    engine.drain()
    assert {end.reason for end in again.ends} == {"length"}
    again.say(Generate("r", PROMPT, PARAMS.clone(deadline_ms=10**5)))
    engine.loop()
    again.say(Generate("r", PROMPT, PARAMS))
    engine.drain()
    assert again.ends[-1].reason == "length"


def test_a_refused_resend_leaves_the_live_request_alone(engine: Engine) -> None:
    first, again = engine.client(b"first"), engine.client(b"again")
    first.say(Generate("r", PROMPT, SEVERAL))
    engine.loop(3)
    again.say(Generate("r", PROMPT, SEVERAL, samples=(SampleSoFar(1, pack_tokens([1] * 5000)),)))
    again.say(Generate("r", PROMPT, SEVERAL, samples=(SampleSoFar(1, b"123"),)))
    again.say(Generate("r", PROMPT, SEVERAL.clone(n=2), samples=(SampleSoFar(1),)))
    engine.drain()
    assert [end.reason for end in again.ends] == ["error"] * 3
    told_once(first, 3)


# ---- to one that never had it


def test_samples_that_have_ended_stay_ended(engine: Engine) -> None:
    client = engine.client(b"client")
    client.got = {("r", 0): WHOLE[0][:4], ("r", 2): []}
    client.say(Generate("r", PROMPT, SEVERAL, samples=(SampleSoFar(0, pack_tokens(WHOLE[0][:4])), SampleSoFar(2))))
    engine.drain()
    assert client.got == {("r", 0): WHOLE[0], ("r", 2): WHOLE[2]}
    assert sorted(end.index for end in client.ends) == [0, 2]
    stats = engine.core.stats()
    assert (stats.generated_tokens, stats.ended_by["length"]) == (36, 1)
    assert stats.requests is not None
    assert stats.requests.output_tokens.sum == 36, "what it had before was generated elsewhere"


def test_a_sample_that_lacks_nothing_but_its_end_gets_that(engine: Engine) -> None:
    client = engine.client(b"client")
    client.got = {("r", 0): list(WHOLE[0]), ("r", 1): WHOLE[1][:18]}
    samples = tuple(SampleSoFar(index, pack_tokens(tokens)) for (_, index), tokens in client.got.items())
    client.say(Generate("r", PROMPT, SEVERAL, samples=samples))
    engine.loop()
    assert client.ends == [Finished("r", 20, [], "length", index=0)]
    engine.drain()
    assert client.got == {("r", 0): WHOLE[0], ("r", 1): WHOLE[1]}
    assert len(client.ends) == 2


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"samples": (SampleSoFar(0),), "params": PARAMS}, "samples are for a request that has several"),
        ({"samples": (SampleSoFar(0),), "params": BEAMS}, "samples are for a request that has several"),
        ({"samples": (SampleSoFar(3),)}, r"each below n=3; got \[3\]"),
        ({"samples": (SampleSoFar(1), SampleSoFar(1))}, r"in the order of their indices, .*; got \[1, 1\]"),
        ({"samples": (SampleSoFar(2), SampleSoFar(1))}, r"in the order of their indices, .*; got \[2, 1\]"),
        ({"samples": (SampleSoFar(0),), "have": 1, "output": bytes(4)}, "have and output must be empty if `samples`"),
        ({"samples": (SampleSoFar(0, bytes(3)),)}, "output of a sample must be u32 token ids, got 3 bytes"),
        ({"samples": (SampleSoFar(2, pack_tokens([50])),)}, "below 50, the output of sample 2 holds 50"),
        ({"samples": (SampleSoFar(0), SampleSoFar(1, bytes(4 << 20)))}, "1048576 of output that came with it are more"),
        ({"have": 1, "output": bytes(4)}, "says in `samples` what each has"),
    ],
)
def test_samples_that_no_request_can_have(fields: dict[str, Any], error: str) -> None:
    core = make_core()
    message: dict[str, Any] = {"request_id": "r", "prompt": PROMPT, "params": SEVERAL} | fields
    with pytest.raises(RequestError, match=error):
        core.add(b"client", Generate(**message))
    assert not core.scheduler.requests


def test_more_samples_than_run_at_once_take_turns() -> None:
    core = make_core(num_blocks=41, max_num_seqs=2)
    samples = tuple(SampleSoFar(index, pack_tokens(WHOLE[index][:index])) for index in range(5))
    core.add(b"client", Generate("r", PROMPT, PARAMS.clone(n=5), samples=samples))
    assert len(core.scheduler.waiting) == 5
    core.begin()
    assert len(core.scheduler.running) == 2
    core.scheduler.check_integrity()


def test_a_trace_with_resent_requests_replays(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.add("r", [1, 2, 3, 4, 5], 9, n=3, ignore_eos=True, seed=1)
    for _ in range(4):
        recorded.loop()
    params = recorded.scheduler.requests["r"].params
    samples = (SampleSoFar(0, pack_tokens(continuation([1, 2, 3, 4, 5], 2))), SampleSoFar(2))
    recorded.core.add(b"other", Generate("r", pack_tokens([1, 2, 3, 4, 5]), params, samples=samples))
    recorded.drain()
    recorded.core.close()
    replay = Replay(str(tmp_path / "trace")).run()
    assert replay.divergence is None, str(replay.divergence)
    assert replay.num_ended == 2
    told = "\n".join(story("r", TraceReader(str(tmp_path / "trace"))))
    assert "Its client lost the connection, and sent it again" in told
    assert "It goes on with 2 tokens of output" in told
    assert "aborted" not in told
    assert told.count("Arrived") == 1


def test_a_request_that_lacked_only_its_end_has_a_story(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace")
    recorded.add("r", [1, 2, 3, 4, 5], 9, n=3, ignore_eos=True, seed=1)
    for _ in range(4):
        recorded.loop()
    params = recorded.scheduler.requests["r"].params
    samples = tuple(SampleSoFar(index, pack_tokens(continuation([1, 2, 3, 4, 5], 9, index))) for index in range(3))
    recorded.core.add(b"other", Generate("r", pack_tokens([1, 2, 3, 4, 5]), params, samples=samples))
    recorded.add("r", [1], 2)
    recorded.drain()
    recorded.core.close()
    told = story("r", TraceReader(str(tmp_path / "trace")))
    assert sum("Arrived with" in line for line in told) == 2, "the id was used again"


# ---- several clients


def test_a_client_that_has_gone_for_good_does_not_affect_others(engine: Engine) -> None:
    """Two clients have lost their connections; one of them comes back."""
    gone, lost = engine.client(b"gone"), engine.client(b"lost")
    for client, names in ((gone, ("a", "b")), (lost, ("r", "s"))):
        client.say(*(Generate(name, PROMPT, SEVERAL) for name in names))
    engine.loop(4)
    back = engine.client(b"back")
    back.got = {place: list(tokens) for place, tokens in lost.got.items()}
    for client in (gone, lost):
        client.connection.close()
        engine.clients.remove(client)
    for name in ("r", "s"):
        have = (tokens for (its_name, _), tokens in sorted(lost.got.items()) if its_name == name)
        samples = tuple(SampleSoFar(index, pack_tokens(tokens)) for index, tokens in enumerate(have))
        back.say(Generate(name, PROMPT, SEVERAL, samples=samples))
    engine.drain()
    assert back.got == {(name, index): WHOLE[index] for name in ("r", "s") for index in range(3)}
    assert [end.reason for end in back.ends] == ["length"] * 6
    assert engine.core.stats().ended_by == {"stop": 0, "length": 2, "abort": 2, "error": 0}
