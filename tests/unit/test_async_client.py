"""AsyncClient over a fake engine: texts, ends, aborts and errors as a user sees them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.clients import SIZE, collect, connected, expect, ids
from tests.fakes import DEADLINE_S, FakeEngine
from vllm_lite.client.async_client import AsyncClient
from vllm_lite.client.outputs import RequestOutput
from vllm_lite.errors import EngineDeadError, EngineError, ModelError, RequestError
from vllm_lite.protocol.api import Abort, Finished, Generate, GetStats, Refused, TokenLogprobs, Tokens
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import Stats


def begin(client: AsyncClient, *args: Any, **options: Any) -> "asyncio.Task[list[RequestOutput]]":
    return asyncio.ensure_future(collect(client.generate(*args, **options)))


# ---- a stream


async def test_text_and_tokens_grow_until_the_end(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = client.generate("the cat", SamplingParams(max_tokens=9), "r1")
        first = asyncio.ensure_future(anext(stream))
        asked = await expect(engine, Generate)
        assert (asked.request_id, unpack_tokens(asked.prompt)) == ("r1", ids("the cat"))
        engine.tokens("r1", 0, *ids("one"))
        output = await first
        assert (output.prompt, output.prompt_token_ids) == ("the cat", ids("the cat"))
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("one", ids("one"))
        assert not output.finished
        assert output.num_cached_tokens is None
        engine.finish("r1", 3, *ids(" two"), num_cached_tokens=2)
        last = await anext(stream)
        assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("one two", "length")
        assert (last.finished, last.num_cached_tokens) == (True, 2)
        assert last.metrics.arrival_time < last.metrics.first_token_time < last.metrics.last_token_time  # type: ignore[operator]
        assert output.outputs[0].text == "one"  # an earlier output is not changed by a later one
        assert output.outputs[0].token_ids == ids("one")
        assert output.metrics.last_token_time == output.metrics.first_token_time
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        engine.expect_nothing_more()


async def test_many_streams_at_once(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        tasks = [begin(client, [number], request_id=str(number)) for number in range(20)]
        for _ in tasks:
            await expect(engine, Generate)
        for place, letter in enumerate("abc"):
            engine.send_outputs(*(Tokens(str(number), place, ids(letter)) for number in range(20)))
        engine.send_outputs(*(Finished(str(number), 3, ids(chr(65 + number)), "length") for number in range(20)))
        results = await asyncio.gather(*tasks)
        assert [outputs[-1].outputs[0].text for outputs in results] == ["abc" + chr(65 + n) for n in range(20)]


async def test_logprobs(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task = begin(client, [1], SamplingParams(logprobs=2), "r")
        assert (await expect(engine, Generate)).params.logprobs == 2
        a, b, c = ids("abc")
        engine.send_outputs(Tokens("r", 0, [a], [TokenLogprobs(-0.5, 1, ((a, -0.5), (b, -1.5)))]))
        engine.send_outputs(Finished("r", 1, [c], "length", logprobs=[TokenLogprobs(-3.0, 7, ((a, -0.5), (b, -1.5)))]))
        completion = (await task)[-1].outputs[0]
        assert completion.cumulative_logprob == -3.5
        assert completion.logprobs is not None
        seen = [[(key, v.logprob, v.rank, v.decoded_token) for key, v in each.items()] for each in completion.logprobs]
        assert seen == [
            [(a, -0.5, 1, "a"), (b, -1.5, 2, "b")],
            [(c, -3.0, 7, "c"), (a, -0.5, 1, "a"), (b, -1.5, 2, "b")],
        ]


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one!")])
async def test_the_stop_tokens_text_is_left_out(folder: Path, include: bool, text: str) -> None:
    async with connected(folder) as (client, engine):
        params = SamplingParams(stop_token_ids=tuple(ids("!")), include_stop_str_in_output=include)
        task = begin(client, [1], params, "r")
        await expect(engine, Generate)
        engine.finish("r", 0, *ids("one!"), reason="stop", stop_token=ids("!")[0])
        completion = (await task)[-1].outputs[0]
        assert (completion.text, completion.token_ids) == (text, ids("one!"))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", ids("!")[0])


async def test_half_a_character_is_shown_at_the_end_only(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task = begin(client, [1], request_id="r")
        await expect(engine, Generate)
        first, second = ids("è")
        engine.tokens("r", 0, first)
        engine.tokens("r", 1, second)
        engine.finish("r", 2, first)
        texts = [output.outputs[0].text for output in await task]
        assert texts[-1] == "è\ufffd"
        assert set(texts[:-1]) <= {"", "è"}


async def test_without_detokenizing_there_is_no_text(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task = begin(client, [1], SamplingParams(detokenize=False), "r")
        await expect(engine, Generate)
        engine.finish("r", 0, 5, 6)
        assert [(o.outputs[0].text, o.outputs[0].token_ids) for o in await task] == [("", [5, 6])]


# ---- stop strings


async def test_a_stop_string_ends_the_stream_and_aborts_the_request(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = client.generate([1], SamplingParams(stop=("END",)), "r")
        first = asyncio.ensure_future(anext(stream))
        await expect(engine, Generate)
        engine.tokens("r", 0, *ids("one E"))
        assert (await first).outputs[0].text == "one "
        engine.tokens("r", 5, *ids("ND, two"))
        last = await anext(stream)  # the engine has not said that it is over
        completion = last.outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one ", "stop", "END")
        assert completion.token_ids == ids("one END")
        assert last.finished
        assert await expect(engine, Abort) == Abort("r", stopped=True)  # though its reader has not come back
        engine.tokens("r", 12, 1)
        engine.finish("r", 13, reason="abort")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        engine.expect_nothing_more()


async def test_a_stop_string_in_the_last_message_aborts_nothing(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task = begin(client, [1], SamplingParams(stop=("END",), include_stop_str_in_output=True), "r")
        await expect(engine, Generate)
        engine.finish("r", 0, *ids("one END two"))
        completion = (await task)[-1].outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one END", "stop", "END")
        await client.abort("r")
        stats = asyncio.ensure_future(client.stats())
        await expect(engine, GetStats)  # no Abort came before it
        engine.send(Stats(*range(11)))
        assert await stats == Stats(*range(11))


async def test_text_held_back_for_a_stop_string_is_returned_at_the_end(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        stream = client.generate([1], SamplingParams(stop=("END",)), "r")
        first = asyncio.ensure_future(anext(stream))
        await expect(engine, Generate)
        engine.tokens("r", 0, *ids("one EN"))
        assert (await first).outputs[0].text == "one "
        engine.finish("r", 6)
        assert (await anext(stream)).outputs[0].text == "one EN"


# ---- ends


@pytest.mark.parametrize("how", ["aclose", "cancel", "break"])
async def test_leaving_a_stream_aborts_its_request(folder: Path, how: str) -> None:
    async with connected(folder) as (client, engine):
        stream = client.generate([1], request_id="r")
        first = asyncio.ensure_future(anext(stream))
        await expect(engine, Generate)
        engine.tokens("r", 0, 1)
        await first
        if how == "aclose":
            await stream.aclose()
        elif how == "cancel":
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)  # let it begin to wait
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            del stream, first  # as a `break` out of `async for` does; the event loop closes it
        assert await expect(engine, Abort) == Abort("r")


async def test_abort_by_id_ends_the_iterator(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task = begin(client, [1], request_id="r")
        await expect(engine, Generate)
        await client.abort("r")
        await expect(engine, Abort)
        engine.finish("r", 0, reason="abort")
        assert [output.outputs[0].finish_reason for output in await task] == ["abort"]


async def test_an_error_of_the_engine_is_raised_to_its_reader_alone(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        bad, good = begin(client, [1], request_id="bad"), begin(client, [1], request_id="good")
        for _ in range(2):
            await expect(engine, Generate)
        engine.finish("bad", 0, reason="error", error="the logits are not finite")
        with pytest.raises(RequestError, match="the logits are not finite"):
            await bad
        engine.finish("good", 0, 1)
        assert (await good)[-1].finished


async def test_the_engines_death_ends_every_iterator(folder: Path) -> None:
    async with connected(folder, recovery_timeout_s=0) as (client, engine):
        tasks = [begin(client, [1], request_id=str(number)) for number in range(10)]
        for _ in tasks:
            await expect(engine, Generate)
        engine.tokens("3", 0, 1)
        await asyncio.to_thread(engine.die)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 10
        assert len(set(map(id, results))) == 10  # each has an exception, and so a traceback, of its own
        with pytest.raises(EngineDeadError):
            await anext(client.generate([1]))


async def test_close_ends_streams_that_are_read(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task = begin(client, [1], request_id="r")
        await expect(engine, Generate)
        await client.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        assert await expect(engine, Abort) == Abort("r")


# ---- what is asked


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, "two"], "must be integers, got 'two' at position 1"),
        ([1, True], "must be integers, got True at position 1"),
        ([1, SIZE], f"between 0 and {SIZE - 1}, got {SIZE} at position 1"),
        ([-1], f"between 0 and {SIZE - 1}, got -1 at position 0"),
        ([1] * 64, "context length is 64 tokens, .* at least 64 input tokens; .* shorten it to 63 or fewer"),
        (None, "must be a text, .* got NoneType"),
        (b"bytes", "got bytes"),
        ({"prompt": [1]}, "got a list under 'prompt'"),
        ({"prompt_token_ids": "text"}, "got a str under 'prompt_token_ids'"),
        ({"text": "one"}, r"got a dict with keys \['text'\]"),
        ("\ud800", "not valid Unicode at character 0"),
    ],
)
async def test_bad_prompts_are_refused_here(folder: Path, prompt: Any, error: str) -> None:
    async with connected(folder) as (client, engine):
        with pytest.raises(RequestError, match=error):
            await anext(client.generate(prompt))
        engine.expect_nothing_more()


@pytest.mark.parametrize(
    "prompt", ["ab", ids("ab"), tuple(ids("ab")), {"prompt": "ab"}, {"prompt_token_ids": ids("ab")}]
)
async def test_forms_of_a_prompt(folder: Path, prompt: Any) -> None:
    async with connected(folder) as (client, engine):
        task = begin(client, prompt, request_id="r")
        assert unpack_tokens((await expect(engine, Generate)).prompt) == ids("ab")
        engine.finish("r", 0, 1)
        assert (await task)[0].prompt_token_ids == ids("ab")


async def test_a_long_prompt_is_tokenized_aside(folder: Path) -> None:
    async with connected(folder) as (client, _):
        with pytest.raises(RequestError, match="at least 20000 input tokens"):
            await anext(client.generate("x" * 20_000))


async def test_a_seed_is_drawn_where_none_is_given(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        seeds = []
        for params in (SamplingParams(), SamplingParams(), SamplingParams(seed=7), None):
            task = begin(client, [1], params)
            asked = await expect(engine, Generate)
            seeds.append(asked.params.seed)
            engine.finish(asked.request_id, 0, 1)
            await task
        assert len(set(seeds)) == 4
        assert seeds[2] == 7
        assert all(seed is not None and 0 <= seed < 2**64 for seed in seeds)


async def test_an_id_in_use_is_refused(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        task = begin(client, [1], request_id="r")
        await expect(engine, Generate)
        with pytest.raises(RequestError, match="'r' is in use"):
            await anext(client.generate([1], request_id="r"))
        engine.finish("r", 0, 1)
        assert len(await task) == 1


async def test_without_a_tokenizer_there_are_token_ids() -> None:
    async with connected(None) as (client, engine):
        with pytest.raises(RequestError, match="a text prompt needs a tokenizer"):
            await anext(client.generate("text"))
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            await anext(client.generate([1], SamplingParams(stop=("x",))))
        task = begin(client, [1], request_id="r")
        await expect(engine, Generate)
        engine.finish("r", 0, 5)
        assert [(o.outputs[0].text, o.outputs[0].token_ids) for o in await task] == [("", [5])]


async def test_a_tokenizer_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with FakeEngine() as engine, pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        await AsyncClient.connect(engine.address, tokenizer=tmp_path, timeout_s=DEADLINE_S)


async def test_connect_reports_a_refusal() -> None:
    with FakeEngine(answer=Refused("another model")) as engine, pytest.raises(EngineError, match="another model"):
        await AsyncClient.connect(engine.address, model="mine", timeout_s=DEADLINE_S)


async def test_a_client_that_is_not_connected_raises() -> None:
    with pytest.raises(EngineError, match="not connected"):
        await anext(AsyncClient("inproc://nobody").generate([1]))


async def test_a_client_of_another_event_loop_raises(folder: Path) -> None:
    with FakeEngine() as engine:
        connecting = AsyncClient.connect(engine.address, tokenizer=folder, timeout_s=DEADLINE_S)
        client = await asyncio.to_thread(asyncio.run, connecting)
        with pytest.raises(EngineError, match="connected in another event loop"):
            await asyncio.wait_for(anext(client.generate([1])), DEADLINE_S)
        await client.close()
