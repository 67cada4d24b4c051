"""AsyncClient and LLM with a fake engine where one prompt becomes several samples: n, best_of, beams, forks."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.clients import collect, connected, expect, ids, settle
from tests.fakes import FakeEngine
from vllm_lite.client.async_client import AsyncClient
from vllm_lite.client.outputs import CompletionOutput, RequestOutput
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Abort, Finished, ForkRequest, Generate, TokenLogprobs, Tokens
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.params import SamplingParams

GONE = "request 'r' is not running; only a live request can be forked"


def logprobs(*values: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(value, 1, ()) for value in values]


async def begin(
    client: AsyncClient, engine: FakeEngine, params: SamplingParams
) -> tuple["asyncio.Task[list[RequestOutput]]", Generate]:
    task = asyncio.ensure_future(collect(client.generate([1], params, "r")))
    return task, await expect(engine, Generate)


def texts(output: RequestOutput) -> list[str]:
    return [completion.text for completion in output.outputs]


# ---- n


async def test_samples_come_side_by_side_and_end_one_by_one(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = client.generate([1], SamplingParams(n=3, logprobs=0), "r")
        first = asyncio.ensure_future(anext(stream))
        assert (await expect(engine, Generate)).params.n == 3
        one, two = ids("è")  # half a character each
        engine.send_outputs(
            Tokens("r", 0, ids("a"), logprobs(-1.0)),
            Tokens("r", 0, [one], logprobs(-2.0), index=2),
        )
        output = await first
        assert texts(output) == ["a", "", ""]
        assert [completion.token_ids for completion in output.outputs] == [ids("a"), [], [one]]
        engine.send_outputs(
            Finished("r", 1, ids("b"), "stop", logprobs=logprobs(-0.5), num_cached_tokens=1),
            Finished("r", 1, [two], "length", logprobs=logprobs(-0.25), index=2, num_cached_tokens=1),
        )
        output = await anext(stream)
        assert not output.finished
        assert [completion.finish_reason for completion in output.outputs] == ["stop", None, "length"]
        engine.finish("r", 0, *ids("xyz"), index=1, logprobs=logprobs(-1.0, -1.0, -1.0), num_cached_tokens=1)
        output = await anext(stream)
        assert (output.finished, output.num_cached_tokens) == (True, 1)
        assert texts(output) == ["a", "xyz", "è"]  # a stop token's text is not shown
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert [completion.cumulative_logprob for completion in output.outputs] == [-1.5, -3.0, -2.25]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        engine.expect_nothing_more()


async def test_a_stop_string_ends_its_sample_alone(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task, _ = await begin(client, engine, SamplingParams(n=2, stop=("END",)))
        engine.send_outputs(Tokens("r", 0, ids("one END two")), Tokens("r", 0, ids("uno "), index=1))
        assert await expect(engine, Abort) == Abort("r", stopped=True, samples=(0,))
        engine.send_outputs(Tokens("r", 11, ids("three")), Tokens("r", 4, ids("E"), index=1))  # it had not heard of it
        engine.finish("r", 15, reason="abort")
        await settle(client, engine)  # nothing was said twice
        engine.send_outputs(Tokens("r", 5, ids("ND"), index=1))
        outputs = await task
        assert await expect(engine, Abort) == Abort("r", stopped=True)  # as both have ended here
        assert texts(outputs[-1]) == ["one ", "uno "]
        assert [completion.stop_reason for completion in outputs[-1].outputs] == ["END", "END"]
        assert [completion.token_ids for completion in outputs[-1].outputs] == [ids("one END"), ids("uno END")]
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)


async def test_no_abort_where_the_engine_has_ended_every_sample(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task, _ = await begin(client, engine, SamplingParams(n=2, stop=("END",)))
        engine.send_outputs(
            Tokens("r", 0, ids("one END two")), Finished("r", 11, [], "length"), Tokens("r", 0, ids("x"), index=1)
        )
        await settle(client, engine)  # no Abort came before it
        engine.finish("r", 1, *ids("y"), index=1)
        assert texts((await task)[-1]) == ["one ", "xy"]
        engine.expect_nothing_more()


async def test_an_error_ends_the_request_with_all_its_samples(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task, _ = await begin(client, engine, SamplingParams(n=3))
        engine.finish("r", 0, *ids("x"), index=2)
        engine.finish("r", 0, reason="error", error="the deadline of 5 ms passed")
        with pytest.raises(RequestError, match="the deadline of 5 ms passed"):
            await task
        engine.expect_nothing_more()


async def test_an_aborted_request_ends_with_each_samples_tokens(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task, _ = await begin(client, engine, SamplingParams(n=2))
        engine.finish("r", 0, *ids("one"), num_cached_tokens=3)
        await client.abort("r")
        await expect(engine, Abort)
        engine.finish("r", 0, reason="abort", index=1)
        last = (await task)[-1]
        assert [completion.finish_reason for completion in last.outputs] == ["length", "abort"]
        assert (last.finished, last.num_cached_tokens) == (True, 3)


# ---- best_of


@pytest.mark.parametrize("asked", [None, 0])
async def test_best_of_keeps_the_likeliest(folder: Path, asked: int | None) -> None:
    async with connected(folder) as (client, engine):
        task, message = await begin(client, engine, SamplingParams(n=2, best_of=3, stop=("END",), logprobs=asked))
        assert (message.params.n, message.params.best_of, message.params.logprobs) == (3, None, 0)
        engine.send_outputs(Tokens("r", 0, ids("ab"), logprobs(-2.0, -2.0)))
        await settle(client, engine)
        engine.finish("r", 2, *ids("c"), logprobs=logprobs(-1.0))
        engine.finish("r", 0, *ids("x"), logprobs=logprobs(-4.0), index=1)
        # The logprobs of what is behind a stop string do not count.
        engine.finish("r", 0, *ids("ENDz"), logprobs=logprobs(-1.0, -1.0, -1.0, -90.0), index=2)
        (output,) = await task  # nothing is shown before all have ended
        assert output.finished
        assert [(one.index, one.text, one.cumulative_logprob) for one in output.outputs] == [
            (0, "", -3.0),
            (1, "x", -4.0),
        ]
        shown = [one.logprobs is not None for one in output.outputs]
        assert shown == [asked is not None] * 2


async def test_best_of_n_is_no_choice(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = await reading(client, engine, SamplingParams(n=2, best_of=2), "a")
        engine.finish("r", 1)
        engine.finish("r", 0, index=1)
        assert texts((await collect(stream))[-1]) == ["a", ""]


# ---- beams


async def test_beams_come_at_the_end_with_their_scores(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        params = SamplingParams(n=2, use_beam_search=True, length_penalty=0.5, early_stopping=True)
        task, message = await begin(client, engine, params)
        assert message.params == msgspec.structs.replace(params, seed=message.params.seed)
        engine.finish("r", 0, *ids("ab"), cumulative_logprob=-1.25)
        await settle(client, engine)
        engine.finish("r", 0, *ids("c!"), reason="stop", index=1, cumulative_logprob=-2.5)
        (output,) = await task
        assert [(one.text, one.finish_reason, one.cumulative_logprob) for one in output.outputs] == [
            ("ab", "length", -1.25),
            ("c", "stop", -2.5),
        ]
        assert output.outputs[1].token_ids == ids("c!")
        assert output.outputs[0].logprobs is None


@pytest.mark.parametrize("options", [{"stop": ("x",)}, {"logprobs": 0}])
async def test_beams_have_no_stop_strings_and_no_logprobs(folder: Path, options: dict[str, Any]) -> None:
    async with connected(folder) as (client, engine):
        with pytest.raises(RequestError, match="beam search takes no stop strings and gives no logprobs"):
            await anext(client.generate([1], SamplingParams(use_beam_search=True, n=2, **options)))
        engine.expect_nothing_more()


# ---- forks


async def reading(client: AsyncClient, engine: FakeEngine, params: SamplingParams, text: str) -> Any:
    """A stream whose reader has received `text`."""
    stream = client.generate([1, 2], params, "r")
    first = asyncio.ensure_future(anext(stream))
    asked = (await expect(engine, Generate)).params
    assert (asked.n, asked.best_of, asked.logprobs) == (params.n, None, params.logprobs)
    tokens = ids(text)
    logs = None if params.logprobs is None else logprobs(*[-1.0] * len(tokens))
    engine.send_outputs(Tokens("r", 0, tokens, logs))
    await first
    return stream


def last(output: RequestOutput) -> CompletionOutput:
    return output.outputs[0]


async def test_a_fork_begins_with_its_parents_tokens(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        params = SamplingParams(seed=5, max_tokens=20, logprobs=0, stop=("END",))
        parent = await reading(client, engine, params, "one E")
        forks = await client.fork("r", 2)
        asked = [await expect(engine, ForkRequest) for _ in forks]
        assert [(one.request_id, one.have, one.params.max_tokens) for one in asked] == [("r", 5, 20)] * 2
        assert len({one.child_id for one in asked} | {"r"}) == 3
        assert len({one.params.seed for one in asked} | {5, None}) == 4
        engine.finish("r", 5, *ids("."), logprobs=logprobs(-1.0))
        engine.finish(asked[0].child_id, 5, *ids("NDx"), logprobs=logprobs(-2.0, -2.0, -9.0), num_cached_tokens=2)
        engine.send_outputs(Tokens(asked[1].child_id, 5, ids("!"), logprobs(-3.0)))
        (first,) = await collect(forks[0])
        assert (first.request_id, first.prompt_token_ids) == (asked[0].child_id, [1, 2])
        assert (first.finished, first.num_cached_tokens) == (True, 2)
        assert (last(first).text, last(first).token_ids, last(first).stop_reason) == ("one ", ids("one END"), "END")
        assert last(first).cumulative_logprob == -9.0
        assert [list(each) for each in last(first).logprobs or []] == [[token] for token in ids("one END")]
        assert last(await anext(forks[1])).text == "one E!"
        assert last((await collect(parent))[-1]).text == "one E."


async def test_forks_have_parameters_of_their_own(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        await reading(client, engine, SamplingParams(seed=5), "one END")
        # A stop string within a fork's initial output has not ended it, but one that ends in the fork's first own token
        # does.
        forks = await client.fork("r", 2, SamplingParams(seed=2**64 - 1, temperature=0.5, stop=("END", "D.")))
        asked = [await expect(engine, ForkRequest) for _ in forks]
        assert [(one.params.seed, one.params.temperature) for one in asked] == [(2**64 - 1, 0.5), (0, 0.5)]
        engine.finish(asked[0].child_id, 7, *ids("."))
        engine.finish(asked[1].child_id, 7, *ids("!"))
        assert [last((await collect(fork))[-1]).text for fork in forks] == ["one EN", "one END!"]


@pytest.mark.parametrize("how", ["aclose", "break", "never read"])
async def test_leaving_a_fork_aborts_it_alone(folder: Path, how: str) -> None:
    async with connected(folder) as (client, engine):
        parent = await reading(client, engine, SamplingParams(), "one")
        (fork,) = await client.fork("r")
        child = (await expect(engine, ForkRequest)).child_id
        if how != "never read":
            engine.tokens(child, 3, *ids("x"))
            await anext(fork)
        if how == "aclose":
            await fork.aclose()
        del fork
        assert await expect(engine, Abort) == Abort(child)
        engine.finish("r", 3)
        assert (await collect(parent))[-1].finished


async def test_an_ended_parent_is_replaced_by_its_tokens(folder: Path) -> None:
    """The engine had ended it when the fork arrived; its end was on its way to its reader."""

    async with connected(folder) as (client, engine):
        parent = await reading(client, engine, SamplingParams(), "one")
        (fork,) = await client.fork("r", 1, SamplingParams(max_tokens=9, seed=3))
        outputs = asyncio.ensure_future(collect(fork))
        asked = await expect(engine, ForkRequest)
        engine.finish("r", 3, *ids("x"))
        engine.finish(asked.child_id, 3, reason="error", error=GONE)
        again = await expect(engine, Generate)
        assert (again.request_id, again.have, again.params) == (asked.child_id, 3, asked.params)
        assert (unpack_tokens(again.prompt), unpack_tokens(again.output)) == ([1, 2], ids("one"))
        engine.finish(asked.child_id, 3, *ids("!"))
        assert last((await outputs)[-1]).text == "one!"
        assert last((await collect(parent))[-1]).text == "onex"


async def test_a_fork_that_the_engine_refuses_raises(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = await reading(client, engine, SamplingParams(), "one")
        (fork,) = await client.fork("r")
        engine.finish((await expect(engine, ForkRequest)).child_id, 3, reason="error", error="no room")
        with pytest.raises(RequestError, match="no room"):
            await anext(fork)
        engine.finish("r", 3)
        await collect(stream)


@pytest.mark.parametrize(
    ("n", "params", "error"),
    [
        (0, None, "n must be an integer between 1 and 64, got 0"),
        (1, SamplingParams(n=2), "of a fork must have one sample"),
        (1, SamplingParams(best_of=2), "of a fork must have one sample"),
        (1, SamplingParams(use_beam_search=True), "of a fork must have one sample"),
        (1, SamplingParams(max_tokens=3), "counts the 3 tokens a fork begins with; got 3"),
        (1, SamplingParams(logprobs=1), "only if the request it begins with has them"),
        (1, SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids must be between"),
    ],
)
async def test_bad_forks_are_refused_here(folder: Path, n: int, params: SamplingParams | None, error: str) -> None:
    async with connected(folder) as (client, engine):
        stream = await reading(client, engine, SamplingParams(), "one")
        with pytest.raises(RequestError, match=error):
            await client.fork("r", n, params)
        engine.expect_nothing_more()
        await stream.aclose()


async def test_only_one_sample_that_is_being_read_can_be_forked(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        with pytest.raises(RequestError, match="request 'r' is not running"):
            await client.fork("r")
        stream = await reading(client, engine, SamplingParams(n=2), "one")
        with pytest.raises(RequestError, match="of the request to fork must have one sample"):
            await client.fork("r", 1, SamplingParams())
        engine.finish("r", 3)
        engine.finish("r", 0, index=1)
        await collect(stream)
        with pytest.raises(RequestError, match="request 'r' is not running"):
            await client.fork("r")
