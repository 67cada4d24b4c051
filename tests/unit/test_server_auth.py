"""Who may call what: users' keys, admins' keys, and servers without."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from vllm_lite.server.config import Keys
from vllm_lite.server.http.auth import AuthMiddleware, require_admin
from vllm_lite.server.openai.errors import ApiError

USER, ADMIN = "user-key", "admin-key"


def status(
    keys: Keys, key: str | None, path: str = "/reset_prefix_cache", *, is_local: bool = True, more: Any = ()
) -> tuple[int, str]:
    """The status of a request to `path`, an admin's route or not, and the body of its error."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            if path == "/reset_prefix_cache":
                require_admin(Request(scope))
            await send({"type": "http.response.start", "status": 200, "headers": []})
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    headers += more
    scope = {"type": "http", "path": path, "method": "POST", "headers": headers}
    asyncio.run(AuthMiddleware(app, keys, is_local=is_local)(scope, None, send))  # type: ignore[arg-type]
    assert any(name == b"x-request-id" for name, _ in sent[0]["headers"])
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


def test_no_web_page_changes_a_server_without_keys() -> None:
    """Any page can post to this machine from a browser on it; the browser then says whose page it is."""
    page = [(b"origin", b"https://example.org")]
    assert status(Keys(), None, more=page)[0] == 403
    assert status(Keys((), (ADMIN,)), ADMIN, more=page)[0] == 200


BOTH, USERS, ADMINS, NONE = Keys((USER,), (ADMIN,)), Keys((USER,)), Keys((), (ADMIN,)), Keys()


@pytest.mark.parametrize(
    ("keys", "key", "is_local", "expected"),
    [
        (BOTH, ADMIN, False, 200),
        (BOTH, USER, True, 403),
        (BOTH, "wrong", True, 401),
        (BOTH, None, True, 401),
        (USERS, USER, True, 403),
        (USERS, None, True, 401),
        (ADMINS, ADMIN, False, 200),
        (ADMINS, "wrong", True, 403),
        (ADMINS, None, True, 401),
        (NONE, None, True, 200),
        (NONE, "any", True, 200),
        (NONE, None, False, 403),
    ],
)
def test_who_may_change_the_server(keys: Keys, key: str | None, is_local: bool, expected: int) -> None:
    assert status(keys, key, is_local=is_local)[0] == expected


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [(BOTH, ADMIN, 200), (BOTH, USER, 200), (BOTH, None, 401), (ADMINS, None, 200), (NONE, None, 200)],
)
def test_who_may_generate(keys: Keys, key: str | None, expected: int) -> None:
    assert status(keys, key, "/v1/completions", is_local=False)[0] == expected
    assert status(keys, None, "/health", is_local=False)[0] == 200


@pytest.mark.parametrize("name", [b"x-api-key", b"api-key"])
def test_a_key_may_stand_in_headers_of_other_dialects(name: bytes) -> None:
    for key, expected in ((USER, 200), (ADMIN, 200), ("wrong", 401), ("", 401)):
        assert status(BOTH, None, "/v1/completions", more=[(name, key.encode())])[0] == expected
    assert status(BOTH, None, more=[(name, ADMIN.encode())])[0] == 200
    assert status(BOTH, "wrong", "/v1/completions", more=[(name, USER.encode())])[0] == 401


@pytest.mark.parametrize(("keys", "key"), [(USERS, USER), (NONE, None)])
def test_a_closed_door_says_which_flag_opens_it(keys: Keys, key: str | None) -> None:
    code, text = status(keys, key, is_local=False)
    assert code == 403
    assert "--admin-api-key" in text
    assert "PermissionDeniedError" in text


BAD = (
    f"Bearer {USER}, Bearer x",
    USER,
    f"Basic {USER}",
    f"Bearer\t{USER}",
    "Bearer",
    "Bearer \xff",
    "Bearer " + "a" * 60_000,
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models?api_key=" + USER, "/reset_prefix_cache"])
@pytest.mark.parametrize("value", BAD, ids=range(len(BAD)))
def test_what_is_no_key_is_answered_by_one_sentence(path: str, value: str) -> None:
    code, text = status(BOTH, None, path, more=[(b"authorization", value.encode("latin-1"))])
    assert code == 401
    assert "a valid API key is needed, as `Authorization: Bearer KEY`" in text


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_two_keys_in_one_place_are_none(name: bytes) -> None:
    """In either order: what a proxy checked may be the other one."""
    start = b"Bearer " if name == b"authorization" else b""
    two = [(name, start + USER.encode()), (name, start + b"wrong")]
    for given in (two, two[::-1]):
        assert status(BOTH, None, "/v1/completions", more=given)[0] == 401
    assert status(BOTH, None, "/v1/completions", more=two[:1] * 2)[0] == 200
