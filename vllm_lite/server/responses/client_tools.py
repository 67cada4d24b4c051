"""Tools that the client runs: each is shown to the model as a function, and its calls to the client as OpenAI's items.

    tool           function shown to the model      item of a call         item of its output
    function       as it is                         function_call          function_call_output
    custom         one text, `input`                custom_tool_call       custom_tool_call_output
    local_shell    a command, as a list of words    local_shell_call       local_shell_call_output
    shell          a list of commands               shell_call             shell_call_output
    apply_patch    one change of one file           apply_patch_call       apply_patch_call_output
    tool_search    as the client describes it       tool_search_call       tool_search_output

A `CallForm` converts one row in both directions: the tool to a function, a call in the history to arguments, and a call
of the model to the fields of an item.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from vllm_lite.client.text.response.arguments import arguments_of

Item = dict[str, Any]
"""An item of the API: `type`, `id`, and the fields of that type."""
TOOL_FIELDS = ("name", "description", "parameters", "strict")
_encode = msgspec.json.encode


class BadItemError(ValueError):
    """A field of an item is missing or has the wrong type."""

    def __init__(self, item: Item, field: str, kind: str) -> None:
        super().__init__(f"{'an' if item['type'][0] in 'aeiou' else 'a'} {item['type']} needs {field}, {kind}")
        self.field = field


class CallForm(ABC):
    """One kind of tool. `call` is the item type of its calls, `output` that of their outputs. `streamed` is the field
    of a call that is streamed in pieces, and the name of its events; None for a call that is sent whole."""

    call: ClassVar[str]
    output: ClassVar[str]
    streamed: ClassVar[tuple[str, str] | None] = None

    @abstractmethod
    def function(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the tool as a function with TOOL_FIELDS."""

    @abstractmethod
    def arguments(self, item: Item) -> tuple[str, str]:
        """Return the name and the arguments (JSON) of a call in the history. Raises BadItemError."""

    @abstractmethod
    def fields(self, arguments: dict[str, Any]) -> Item:
        """Return the fields of the item for a call with these arguments, which may be incomplete or have wrong
        types."""


class FunctionForm(CallForm):
    call, output = "function_call", "function_call_output"
    streamed = ("arguments", "function_call_arguments")

    def function(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        given = tool.get("function")
        inner = given if isinstance(given, dict) else tool  # the nested form of chats
        return {name: inner[name] for name in TOOL_FIELDS if inner.get(name) is not None}

    def arguments(self, item: Item) -> tuple[str, str]:
        return text_of(item, "name"), text_of(item, "arguments")

    def fields(self, arguments: dict[str, Any]) -> Item:
        return {"arguments": _encode(arguments).decode()}


class CustomForm(CallForm):
    call, output = "custom_tool_call", "custom_tool_call_output"
    streamed = ("input", "custom_tool_call_input")

    def function(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the tool as a function. A grammar of its text is part of the description and not enforced: calls are
        constrained to JSON, not within its strings."""
        about = [text] if isinstance(text := tool.get("description"), str) else []
        form = tool.get("format")
        if isinstance(form, dict) and form.get("type") == "grammar":
            about.append(f"`input` follows this grammar ({form.get('syntax')}):\n{form.get('definition')}")
        schema = _object({"input": {"type": "string"}}, ["input"])
        return {"name": tool.get("name"), "description": "\n\n".join(about), "parameters": schema}

    def arguments(self, item: Item) -> tuple[str, str]:
        return text_of(item, "name"), _encode({"input": text_of(item, "input")}).decode()

    def fields(self, arguments: dict[str, Any]) -> Item:
        """Take the only text as the input if the model has named it differently."""
        texts = [value for value in arguments.values() if isinstance(value, str)]
        given = arguments.get("input", texts[0] if len(texts) == 1 else "")
        return {"input": given if isinstance(given, str) else _encode(given).decode()}


class LocalShellForm(CallForm):
    call, output = "local_shell_call", "local_shell_call_output"
    _action = ("command", "env", "timeout_ms", "user", "working_directory")

    def function(self, tool: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - it has nothing to say
        properties = {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        }
        about = "Run a command on the user's machine and return its output."
        return {"name": "local_shell", "description": about, "parameters": _object(properties, ["command"])}

    def arguments(self, item: Item) -> tuple[str, str]:
        action = _object_of(item, "action")
        given = {name: action[name] for name in self._action if action.get(name)}
        return "local_shell", _encode(given).decode()

    def fields(self, arguments: dict[str, Any]) -> Item:
        command = arguments.get("command")
        words = ["bash", "-lc", command] if isinstance(command, str) else _texts(command)
        env = arguments.get("env")
        known = {key: value for key, value in env.items() if isinstance(value, str)} if isinstance(env, dict) else {}
        places = {
            name: arguments[name] for name in ("user", "working_directory") if isinstance(arguments.get(name), str)
        }
        limit = _whole(timeout_ms=arguments.get("timeout_ms"))
        return {"action": {"type": "exec", "command": words, "env": known, **places, **limit}}


class ShellForm(CallForm):
    call, output = "shell_call", "shell_call_output"

    def function(self, tool: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - it has nothing to say
        properties = {
            "commands": {"type": "array", "items": {"type": "string"}, "description": "Commands of a shell."},
            "timeout_ms": {"type": "integer"},
            "max_output_length": {"type": "integer"},
        }
        about = "Run commands in a shell on the user's machine and return their outputs."
        return {"name": "shell", "description": about, "parameters": _object(properties, ["commands"])}

    def arguments(self, item: Item) -> tuple[str, str]:
        action = _object_of(item, "action")
        numbers = _whole(timeout_ms=action.get("timeout_ms"), max_output_length=action.get("max_output_length"))
        return "shell", _encode({"commands": _texts(action.get("commands")), **numbers}).decode()

    def fields(self, arguments: dict[str, Any]) -> Item:
        given = arguments.get("commands")
        commands = [given] if isinstance(given, str) else _texts(given)
        names = ("timeout_ms", "max_output_length")
        numbers = {**dict.fromkeys(names), **_whole(**{name: arguments.get(name) for name in names})}
        return {"action": {"commands": commands, **numbers}, "environment": {"type": "local"}}


class ApplyPatchForm(CallForm):
    call, output = "apply_patch_call", "apply_patch_call_output"
    _kinds = ("create_file", "update_file", "delete_file")

    def function(self, tool: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - it has nothing to say
        properties = {
            "type": {"enum": list(self._kinds)},
            "path": {"type": "string"},
            "diff": {"type": "string", "description": "The change as a V4A diff; none where a file is deleted."},
        }
        about = "Create, update or delete one file on the user's machine."
        return {"name": "apply_patch", "description": about, "parameters": _object(properties, ["type", "path"])}

    def arguments(self, item: Item) -> tuple[str, str]:
        return "apply_patch", _encode(_object_of(item, "operation")).decode()

    def fields(self, arguments: dict[str, Any]) -> Item:
        kind = arguments.get("type")
        operation = {"type": kind if kind in self._kinds else "update_file", "path": str(arguments.get("path", ""))}
        if kind != "delete_file":
            operation["diff"] = str(arguments.get("diff", ""))
        return {"operation": operation}


class ToolSearchForm(CallForm):
    call, output = "tool_search_call", "tool_search_output"

    def function(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: tool[name] for name in ("description", "parameters") if tool.get(name) is not None}
        return {"name": "tool_search", **found}

    def arguments(self, item: Item) -> tuple[str, str]:
        given = item.get("arguments")
        return "tool_search", given if isinstance(given, str) else _encode(given or {}).decode()

    def fields(self, arguments: dict[str, Any]) -> Item:
        return {"arguments": arguments, "execution": "client"}


FORMS: dict[str, CallForm] = {
    "function": FunctionForm(),
    "custom": CustomForm(),
    "local_shell": LocalShellForm(),
    "shell": ShellForm(),
    "apply_patch": ApplyPatchForm(),
    "tool_search": ToolSearchForm(),
}
"""Forms by the type of the tool."""
CALLS = {form.call: form for form in FORMS.values()}
OUTPUTS = {form.output: form for form in FORMS.values()}


def read_call(item: Item) -> Item:
    """Check a call in the history, and return its stored fields other than type and id. Raises BadItemError."""
    form = CALLS[item["type"]]
    if form is FORMS["tool_search"] and item.get("call_id") is None:
        item = {**item, "call_id": ""}  # one that the provider has answered itself
    call_id = text_of(item, "call_id")
    name, arguments = form.arguments(item)
    if form.streamed is None:
        found = form.fields(decoded(arguments))
    else:
        place = {"namespace": item["namespace"]} if isinstance(item.get("namespace"), str) else {}
        found = {"name": name, form.streamed[0]: item[form.streamed[0]], **place}
    return {"call_id": call_id, **found, "status": "completed"}


def decoded(arguments: str) -> dict[str, Any]:
    """Decode the arguments of a call; {} if they are not an object, as in a truncated call."""
    return arguments_of(arguments) or {}


def flat_name(namespace: str | None, name: str) -> str:
    """Name of a tool for the model, which has no namespaces."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


# ---- small things


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text_of(item: Item, name: str) -> str:
    """A field of an item. Raises BadItemError if it is no text."""
    if not isinstance(item.get(name), str):
        raise BadItemError(item, name, "a text")
    return str(item[name])


def _object_of(item: Item, name: str) -> dict[str, Any]:
    found = item.get(name)
    if not isinstance(found, dict):
        raise BadItemError(item, name, "an object")
    return found


def _texts(given: Any) -> list[str]:
    return [each for each in given if isinstance(each, str)] if isinstance(given, list) else []


def _whole(**numbers: Any) -> dict[str, int]:
    return {name: value for name, value in numbers.items() if isinstance(value, int) and not isinstance(value, bool)}
