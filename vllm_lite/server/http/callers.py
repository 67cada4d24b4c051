"""Callers: checks of the Host header, the origin of web pages, and proxies.

A host name that an attacker owns can resolve to 127.0.0.1 (DNS rebinding). The attacker's page, in a browser on this
machine, then has the same origin as a local server, and no browser rule keeps it from calling. But it cannot hide the
name, which browsers send as Host. So a server that trusts its machine (it listens on loopback and has no keys) only
answers to names of this machine, and only to its pages. Addresses are accepted: they involve no DNS.
"""

import re
import socket
from ipaddress import ip_address
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from vllm_lite.server.config import Keys, ServeConfig, is_loopback
from vllm_lite.server.openai.errors import ApiError, shown

LOCAL_PAGES = (
    r"https?://(localhost|[\w.-]+\.localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?"
    r"|(app|capacitor|file|ionic|tauri|vscode-file|vscode-webview)://.*"
)
"""Origins of pages that this machine serves, and of apps with web views: Ollama's list, including those of phones."""
_IS_LOCAL_PAGE = re.compile(LOCAL_PAGES).fullmatch
_FORWARDED = (b"x-forwarded-", b"x-real-ip", b"forwarded", b"via")
"""Headers that proxies add, or their prefixes."""
_PRIVATE = ("*.internal",)
"""A domain in which nobody can register a name. Containers call their host by one."""
_NO_PAGE = ("none", "")
_OWN_PAGE = "same-origin"
_SAFE = re.compile(r"[\w.:/\[\]-]{1,200}")


class Callers(NamedTuple):
    """The rules of one server, which listens at `host`, "" for a Unix socket.

    It answers to the host names `hosts`, None for any, and to pages of `origins`, None if only the browser decides.
    `named` are the host names in its settings.
    """

    host: str
    is_local: bool
    hosts: frozenset[str] | None = None
    named: frozenset[str] = frozenset()
    origins: frozenset[str] | None = None
    local_pages: bool = False

    @classmethod
    def of(cls, config: ServeConfig, keys: Keys) -> "Callers":
        """Make the rules from the settings. Host names and origins are checked by default only if the server trusts its
        machine; with keys, or open to a network, only if the settings name some: pages have no key, and names prove
        nothing."""
        host = "" if config.uds is not None else config.host.lower()
        trusts, names = config.trusts_machine(keys), config.allowed_hosts
        named = frozenset(name.lower().rstrip(".") for name in names or ())
        hosts = None
        if "*" not in (names or ()) and (trusts or names is not None):
            hosts = frozenset({host, socket.gethostname().lower(), *_PRIVATE, *named})
        origins = frozenset(config.allowed_origins or ())
        looks = trusts and "*" not in origins
        local_pages = trusts and config.allowed_origins is None
        return cls(host, config.is_local, hosts, named, origins if looks else None, local_pages)

    def refusal(self, headers: Headers) -> ApiError | None:
        """Return the error for a host name or an origin that is not allowed."""
        for name in map(name_in, headers.getlist("host") if self.hosts is not None else ()):
            if not self._answers_to(name):
                text = f"this server does not answer to the name {shown(name)!r} (header Host)"
                named = name if _SAFE.fullmatch(name) else "NAME"
                return ApiError(403, f"{text}; start it with --allowed-hosts {named}")
        origin = headers.get("origin")
        if self.origins is None or origin is None or self._may_call(origin, headers.get("host", "")):
            return None
        if not _SAFE.fullmatch(origin) or origin == "null":
            text = "pages without an origin, such as files, may not call this server: serve them from localhost"
            return ApiError(403, f"{text}, or start it with --allowed-origins '*'")
        text = f"pages of {origin} (header Origin) may not call this server"
        return ApiError(403, f"{text}; start it with --allowed-origins {origin}")

    def strangers(self, scope: Scope, *, but_own_pages: bool = False) -> str | None:
        """Return the possible sender of a request without a key if it is not certainly a program of this machine; None
        if it is. Pages of the server itself count as strangers, unless `but_own_pages`."""
        headers = Headers(scope=scope)
        if is_page(headers) and not (but_own_pages and headers.get("sec-fetch-site") == _OWN_PAGE):
            return "web pages"
        if not self.is_local:
            return "a network"
        if scope.get("http_version") == "1.0" or any(name.startswith(_FORWARDED) for name, _ in scope["headers"]):
            return "what comes through a proxy"  # nginx speaks HTTP/1.0 and adds nothing, unless it is set up to
        names = {name_in(given) for given in headers.getlist("host") if self.host} - {"", self.host}
        return None if all(map(is_loopback, names)) else "what calls it by another name than localhost"

    def _answers_to(self, name: str) -> bool:
        hosts = self.hosts or frozenset()
        if not name or name in hosts or is_loopback(name) or _is_address(name):
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in hosts)

    def _may_call(self, origin: str, host: str) -> bool:
        """Whether an origin may call: the server's own, under any name that a proxy gives it, or an allowed one."""
        where = origin.partition("://")[2].lower()
        is_own = bool(where) and (where == host.lower() or name_in(where) in self.named)
        if is_own or origin in (self.origins or ()):
            return True
        return self.local_pages and _IS_LOCAL_PAGE(origin) is not None


def is_page(headers: Headers) -> bool:
    """Whether a web page sent the request, by headers that browsers add and no page can omit. A URL typed into a
    browser comes from no page."""
    return "origin" in headers or headers.get("sec-fetch-site", "") not in _NO_PAGE


def name_in(host: str) -> str:
    """Return the name or address in a Host header, without its port."""
    name = host.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
