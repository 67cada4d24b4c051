"""Ollama's routes that manage models: list, load, unload, pull, copy and delete.

Chats and completions are forwarded to the models; the router only reads their `keep_alive`.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vllm_lite import __version__
from vllm_lite.checkpoint.hub import HubSource, is_hub_id, local_folder
from vllm_lite.checkpoint.hub_cache import remove_cached
from vllm_lite.checkpoint.library_names import hub_id
from vllm_lite.errors import ConfigError, VllmLiteError
from vllm_lite.server.http.application import gets, posts
from vllm_lite.server.http.auth import require_admin
from vllm_lite.server.http.body import BodyReader
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.ollama.answers import LINES, created_at, said
from vllm_lite.server.ollama.information import NEVER, iso, shown_of
from vllm_lite.server.openai.errors import ApiError, public_text
from vllm_lite.server.router.catalog import Entry, hub_entry, served_names
from vllm_lite.server.router.fleet import Fleet
from vllm_lite.server.router.forward import ForwardedAnswer, RoutedBody, read_routed
from vllm_lite.server.router.known import describe, forget_hub, ollama_details, ollama_entry
from vllm_lite.server.router.member import FleetModel

PROGRESS_S = 0.25
MAX_PULLS = 2
_CONTENTS = ("messages", "prompt", "input", "suffix", "images")
"""Fields that have the content of a request; clients also send them empty."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)")


def keep_alive_s(given: str | float) -> float | None:
    """Convert a `keep_alive`, "5m" or 300, to seconds; None for a negative one, which means for ever. Raises
    ApiError."""
    if isinstance(given, int | float):
        return None if given < 0 else float(given)
    text = given.strip()
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return keep_alive_s(float(text))
    sign, parts = text.startswith("-"), _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text.lstrip("+-"):
        raise ApiError(
            400, f"keep_alive must be a number of seconds or like 5m or 1h30m, got {text[:64]!r}", "keep_alive"
        )
    return None if sign else sum(float(number) * _UNITS[unit] for number, unit in parts)


class OllamaManagement:
    def __init__(self, fleet: Fleet, reader: BodyReader) -> None:
        self._fleet = fleet
        self._reader = reader
        self._num_pulls = 0

    def routes(self) -> list[Route]:
        about = {"/api/tags": self.tags, "/api/ps": self.running, "/api/version": self.version}
        of_model = {"/api/show": self.show, "/api/pull": self.pull, "/api/copy": self.copy}
        forwarded = dict.fromkeys(("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"), self.generate)
        delete = Route("/api/delete", self.delete, methods=["DELETE"])
        return [*gets(about), *posts({**of_model, **forwarded}), delete]

    async def version(self, _: Request) -> Response:
        return as_json({"version": __version__})

    async def tags(self, _: Request) -> Response:
        members = list(self._fleet.members.values())
        return as_json({"models": [entry for member in members for entry in _entries(member)]})

    async def running(self, _: Request) -> Response:
        """Answer with the models that are loaded, loading or asleep."""
        loaded = [
            member for member in self._fleet.members.values() if member.state in ("loaded", "loading", "sleeping")
        ]
        return as_json({"models": [_running(member) for member in loaded]})

    async def show(self, request: Request) -> Response:
        routed = await read_routed(request, self._reader)
        member = self._named(routed)
        if member.state == "loaded":
            return ForwardedAnswer(self._fleet, member, request, routed, self._reader)
        return as_json(_shown(member))

    async def generate(self, request: Request) -> Response:
        """Forward a chat, completion or embedding to its model. Without content, a `keep_alive` of 0 unloads the
        model."""
        routed = await read_routed(request, self._reader)
        member, kept = self._named(routed), routed.field("keep_alive", str | float | None)
        if kept is not None:
            seconds = keep_alive_s(kept)
            if seconds == 0 and not any(routed.field(name, Any) for name in _CONTENTS):
                self._fleet.let_go(member)
                return _unloaded(request, routed)
            self._fleet.keep(member, seconds)
        return ForwardedAnswer(self._fleet, member, request, routed, self._reader)

    async def copy(self, request: Request) -> Response:
        """Add a name for a model, until the server ends."""
        require_admin(request)
        routed = await read_routed(request, self._reader)
        source, name = routed.field("source", str | None), routed.field("destination", str | None)
        if not source or not name:
            raise ApiError(400, "give the model as source, and its other name as destination")
        entry = self._fleet.find(source).entry
        if entry.config is None:
            raise ApiError(400, f"{source!r} cannot be copied: {entry.trouble}")
        copied = msgspec.structs.replace(entry.config, served_model_name=served_names(name))
        new = Entry(name, copied, is_from_hub=entry.is_from_hub, is_added=True)
        try:
            self._fleet.catalog.add(new)
        except ConfigError as error:
            raise ApiError(400, str(error), "destination") from error
        self._fleet.add(new)
        return Response()

    async def delete(self, request: Request) -> Response:
        """Delete a model that was pulled or copied; its files are removed with its last name."""
        require_admin(request)
        routed = await read_routed(request, self._reader)
        member = self._named(routed)
        entry = member.entry
        of_same = [each for each in self._fleet.members.values() if each.entry.config and entry.config]
        others = [each for each in of_same if each is not member and each.entry.config.model == entry.config.model]  # type: ignore[union-attr]
        if not (entry.is_from_hub or entry.is_added):
            raise ApiError(403, f"{entry.name!r} is in the server's settings (--models); take it out there")
        await self._fleet.remove(member)
        if entry.config is not None and entry.is_from_hub and not others:
            try:
                await asyncio.to_thread(remove_cached, entry.config.model)
            except VllmLiteError as error:
                raise ApiError(400, str(error)) from error
            forget_hub()
        return Response()

    async def pull(self, request: Request) -> Response:
        """Download a model from the hub, and serve it under its hub id."""
        routed = await read_routed(request, self._reader)
        given = routed.field("model", str | None) or routed.field("name", str | None) or ""
        is_stream = routed.field("stream", bool | None) is not False
        if self._fleet.catalog.find(given) is not None:
            return _lines([{"status": "success"}], is_stream)
        require_admin(request)
        try:
            name = hub_id(given)
        except VllmLiteError as error:
            raise ApiError(404, str(error), "model") from error
        if not is_hub_id(name):
            raise ApiError(
                404, f"{given[:200]!r} is not a hub id; give ORG/REPO, or ORG/REPO:LABEL of a GGUF file", "model"
            )
        if self._num_pulls >= MAX_PULLS:
            raise ApiError(
                429, f"{self._num_pulls} models are being pulled; try again later", headers={"Retry-After": "30"}
            )
        pulling = asyncio.ensure_future(self._pulled(name))
        if is_stream:
            return StreamingResponse(_progress(name, pulling), media_type=LINES)
        try:
            await pulling
        except VllmLiteError as error:
            raise ApiError(400, public_text(error), "model") from error
        return _lines([{"status": "success"}], is_stream)

    async def _pulled(self, name: str) -> None:
        """Download a model, and add it to the fleet. Raises VllmLiteError."""
        self._num_pulls += 1
        try:
            await asyncio.to_thread(local_folder, HubSource(name), lambda: self._fleet.is_draining)
        finally:
            self._num_pulls -= 1
        await asyncio.to_thread(forget_hub)
        if self._fleet.catalog.find(name) is None:
            entry = hub_entry(self._fleet.catalog, name)
            self._fleet.catalog.add(entry)
            self._fleet.add(entry)

    def _named(self, routed: RoutedBody) -> FleetModel:
        return self._fleet.find(routed.field("model", str | None) or routed.field("name", str | None))


def _entries(member: FleetModel) -> list[dict[str, Any]]:
    if member.entry.config is None:
        return []
    known = describe(member.entry)
    return [ollama_entry(member.entry, name, known) for name in (*member.entry.names, *member.entry.adapters)]


def _running(member: FleetModel) -> dict[str, Any]:
    known = describe(member.entry)
    keep_s = None if member.entry.pin else member.keep_alive_s
    length = (member.entry.config.max_model_len if member.entry.config else None) or known.facts.context_length
    return {
        **ollama_entry(member.entry, member.entry.name, known),
        "size": member.status.held_bytes or known.num_bytes,
        "expires_at": NEVER if keep_s is None else iso(time.time() + keep_s),
        "size_vram": 0 if member.state == "sleeping" else member.status.held_bytes,
        "context_length": length or 0,
    }


def _shown(member: FleetModel) -> dict[str, Any]:
    """The answer of /api/show for an unloaded model."""
    known = describe(member.entry)
    name, length, when = member.entry.name, known.facts.context_length, iso(known.modified_s)
    return shown_of(name, ollama_details(known), length, known.capabilities, when)


def _unloaded(request: Request, routed: RoutedBody) -> Response:
    kind = "chat" if request.scope["path"].endswith("/chat") else "generate"
    model = routed.field("model", str | None) or routed.field("name", str | None)
    fields = {"model": model, "created_at": created_at(), **said(kind, {}), "done": True, "done_reason": "unload"}  # type: ignore[arg-type]
    return _lines([fields], routed.field("stream", bool | None) is not False)


def _lines(objects: list[dict[str, Any]], is_stream: bool) -> Response:
    body = b"".join(msgspec.json.encode(each) + b"\n" for each in objects)
    return Response(body, media_type=LINES if is_stream else "application/json")


async def _progress(name: str, pulling: "asyncio.Task[None]") -> AsyncIterator[bytes]:
    """Yield progress lines while a model is downloaded. The download continues if the client disconnects."""
    yield msgspec.json.encode({"status": "pulling manifest"}) + b"\n"
    while not pulling.done():
        await asyncio.wait((pulling,), timeout=PROGRESS_S)
        if not pulling.done():
            yield msgspec.json.encode({"status": f"pulling {name}"}) + b"\n"
    failure = pulling.exception()
    last = {"status": "success"} if failure is None else {"error": str(failure)}
    yield msgspec.json.encode(last) + b"\n"
