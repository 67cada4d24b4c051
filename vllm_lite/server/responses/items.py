"""Input items, checked and completed once, so that the items stored and listed are those shown to the model.

An item's id contains the id of its response, so that items are found without an index.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.forms import check_depth
from vllm_lite.server.responses.call_outputs import image_of, read_output
from vllm_lite.server.responses.client_tools import CALLS, OUTPUTS, BadItemError, Item, read_call

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "code_interpreter_call": "ci",
    "file_search_call": "fs",
    "mcp_call": "mcp",
    "program": "prog",
    "program_output": "progo",
}
"""Types of items that are shown to the model, and the prefixes of their ids. All others are dropped, and named in the
answer's Warning header: they have no content for a model, or are newer than this server."""
PROVIDED = {
    "code_interpreter_call": ("code", "outputs"),
    "file_search_call": ("queries", "results"),
    "mcp_call": ("server_label", "name", "arguments", "output", "error"),
    "program": ("code",),
    "program_output": ("result",),
}
"""Items of a provider's actions, and their fields that become assistant text."""
_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_OF_RESPONSE = re.compile(f"(?:{'|'.join(PREFIXES.values())})_(.{{1,200}})_i?[0-9]{{1,6}}")
_MAX_ID_CHARS = 256
_MARK = "vl1."


def item_id(kind: str, response_id: str, place: int, *, is_input: bool) -> str:
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{'i' if is_input else ''}{place}"


def response_of(reference: str) -> str | None:
    """Return the id of the response that an item belongs to; None for an id of another format."""
    match = _OF_RESPONSE.fullmatch(reference) if len(reference) <= _MAX_ID_CHARS else None
    return None if match is None else f"resp_{match.group(1)}"


def encrypted(text: str) -> str:
    """Encode reasoning for a client that stores no plain text of it. It is not secret: `content` has the same text."""
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def _decrypted(given: Any) -> str:
    """Decode the result of encrypted(); "" for another server's."""
    if not isinstance(given, str) or not given.startswith(_MARK):
        return ""
    try:
        return base64.urlsafe_b64decode(given.removeprefix(_MARK)).decode()
    except (binascii.Error, ValueError):
        return ""


# ---- fields of requests


def is_reference(item: Item) -> bool:
    return item.get("type") == "item_reference" or (item.get("type") is None and "id" in item and "role" not in item)


def references(given: str | Sequence[Item] | None) -> Iterator[tuple[int, str]]:
    """Yield index and id of each item that is a reference. Raises ApiError."""
    for place, item in enumerate(given if isinstance(given, list) else ()):
        if is_reference(item):
            reference = item.get("id")
            if not isinstance(reference, str):
                raise _wrong(place, "an item_reference needs the id of an item")
            yield place, reference


class Read(NamedTuple):
    """The input items that are shown to the model, and the paths of the others, for the Warning header."""

    items: list[Item]
    left_out: list[str]


def read(
    given: str | Sequence[Item] | None, response_id: str, found: Mapping[int, Item], *, sees: bool = False
) -> Read:
    """Check the input, and complete each item. `found` are the referenced items by index; `sees`: the model takes
    images. Raises ApiError."""
    if given is None:
        raise ApiError(400, "input is missing: give a text or a list of items", "input")
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    shown, left_out = list[Item](), list[str]()
    for place, item in enumerate(given):
        if place in found:
            shown.append(found[place])
            continue
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str):
            raise _wrong(place, f"type must be a text such as 'message', got {str(kind)[:60]!r}")
        if kind in PREFIXES:
            read_item, others = _completed(kind, item, place, response_id, sees)
            shown.append(read_item)
            left_out += [f"input[{place}] {other}" for other in others]
        else:
            left_out.append(f"input[{place}] {kind}")
    return Read(shown, left_out)


def _completed(kind: str, item: Item, place: int, response_id: str, sees: bool) -> tuple[Item, list[str]]:
    """Return the item with all its fields, and the types of its parts that are not shown to the model."""
    own = item.get("id")
    is_good = isinstance(own, str) and 0 < len(own) <= _MAX_ID_CHARS
    name = own if is_good else item_id(kind, response_id, place, is_input=True)
    others = list[str]()
    try:
        if kind in CALLS:
            fields = read_call({**item, "type": kind})
        elif kind in OUTPUTS:
            fields, others = read_output({**item, "type": kind}, sees)
        elif kind in PROVIDED:
            fields = {key: value for key, value in item.items() if key not in ("type", "id")}
        elif kind == "message":
            fields = _message(item, place, sees)
        else:
            fields = _READERS[kind](item, place)
    except BadItemError as error:
        raise _wrong(place, str(error), f".{error.field}") from error
    check_depth(fields, f"input[{place}]", f"input[{place}]")
    return {"type": kind, "id": name, **fields}, others


def _message(item: Item, place: int, sees: bool) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(place, f"role must be one of {', '.join(_ROLES)}, got {str(role)[:60]!r}", ".role")
    is_answer = role == "assistant"
    more: Item = {"annotations": []} if is_answer else {}
    kind, name, content = "output_text" if is_answer else "input_text", f"input[{place}].content", item.get("content")
    if not isinstance(content, list):
        content = [{"type": kind, "text": text} for text in _texts(content, name)]
    parts = [
        (image_of(part) if sees and role == "user" else None)
        or {"type": kind, "text": _text(part, f"{name}[{number}]"), **more}
        for number, part in enumerate(content)
    ]
    return {"role": role, "status": "completed", "content": parts}


def _reasoning(item: Item, place: int) -> Item:
    """A reasoning item, with its text from `content`, `encrypted_content` or `summary`."""
    content = item.get("content")
    texts = _texts(content, f"input[{place}].content") if content else []
    packed = _decrypted(item.get("encrypted_content"))
    summary = _texts(item.get("summary") or [], f"input[{place}].summary")
    shown = texts or ([packed] if packed else [])
    return {
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in shown],
        "status": "completed",
    }


def _tools(item: Item, place: int) -> Item:
    """An item with additional tools, which toolbox.py checks."""
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _wrong(place, "additional_tools need tools, a list of objects", ".tools")
    return {"role": "developer", "tools": tools}


_READERS = {"reasoning": _reasoning, "additional_tools": _tools}


def _texts(content: Any, name: str) -> list[str]:
    """Return the texts of `content`. Raises ApiError for a part that is not text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(400, f"{name} must be a text or a list of parts", name)
    return [_text(part, f"{name}[{place}]") for place, part in enumerate(content)]


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in _TEXTS or not isinstance(text, str):
        raise ApiError(400, f"{where} holds {str(kind)[:60]!r}; only text is supported", where)
    return text


def _wrong(place: int, text: str, field: str = "") -> ApiError:
    return ApiError(400, f"input[{place}]: {text}", f"input[{place}]{field}")
