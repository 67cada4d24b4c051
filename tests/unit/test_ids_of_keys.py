"""Ids that clients choose: each key has ids of its own, under one name that no other key can ask for."""

import json
import typing

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tests.unit.resumable_stage import WORDS, Stage, asking, events_in
from tests.unit.test_server_resumable import begun
from vllm_lite.protocol.api import Finished
from vllm_lite.protocol.external import ExternalId
from vllm_lite.protocol.params import MAX_NAME_CHARS
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.auth import AuthMiddleware, name_of, names_of, owner_of
from vllm_lite.server.http.callers import Callers
from vllm_lite.server.openai.errors import ApiError


async def test_two_keys_may_choose_one_id() -> None:
    """Each key has a call of its own under the id, and reads, sees and ends only that one. So no error reveals the ids
    of other keys."""

    stage, keys = Stage(), (b"a" * 32, b"b" * 32)
    clients = [await begun(stage, 2 + place, key=key) for place, key in enumerate(keys)]
    names = [message.request_id for message in stage.session.messages]
    assert len(set(names)) == 2
    with pytest.raises(ApiError, match="request id 'chatcmpl-1' is in use") as caught:
        await stage.start(key=keys[0]).ended()
    assert caught.value.status == 409
    for place, key in enumerate(keys):
        found = json.loads(bytes((await stage.live.state(asking("chatcmpl-1", key=key))).body))
        assert (found["id"], found["usage"]["completion_tokens"]) == ("chatcmpl-1", 2 + place)
    with pytest.raises(ApiError, match="no request 'chatcmpl-1' is running") as caught:
        await stage.live.state(asking("chatcmpl-1", key=b"c" * 32))
    assert caught.value.status == 404
    assert await stage.live.end("chatcmpl-1", asking("chatcmpl-1", key=keys[1]))
    assert stage.session.ended_externally == [names[1]]
    await stage.say(Finished(names[1], 3, [], "abort"))
    await stage.say(Finished(names[0], 2, WORDS[2:], "length"))
    assert [events_in(client.data)[-2][1].count('"abort"') for client in clients] == [0, 1]


async def test_an_admin_finds_the_calls_of_all_keys() -> None:
    stage, keys = Stage(), (b"a" * 32, b"b" * 32)
    await begun(stage, 2, key=keys[1])
    (message,) = stage.session.messages
    admin = asking("chatcmpl-1", key=b"x" * 32)
    admin.scope["vllm_lite.reach"] = [b"x" * 32, b"", *keys]
    assert json.loads(bytes((await stage.live.state(admin)).body))["id"] == "chatcmpl-1"
    await stage.live.end_first([["cmpl-1", "chatcmpl-1"]], admin)
    assert stage.session.ended_externally == [message.request_id]
    elsewhere = Stage()  # another server of the same engine
    elsewhere.session.external_ids = {message.external_id}
    assert await elsewhere.live.end("chatcmpl-1", admin) is False  # the engine of this test ends nothing
    assert elsewhere.session.ended_externally == [message.external_id]


def test_names_are_short_whatever_the_id() -> None:
    (limit,) = (each.max_length for each in typing.get_args(ExternalId)[1:])
    name = name_of("chatcmpl-" + "x" * MAX_NAME_CHARS, "0" * 32)
    assert len(f"{name}-1023@99") <= limit


async def reach(keys: Keys, key: str) -> list[str]:
    """Names of the calls with the id "a" that a sender with `key` may look at, as the middleware says."""
    seen = list[Request]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        seen.append(Request(scope))

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": "GET", "path": "/v1/requests/a", "headers": headers, "client": ("127.0.0.1", 1)}
    middleware = AuthMiddleware(app, keys, callers=Callers.of(ServeConfig(), keys))
    await middleware(scope, None, None)  # type: ignore[arg-type]
    (request,) = seen
    names = names_of(request, "a")
    assert names[0] == name_of("a", owner_of(request, "a"))
    return names


async def test_names_that_each_key_reaches() -> None:
    """A user's key has its own names; an admin key reaches all, and those of calls without a key; without keys all
    share one."""
    keys = Keys(user=("one", "two"), admin=("admin",))
    (one,), (two,), admin = await reach(keys, "one"), await reach(keys, "two"), await reach(keys, "admin")
    assert len({"a", one, two, admin[0]}) == 4
    assert set(admin) == {"a", one, two, admin[0]}
    assert await reach(Keys(), "") == ["a"]
    assert await reach(Keys(admin=("admin",)), "") == ["a"]
    assert "a" in await reach(Keys(admin=("admin",)), "admin")
