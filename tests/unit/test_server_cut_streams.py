"""Streams cut at any place are resumed without a repeated or missing token."""

from typing import Any

import pytest

from tests.unit.resumable_stage import CHAT, COMPLETION, Client, Stage, content, events_in, settle, steps
from vllm_lite.client.streams.stream import Event
from vllm_lite.server.openai.bodies import ChatBody, CompletionBody, GenerateBody, StreamOptions

USAGE, ALWAYS = StreamOptions(include_usage=True), StreamOptions(include_usage=True, continuous_usage_stats=True)
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {  # body, prompts, params
    "chat": (ChatBody(**CHAT), 1, {}),
    "two with usage": (ChatBody(**CHAT, stream_options=USAGE), 1, {"n": 2}),
    "logprobs": (ChatBody(**CHAT, logprobs=True, top_logprobs=1, stream_options=ALWAYS), 1, {"logprobs": 1}),
    "echo": (ChatBody(**CHAT, echo=True, return_token_ids=True), 1, {"n": 2}),
    "completion": (CompletionBody(**COMPLETION, logprobs=1), 1, {"n": 2, "logprobs": 1}),
    "echoed": (CompletionBody(**COMPLETION, echo=True, stream_options=USAGE), 2, {"n": 2}),
    "only the prompt": (CompletionBody(**COMPLETION, echo=True, max_tokens=0, stream_options=USAGE), 1, {"n": 1}),
    "beams": (CompletionBody(**COMPLETION, stream_options=USAGE), 1, {"n": 2, "use_beam_search": True, "seed": None}),
    "ranked": (CompletionBody(**COMPLETION), 1, {"n": 1, "best_of": 2, "logprobs": 0}),
    "prompts' ids": (CompletionBody(**COMPLETION, return_token_ids=True), 2, {"n": 2}),
    "ids": (GenerateBody(token_ids=[5, 6, 7], stream=True, resumable=True, return_token_ids=True), 2, {"n": 1}),
    "stop": (ChatBody(**CHAT), 1, {"n": 1, "stop": (" a",)}),
}


def play(case: str) -> tuple[Stage, Client, list[list[Event]], str]:
    """A stage, the client of the case, all that the engine will say, and the call's id."""
    body, num_prompts, params = CASES[case]
    stage = Stage()
    client = stage.start(body, num_prompts=num_prompts, **params)
    kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl" if isinstance(body, CompletionBody) else "gen"
    names = stage.calls.stream_ids(f"{kind}-1", num_prompts)
    count = params.get("best_of", params.get("n", 1))
    return stage, client, steps(names, count, params.get("logprobs")), f"{kind}-1"


async def uncut(case: str) -> tuple[Stage, Client, str]:
    stage, client, said, call_id = play(case)
    await settle()
    for events in said:
        await stage.say(*events)
    await client.ended()
    assert client.is_complete
    return stage, client, call_id


@pytest.mark.parametrize("case", CASES)
async def test_cut_at_every_byte_and_resumed_when_all_is_there(case: str) -> None:
    stage, client, call_id = await uncut(case)
    whole = [data for _, data in events_in(client.data)]
    expected = content(whole)
    assert expected["done"] == 1
    assert len({last for last, _ in events_in(client.data)}) == len(whole)  # each event has an id of its own
    resumed: dict[str, list[str]] = {}
    for cut in range(len(client.data) + 1):
        seen = events_in(client.data[:cut])
        last = seen[-1][0] if seen else ""
        if last not in resumed:
            again = await stage.resume(call_id, last)
            await again.ended()
            assert again.status == (204 if len(seen) == len(whole) else 200)
            resumed[last] = [data for _, data in events_in(again.data)]
        assert content([data for _, data in seen] + resumed[last]) == expected
    assert len(resumed) == len(whole) + 1
    assert stage.kept.unread_s(call_id) == 0.0
    assert stage.calls.dispatcher.num_sequences == len(stage.calls) == 0


@pytest.mark.parametrize("case", CASES)
async def test_cut_after_every_token_and_resumed_while_it_runs(case: str) -> None:
    """Tokens that arrive without a reader are merged into one chunk, so the following events differ from those of an
    uncut stream."""

    _, client, _ = await uncut(case)
    expected = content([data for _, data in events_in(client.data)])
    num_steps = len(play(case)[2])
    for cut in range(num_steps):
        stage, client, said, call_id = play(case)
        await settle()
        for events in said[:cut]:
            await stage.say(*events)
        client.go()
        await client.ended()
        assert len(stage.kept) == 1
        middle = (cut + num_steps) // 2
        await stage.say(*(event for events in said[cut:middle] for event in events))
        seen = events_in(client.data)
        seen = seen[: len(seen) - cut % 2]  # the last event may not have come
        again = await stage.resume(call_id, seen[-1][0] if seen else "")
        await settle()
        rest = [event for events in said[middle:] for event in events if event.request_id in stage.session.sinks]
        await stage.say(*rest)
        await again.ended()
        assert content([data for _, data in seen + events_in(again.data)]) == expected
