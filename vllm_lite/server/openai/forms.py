"""Constraints on an answer: a form of structured outputs, and the tools that may or must be called.

Clients use many names for them. They are converted to StructuredOutputsParams and ToolsWanted, of which grammars.py
makes the grammar.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from vllm_lite.choices import with_choices
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.server.openai.bodies import MAX_TOOLS, ChatBody, FormFields, FunctionTool
from vllm_lite.server.openai.errors import ApiError

MAX_DEPTH = 64
"""Maximum nesting of values that are passed to a template."""
_NAMED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""The form that each field requests: vLLM's older names, and those of llama.cpp."""
_RESPONSE_FORMATS = "text, json_object, json_schema or structural_tag"
_TOOL_CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
)


class WantedForm(msgspec.Struct, frozen=True):
    """A requested form, and the field of the body that requests it."""

    params: StructuredOutputsParams
    field: str


class ToolsWanted(msgspec.Struct, frozen=True):
    """The tools of one request.

    given     the entries as sent, for the template and the parser
    allowed   tools that may be called
    mode      whether a call is optional, required, or required of a `named` tool
    parallel  whether there may be several calls
    """

    given: list[dict[str, Any]]
    allowed: list[FunctionTool]
    mode: Literal["auto", "required", "named"] = "auto"
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode != "auto"


# ---- structured outputs


def form_of(body: FormFields) -> WantedForm | None:
    """Return the form that `body` requests by any of the names. Raises ApiError for two forms, or an invalid one."""
    found: list[WantedForm] = []
    if body.structured_outputs:
        found.append(_form(body.structured_outputs, "structured_outputs"))
    spaces = body.guided_whitespace_pattern
    for field, name in _NAMED.items():
        value = getattr(body, field)
        if value is not None and value not in ("", []):
            more = {"whitespace_pattern": spaces, "disable_additional_properties": name == "json"}
            found.append(_form({name: value, **more}, field))
    if body.response_format and (form := _response_format(body.response_format)) is not None:
        found.append(form)
    if len(found) > 1:
        names = " and ".join(each.field for each in found)
        raise ApiError(400, f"an answer has one form; {names} ask for {len(found)}", found[-1].field)
    return found[0] if found else None


def thinking_budget(body: FormFields) -> int | None:
    """Return the maximum number of thinking tokens; None, also spelled -1, for no limit. Raises ApiError."""
    for field in ("thinking_token_budget", "max_thinking_tokens"):
        value = getattr(body, field)
        if value is not None and value != -1:
            if not 0 <= value < 2**31:
                raise ApiError(
                    400, f"{field} must be between 0 and {2**31 - 1}, or -1 for no limit; got {value}", field
                )
            return int(value)
    return None


def _response_format(given: dict[str, Any]) -> WantedForm | None:
    """Read OpenAI's response_format. Raises ApiError."""
    field, kind = "response_format", given.get("type")
    if kind == "text":
        return None
    if kind in ("json_object", "json_schema") and given.get("schema") is not None:  # llama.cpp's form
        return _form(_closed(given["schema"], "response_format.schema"), field)
    if kind == "json_object":
        return _form({"json_object": True}, field)
    if kind == "structural_tag":
        return _form({"structural_tag": given}, field)
    if kind != "json_schema":
        raise ApiError(400, f"response_format.type must be {_RESPONSE_FORMATS}, got {kind!r}"[:200], field)
    inner = given.get("json_schema")
    if not isinstance(inner, dict):
        raise ApiError(400, 'response_format.json_schema must be an object with a "schema"', field)
    schema = inner.get("schema", inner.get("json_schema"))
    if schema is None:
        return _form({"json_object": True}, field)
    return _form(_closed(schema, "response_format.json_schema.schema"), field)


def _closed(schema: Any, place: str) -> dict[str, Any]:
    """The form of a schema whose objects have only the named properties, unless the schema allows others explicitly.

    Frameworks that send pydantic's schema of a class expect this, and OpenAI's models add no properties either when
    `strict` is not set, without a grammar. A small model often adds properties of its own.
    """
    if not isinstance(schema, (dict, bool)):
        raise ApiError(400, f"{place} must be a JSON schema, an object", "response_format")
    return {"json": schema, "disable_additional_properties": True}


def _form(values: dict[str, Any], field: str) -> WantedForm:
    try:
        known = {name: value for name, value in values.items() if value is not None and not name.startswith("_")}
        return WantedForm(msgspec.convert(known, StructuredOutputsParams), field)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        text = str(error).replace("`$.", "`").replace(" - at `$`", "")
        raise ApiError(400, text if text.startswith(field) else f"{field}: {text}", field) from error


# ---- tools


def tools_of(body: ChatBody) -> ToolsWanted | None:
    """Return the tools that a chat may or must call; None if it has none, or may call none. Raises ApiError."""
    given, choice = body.tools or [], body.tool_choice
    tools = checked_tools(given)
    if choice == "none" or (not tools and choice in (None, "auto", "")):
        return None
    if not tools:
        raise ApiError(400, f"tool_choice is {choice!r}, and there are no tools; give some"[:200], "tool_choice")
    parallel = body.parallel_tool_calls is not False
    if choice in (None, "auto", ""):
        return ToolsWanted(given, tools, "auto", parallel)
    if choice == "required":
        return ToolsWanted(given, tools, "required", parallel)
    if isinstance(choice, str):
        raise ApiError(400, f"tool_choice must be {_TOOL_CHOICES}, got {choice!r}"[:300], "tool_choice")
    kind = choice.get("type", "function")
    if kind == "function":
        return ToolsWanted(given, [_named(tools, choice)], "named", parallel=False)
    if kind != "allowed_tools":
        raise ApiError(400, f"tool_choice must be {_TOOL_CHOICES}, got the type {kind!r}"[:300], "tool_choice")
    return _allowed(given, tools, choice, parallel=parallel)


def checked_tools(given: list[dict[str, Any]]) -> list[FunctionTool]:
    """Check each of `tools`. Raises ApiError that names the invalid one."""
    tools = []
    for place, each in enumerate(given):
        check_depth(each, f"tools[{place}]", "tools")
        try:
            tools.append(msgspec.convert(each, FunctionTool))
        except msgspec.ValidationError as error:
            text = with_choices(error, FunctionTool).replace("`$.", "`")
            raise ApiError(400, f"tools[{place}]: {text}", "tools") from error
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"tools has two functions named {twice[:100]!r}; names must differ", "tools")
    return tools


def _named(tools: list[FunctionTool], choice: Mapping[str, Any]) -> FunctionTool:
    """Find the tool that a tool_choice names, {"function": {"name": ...}} or {"name": ...}. Raises ApiError."""
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ApiError(400, f"tool_choice must be {_TOOL_CHOICES}; it names no function", "tool_choice")
    found = next((tool for tool in tools if tool.function.name == name), None)
    if found is None:
        known = ", ".join(tool.function.name[:64] for tool in tools[:16])
        raise ApiError(400, f"tool_choice names {name[:100]!r}; the tools are {known}", "tool_choice")
    return found


def _allowed(
    given: list[dict[str, Any]], tools: list[FunctionTool], choice: Mapping[str, Any], *, parallel: bool
) -> ToolsWanted:
    """Read {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}: the model is shown all tools, and may call
    some."""
    inner = choice.get("allowed_tools", choice)
    inner = inner if isinstance(inner, Mapping) else {}
    mode, allowed = inner.get("mode", "auto"), inner.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list) or not 0 < len(allowed) <= MAX_TOOLS:
        text = 'tool_choice.allowed_tools takes a mode, "auto" or "required", and a list of tools'
        raise ApiError(400, text, "tool_choice")
    found = [_named(tools, each if isinstance(each, Mapping) else {}) for each in allowed]
    return ToolsWanted(given, found, mode, parallel)


def check_depth(value: Any, name: str, param: str, most: int = MAX_DEPTH) -> None:
    """Raise ApiError for a value that is nested too deeply for a template, or for the encoder: a thread with an almost
    empty stack has decoded it."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ApiError(400, f"{name} is nested more than {most} deep", param)
