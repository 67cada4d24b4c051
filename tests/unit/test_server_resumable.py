"""Streams that outlive their connections: their readers, how long they are kept, and how many."""

from typing import Any

import msgspec
import pytest

from tests.unit.resumable_stage import (
    COMPLETION,
    RESUME_S,
    WORDS,
    Client,
    Stage,
    asking,
    content,
    events_in,
    settle,
)
from vllm_lite.client.streams.stream import StreamFailure
from vllm_lite.errors import EngineDeadError
from vllm_lite.protocol.api import Finished, Tokens
from vllm_lite.server.calls import resumable as resumable_module
from vllm_lite.server.http.body import decode
from vllm_lite.server.openai.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
)
from vllm_lite.server.openai.errors import ApiError


async def test_other_streams_are_as_they_were() -> None:
    """Without ids, and gone with their clients."""

    stage = Stage()
    client = stage.start(ChatBody(messages=[ChatMessage("user", "Hi")], stream=True))
    await settle()
    await stage.say(Tokens("chatcmpl-1", 0, WORDS[:1]))
    assert b"id: " not in client.data
    with pytest.raises(ApiError, match='without "resumable": true') as caught:
        await stage.resume()
    assert caught.value.status == 404
    with pytest.raises(ApiError, match="no request 'chatcmpl-1' can be resumed"):  # that it runs is its owner's
        await stage.resume(key=b"b" * 32)
    client.go()
    await client.ended()
    assert stage.session.dropped == ["chatcmpl-1"]
    assert len(stage.calls) == len(stage.kept) == 0
    with pytest.raises(ApiError, match="no request 'chatcmpl-1' can be resumed") as caught:
        await stage.resume()
    assert caught.value.status == 404


# ---- readers


async def begun(stage: Stage, count: int = 2, **settings: Any) -> Client:
    """A resumable call with some tokens, which its client has."""
    client = stage.start(**settings)
    await settle()
    await stage.say(Tokens(stage.session.messages[-1].request_id, 0, WORDS[:count]))
    assert events_in(client.data)
    return client


async def finish(stage: Stage, start: int = 2) -> None:
    await stage.say(Finished(stage.session.messages[-1].request_id, start, WORDS[start:], "length"))


async def test_the_newer_of_two_readers_reads() -> None:
    """The server has not noticed that the connection is broken, and may be in the middle of a write."""

    stage = Stage()
    old = await begun(stage)
    old.may_write.clear()
    await stage.say(Tokens("chatcmpl-1", 2, WORDS[2:3]))
    seen = events_in(old.data)
    new = await stage.resume(last=seen[-1][0])
    await settle()
    await finish(stage, 3)
    await new.ended()
    assert new.is_complete
    assert content([data for _, data in seen + events_in(new.data)])[0]["text"] == "Once \N{BEAR FACE} upon a bear"
    old.may_write.set()
    await old.ended()
    assert old.is_complete  # its connection has the end of a response, and the stream has none
    assert b"DONE" not in old.data
    assert stage.kept.unread_s("chatcmpl-1") == 0.0
    assert stage.kept.get("chatcmpl-1") is not None


async def test_an_older_reader_that_waits_ends_at_once_and_harms_nothing() -> None:
    stage = Stage()
    old = await begun(stage)
    new = await stage.resume()
    await old.ended()
    assert stage.kept.unread_s("chatcmpl-1") is None
    await stage.say(Tokens("chatcmpl-1", 2, WORDS[2:4]))
    await finish(stage, 4)
    await new.ended()
    assert content([data for _, data in events_in(new.data)])[0]["text"] == "Once \N{BEAR FACE} upon a bear"


async def test_a_reader_that_has_nothing_yet_learns_that_it_was_replaced() -> None:
    stage = Stage()
    old = stage.start()
    await settle()
    new = await stage.resume()
    with pytest.raises(ApiError, match="continues on a newer connection") as caught:
        await old.ended()
    assert caught.value.status == 409
    await stage.say(Finished("chatcmpl-1", 0, WORDS, "length"))
    await new.ended()
    assert content([data for _, data in events_in(new.data)])["done"] == 1


async def test_only_the_key_that_started_it_resumes_it() -> None:
    stage = Stage()
    client = await begun(stage, key=b"a" * 32)
    client.go()
    await client.ended()
    for key in (b"", b"b" * 32):
        with pytest.raises(ApiError, match="no request 'chatcmpl-1' can be resumed") as caught:
            await stage.resume(key=key)
        assert caught.value.status == 404
    again = await stage.resume(key=b"a" * 32)
    await finish(stage)
    await again.ended()
    assert again.is_complete


# ---- how long


async def test_it_is_aborted_if_no_client_returns() -> None:
    stage = Stage()
    client = await begun(stage)
    stage.now_s += 1000
    stage.kept.look()  # it is read: that may take as long as it likes
    client.go()
    await client.ended()
    assert stage.session.dropped == []
    stage.now_s += RESUME_S - 0.01
    stage.kept.look()
    again = await stage.resume()
    await settle()
    stage.now_s += 1000
    stage.kept.look()
    assert len(stage.calls) == 1
    again.go()
    await again.ended()
    stage.now_s += RESUME_S - 0.01  # counts from the last break
    stage.kept.look()
    assert len(stage.calls) == 1
    stage.now_s += 0.01
    stage.kept.look()
    assert stage.session.dropped == ["chatcmpl-1"]
    assert len(stage.calls) == len(stage.kept) == stage.calls.dispatcher.num_sequences == 0
    with pytest.raises(ApiError, match="for 30 s after") as caught:
        await stage.resume()
    assert caught.value.status == 404


@pytest.mark.parametrize("is_sent", [True, False])
async def test_a_stream_that_has_ended_is_kept_as_long(is_sent: bool) -> None:
    """Also if everything was sent, because the client may not have received it. The call no longer counts as
    running."""

    stage = Stage()
    client = await begun(stage)
    if not is_sent:
        client.go()
    await settle()
    await finish(stage)
    await client.ended()
    stage.now_s += RESUME_S - 0.01
    stage.kept.look()
    assert len(stage.calls) == 0
    again = await stage.resume(last=events_in(client.data)[1][0])
    await again.ended()
    assert again.is_complete
    stage.now_s += RESUME_S
    stage.kept.look()
    assert len(stage.kept) == 0


async def test_the_end_of_the_server_ends_them() -> None:
    stage = Stage()
    running, ended = await begun(stage), stage.start(name="2")
    await settle()
    await stage.say(Finished("chatcmpl-2", 0, WORDS[:1], "length"))
    await ended.ended()
    running.go()
    await running.ended()
    stage.calls.is_draining = True
    stage.kept.look()
    assert [stage.kept.get(name) is None for name in ("chatcmpl-1", "chatcmpl-2")] == [False, True]
    assert len(stage.calls) == 1
    stage.calls.abort_all()
    await stage.say(Finished("chatcmpl-1", 2, [], "abort"))
    stage.kept.look()
    assert len(stage.calls) == len(stage.kept) == 0


async def test_delete_ends_it() -> None:
    stage = Stage()
    client = await begun(stage)
    await stage.live.abort(asking("chatcmpl-1"))
    assert stage.session.ended_externally == ["chatcmpl-1"]
    assert len(stage.kept) == 1  # its client is to read that it was aborted
    client.go()
    await client.ended()
    state = msgspec.json.decode((await stage.live.state(asking("chatcmpl-1"))).body)
    assert (state["resumable"], state["disconnected_s"]) == (True, 0.0)
    await stage.live.abort(asking("chatcmpl-1"))
    assert stage.session.dropped == ["chatcmpl-1"]
    assert len(stage.kept) == len(stage.calls) == 0


async def test_delete_ends_it_also_while_there_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    await begun(stage)

    def replaced(_: str) -> Any:
        raise EngineDeadError("the engine is being replaced")

    monkeypatch.setattr(stage.session, "abort_external", replaced)
    await stage.live.abort(asking("chatcmpl-1"))
    assert stage.session.aborted == ["chatcmpl-1"]
    with pytest.raises(ApiError) as caught:  # another server's, perhaps
        await stage.live.abort(asking("chatcmpl-2"))
    assert caught.value.status == 503


# ---- how many


async def test_streams_without_a_reader_count_as_running() -> None:
    stage = Stage(max_queued=0)
    clients = [stage.start(name=str(number)) for number in range(9)]
    await settle()
    for client in clients:
        client.go()
    await settle()
    assert len(stage.calls) == 9
    with pytest.raises(ApiError) as caught:
        await stage.start(name="10").task
    assert caught.value.status == 429
    assert len(stage.kept) == 9
    await stage.say(Finished("chatcmpl-3", 0, WORDS[:1], "length"))
    client = stage.start(name="10")
    await settle()
    assert len(stage.kept) == 10
    client.go()


@pytest.mark.parametrize(("limit", "most"), [("MAX_ENDED", 2), ("MAX_ENDED_TOKENS", 2 * (3 + len(WORDS)))])
async def test_ended_streams_are_evicted_oldest_first(limit: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among streams that have ended, those that were sent completely go first, then the oldest."""

    monkeypatch.setattr(resumable_module, limit, most)
    stage = Stage()
    broken: list[str] = []
    sent: list[str] = []
    for number in range(5):
        client = stage.start(name=str(number))
        await settle()
        stage.now_s += 1
        if number in (0, 2, 4):
            client.go()
            await client.ended()
        await stage.say(Finished(f"chatcmpl-{number}", 0, WORDS, "length"))
        await settle()
        stage.kept.look()
        (broken if number in (0, 2, 4) else sent).append(f"chatcmpl-{number}")
    assert [name for name in broken + sent if stage.kept.get(name) is not None] == broken[1:]


async def test_a_stream_that_is_larger_than_all_may_be_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_module, "MAX_ENDED_TOKENS", 1)
    stage = Stage()
    client = await begun(stage)
    client.go()
    await client.ended()
    await finish(stage)
    stage.kept.look()
    assert len(stage.kept) == 1


# ---- errors


async def test_refused_requests_are_not_kept() -> None:
    stage = Stage()
    client = stage.start()
    await settle()
    await stage.say(Finished("chatcmpl-1", 0, [], "error", error="max_tokens is wrong"))
    with pytest.raises(ApiError) as caught:
        await client.ended()
    assert caught.value.status == 400
    assert len(stage.kept) == len(stage.calls) == 0


async def test_an_error_is_sent_to_the_client_that_returns() -> None:
    stage = Stage()
    client = await begun(stage)
    client.go()
    await client.ended()
    await stage.say(StreamFailure("chatcmpl-1", EngineDeadError("it died")))
    again = await stage.resume(last=events_in(client.data)[-1][0])
    await again.ended()
    ((last, error),) = events_in(again.data)
    assert content([error])["errors"] == ["it died"]
    third = await stage.resume(last=last)
    await third.ended()
    assert third.status == 204
    from_start = await stage.resume()
    await from_start.ended()
    found = content([data for _, data in events_in(from_start.data)])
    assert (found[0]["roles"], found[0]["ids"], found["errors"], found["done"]) == (1, [], ["it died"], 0)


async def test_an_error_before_anything_was_shown_is_a_status_later_as_well() -> None:
    stage = Stage()
    client = stage.start()
    await settle()
    client.go()
    await client.ended()
    await stage.say(Finished("chatcmpl-1", 0, [], "error", error="max_tokens is wrong"))
    again = await stage.resume()
    with pytest.raises(ApiError, match="max_tokens is wrong") as caught:
        await again.ended()
    assert caught.value.status == 400
    assert len(stage.kept) == 0


async def test_an_id_is_taken_as_long_as_its_stream_is_kept() -> None:
    stage = Stage()
    client = await begun(stage)
    await finish(stage)
    await client.ended()
    with pytest.raises(ApiError, match="in use"):
        await stage.live.new_id("chatcmpl", "1", asking(""))
    with pytest.raises(ApiError, match="in use"):
        await stage.start().ended()
    assert stage.kept.get("chatcmpl-1") is not None


# ---- strangers


@pytest.mark.parametrize(
    "last",
    [
        "x",
        "0",
        "-1-0-0.0-0.0",
        "0-0-0.0",  # one choice, there are two
        "0-0-0.0-0.0-0.0",
        "0-0" + "-0.0" * 65,
        "0-0" + "-0.0" * 3000,
        "3-0-0.0-0.0",  # the opening has two events
        "2-0-99.0-0.0",
        "2-0-0.99-0.0",
        "2-0--1.0-0.0",
        "2-0-2.5!-0.0",  # it has not ended
        "2-1-0.0-0.0",
        "2-2-0.0-0.0",
        "2-3-0.0-0.0",
        "2-0-999999999999.0-0.0",
        "2-0-\u00b2.0-0.0",
        "2-0-0.0-0.0 ",
        "2-0-0.0-0.0\n",
    ],
)
async def test_no_place_in_the_stream(last: str) -> None:
    stage = Stage()
    client = await begun(stage, n=2)
    with pytest.raises(ApiError, match="is not a place in the stream") as caught:
        await stage.resume(last=last)
    assert caught.value.status == 400
    assert len(caught.value.message) < 250
    await stage.say(Tokens("chatcmpl-1", 0, WORDS[:1], index=1))  # its reader has not noticed
    assert content([data for _, data in events_in(client.data)])[1]["text"] == "Once"
    client.go()


@pytest.mark.parametrize("last", ["0-0-2.8!", "0-0-9.9", "0-0-1.0", "0-2-0.0"])
async def test_beams_are_there_at_once_or_not_at_all(last: str) -> None:
    stage = Stage()
    body = CompletionBody(**COMPLETION)
    stage.start(body, use_beam_search=True, seed=None)
    await settle()
    for end in ([], [Finished("cmpl-1", 0, WORDS, "length", cumulative_logprob=-1.0)]):
        await stage.say(*end) if end else None
        with pytest.raises(ApiError, match="is not a place"):
            await stage.resume("cmpl-1", last)


async def test_a_client_learns_which_answers_cannot_be_resumable() -> None:
    body = b'{"messages":[{"role":"user","content":"Hi"}],"resumable":true%s}'
    with pytest.raises(ApiError, match="only a stream is resumable") as caught:
        decode(body % b"", ChatBody)
    assert (caught.value.status, caught.value.param) == (400, "resumable")
    assert decode(body % b',"stream":true', ChatBody)[0].resumable

    with pytest.raises(ApiError, match="--stream-resume-s 0"):
        Stage(resume_s=0).start()
    with pytest.raises(ApiError, match="at most 64 choices, and this one has 66"):
        Stage().start(CompletionBody(**COMPLETION), num_prompts=33, n=2)
    Stage(max_queued=99).start(CompletionBody(**COMPLETION), num_prompts=32, n=2)
    await settle()
