"""Bodies that take much more memory than their length: how many are read at once; reading them does not block the
loop."""

import asyncio
import json
from collections import Counter

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.unit.test_server_body import DEADLINE_S, Sender, prompt_of, reader
from vllm_lite.client.text.templates.message_parts import reasoning_fields
from vllm_lite.client.text.templates.template_process import Render
from vllm_lite.runtime.frames import frame
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http import body as reading
from vllm_lite.server.http.body import MAX_HELD, MAX_NESTED, SMALL_BYTES, BodyReader, memory_of
from vllm_lite.server.http.weight import Scale
from vllm_lite.server.openai.bodies import CompletionBody
from vllm_lite.server.openai.errors import ApiError


async def test_texts_may_contain_brackets_and_quotes() -> None:
    data = json.dumps({"prompt": '[{,:"\\' * (MAX_NESTED // 2)}).encode()
    body, _ = await BodyReader(ServeConfig()).read(Sender(data, waits=False).request, CompletionBody)
    assert len(body.prompt) == 6 * (MAX_NESTED // 2)


async def test_a_body_that_is_heavier_than_all_room_is_taken_alone() -> None:
    """One wide character at the end makes the body's text four times as large: a second long body then has to wait, a
    small one does not."""

    read = BodyReader(ServeConfig(max_request_bytes=1 << 18))
    held = asyncio.Event()

    async def route(request: Request) -> Response:
        await read.receive(request)
        await held.wait()
        return Response(str(memory_of(request)))

    wide = '{"prompt":[' + '"a",' * 25_000 + '"\N{GRINNING FACE}"]}'
    first = asyncio.ensure_future(read.holding(route)(Sender(wide.encode(), waits=False).request))
    async with asyncio.timeout(DEADLINE_S):
        while read.held_bytes < MAX_HELD << 18:  # noqa: ASYNC110 - it reads
            await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await read.holding(route)(Sender(prompt_of(200_000), waits=False).request)
    assert caught.value.status == 429
    tasks = [
        first,
        asyncio.ensure_future(read.holding(route)(Sender(prompt_of(SMALL_BYTES // 2), waits=False).request)),
    ]
    held.set()
    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*tasks)
    assert int(answers[0].body) > MAX_HELD << 18
    assert read.held_bytes == 0


async def test_long_bodies_let_the_loop_turn_between_slices() -> None:
    """Sixteen at once: between two turns of the loop no more than one slice of all of them is weighed."""

    read, turns, weighed = reader(), 0, []
    feed = Scale.feed

    def seen(self: Scale, piece: bytes) -> None:
        weighed.append(turns)
        feed(self, piece)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scale, "feed", seen)
        patch.setattr(reading, "SMALL_BYTES", 1)
        turning = asyncio.ensure_future(turn())
        senders = [Sender(prompt_of(300_000), waits=False) for _ in range(16)]
        await asyncio.gather(*(read.receive(each.request) for each in senders), return_exceptions=True)
        turning.cancel()
    assert len(weighed) >= 16
    assert max(Counter(weighed).values()) == 1


def test_a_thought_is_sent_to_the_template_once() -> None:
    """Under three names it is one text here, and would be three there."""
    thought = "x" * 100_000
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!", **reasoning_fields(thought)},
        {"role": "assistant", "content": "!", **reasoning_fields(thought + "y", calls_behind_text=True)},
        {"role": "assistant", "content": "!", "reasoning": "one", "thinking": "another"},
    ]
    chat = Render([dict(each) for each in messages], True, False, {}, 10)
    sent = chat.without_copies()
    assert len(frame(sent)) < 2 * len(thought) + 1000 < len(frame(chat))
    assert msgspec.msgpack.decode(frame(sent)[4:], type=Render).complete() == messages
    assert chat.messages == messages
