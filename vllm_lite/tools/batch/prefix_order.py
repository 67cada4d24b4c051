"""Sorts the rows of a window so that rows with a common prefix follow each other.

A shared prefix is then computed once and used while it is cached; otherwise rows in between may evict it. Only the
order changes: answers keep their custom_ids, and a window bounds how far is read ahead.

Sending the first rows of several groups ahead of the others, so that these find the prefix computed, was measured, too:
fewer tokens were cached, as more prefixes must be in the cache at once.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from vllm_lite.tools.batch.rows import Bad, Entry

MAX_WINDOW_BYTES = 64 << 20


def in_prefix_order(entries: Iterable[Entry], num_rows: int) -> Iterator[Entry]:
    """Sort within windows of `num_rows`, or fewer if they exceed MAX_WINDOW_BYTES. With `num_rows` <= 1 the order
    stays."""
    if num_rows <= 1:
        yield from entries
        return
    window, num_bytes = list[tuple[bytes, Entry]](), 0
    for entry in entries:
        key = prefix_key(entry)
        window.append((key, entry))
        num_bytes += len(key)
        if len(window) == num_rows or num_bytes > MAX_WINDOW_BYTES:
            yield from _sorted(window)
            window, num_bytes = [], 0
    yield from _sorted(window)


def _sorted(window: list[tuple[bytes, Entry]]) -> Iterator[Entry]:
    window.sort(key=lambda keyed: keyed[0])
    return (entry for _, entry in window)


def prefix_key(entry: Entry) -> bytes:
    """A sort key: its bytes are equal as far as two prompts are; rows that cannot share a prefix differ at the
    start."""
    if isinstance(entry, Bad):
        return b""
    body = entry.body
    apart = (entry.url, *(body.get(name) for name in ("model", "cache_salt", "chat_template", "tools")))
    return b"".join((_json(apart), *_prompt(body)))


def _prompt(body: dict[str, Any]) -> Iterator[bytes]:
    messages = body.get("messages")
    if isinstance(messages, list):
        for message in messages:
            fields = message if isinstance(message, dict) else {"content": message}
            content = fields.get("content")
            yield _json(fields.get("role")) + b"\0"
            yield content.encode("utf-8", "replace") if isinstance(content, str) else _json(content)
            yield b"\0"
        return
    if body.get("instructions"):
        yield _json(body["instructions"]) + b"\0"
    prompt = next((body[name] for name in ("prompt", "state", "input", "query", "text_1") if body.get(name)), "")
    for part in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(part, str):
            yield part.encode("utf-8", "replace") + b"\0"
        elif isinstance(part, int) and 0 <= part < 1 << 32:  # one token, big-endian, as bytes are compared
            yield part.to_bytes(4, "big")
        else:
            yield _json(part)


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
