"""Tools and items of /v1/responses other than plain functions: the treatment of each type that OpenAI's package has."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
import pytest
from openai.types.responses.response_input_item import ResponseInputItem
from openai.types.responses.response_item import ResponseItem
from openai.types.responses.response_output_item import ResponseOutputItem
from openai.types.responses.tool import Tool

from tests.client_tools import AGENTS, ANY_ITEM, DEEP, PATCH, SEARCH
from tests.response_events import checked
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.responses import history, items
from vllm_lite.server.responses.client_tools import FORMS, OUTPUTS
from vllm_lite.server.responses.toolbox import Toolbox

# ---- the types of the package


def flat(kind: Any) -> Iterator[Any]:
    """The models of which a union consists."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from flat(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for each in get_args(kind):
            yield from flat(each)
    else:
        yield kind


def types_of(model: type[pydantic.BaseModel]) -> list[str]:
    """The values of its field `type`."""
    hint = model.model_fields["type"].annotation
    return [value for each in flat(hint) if get_origin(each) is Literal for value in get_args(each)]


def example(hint: Any) -> Any:
    """A value with the fields that it has to have."""
    kind = next(each for each in flat(hint) if each is not type(None))
    origin = get_origin(kind)
    if origin is Literal:
        return get_args(kind)[0]
    if origin is list:
        return [example(get_args(kind)[0])]
    if origin is dict or kind is object:
        return {}
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        needed = {name: field for name, field in kind.model_fields.items() if field.is_required()}
        return {name: example(field.annotation) for name, field in needed.items()}
    return {str: "x", int: 1, float: 1.0, bool: True}[kind]


TOOL_MODELS = [(kind, model) for model in flat(Tool) for kind in types_of(model)]
ITEM_MODELS = [
    (kind, model)
    for union in (ResponseInputItem, ResponseOutputItem, ResponseItem)
    for model in flat(union)
    for kind in types_of(model)
]


LEFT_OUT_TOOLS = [
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]
"""Types of tools that a provider runs."""
DROPPED_ITEMS = [
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "web_search_call",
]
"""Types of items without content for a model, or with content for the provider only."""


@pytest.mark.parametrize(("kind", "model"), TOOL_MODELS, ids=[kind for kind, _ in TOOL_MODELS])
def test_every_type_of_tools_has_a_treatment(kind: str, model: Any) -> None:
    tool = {**example(model), "type": kind}
    box = Toolbox([tool])
    assert kind in {*FORMS, "namespace", *LEFT_OUT_TOOLS}, "a new type: decide what becomes of it"
    if kind in LEFT_OUT_TOOLS or kind == "tool_search":  # which a provider runs unless it says "client"
        assert (box.functions, box.left_out) == ([], [f"tools[0] {kind}"])
    else:
        assert len(box.functions) == 1
        assert not box.left_out


@pytest.mark.parametrize(
    ("kind", "model"), ITEM_MODELS, ids=[f"{kind}-{model.__name__}" for kind, model in ITEM_MODELS]
)
def test_every_type_of_items_has_a_treatment(kind: str, model: Any) -> None:
    item = {**example(model), "type": kind}
    if kind == "item_reference":
        assert items.is_reference(item)
        return
    before = []
    if kind in OUTPUTS:  # of a call that was made
        made = next(each for name, each in ITEM_MODELS if name == OUTPUTS[kind].call)
        before = [{**example(made), "type": OUTPUTS[kind].call, "call_id": "x"}]
        item["call_id"] = "x"
    user = {"role": "user", "content": "Go on."}
    shown, left_out = items.read([user, *before, item], "resp_1", {})
    is_known = kind in items.PREFIXES
    assert is_known != (kind in DROPPED_ITEMS), "a new type: decide what becomes of it"
    assert left_out == ([] if is_known else [f"input[{1 + len(before)}] {kind}"])
    messages = history.messages(None, shown, Toolbox([]))
    if not is_known:
        assert [message.role for message in messages] == ["user"]
    elif kind not in ("additional_tools", "reasoning"):
        assert len(messages) > 1 + len(before)
    for each in shown:
        checked(each, ANY_ITEM)


@pytest.mark.parametrize("kind", sorted(items.PROVIDED))
def test_results_of_a_providers_tools_become_texts(kind: str) -> None:
    fields = {name: f"the {name}" for name in items.PROVIDED[kind]}
    if kind == "code_interpreter_call":
        fields["outputs"] = [{"type": "logs", "logs": "42"}, {"type": "image", "url": "data:" + "x" * 1000}]  # type: ignore[assignment]
    shown = items.read([{"type": kind, "id": "a", **fields}], "resp_1", {}).items
    (message,) = history.messages(None, shown, Toolbox([]))
    assert message.role == "assistant"
    content = str(message.content)
    assert content.startswith(f"[{kind} ")
    assert "data:" not in content
    assert all(f'"{name}":' in content for name in items.PROVIDED[kind])


def test_unknown_types_are_dropped_by_name() -> None:
    found = items.read([{"type": "hologram", "id": "a"}, {"role": "user", "content": "Hi."}], "resp_1", {})
    assert found.left_out == ["input[0] hologram"]
    assert [item["type"] for item in found.items] == ["message"]
    assert Toolbox([{"type": "hologram"}]).left_out == ["tools[0] hologram"]
    with pytest.raises(ApiError, match=r"input\[0\]: type must be a text"):
        items.read([{"type": 3}], "resp_1", {})
    with pytest.raises(ApiError, match=r"tools\[0\]\.type is missing"):
        Toolbox([{"name": "x"}])


# ---- tools


def test_a_namespace_is_flattened_and_restored() -> None:
    spaces: list[Any] = [AGENTS, {**AGENTS, "name": "mcp__x__"}]
    box = Toolbox([{"type": "function", "name": "agents__spawn"}, *spaces])
    names = [each["function"]["name"] for each in box.functions]
    assert names == ["agents__spawn", "agents__spawn_", "mcp__x__spawn"]
    assert box.functions[1]["function"]["description"] == "Other agents.\n\nStart one."
    assert [(tool.name, tool.namespace) for tool in map(box.tool, names)] == [
        ("agents__spawn", None),
        ("spawn", "agents"),
        ("spawn", "mcp__x__"),
    ]
    assert [box.function("spawn", space) for space in ("agents", "mcp__x__", "gone")] == [*names[1:], "gone__spawn"]


def test_calls_of_the_history_are_those_that_the_model_wrote() -> None:
    box = Toolbox([AGENTS, {"type": "local_shell"}])
    spawn = {"type": "function_call", "call_id": "1", "name": "spawn", "namespace": "agents", "arguments": "{}"}
    shell = {"type": "local_shell_call", "id": "lsh_1", "call_id": "2", "action": {"type": "exec", "command": ["ls"]}}
    outputs = [
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "b"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
    ]
    first, *results = history.messages(None, items.read([spawn, shell, *outputs], "resp_1", {}).items, box)
    assert [call.function.name for call in first.tool_calls or ()] == ["agents__spawn", "local_shell"]
    assert [(result.content, result.tool_call_id) for result in results] == [("b", "2"), ("a", "1")]


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'}
    (function,) = Toolbox([{**PATCH, "format": grammar}]).functions
    assert function["function"]["parameters"]["required"] == ["input"]
    assert 'start: "x"+' in function["function"]["description"]


def test_tools_may_come_with_the_input() -> None:
    given = items.read(
        [
            {"role": "user", "content": "Go on."},
            {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "agents"}},
            {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": [AGENTS]},
            {"type": "additional_tools", "role": "developer", "tools": [PATCH, AGENTS, {"type": "web_search"}]},
        ],
        "resp_1",
        {},
    ).items
    box = Toolbox([SEARCH], history.later_tools(given))
    assert [each["function"]["name"] for each in box.functions] == ["tool_search", "agents__spawn", "apply_patch"]
    assert box.left_out == ["additional_tools.tools[2] web_search"]
    messages = history.messages(None, given, box)
    assert [call.function.name for call in messages[1].tool_calls or ()] == ["tool_search"]
    assert messages[2].content == "Tools that can be called now:\n- agents__spawn"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "auto"),
        ({"type": "function", "name": "agents__spawn"}, "agents__spawn"),
        ({"type": "function", "name": "spawn"}, "agents__spawn"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        ({"type": "function", "function": {"name": "look"}}, "look"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "shell"}, "shell"),
    ],
)
def test_a_choice_names_a_function(given: Any, expected: str) -> None:
    box = Toolbox([{"type": "function", "name": "look"}, AGENTS, PATCH, {"type": "shell"}, {"type": "web_search"}])
    found = box.choice(given)
    assert found in (expected, {"type": "function", "function": {"name": expected}})


def test_a_choice_of_several_excludes_dropped_tools() -> None:
    box = Toolbox([PATCH, {"type": "web_search"}])
    several: dict[str, Any] = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}
    with pytest.raises(ApiError, match="allows none of the tools"):
        box.choice(several)
    with pytest.raises(ApiError, match="nobody runs here"):
        box.choice({"type": "web_search_preview"})
    several["tools"].append({"type": "custom", "name": "apply_patch"})
    with pytest.raises(ApiError, match="tool_choice is nested"):
        box.choice({**several, "any": DEEP})
    named = [{"type": "function", "function": {"name": "apply_patch"}}]
    assert box.choice(several) == {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    several["tools"] *= 65
    assert box.choice(several) is several  # chats refuse it


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([PATCH, {"type": "function", "name": "apply_patch"}], r"tools\[1\] is called 'apply_patch' as another one is"),
        ([{"type": "web_search"}, {"type": "function"}], r"tools\[1\]\.name is missing"),
        ([{"type": "function", "name": "x" * 300}], r"tools\[0\]: .*length"),
        ([{**AGENTS, "tools": [{"type": "namespace"}]}], r"tools\[0\]\.tools\[0\] is 'namespace'"),
        ([{**AGENTS, "tools": [{"type": "function", "name": "x", "description": 3}]}], r"\[0\]: .*description"),
        ([{"type": "web_search", "any": DEEP}], r"tools\[0\] is nested more than 64 deep"),
        ([{"type": "namespace", "name": "x"}], r"tools\[0\]: a namespace needs a name and a list of tools"),
        ([{**AGENTS, "tools": [{**PATCH, "name": f"a{i}"} for i in range(129)]}], "tools are over 128"),
    ],
)
def test_bad_tools_are_named(tools: list[Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        Toolbox(tools)
