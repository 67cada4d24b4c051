"""Toolbox: the tools of one request by type, and the mapping between them and the model's functions.

A tool that the client runs becomes a function (client_tools.py), one of a namespace a function with the namespace as
prefix. Any other tool, which a provider would run or which is newer than this server, is left out, and named in the
answer's Warning header: an agent that sends `web_search` with every request continues without it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from vllm_lite.server.openai.bodies import MAX_TOOLS, FunctionTool
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.forms import check_depth
from vllm_lite.server.responses.client_tools import FORMS, TOOL_FIELDS, CallForm, flat_name


class ClientTool(NamedTuple):
    """A tool that the client runs: the form of its calls, and its name for the client."""

    form: CallForm
    name: str
    namespace: str | None = None


class Toolbox:
    """Tools of the body, and of input items that bring further ones. Raises ApiError.

    functions  the tools in the chat format
    left_out   the paths of tools that are not shown to the model, for the Warning header
    """

    def __init__(self, given: Iterable[Mapping[str, Any]], later: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> None:
        """`later` are the tools of input items, with their paths."""
        self.functions: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._tools: dict[str, ClientTool] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        for place, tool in enumerate(given):
            self._add(tool, f"tools[{place}]", may_repeat=False)
        for where, tool in later:
            self._add(tool, where, may_repeat=True)

    def tool(self, function: str) -> ClientTool:
        """The tool behind a function of the model; an unknown function is passed on as a function of its name."""
        return self._tools.get(function) or ClientTool(FORMS["function"], function)

    def function(self, name: str, namespace: str | None) -> str:
        """The name of the model's function for a tool."""
        return self._names.get((namespace, name)) or flat_name(namespace, name)

    def choice(self, given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Convert a tool_choice to the chat format."""
        if not isinstance(given, dict):
            return given
        check_depth(given, "tool_choice", "tool_choice")
        if given.get("type") != "allowed_tools":
            return given if "type" not in given else self._named(given, "tool_choice")
        inner = given.get("allowed_tools", given)
        allowed = inner.get("tools") if isinstance(inner, dict) else None
        if not isinstance(allowed, list) or len(allowed) > MAX_TOOLS:
            return given  # forms.py reports the error
        found = [self._named(each, "tool_choice.tools") for each in allowed if self._is_shown(each)]
        if not found:
            raise ApiError(400, "tool_choice allows none of the tools that the model is shown", "tool_choice")
        return {"type": "allowed_tools", "allowed_tools": {"mode": inner.get("mode", "auto"), "tools": found}}

    # ---- one tool

    def _add(self, tool: Mapping[str, Any], where: str, *, may_repeat: bool) -> None:
        kind = tool.get("type")
        check_depth(tool, where, "tools")
        if not isinstance(kind, str):
            raise ApiError(400, f"{where}.type is missing; it is 'function' for one that the client runs", where)
        if kind == "namespace":
            self._add_all(tool, where, may_repeat=may_repeat)
        elif not _is_for_client(tool):
            self.left_out.append(f"{where} {kind}")
        else:
            self._add_function(FORMS[kind], tool, None, where, may_repeat=may_repeat)

    def _add_all(self, space: Mapping[str, Any], where: str, *, may_repeat: bool) -> None:
        """Add the tools of a namespace. Its description goes to the first of them."""
        name, tools, about = space.get("name"), space.get("tools"), space.get("description")
        if not isinstance(name, str) or not isinstance(tools, list):
            raise ApiError(400, f"{where}: a namespace needs a name and a list of tools", where)
        for place, tool in enumerate(tools):
            inner = f"{where}.tools[{place}]"
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind not in ("function", "custom"):
                raise ApiError(400, f"{inner} is {str(kind)[:60]!r}; a namespace has functions and custom tools", where)
            described = _with_more(tool, about) if isinstance(about, str) and not place else tool
            self._add_function(FORMS[kind], described, name, inner, may_repeat=may_repeat)

    def _add_function(
        self, form: CallForm, tool: Mapping[str, Any], namespace: str | None, where: str, *, may_repeat: bool
    ) -> None:
        function = form.function(tool)
        if not isinstance(function.get("name"), str):
            raise ApiError(400, f"{where}.name is missing", "tools")
        key = (namespace, function["name"])
        if may_repeat and key in self._names:
            return
        name = flat_name(*key)
        while namespace is not None and name in self._tools:
            name += "_"  # a tool outside of the namespace has this name
        shown = {"type": "function", "function": {**function, "name": name}}
        try:
            msgspec.convert(shown, FunctionTool)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"{where}: {str(error).replace('`$.function.', '`')}", "tools") from error
        if key in self._names:
            raise ApiError(400, f"{where} is called {name[:100]!r} as another one is; names must differ", "tools")
        if len(self.functions) == MAX_TOOLS:
            raise ApiError(400, f"tools are over {MAX_TOOLS}, those of namespaces and items included", "tools")
        self._names[key] = name
        self._tools[name] = ClientTool(form, key[1], namespace)
        self.functions.append(shown)

    # ---- a choice

    def _is_shown(self, choice: Any) -> bool:
        return isinstance(choice, dict) and str(choice.get("type", "function")) in FORMS

    def _named(self, choice: dict[str, Any], where: str) -> dict[str, Any]:
        kind = str(choice.get("type", "function"))
        if kind not in FORMS:
            raise ApiError(400, f"{where} asks for {kind[:60]!r}, which nobody runs here", "tool_choice")
        name, inner = choice.get("name"), choice.get("function")
        if kind not in ("function", "custom"):
            name = kind
        elif isinstance(inner, dict):
            name = inner.get("name")
        if not isinstance(name, str):
            raise ApiError(400, f"{where} names no tool", "tool_choice")
        space = choice.get("namespace")
        found = self.function(name, space if isinstance(space, str) else None)
        if found not in self._tools and space is None:
            others = [flat for (_, other), flat in self._names.items() if other == name]
            found = others[0] if len(others) == 1 else found
        return {"type": "function", "function": {"name": found}}


def _with_more(tool: Mapping[str, Any], about: str) -> dict[str, Any]:
    """Prepend `about` to a tool's description; a description that is not text is kept, to be refused later."""
    own = tool.get("description") or ""
    return {**tool, "description": "\n\n".join(filter(None, (about, own))) if isinstance(own, str) else own}


def _is_for_client(tool: Mapping[str, Any]) -> bool:
    """Whether the client runs a tool; for some types a field says so."""
    kind = tool["type"]
    if kind == "shell":
        place = tool.get("environment")
        return place is None or (isinstance(place, dict) and place.get("type") == "local")
    if kind == "tool_search":
        return tool.get("execution") == "client"
    return kind in FORMS


def shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the format of the response object."""
    if tool.get("type") != "function":
        return dict(tool)
    function = FORMS["function"].function(tool)
    return {"type": "function", **{name: function.get(name) for name in TOOL_FIELDS}}
