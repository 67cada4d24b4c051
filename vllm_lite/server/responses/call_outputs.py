"""Outputs of tools that the client has run: their checks, and their texts for the model."""

from collections.abc import Callable
from typing import Any

from vllm_lite.server.responses.client_tools import BadItemError, Item, flat_name, text_of

IMAGE = "input_image"
_IMAGE_TEXT = "[image, shown below]"
"""Placeholder for an image in an output, as templates accept images in user messages only."""
_TEXT_PARTS = ("input_text", "output_text", "text")


def image_of(part: Any) -> Item | None:
    """An image part, normalized for storage; None for any other part. Raises BadItemError."""
    if not isinstance(part, dict) or part.get("type") != IMAGE:
        return None
    url = part.get("image_url")
    if not isinstance(url, str):
        raise BadItemError(part, "image_url", "a URL; files are not kept here, so a file_id names none")
    return {"type": IMAGE, "image_url": url, "detail": "auto"}


def images_in(item: Item) -> list[Item]:
    """The images of a message or an output, as returned by image_of()."""
    for name in ("content", "output"):
        if isinstance(parts := item.get(name), list):
            return [part for part in parts if part.get("type") == IMAGE]
    return []


def read_output(item: Item, sees: bool = False) -> tuple[Item, list[str]]:
    """Return the stored fields of an output other than its type and id, and the types of its parts that are neither
    text nor, if the model `sees` images, images: the model gets the type in place of such a part. Raises
    BadItemError."""
    kind = item["type"]
    if kind == "local_shell_call_output":  # its id is the call's
        link = text_of(item, "id" if item.get("call_id") is None else "call_id")
        return {"id": link, "output": text_of(item, "output"), "status": "completed"}, []
    found: Item = (
        {} if kind == "tool_search_output" and not item.get("call_id") else {"call_id": text_of(item, "call_id")}
    )
    reader = _READERS.get(kind)
    if reader is not None:
        return {**found, "status": "completed", **reader(item)}, []
    output, others = "" if item.get("output") is None else item["output"], list[str]()
    if not isinstance(output, str):
        output, others = _parts(item, sees)
    return {**found, "output": output, "status": "completed"}, others


def call_of(item: Item) -> str | None:
    """The id of the call that an output belongs to, if any."""
    return item.get("id") if item["type"] == "local_shell_call_output" else item.get("call_id")


def output_text(item: Item) -> str:
    """Convert an output that read_output() has checked to text."""
    kind, output = item["type"], item.get("output")
    if kind == "tool_search_output":
        return "\n".join(["Tools that can be called now:", *_names_in(item["tools"])])
    if kind == "apply_patch_call_output":
        return f"{item['status']}: {output}" if output else str(item["status"])
    if kind == "shell_call_output":
        return "\n".join(_ran(each) for each in output or ())
    return output if isinstance(output, str) else "\n".join(part.get("text", _IMAGE_TEXT) for part in output or ())


# ---- those with fields of their own


def _shell(item: Item) -> Item:
    output = item.get("output")
    ran = [{"stdout": output}] if isinstance(output, str) else output
    if not isinstance(ran, list) or not all(isinstance(each, dict) for each in ran):
        raise BadItemError(item, "output", "a list of objects with stdout, stderr and outcome")
    return {"output": [_one_command(each) for each in ran]}


def _one_command(each: dict[str, Any]) -> Item:
    outcome = each.get("outcome")
    given = outcome if isinstance(outcome, dict) else {}
    code = given.get("exit_code")
    ended: Item = {"type": "exit", "exit_code": code if isinstance(code, int) else 0}
    texts = {name: str(each.get(name) or "") for name in ("stdout", "stderr")}
    return {**texts, "outcome": {"type": "timeout"} if given.get("type") == "timeout" else ended}


def _patch(item: Item) -> Item:
    status = item.get("status")
    if status not in ("completed", "failed"):
        raise BadItemError(item, "status", "which is completed or failed")
    return {"status": status, **({"output": item["output"]} if isinstance(item.get("output"), str) else {})}


def _search(item: Item) -> Item:
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadItemError(item, "tools", "a list of objects")
    return {"tools": tools, "execution": "client"}


_READERS: dict[str, Callable[[Item], Item]] = {
    "shell_call_output": _shell,
    "apply_patch_call_output": _patch,
    "tool_search_output": _search,
}


# ---- small things


def _parts(item: Item, sees: bool) -> tuple[list[Item], list[str]]:
    output = item.get("output")
    if not isinstance(output, list):
        raise BadItemError(item, "output", "a text or a list of parts")
    found, others = list[Item](), list[str]()
    for part in output:
        kind = part.get("type") if isinstance(part, dict) else None
        if sees and (image := image_of(part)) is not None:
            found.append(image)
            continue
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            text = part["text"]
        elif isinstance(kind, str):
            others.append(kind)
            text = f"[{kind[:40]}, which is not shown]"
        else:
            raise BadItemError(item, "output", "whose parts have a type")
        found.append({"type": "input_text", "text": text})
    return found, others


def _ran(each: Item) -> str:
    outcome = each["outcome"]
    end = "timed out" if outcome["type"] == "timeout" else f"exit code {outcome['exit_code']}"
    return "\n".join(text for text in (each["stdout"], each["stderr"], end) if text)


def _names_in(tools: list[Item]) -> list[str]:
    """Lines with the names of the functions that `tools` are for the model."""
    found = list[str]()
    for tool in tools:
        inner, space = tool.get("tools"), None
        if isinstance(inner, list):
            space = str(tool.get("name"))
        named = inner if isinstance(inner, list) else [tool]
        found += [f"- {flat_name(space, str(each.get('name')))}" for each in named if isinstance(each, dict)]
    return found
