"""Makes requests from the rows of a table.

A table may have the columns of OpenAI's format, `custom_id`, `url` and `body`, where `body` is a JSON text or a struct.
Otherwise each row is a prompt: `messages` for a chat, `prompt` for a completion, or the column set by the user; fields
that all requests share come from --body.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.server.route_table import ROUTES
from vllm_lite.tools.batch.rows import ENDPOINTS, Bad, BatchRequest, Entry, check, decoded

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = {route.path: route.batch for route in ROUTES if route.batch}
"""The field of the body for the prompt, by route. Other routes take several texts, so their tables need a `body`."""
USUAL = ("messages", "prompt")


class RowMapper(NamedTuple):
    """The user's settings for tables."""

    endpoint: str | None = None
    prompt_column: str | None = None
    id_column: str | None = None
    body: Mapping[str, Any] = {}

    @property
    def is_set(self) -> bool:
        return self != RowMapper()

    def columns(self, names: Collection[str], shown: str) -> list[str]:
        """The columns of a table that are needed for requests, the id column first if it has one. Raises ConfigError if
        there are none."""
        wanted = (self.id_column or "custom_id", "method", "url", "body")
        found = [name for name in wanted if name in names]
        if self.id_column is not None and self.id_column not in names:
            raise ConfigError(f"{shown} has no column {self.id_column!r}; it has {_listed(names)}")
        if "body" in names and self.prompt_column is None:
            return found
        if self.endpoint not in (None, *PROMPTS):
            raise ConfigError(f"{shown} needs a column `body` for --endpoint {self.endpoint}: one text is not enough")
        prompt = self.prompt_column or next((name for name in USUAL if name in names), None)
        if prompt is None or prompt not in names:
            what = f"no column {prompt!r}" if prompt else "none of the columns body, messages and prompt"
            raise ConfigError(f"{shown} has {what}; name one of {_listed(names)} by --prompt-column")
        if prompt == wanted[0]:
            raise ConfigError(f"{shown} has ids in the column {prompt!r}; name another by --prompt-column")
        return [*(name for name in found if name == wanted[0]), prompt]

    def request(self, number: int, row: Mapping[str, Any]) -> Entry:
        """Make a request from a row with the columns of `columns`."""
        id_column = self.id_column or "custom_id"
        given = row.get(id_column)
        custom_id = f"row-{number}" if id_column not in row else str(given) if isinstance(given, str | int) else None
        if "body" in row and self.prompt_column is None:
            return self._whole(number, {**row, "custom_id": custom_id})
        if not custom_id:
            return Bad(number, None, "invalid_request", f"{id_column} must be a text or a number, got {given!r:.50}")
        (value,) = (value for name, value in row.items() if name != id_column)
        url = self.endpoint or (CHAT if isinstance(value, list) else COMPLETIONS)
        if value is None or value in ("", []):
            return Bad(number, custom_id, "invalid_request", "the prompt is empty")
        if url == CHAT and isinstance(value, str):
            value = [{"role": "user", "content": value}]
        return _sendable(BatchRequest(number, custom_id, url, {**self.body, PROMPTS[url]: _without_nulls(value)}))

    def _whole(self, number: int, row: dict[str, Any]) -> Entry:
        body = row["body"]
        if not isinstance(body, str):
            body = _without_nulls(body)
        else:
            try:
                body = decoded(body.encode())
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                return Bad(number, row["custom_id"], "invalid_json", f"body is not JSON: {error}")
        method, url = row.get("method") or "POST", row.get("url") or self.endpoint
        body = {**self.body, **body} if isinstance(body, dict) else repr(body)
        return _sendable(check(number, {"custom_id": row["custom_id"], "method": method, "url": url, "body": body}))


def make_mapper(endpoint: str | None, prompt_column: str | None, id_column: str | None, body: str | None) -> RowMapper:
    """Check the user's settings. Raises ConfigError."""
    if endpoint is not None and endpoint not in (ENDPOINTS if prompt_column is None else PROMPTS):
        known = ", ".join(ENDPOINTS if prompt_column is None else PROMPTS)
        raise ConfigError(f"--endpoint must be one of {known}, got {endpoint!r}")
    try:
        common = {} if body is None else decoded(body.encode(errors="surrogateescape"))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"--body must be JSON, got {body!r}: {error}") from error
    if not isinstance(common, dict) or common.get("stream"):
        raise ConfigError(f"--body must be a JSON object without stream, got {body!r}")
    return RowMapper(endpoint, prompt_column, id_column, common)


def _sendable(entry: Entry) -> Entry:
    """The row, or a bad row if it has values that JSON cannot represent, such as dates."""
    if isinstance(entry, BatchRequest):
        try:
            json.dumps(entry.body, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return Bad(entry.line, entry.custom_id, "invalid_request", f"the row cannot be sent: {error}")
    return entry


def _without_nulls(value: Any) -> Any:
    """Remove null values, with which tables fill the missing keys of a struct."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")
