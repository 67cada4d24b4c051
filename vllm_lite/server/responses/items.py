"""Input items: checked and completed once, so that what is kept and listed is what the model was shown.

An item's id has the id of its response in it, so that an item is found without an index of all items.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_lite.server.openai.bodies import CalledFunction, ChatMessage, ToolCall
from vllm_lite.server.openai.errors import ApiError

Item = dict[str, Any]
"""An item as the API shows it: `type`, `id`, and what that type has."""
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_OF_RESPONSE = re.compile(r"(?:msg|rs|fc|fco)_(.{1,200})_i?[0-9]{1,6}")
_MAX_ID_CHARS = 256
_MARK = "vl1."


def item_id(kind: str, response_id: str, place: int, *, is_input: bool) -> str:
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{'i' if is_input else ''}{place}"


def response_of(reference: str) -> str | None:
    """Return the id of the response that an item belongs to, by the item's id; None for no id of ours."""
    match = _OF_RESPONSE.fullmatch(reference) if len(reference) <= _MAX_ID_CHARS else None
    return None if match is None else f"resp_{match.group(1)}"


def encrypted(text: str) -> str:
    """Pack reasoning for a client that keeps nothing else of it. It is no secret: the same text is in `content`."""
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def _decrypted(given: Any) -> str:
    """Unpack what encrypted() has made; "" for what another server has made."""
    if not isinstance(given, str) or not given.startswith(_MARK):
        return ""
    try:
        return base64.urlsafe_b64decode(given.removeprefix(_MARK)).decode()
    except (binascii.Error, ValueError):
        return ""


# ---- what a request says


def is_reference(item: Item) -> bool:
    return item.get("type") == "item_reference" or (item.get("type") is None and "id" in item and "role" not in item)


def references(given: str | Sequence[Item] | None) -> Iterator[tuple[int, str]]:
    """Yield the place and the id of each item that is only referred to. Raises ApiError."""
    for place, item in enumerate(given if isinstance(given, list) else ()):
        if is_reference(item):
            reference = item.get("id")
            if not isinstance(reference, str):
                raise _wrong(place, "an item_reference needs the id of an item")
            yield place, reference


def read(given: str | Sequence[Item] | None, response_id: str, found: Mapping[int, Item]) -> list[Item]:
    """Check the input, and complete each item. `found` are those that it refers to, by place. Raises ApiError."""
    if given is None:
        raise ApiError(400, "input is missing: give a text or a list of items", "input")
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    return [
        found[place] if place in found else _completed(item, place, response_id) for place, item in enumerate(given)
    ]


def _completed(item: Item, place: int, response_id: str) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        known = ", ".join(_READERS)
        raise _wrong(place, f"items of type {str(kind)[:60]!r} are not supported; those are {known}, item_reference")
    own = item.get("id")
    is_good = isinstance(own, str) and 0 < len(own) <= _MAX_ID_CHARS
    name = own if is_good else item_id(str(kind), response_id, place, is_input=True)
    return {"type": kind, "id": name, **reader(item, place)}


def _message(item: Item, place: int) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(place, f"role must be one of {', '.join(_ROLES)}, got {str(role)[:60]!r}", ".role")
    is_answer = role == "assistant"
    more: Item = {"annotations": []} if is_answer else {}
    texts = _texts(item.get("content"), f"input[{place}].content")
    kind = "output_text" if is_answer else "input_text"
    return {"role": role, "status": "completed", "content": [{"type": kind, "text": text, **more} for text in texts]}


def _call(item: Item, place: int) -> Item:
    found = {name: item.get(name) for name in ("call_id", "name", "arguments")}
    for name, value in found.items():
        if not isinstance(value, str):
            raise _wrong(place, f"a function_call needs {name}, a text", f".{name}")
    return {**found, "status": "completed"}


def _call_output(item: Item, place: int) -> Item:
    if not isinstance(item.get("call_id"), str):
        raise _wrong(place, "a function_call_output needs the call_id of its function_call", ".call_id")
    output = "" if item.get("output") is None else item["output"]
    texts = _texts(output, f"input[{place}].output")
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"call_id": item["call_id"], "output": output if isinstance(output, str) else parts, "status": "completed"}


def _reasoning(item: Item, place: int) -> Item:
    """The text, from wherever the client has it: the content, what was packed, or a summary."""
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


_READERS = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


def _texts(content: Any, name: str) -> list[str]:
    """Return the texts of a content. Raises ApiError for a part that is none."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(400, f"{name} must be a text or a list of parts", name)
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(text, str):
            where = f"{name}[{place}]"
            raise ApiError(400, f"{where} holds {str(kind)[:60]!r}; only text is supported", where)
        texts.append(text)
    return texts


def _wrong(place: int, text: str, field: str = "") -> ApiError:
    return ApiError(400, f"input[{place}]: {text}", f"input[{place}]{field}")


# ---- as a chat


def text_in(item: Item, field: str = "content") -> str:
    content = item.get(field)
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", part.get("refusal", "")) for part in content or ())


class _Answer:
    """One message of the assistant, put together from its reasoning, its text and its calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    @property
    def is_open_to_text(self) -> bool:
        """Whether reasoning and texts may still be added: what comes behind a call is another message."""
        return not self.calls

    def message(self) -> ChatMessage | None:
        if not (self.reasoning or self.texts or self.calls):
            return None
        return ChatMessage(
            "assistant",
            "\n".join(self.texts) if self.texts or not self.calls else None,
            tool_calls=self.calls or None,
            reasoning="\n".join(self.reasoning) or None,
        )


def messages(instructions: str | None, items: Iterable[Item]) -> list[ChatMessage]:
    """Make the messages of a chat. Instructions and what the system says first are one message, as many templates take
    only one. Raises ApiError for the output of a call that was not made."""
    system, found, answer = [instructions] if instructions else [], list[ChatMessage](), _Answer()
    known = set()

    def flush() -> None:
        nonlocal answer
        if (message := answer.message()) is not None:
            found.append(message)
        answer = _Answer()

    for item in items:
        kind, role = item["type"], item.get("role")
        if kind == "reasoning":
            if answer.texts or answer.calls:
                flush()
            answer.reasoning += [text_in(item) or text_in(item, "summary")]
        elif kind == "function_call":
            known.add(item["call_id"])
            answer.calls.append(ToolCall(CalledFunction(item["name"], item["arguments"]), item["call_id"]))
        elif kind == "message" and role == "assistant":
            if not answer.is_open_to_text:
                flush()
            answer.texts.append(text_in(item))
        else:
            flush()
            if kind == "function_call_output":
                if item["call_id"] not in known:
                    text = f"no function_call before it has the call_id {item['call_id'][:80]!r} of this output"
                    raise ApiError(400, text, "input")
                found.append(ChatMessage("tool", text_in(item, "output"), tool_call_id=item["call_id"]))
            elif role == "user" or found:
                found.append(ChatMessage("user" if role == "user" else "system", text_in(item)))
            else:
                system.append(text_in(item))
    flush()
    start = [ChatMessage("system", "\n\n".join(system))] if system else []
    if not start and not found:
        raise ApiError(400, "input is empty: give a text or a list of items", "input")
    return start + found
