"""Tools beside plain functions that a client of /v1/responses brings, for tests."""

from typing import Any

import msgspec
import pydantic
from openai.types.responses.response_input_item import ResponseInputItem
from openai.types.responses.response_item import ResponseItem

ANY_ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseItem | ResponseInputItem)
SEARCH = {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {"type": "object"}}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "description": "Start one.", "parameters": {"type": "object"}}],
}
DEEP = msgspec.json.decode(b"[" * 900 + b"]" * 900)
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "text"}}
