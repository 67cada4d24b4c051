"""OpenAI's batch files. In: a line of {custom_id, method, url, body} for each request. Out: a line of {id, custom_id,
response, error} for each answer, in the order in which they came.

The output is also the state of the batch. A run appends whole lines; after any end the next run reads which requests
are answered, cuts off an incomplete last line, and goes on.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from vllm_lite.errors import ConfigError

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/systemone",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
SYNC_S = 1.0
"""At most so much work is lost when the machine dies; the death of a process loses none."""


class BatchRequest(NamedTuple):
    """One line of the input, counted from 1."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


class Bad(NamedTuple):
    """A line that is no valid request. Without a `custom_id` of its own it gets no line in the output."""

    line: int
    custom_id: str | None
    code: str
    message: str


def check_path(path: str, flag: str) -> None:
    """Raises ConfigError for a URL, which is no local file."""
    if "://" in path:
        raise ConfigError(f"{flag} must be a file on this machine, got {path!r}; download or upload it yourself")


def count_lines(path: str) -> int:
    """Count the lines that are not empty. Raises ConfigError if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error.strerror or error}") from error


def read(path: str) -> Iterator[BatchRequest | Bad]:
    """Parse the lines one by one, as they are taken."""
    seen: set[str] = set()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                entry = parse(number, line)
                if entry.custom_id is not None and entry.custom_id in seen:
                    message = f"custom_id {entry.custom_id!r} stands on an earlier line already"
                    entry = Bad(number, None, "duplicate_custom_id", message)
                elif entry.custom_id is not None:
                    seen.add(entry.custom_id)
                yield entry


def parse(number: int, line: bytes) -> BatchRequest | Bad:
    """Parse one line of the input."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Bad(number, None, "invalid_json", f"this is not JSON: {error}")
    custom_id = given.get("custom_id") if isinstance(given, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        return Bad(number, None, "invalid_request", "a request needs a custom_id, a text")
    method, url, body = given.get("method", "POST"), given.get("url"), given.get("body")
    if method != "POST":
        return Bad(number, custom_id, "invalid_method", f"method must be POST, got {method!r}")
    if url not in ENDPOINTS:
        return Bad(number, custom_id, "invalid_url", f"url must be one of {', '.join(ENDPOINTS)}, got {url!r}")
    if not isinstance(body, dict):
        return Bad(number, custom_id, "invalid_request", f"body must be an object, got {json.dumps(body)[:50]}")
    if body.get("stream"):
        return Bad(number, custom_id, "invalid_request", "stream must not be set: a batch is answered in whole")
    return BatchRequest(number, custom_id, url, body)


def answer(custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Make the line of the output for a server's answer."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _id(), "custom_id": custom_id, "response": response, "error": None}


def failure(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Make the line of the output for a line that was not sent."""
    error = {"code": code, "message": message}
    return {"id": _id(), "custom_id": custom_id, "response": None, "error": error}


def is_failure(line: dict[str, Any]) -> bool:
    """Whether this line of the output reports a failure."""
    return line["error"] is not None or line["response"]["status_code"] != 200


def _id() -> str:
    return f"batch_req_{os.urandom(12).hex()}"


class BatchResults:
    """The output file, locked while it is open. `done` holds the custom_ids in it."""

    def __init__(self, path: str, *, retry_failed: bool = False) -> None:
        """`retry_failed` removes the failures. Raises ConfigError if it is not an output file."""
        self.done: set[str] = set()
        self.num_failed = 0
        self._synced_s = time.monotonic()
        try:
            self._fd = _locked(path)
            try:
                kept = self._scan(path)
                if retry_failed and self.num_failed:
                    self._replace(path, kept)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be written: {error.strerror or error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._fd)
        os.close(self._fd)

    def append(self, line: dict[str, Any]) -> None:
        """Write the line. It stays written even if this process dies now."""
        data = memoryview(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]
        self.done.add(line["custom_id"])
        self.num_failed += is_failure(line)
        if time.monotonic() - self._synced_s > SYNC_S:
            os.fsync(self._fd)
            self._synced_s = time.monotonic()

    def _scan(self, path: str) -> list[tuple[int, int]]:
        """Read the file, cut off an incomplete last line. Returns offset and length of each line that is no failure."""
        at = 0
        good = []
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._fd, at)
                    break
                try:
                    entry = json.loads(line)
                    self.done.add(entry["custom_id"])
                    failed = is_failure(entry)
                except (ValueError, LookupError, TypeError) as error:
                    text = f"{path!r} holds something else than answers, in line {number}; choose another --output-file"
                    raise ConfigError(text) from error
                self.num_failed += failed
                if not failed:
                    good.append((at, len(line)))
                at += len(line)
        return good

    def _replace(self, path: str, kept: list[tuple[int, int]]) -> None:
        """Replace the file by one with `kept` only, atomically."""
        self.done.clear()
        self.num_failed = 0
        new = f"{path}.new"
        Path(new).unlink(missing_ok=True)
        fd = _locked(new)
        with open(path, "rb") as old:
            for at, length in kept:
                old.seek(at)
                line = old.read(length)
                self.done.add(json.loads(line)["custom_id"])
                os.write(fd, line)
        os.fsync(fd)
        os.replace(new, path)
        os.close(self._fd)
        self._fd = fd


def _locked(path: str) -> int:
    """Open and lock `path` for appending. Raises ConfigError if another run has locked it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(f"another run-batch is writing {path!r}; wait for it, or choose another file") from error
    return fd
