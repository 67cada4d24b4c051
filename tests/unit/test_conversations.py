"""Conversations as a load: of `bench serve`, which sends them, and of `simulate`."""

import asyncio
import json
from typing import Any

import pytest

from tests.unit.test_bench_client import DEADLINE_S, DONE, HEAD, Script, Stub, chunked
from tests.unit.test_simulate import made_up
from vllm_lite.errors import ConfigError
from vllm_lite.tools.bench import serve
from vllm_lite.tools.bench.serve_client import Endpoint, Outcome
from vllm_lite.tools.bench.serve_datasets import DatasetOptions, LoadItem
from vllm_lite.tools.bench.serve_http import HttpClient
from vllm_lite.tools.simulate.load import LoadOptions, SimulatedRequest, make_load
from vllm_lite.tools.simulate.variants import simulate

# ---- sent


def talking(*, has_ids: bool) -> Script:
    """A script that answers with three tokens, whose ids follow the prompt's last id."""

    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        last = body["prompt"][-1]
        ids = {"token_ids": [last + 1, last + 2, last + 3]} if has_ids else {}
        event = {"choices": [{"index": 0, "text": "abc", "finish_reason": "length", **ids}]}
        writer.write(HEAD + chunked(b"data: " + json.dumps(event).encode() + b"\n\n" + DONE) + chunked(b""))

    return script


@pytest.mark.parametrize("has_ids", [True, False])
async def test_the_next_turn_begins_with_the_prompt_and_the_answer_before_it(has_ids: bool) -> None:
    async with Stub(talking(has_ids=has_ids)) as stub:
        http = HttpClient(stub.url, {})
        api = Endpoint(http, "/v1/completions", {}, timeout_s=DEADLINE_S)
        turns = [LoadItem([10], 1, 3), LoadItem([20], 5, 3, after=0), LoadItem([30], 9, 3, after=1)]
        outcomes, _ = await asyncio.wait_for(serve.drive(api, turns, [0.0] * 3, None, lambda _: None), DEADLINE_S)
        http.close()
    prompts = [body["prompt"] for _, body in stub.requests]
    if has_ids:
        assert prompts == [[10], [10, 11, 12, 13, 20], [10, 11, 12, 13, 20, 21, 22, 23, 30]]
        assert not any(outcome.error for outcome in outcomes)
    else:
        assert prompts == [[10]]
        assert not outcomes[0].error, "it was served"
        assert "the turn before it has no token_ids" in outcomes[1].error
        assert "the turn before it failed" in outcomes[2].error


# ---- simulated


def chats(count: int = 40, **changes: Any) -> list[SimulatedRequest]:
    options = DatasetOptions(dataset_name="chats", num_prompts=count, chat_output_len=30, **changes)
    return make_load(LoadOptions(options, 8.0), None)


def test_a_turn_is_sent_behind_the_answer_before_it_and_finds_its_blocks() -> None:
    load = chats()
    done = simulate(made_up(), {}, load)
    for request, outcome in zip(load, done.outcomes, strict=True):
        if request.after is None:
            assert outcome.start_s == request.time_s
            continue
        before = done.outcomes[request.after]
        assert outcome.start_s == pytest.approx(before.chunks_s[-1] + request.time_s)
        assert outcome.input_len == before.input_len + before.output_len + len(request.tokens) // 4
    assert done.figures["completed"] == 40
    alone = simulate(made_up(), {}, [each._replace(after=None) for each in load])
    assert done.figures["prefix_hit_rate"] > 0.75, "all but the last message, and its block, is there"
    assert alone.figures["prefix_hit_rate"] < 0.55


def test_a_conversation_that_grows_too_long_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="tokens with its answer, the engine takes 2048"):
        simulate(made_up(), {}, chats(chat_turns=40))


def test_agents_have_more_in_common_and_wait_less() -> None:
    options = DatasetOptions(dataset_name="agents", num_prompts=16, chat_prefix_len=640, chat_turns=4)
    done = simulate(made_up(), {}, make_load(LoadOptions(options, 2.0), None))
    assert done.figures["completed"] == 16
    assert done.figures["prefix_hit_rate"] > 0.6


def test_no_token_ids_are_null_for_some_servers() -> None:
    outcome = Outcome(1)
    outcome.take([b'{"choices": [{"text": "a", "token_ids": null}]}'], 1.0)
    assert (outcome.text, outcome.token_ids) == ("a", [])
