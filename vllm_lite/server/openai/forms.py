"""The form that a request demands of its answer: one form of structured outputs, and the tools that may or must be
called.

Clients know many names for the same. Here they become StructuredOutputsParams and ToolsWanted; grammars.py makes the
grammar of both.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.server.openai.bodies import MAX_TOOLS, ChatBody, FormFields, FunctionTool
from vllm_lite.server.openai.errors import ApiError

MAX_DEPTH = 64
"""How deeply values that go to a template may be nested."""
_GUIDED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
_RESPONSE_FORMATS = "text, json_object, json_schema or structural_tag"
_TOOL_CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
)


class WantedForm(msgspec.Struct, frozen=True):
    """The form of an output, and the field of the body that asks for it."""

    params: StructuredOutputsParams
    field: str


class ToolsWanted(msgspec.Struct, frozen=True):
    """The tools of one request.

    given     as they came: for the template and the parser
    allowed   those that may be called
    mode      whether a call may be made, has to be made, or one of a `named` tool
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
    """Return the form that `body` asks for, under whichever name. Raises ApiError for two of them, or a bad one."""
    found: list[WantedForm] = []
    if body.structured_outputs:
        found.append(_form(body.structured_outputs, "structured_outputs"))
    spaces = body.guided_whitespace_pattern
    for name, field in _GUIDED.items():
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
    """Return how many tokens the thinking may have; None, also spelled -1, for any number. Raises ApiError."""
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
    """Read OpenAI's field. Raises ApiError."""
    field, kind = "response_format", given.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and given.get("schema") is None:
        return _form({"json_object": True}, field)
    if kind == "json_object":  # with the schema beside it, as llama.cpp takes it
        return _form(_closed(given["schema"], "response_format.schema"), field)
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
    """The form of a schema whose objects have the properties that it names, unless it says that others may stand there.

    Frameworks that send what pydantic makes of a class mean it so, and OpenAI's own models, which follow no grammar
    where `strict` is not set, add nothing either. A small model often goes on with names of its own.
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
    """Return the tools that a chat may or must call; None if it has none, or none of them may be. Raises ApiError."""
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
    """Read each of `tools`. Raises ApiError that says which one is wrong, and how."""
    tools = []
    for place, each in enumerate(given):
        check_depth(each, f"tools[{place}]", "tools")
        try:
            tools.append(msgspec.convert(each, FunctionTool))
        except msgspec.ValidationError as error:
            raise ApiError(400, f"tools[{place}]: {str(error).replace('`$.', '`')}", "tools") from error
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"tools has two functions named {twice[:100]!r}; names must differ", "tools")
    return tools


def _named(tools: list[FunctionTool], choice: Mapping[str, Any]) -> FunctionTool:
    """Find the tool that a choice names, {"function": {"name": ...}} or {"name": ...}. Raises ApiError."""
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
    """Read {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}: all are shown, some may be called."""
    inner = choice.get("allowed_tools", choice)
    inner = inner if isinstance(inner, Mapping) else {}
    mode, allowed = inner.get("mode", "auto"), inner.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list) or not 0 < len(allowed) <= MAX_TOOLS:
        text = 'tool_choice.allowed_tools takes a mode, "auto" or "required", and a list of tools'
        raise ApiError(400, text, "tool_choice")
    found = [_named(tools, each if isinstance(each, Mapping) else {}) for each in allowed]
    return ToolsWanted(given, found, mode, parallel)


def check_depth(value: Any, name: str, param: str, most: int = MAX_DEPTH) -> None:
    """Raises ApiError for a value that is nested more deeply than a template should have to follow, or than can be
    encoded: a thread has decoded it, whose stack was almost empty."""
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
