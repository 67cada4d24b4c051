"""Requests found by their external id, by any client, and how much is kept of them."""

from typing import Any

import pytest

from tests.unit.test_core import drain, make_core
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.scheduling import external
from vllm_lite.protocol.api import Descriptions, EndedRequest, ForkRequest, Generate, TokenLogprobs
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams


def named(core: EngineCore, client: bytes, name: str, context: bytes, **params: Any) -> None:
    message = Generate(name, pack_tokens([1, 2, 3]), SamplingParams(**params), external_id="cmpl-x", context=context)
    core.add(client, message)


def test_requests_are_found_by_their_external_id() -> None:
    """Requests of any client are found until the last of them ends, with the data that a client needs to fork them."""
    core = make_core()

    def look(external_id: str) -> Descriptions:
        return core.describe(external_id=external_id, with_content=True)

    named(core, b"a", "r-0", b"first", max_tokens=9, ignore_eos=True)
    named(core, b"b", "r-1", b"second", max_tokens=2, ignore_eos=True, priority=4)
    core.add(b"a", Generate("other", pack_tokens([1]), SamplingParams(max_tokens=20)))
    assert look("cmpl-y") == look("") == Descriptions([])
    while core.begin():
        core.finish(core.executor.poll())  # type: ignore[arg-type]
        if "r-1" not in core.scheduler.requests:
            break
    found = look("cmpl-x")
    (first,) = found.requests
    assert found.ended == [EndedRequest(b"second", 3, 2, 4)]
    assert (first.request_id, first.context, first.num_ended_output) == ("r-0", b"first", 0)
    assert first.content is not None
    assert first.content.prompt == pack_tokens([1, 2, 3])
    assert len(first.content.output) == 4 * first.samples[0].num_output > 0
    assert first.content.params.max_tokens == 9
    assert core.describe(external_id="cmpl-x").requests[0].content is None
    drain(core)
    assert look("cmpl-x") == Descriptions([])
    assert (core.scheduler.queues.external._live, core.scheduler.queues.external._ended) == ({}, {})


def test_a_fork_has_its_own_external_id() -> None:
    core = make_core()

    def look(external_id: str) -> Descriptions:
        return core.describe(external_id=external_id, with_content=True)

    named(core, b"a", "r", b"", max_tokens=9, ignore_eos=True)
    core.begin()
    core.finish(core.executor.poll())  # type: ignore[arg-type]
    core.scheduler.queues.external.keep_logprobs(core.scheduler.requests["r"], [TokenLogprobs(-1.0, 1, ())])
    core.fork(b"b", ForkRequest("r", "s", 1, SamplingParams(max_tokens=9), "cmpl-s", b"of s"))
    (found,) = look("cmpl-s").requests
    assert (found.request_id, found.context, found.samples[0].num_output) == ("s", b"of s", 1)
    assert found.content is not None
    assert found.content.logprobs == [TokenLogprobs(-1.0, 1, ())]
    core.abort("r")
    assert look("cmpl-x").requests == []
    assert look("cmpl-s").requests != []
    core.abort("s")
    assert core.scheduler.queues.external._live == {}
    assert core.scheduler.queues.external.num_logprobs == 0


def test_logprobs_that_are_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logprobs of the request that would exceed the limit are forgotten, its earlier ones too: those kept are
    always its last."""
    monkeypatch.setattr(external, "MAX_LOGPROBS", 10)
    core = make_core()
    kept = core.scheduler.queues.external
    named(core, b"a", "r", b"", max_tokens=9)
    named(core, b"a", "s", b"", max_tokens=9, seed=1)
    named(core, b"a", "two", b"", max_tokens=9, n=2)
    core.add(b"a", Generate("nameless", pack_tokens([1]), SamplingParams(max_tokens=9)))
    requests = dict(core.scheduler.requests)
    entry = TokenLogprobs(-1.0, 1, ((1, -1.0), (2, -2.0)))
    for name, count in (("r", 2), ("s", 1), ("s", 1), ("two", 1), ("nameless", 1), ("r", 1)):
        kept.keep_logprobs(requests[name], [entry] * count)
    assert [len(each.logprobs) for each in requests.values()] == [3, 0, 0, 0]
    assert kept.num_logprobs == 9
    core.abort("r")
    kept.keep_logprobs(requests["r"], [entry])  # its last tokens, sent when it has ended
    assert (kept.num_logprobs, requests["r"].logprobs) == (0, [])


@pytest.mark.parametrize(("limit", "value"), [("MAX_ENDED", 2), ("MAX_ENDED_BYTES", 10)])
def test_the_number_of_remembered_ended_requests_is_limited(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(external, limit, value)
    core = make_core()
    named(core, b"a", "stays", b"12345", max_tokens=9)
    for index in range(5):
        named(core, b"a", f"r-{index}", b"12345", max_tokens=9)
        core.abort(f"r-{index}")
    found = core.describe(external_id="cmpl-x")
    assert (len(found.requests), len(found.ended)) == (1, 2)
    core.abort("stays")
    kept = core.scheduler.queues.external
    assert (kept._ended, kept._num_ended, kept._num_ended_bytes) == ({}, 0, 0)


def test_only_a_single_request_is_described_with_its_content() -> None:
    """The prompts of many requests would exceed the size of a message."""
    core = make_core()
    for name in ("r", "s"):
        named(core, b"a", name, b"", max_tokens=9)
    states = core.describe(external_id="cmpl-x", with_content=True).requests
    assert [state.content for state in states] == [None, None]
