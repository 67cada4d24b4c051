"""Rows of a batch, in OpenAI's format. Input: {custom_id, method, url, body} for each request. Output: {id, custom_id,
response, error} for each input row, including bad ones."""

import json
import os
from typing import Any, NamedTuple

import msgspec

from vllm_lite.client.text.surrogates import without_halves
from vllm_lite.server.route_table import ROUTES

ENDPOINTS = tuple(route.path for route in ROUTES if route.batch is not None)


class BatchRequest(NamedTuple):
    """One row of the input; lines are counted from 1."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


class Bad(NamedTuple):
    """A row that is not a valid request. `custom_id` is None if it has none."""

    line: int
    custom_id: str | None
    code: str
    message: str


Entry = BatchRequest | Bad


def decoded(data: bytes, kind: Any = Any) -> Any:
    """Decode JSON as the server does: halves of surrogate pairs are replaced. Raises DecodeError, ValueError or
    RecursionError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError):
        mended = without_halves(data)
        if mended == data:
            raise
        return msgspec.json.decode(mended, type=kind)


def parse(number: int, line: bytes) -> Entry:
    try:
        given = decoded(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return Bad(number, None, "invalid_json", f"this is not JSON: {error}")
    return check(number, given)


def check(number: int, given: Any) -> Entry:
    custom_id = given.get("custom_id") if isinstance(given, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        return Bad(number, None, "invalid_request", "a request needs a custom_id, a text")
    method, url, body = given.get("method", "POST"), given.get("url"), given.get("body")
    if method != "POST":
        return Bad(number, custom_id, "invalid_method", f"method must be POST, got {str(method)[:50]!r}")
    if url not in ENDPOINTS:
        return Bad(
            number, custom_id, "invalid_url", f"url must be one of {', '.join(ENDPOINTS)}, got {str(url)[:50]!r}"
        )
    if not isinstance(body, dict):
        return Bad(number, custom_id, "invalid_request", f"body must be an object, got {json.dumps(body)[:50]}")
    if body.get("stream"):
        return Bad(number, custom_id, "invalid_request", "stream must not be set: a batch is answered in whole")
    return BatchRequest(number, custom_id, url, body)


def repeated(entry: Entry) -> Bad:
    """Make the bad row for a repeated custom_id. Its own is None, so that ids of the output are unique."""
    message = f"custom_id {(entry.custom_id or '')[:100]!r} stands on an earlier line already"
    return Bad(entry.line, None, "duplicate_custom_id", message)


def answer(custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Make the output line of a server's answer."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _id(), "custom_id": custom_id, "response": response, "error": None}


def failure(bad: Bad) -> dict[str, Any]:
    """Make the output line of a row that was not sent."""
    error = {"code": bad.code, "message": bad.message, "line": bad.line}
    return {"id": _id(), "custom_id": bad.custom_id, "response": None, "error": error}


def _id() -> str:
    return f"batch_req_{os.urandom(12).hex()}"
