"""Who may call what: users' keys, admins' keys, and servers without, which look at names, pages and proxies."""

import socket
from typing import Any

import pytest
from starlette.requests import Request

from vllm_lite.server import config as config_module
from vllm_lite.server.app import DIALECTS
from vllm_lite.server.config import Keys, ServeConfig
from vllm_lite.server.http.auth import AuthMiddleware, require_admin
from vllm_lite.server.http.callers import Callers
from vllm_lite.server.openai.errors import ApiError

USER, ADMIN = "user-key", "admin-key"


async def answer_to(
    keys: Keys, callers: Callers, headers: Any, path: str = "/reset_prefix_cache", version: str = "1.1"
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

    scope = {"type": "http", "path": path, "method": "POST", "headers": list(headers), "http_version": version}
    await AuthMiddleware(app, keys, callers=callers, dialects=DIALECTS)(scope, None, send)  # type: ignore[arg-type]
    assert any(name == b"x-request-id" for name, _ in sent[0]["headers"])
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


async def status(
    keys: Keys, key: str | None, path: str = "/reset_prefix_cache", *, is_local: bool = True, more: Any = ()
) -> tuple[int, str]:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    return await answer_to(keys, Callers("127.0.0.1", is_local), [*headers, *more], path)


async def test_no_web_page_changes_a_server_without_keys() -> None:
    """Any page can post to this machine from a browser on it; the browser sends the page's origin."""
    page = [(b"origin", b"https://example.org")]
    assert (await status(Keys(), None, more=page))[0] == 403
    assert (await status(Keys((), (ADMIN,)), ADMIN, more=page))[0] == 200


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
async def test_callers_that_may_change_the_server(keys: Keys, key: str | None, is_local: bool, expected: int) -> None:
    assert (await status(keys, key, is_local=is_local))[0] == expected


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [(BOTH, ADMIN, 200), (BOTH, USER, 200), (BOTH, None, 401), (ADMINS, None, 200), (NONE, None, 200)],
)
async def test_callers_that_may_generate(keys: Keys, key: str | None, expected: int) -> None:
    assert (await status(keys, key, "/v1/completions", is_local=False))[0] == expected
    assert (await status(keys, None, "/health", is_local=False))[0] == 200


@pytest.mark.parametrize("name", [b"x-api-key", b"api-key"])
async def test_a_key_may_stand_in_headers_of_other_dialects(name: bytes) -> None:
    for key, expected in ((USER, 200), (ADMIN, 200), ("wrong", 401), ("", 401)):
        assert (await status(BOTH, None, "/v1/completions", more=[(name, key.encode())]))[0] == expected
    assert (await status(BOTH, None, more=[(name, ADMIN.encode())]))[0] == 200
    assert (await status(BOTH, "wrong", "/v1/completions", more=[(name, USER.encode())]))[0] == 401


@pytest.mark.parametrize(("keys", "key"), [(USERS, USER), (NONE, None)])
async def test_a_closed_route_names_the_flag_that_opens_it(keys: Keys, key: str | None) -> None:
    code, text = await status(keys, key, is_local=False)
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
async def test_invalid_keys_are_answered_by_one_sentence(path: str, value: str) -> None:
    code, text = await status(BOTH, None, path, more=[(b"authorization", value.encode("latin-1"))])
    assert code == 401
    assert "a valid API key is needed, as `Authorization: Bearer KEY`" in text


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
async def test_two_keys_in_one_place_are_none(name: bytes) -> None:
    """In either order, because a proxy may have checked the other one."""
    start = b"Bearer " if name == b"authorization" else b""
    two = [(name, start + USER.encode()), (name, start + b"wrong")]
    for given in (two, two[::-1]):
        assert (await status(BOTH, None, "/v1/completions", more=given))[0] == 401
    assert (await status(BOTH, None, "/v1/completions", more=two[:1] * 2))[0] == 200


# ---- names, pages and proxies


async def called(headers: dict[str, str], path: str = "/v1/models", **settings: Any) -> tuple[int, str]:
    """Return the answer of a server of these settings to a request with these headers."""
    config = ServeConfig(**settings)
    key = [(b"authorization", f"Bearer {key}".encode()) for key in config.api_key]
    given = [*key, *((name.lower().encode(), value.encode()) for name, value in headers.items())]
    return await answer_to(config.keys(), Callers.of(config, config.keys()), given, path)


OWN_NAMES = (
    *("localhost", "LOCALHOST:8000", "localhost.", "demo.localhost:80", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000"),
    *("[::ffff:127.0.0.1]", "192.168.1.5:8000", "[fe80::1]", "", ":8000", "host.docker.internal:8000"),
    *(socket.gethostname(), socket.gethostname().upper() + ":1"),
)
OTHER_NAMES = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"),
    *("internal.evil.example", "evilinternal", "a b", "127.0.0.1@evil.example", "1.2.3", "[evil.example]:80"),
)


@pytest.mark.parametrize("name", OWN_NAMES)
async def test_a_server_that_trusts_its_machine_answers_to_its_names(name: str) -> None:
    assert (await called({"Host": name}))[0] == 200
    assert (await called({}))[0] == 200


@pytest.mark.parametrize("name", OTHER_NAMES)
async def test_no_page_reaches_it_by_a_name_that_resolves_to_it(name: str) -> None:
    """DNS rebinding: the browser takes the page for the server's own, but sends the name that it has resolved."""
    for path in ("/v1/models", "/health", "/metrics", "/"):
        code, text = await called({"Host": name, "Origin": f"http://{name}", "Sec-Fetch-Site": "same-origin"}, path)
        assert code == 403
        assert "--allowed-hosts" in text
    two = [(b"host", b"localhost"), (b"host", name.encode())]
    for given in (two, two[::-1]):
        config = ServeConfig()
        assert (await answer_to(Keys(), Callers.of(config, Keys()), given, "/v1/models"))[0] == 403


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"admin_api_key": (ADMIN,)}, False),
        ({"allowed_hosts": ("other.example",)}, False),
        ({"allowed_hosts": ()}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("other.example",)}, False),
        ({"api_key": (USER,), "allowed_hosts": ("other.example",)}, False),
        ({"allowed_hosts": ("chat.example.org",)}, True),
        ({"allowed_hosts": ("other.example", "CHAT.example.org.")}, True),
        ({"allowed_hosts": ("*.example.org",)}, True),
        ({"allowed_hosts": ("*",)}, True),
        ({"host": "0.0.0.0"}, True),
        ({"host": "chat.example.org", "allowed_hosts": ()}, True),
        ({"api_key": (USER,)}, True),
        ({"uds": "/tmp/socket"}, True),
    ],
)
async def test_other_host_names(settings: dict[str, Any], is_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "address_of", lambda host: host)
    assert (await called({"Host": "chat.example.org:443"}, **settings))[0] == (200 if is_open else 403)


async def test_a_wildcard_is_of_whole_labels() -> None:
    for name in ("example.org", "evilexample.org", "chat.example.org.evil.example"):
        assert (await called({"Host": name}, allowed_hosts=("*.example.org",)))[0] == 403


async def test_a_name_is_refused_in_one_sentence_of_the_dialect() -> None:
    sentence = "this server does not answer to the name 'evil.example' (header Host); start it with --allowed-hosts"
    for path, form in (
        ("/v1/chat/completions", '{"error":{"message":"%s'),
        ("/v1/messages", '{"type":"error","error":{"type":"permission_error","message":"%s'),
        ("/api/chat", '{"error":"%s'),
    ):
        code, text = await called({"Host": "evil.example:8000"}, path)
        assert (code, text[: len(form % sentence)]) == (403, form % sentence)
    assert "--allowed-hosts NAME" in (await called({"Host": "a; rm -rf b"}))[1]
    assert len((await called({"Host": "x" * 60_000}))[1]) < 1000


OWN_PAGES = (
    *(
        "http://localhost:3000",
        "https://localhost",
        "http://127.0.0.1:8000",
        "http://[::1]:5",
        "http://tauri.localhost",
    ),
    *("app://obsidian.md", "tauri://localhost", "vscode-webview://1a2b", "file://", "capacitor://localhost"),
)
OTHER_PAGES = (
    *("https://evil.example", "http://localhost.evil.example", "http://evillocalhost", "http://127.0.0.1.evil.example"),
    *(
        "null",
        "chrome-extension://abc",
        "http://localhost:3000.evil.example",
        "https://evil.example/app://x",
        "evil",
        "",
    ),
    *("http://0.0.0.0:8000", "http://localhost@evil.example"),
)


@pytest.mark.parametrize("origin", OWN_PAGES)
async def test_pages_of_this_machine_may_call_it(origin: str) -> None:
    assert (await called({"Host": "localhost:8000", "Origin": origin}))[0] == 200
    assert (await called({"Host": "localhost:8000", "Origin": origin}, allowed_origins=()))[0] == 403
    assert (await called({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, allowed_origins=()))[0] == 200


@pytest.mark.parametrize("origin", OTHER_PAGES)
async def test_pages_of_strangers_may_not(origin: str) -> None:
    code, text = await called({"Host": "localhost:8000", "Origin": origin})
    assert code == 403
    assert "--allowed-origins" in text
    assert "--allowed-origins null" not in text
    assert (await called({"Origin": origin}))[0] == 403
    assert (await called({"Host": "localhost:8000", "Origin": origin}, allowed_origins=("*",)))[0] == 200
    assert (await called({"Host": "localhost:8000", "Origin": origin}, api_key=(USER,)))[0] == 200
    assert (await called({"Host": "localhost:8000", "Origin": origin}, host="0.0.0.0"))[0] == 200


async def test_the_page_that_a_proxy_shows_is_the_server_s_own() -> None:
    """Whether the proxy keeps the Host header or writes its own."""
    page = {"Origin": "https://chat.example.org"}
    for host in ("chat.example.org", "127.0.0.1:8000"):
        assert (await called({"Host": host, **page}))[0] == 403
        assert (await called({"Host": host, **page}, allowed_hosts=("chat.example.org",)))[0] == 200
    assert (await called({"Host": "localhost", **page}, allowed_origins=("https://chat.example.org",)))[0] == 200
    assert (await called({"Host": "localhost", **page}, allowed_origins=("https://other.example.org",)))[0] == 403


FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via")


@pytest.mark.parametrize("name", FORWARDED)
async def test_a_proxy_does_not_lend_its_machine_to_strangers(name: str) -> None:
    """The proxy may run on this machine, and the client anywhere."""
    for settings in ({}, {"uds": "/tmp/socket"}, {"allowed_hosts": ("*",)}):
        code, text = await called({"Host": "localhost", name: "203.0.113.7"}, "/reset_prefix_cache", **settings)
        assert (code, "closed to what comes through a proxy" in text) == (403, True)
        assert "--admin-api-key" in text
    assert (await called({"Host": "localhost", name: "203.0.113.7"}))[0] == 200


async def test_hosts_of_this_machine() -> None:
    admin = "/reset_prefix_cache"
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "[::ffff:127.0.0.1]", "demo.localhost"):
        assert (await called({"Host": host}, admin))[0] == 200
    for host in ("192.168.1.5", "chat.example.org", "host.docker.internal"):
        code, text = await called({"Host": host}, admin, allowed_hosts=("*",))
        assert (code, "another name than localhost" in text) == (403, True)
    assert (await called({"Host": "mybox:80"}, admin, host="127.0.0.1", uds="/tmp/socket"))[0] == 200, (
        "no name led there"
    )
    assert (await called({"Host": "127.0.0.5:80"}, admin, host="127.0.0.5"))[0] == 200
    config = ServeConfig()
    assert (await answer_to(Keys(), Callers.of(config, Keys()), [], version="1.0"))[0] == 403, "as nginx calls it"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://localhost:3000"}, 403),
    ],
)
async def test_web_pages_are_recognized_by_their_headers(headers: dict[str, str], expected: int) -> None:
    """Requests for images and scripts of a page have no Origin header; a typed address has no Sec-Fetch-Site."""
    code, text = await called({"Host": "localhost", **headers}, "/reset_prefix_cache")
    assert (code, "closed to web pages" in text) == (expected, expected == 403)
