"""Outputs of AsyncClient: all so far, the new part, or the end only; and other fields of SamplingParams that stay
here."""

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.clients import collect, connected, expect, ids, settle
from tests.fakes import DEADLINE_S, FakeEngine, welcome
from vllm_lite.client.async_client import AsyncClient
from vllm_lite.client.outputs import Logprob, RequestOutput
from vllm_lite.client.streams.sample import Cursor, Sample
from vllm_lite.errors import ModelError
from vllm_lite.protocol.api import Finished, ForkRequest, Generate, PromptLogprobs, TokenLogprobs, Tokens
from vllm_lite.protocol.params import RequestOutputKind, SamplingParams


def shape(output: RequestOutput) -> list[tuple[int, str, list[int], str | None]]:
    return [(one.index, one.text, one.token_ids, one.finish_reason) for one in output.outputs]


def delta(**fields: Any) -> SamplingParams:
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **fields)


async def test_deltas_have_only_new_tokens(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = client.generate("x", delta(), "r")
        first = asyncio.ensure_future(anext(stream))
        await expect(engine, Generate)
        engine.tokens("r", 0, *ids("one"))
        assert shape(await first) == [(0, "one", ids("one"), None)]
        engine.tokens("r", 3, *ids(" two"))
        assert shape(await anext(stream)) == [(0, " two", ids(" two"), None)]
        engine.finish("r", 7, num_cached_tokens=1)
        last = await anext(stream)
        assert shape(last) == [(0, "", [], "length")]
        assert (last.finished, last.num_cached_tokens, last.outputs[0].finished()) == (True, 1, True)


async def test_a_delta_has_the_samples_with_something_new(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = client.generate("x", delta(n=3), "r")
        first = asyncio.ensure_future(anext(stream))
        await expect(engine, Generate)
        engine.send_outputs(Tokens("r", 0, ids("a")), Tokens("r", 0, ids("b"), index=2))
        assert shape(await first) == [(0, "a", ids("a"), None), (2, "b", ids("b"), None)]
        engine.finish("r", 0, *ids("c"), index=1)
        assert shape(await anext(stream)) == [(1, "c", ids("c"), "length")]
        engine.finish("r", 1, *ids("d"))
        assert shape(await anext(stream)) == [(0, "d", ids("d"), "length")]
        engine.finish("r", 1, index=2)
        last = await anext(stream)
        assert (shape(last), last.finished) == ([(2, "", [], "length")], True)


async def test_deltas_of_logprobs(folder: Path) -> None:
    def scored(*values: float) -> list[TokenLogprobs]:
        return [TokenLogprobs(value, 1, ()) for value in values]

    async with connected(folder) as (client, engine):
        stream = client.generate([5, 6], delta(logprobs=0, prompt_logprobs=0), "r")
        first = asyncio.ensure_future(anext(stream))
        await expect(engine, Generate)
        prompt = PromptLogprobs(1, scored(-3.0))
        engine.send_outputs(Tokens("r", 0, [7, 8], scored(-1.0, -2.0), prompt=prompt))
        output = await first
        assert [list(place) for place in output.outputs[0].logprobs or []] == [[7], [8]]
        assert output.prompt_logprobs is not None
        engine.finish("r", 2, 9, logprobs=scored(-0.5))
        output = await anext(stream)
        assert [list(place) for place in output.outputs[0].logprobs or []] == [[9]]
        assert output.outputs[0].cumulative_logprob == -3.5, "that of all tokens"
        assert output.prompt_logprobs is None, "these came before"


async def test_the_first_delta_of_a_fork_has_all_that_it_inherits(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        parent = client.generate("x", delta(), "r")
        first = asyncio.ensure_future(anext(parent))
        await expect(engine, Generate)
        engine.tokens("r", 0, *ids("one"))
        await first
        (fork,) = await client.fork("r")
        child = (await expect(engine, ForkRequest)).child_id
        engine.finish(child, 3, *ids(" two"))
        assert [shape(output) for output in await collect(fork)] == [[(0, "one two", ids("one two"), "length")]]
        engine.finish("r", 3, *ids("!"))
        assert [shape(output) for output in await collect(parent)] == [[(0, "!", ids("!"), "length")]]


@pytest.mark.parametrize(
    "fields",
    [{"output_kind": RequestOutputKind.FINAL_ONLY}, {"output_kind": RequestOutputKind.DELTA, "best_of": 2}],
)
async def test_there_is_one_output_at_the_end(folder: Path, fields: dict[str, Any]) -> None:
    async with connected(folder) as (client, engine):
        task = asyncio.ensure_future(collect(client.generate("x", SamplingParams(**fields), "r")))
        await expect(engine, Generate)
        engine.tokens("r", 0, *ids("one"))
        await settle(client, engine)
        for index in range(fields.get("best_of", 1)):
            engine.finish("r", 0 if index else 3, *ids("!"), index=index, cumulative_logprob=-float(index))
        (output,) = await task
        assert shape(output) == [(0, "one!", ids("one!"), "length")]
        assert output.finished


async def test_params_of_the_client_are_not_sent(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        params = delta(extra_args={"mine": 1}, seed=5)
        task = asyncio.ensure_future(collect(client.generate("x", params, "r")))
        assert (await expect(engine, Generate)).params == SamplingParams(seed=5)
        engine.finish("r", 0, 5)
        await task


async def test_times_are_in_order(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = client.generate("x", None, "r")
        first = asyncio.ensure_future(anext(stream))
        await expect(engine, Generate)
        engine.tokens("r", 0, 5)
        metrics = (await first).metrics
        assert (metrics.finished_time, metrics.first_token_latency is not None) == (None, True)
        engine.finish("r", 1)
        done = (await anext(stream)).metrics
        assert done.first_token_time == metrics.first_token_time == done.last_token_time
        assert done.arrival_time <= (done.first_token_time or 0) <= (done.finished_time or 0)


async def test_the_tokenizer_is_the_engines(folder: Path) -> None:
    async with connected(folder) as (client, _):
        tokenizer = await client.get_tokenizer()
        assert (tokenizer.encode("one"), tokenizer.eos_token_id) == (ids("one"), 2)
        with pytest.raises(ModelError, match="has no chat template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


async def test_without_a_tokenizer_there_is_none() -> None:
    with FakeEngine(answer=welcome(tokenizer="/nowhere")) as engine:
        async with AsyncClient(engine.address, timeout_s=DEADLINE_S) as client:
            with pytest.raises(ModelError, match="/nowhere has no tokenizer; give token ids"):
                await client.get_tokenizer()


def test_logprobs_take_little_memory() -> None:
    """Twenty candidates as objects have 2,500 bytes; a stranger may ask for them for every token of many answers."""
    sample, count = Sample(None, None, logprobs=True, include_stop=False), 500
    tracemalloc.start()
    try:
        for start in range(count):
            top = tuple((start + 100 * place, -1.0 - place / start if start else -1.0) for place in range(20))
            sample.apply(Tokens("r", start, [start], [TokenLogprobs(-1.0, 1, top)]))
        del top
        assert tracemalloc.get_traced_memory()[0] < 600 * count
    finally:
        tracemalloc.stop()
    assert sample.logprobs is not None
    assert len(sample.logprobs[-2:][-1]) == 20
    assert sample.output(0, logprobs=True).logprobs == list(sample.logprobs)


def test_a_cursor_delivers_each_part_once() -> None:
    sample = Sample(None, None, logprobs=True, include_stop=False)
    cursor, late = Cursor(2, sample), Cursor(0, sample)
    assert cursor.delta() is None
    sample.apply(Tokens("r", 0, [5, 6], [TokenLogprobs(-1.0, 1, ()), TokenLogprobs(-0.5, 2, ())]))
    first = cursor.delta()
    assert first is not None
    assert (first.index, first.token_ids, first.cumulative_logprob, first.finish_reason) == (2, [5, 6], -1.5, None)
    assert cursor.delta() is None
    sample.apply(Finished("r", 2, [7], "stop", logprobs=[TokenLogprobs(-0.25, 1, ())]))
    last = cursor.delta()
    assert last is not None
    assert (last.token_ids, last.logprobs, last.finish_reason) == ([7], [{7: Logprob(-0.25, 1)}], "stop")
    assert cursor.delta() is None
    whole = late.delta()
    assert whole is not None
    assert whole.token_ids == [5, 6, 7]


def test_an_error_is_no_finish_reason_of_a_delta() -> None:
    sample = Sample(None, None, logprobs=False, include_stop=False)
    cursor, other = Cursor(0, sample), Cursor(0, sample)
    assert other.delta() is None
    sample.apply(Tokens("r", 0, [5]))
    sample.finish("error")
    delta = cursor.delta()
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason) == ([5], None)
    assert cursor.delta() is None
