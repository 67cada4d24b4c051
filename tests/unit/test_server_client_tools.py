"""Tools and items of /v1/responses beside plain functions: what becomes of each type that OpenAI's package knows."""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import hypothesis
import hypothesis.strategies as st
import msgspec
import pydantic
import pytest
from openai.types.responses.response_input_item import ResponseInputItem
from openai.types.responses.response_item import ResponseItem
from openai.types.responses.response_output_item import ResponseOutputItem
from openai.types.responses.tool import Tool

from tests.response_events import check_stream, checked, events_in
from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.pieces import CallDelta
from vllm_lite.server.openai.bodies import warned
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.responses import history, items
from vllm_lite.server.responses.called import WrittenCall
from vllm_lite.server.responses.client_tools import CALLS, FORMS, OUTPUTS, decoded
from vllm_lite.server.responses.event_log import EventLog
from vllm_lite.server.responses.output import Output, OutputStyle
from vllm_lite.server.responses.toolbox import TREATMENTS, ClientTool, Toolbox

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


# ---- the types of the package


def flat(kind: Any) -> Iterator[Any]:
    """The models that a union is made of."""
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


@pytest.mark.parametrize(("kind", "model"), TOOL_MODELS, ids=[kind for kind, _ in TOOL_MODELS])
def test_every_type_of_tools_has_a_treatment(kind: str, model: Any) -> None:
    tool = {**example(model), "type": kind}
    box = Toolbox([tool])
    assert kind in TREATMENTS, "a new type: decide what becomes of it"
    if TREATMENTS[kind] == "left out" or kind == "tool_search":  # which a provider runs unless it says "client"
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
    assert is_known != (kind in items.DROPPED), "a new type: decide what becomes of it"
    assert left_out == ([] if is_known else [f"input[{1 + len(before)}] {kind}"])
    messages = history.messages(None, shown, Toolbox([]))
    if not is_known:
        assert [message.role for message in messages] == ["user"]
    elif kind not in ("additional_tools", "reasoning"):
        assert len(messages) > 1 + len(before)
    for each in shown:
        checked(each, ANY_ITEM)


@pytest.mark.parametrize("kind", sorted(items.PROVIDED))
def test_what_a_provider_found_out_is_a_text(kind: str) -> None:
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


def test_a_type_that_nobody_knows_yet_is_dropped_by_name() -> None:
    found = items.read([{"type": "hologram", "id": "a"}, {"role": "user", "content": "Hi."}], "resp_1", {})
    assert found.left_out == ["input[0] hologram"]
    assert [item["type"] for item in found.items] == ["message"]
    assert Toolbox([{"type": "hologram"}]).left_out == ["tools[0] hologram"]
    with pytest.raises(ApiError, match=r"input\[0\]: type must be a text"):
        items.read([{"type": 3}], "resp_1", {})
    with pytest.raises(ApiError, match=r"tools\[0\]\.type is missing"):
        Toolbox([{"name": "x"}])


# ---- tools


def test_a_namespace_is_flattened_and_comes_back() -> None:
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


def test_a_choice_of_several_leaves_out_what_is_left_out() -> None:
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


# ---- calls


EXAMPLES: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"a":1}', "namespace": "agents"},
    {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": 'a "b"\n'},
    {
        "type": "local_shell_call",
        "call_id": "1",
        "action": {
            "type": "exec",
            "command": ["ls", "-l"],
            "env": {"A": "b"},
            "user": "me",
            "working_directory": "/",
            "timeout_ms": 5,
        },
    },
    {
        "type": "shell_call",
        "call_id": "1",
        "action": {"commands": ["ls", "pwd"], "timeout_ms": 9, "max_output_length": 3},
        "environment": {"type": "local"},
    },
    {"type": "apply_patch_call", "call_id": "1", "operation": {"type": "delete_file", "path": "a"}},
    {"type": "apply_patch_call", "call_id": "1", "operation": {"type": "create_file", "path": "a", "diff": "+x"}},
    {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "a"}},
]


@pytest.mark.parametrize("item", EXAMPLES, ids=lambda item: str(item["type"]))
def test_a_call_is_a_function_and_back(item: dict[str, Any]) -> None:
    (kept,) = items.read([item], "resp_1", {}).items
    assert kept == {**item, "id": kept["id"], "status": "completed"}
    form = CALLS[item["type"]]
    name, arguments = form.arguments(kept)
    call = WrittenCall(ClientTool(form, name, item.get("namespace")), "1")
    deltas = "".join(call.feed(letter) for letter in arguments)
    fields, rest = call.close()
    written = {"type": call.kind, **call.opened(), **fields}
    assert written == item
    assert deltas + rest == (written[form.streamed[0]] if form.streamed else "")


@hypothesis.given(st.text(st.characters(codec="utf-8"), max_size=40), st.booleans(), st.data())
def test_a_text_arrives_in_any_pieces(text: str, is_ascii: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(arguments)), max_size=8)) | {0, len(arguments)})
    call = WrittenCall(ClientTool(FORMS["custom"], "x"), "1")
    deltas = [call.feed(arguments[start:end]) for start, end in pairwise(cuts)]
    fields, rest = call.close()
    assert (fields, rest) == ({"input": text}, "")
    assert "".join(deltas) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"patch": "abc"}', "abc"),
        ('{"input": {"a": 1}}', '{"a":1}'),
        ('{"a": "b", "input": "c"}', "c"),
        ('{"input": "ab", "input": "cd"}', "ab"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "cut at \\ud83d', "cut at "),
        ("", ""),
        ('{"a": "b", "c": "d"}', ""),
    ],
)
def test_arguments_of_another_form_are_a_text_at_the_end(arguments: str, expected: str) -> None:
    call = WrittenCall(ClientTool(FORMS["custom"], "x"), "1")
    deltas = "".join(call.feed(letter) for letter in arguments)
    fields, rest = call.close()
    assert fields == {"input": expected}
    assert deltas + rest == expected


@pytest.mark.parametrize("arguments", ["", "{", "[]", '{"command": 3, "env": [], "type": [], "commands": {}}'])
@pytest.mark.parametrize("tool", sorted(FORMS))
def test_any_arguments_are_an_item_of_its_type(tool: str, arguments: str) -> None:
    form = FORMS[tool]
    item = {"type": form.call, "id": "a", "call_id": "1", "status": "completed", **form.fields(decoded(arguments))}
    if form.streamed is not None:
        item["name"] = "x"
    checked(item, ANY_ITEM)


def test_outputs_are_texts() -> None:
    outputs: list[dict[str, Any]] = [
        {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]},
        {"type": "local_shell_call_output", "id": "1", "output": "b"},
        {
            "type": "shell_call_output",
            "output": [
                {"stdout": "c", "stderr": "", "outcome": {"type": "exit", "exit_code": 2}},
                {"stdout": "", "stderr": "d", "outcome": {"type": "timeout"}},
            ],
        },
        {"type": "apply_patch_call_output", "status": "failed", "output": "no such file"},
    ]
    texts, left_out = [], []
    for output in outputs:
        made = next(item for item in EXAMPLES if item["type"] == OUTPUTS[output["type"]].call)
        found = items.read([made, {"call_id": "1", **output}], "resp_1", {})
        texts.append(history.messages(None, found.items, Toolbox([]))[-1].content)
        left_out += found.left_out
    assert texts == [
        "a\n[input_image, which is not shown]",
        "b",
        "c\nexit code 2\nd\ntimed out",
        "failed: no such file",
    ]
    assert left_out == ["input[1] input_image"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "custom_tool_call", "call_id": "1", "name": "x"}, "input[0].input"),
        ({"type": "local_shell_call", "call_id": "1"}, "input[0].action"),
        ({"type": "apply_patch_call_output", "call_id": "1", "status": "maybe"}, "input[0].status"),
        ({"type": "shell_call_output", "call_id": "1", "output": 3}, "input[0].output"),
        ({"type": "tool_search_output", "tools": [3]}, "input[0].tools"),
        ({"type": "additional_tools"}, "input[0].tools"),
        ({"type": "mcp_call", "any": DEEP}, "input[0]"),
        ({"type": "function_call_output", "call_id": "1", "output": [3]}, "input[0].output"),
    ],
)
def test_bad_items_are_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        items.read([item], "resp_1", {})
    assert caught.value.param == param


WORDS = st.sampled_from(["", "x", "function", "shell", "type", "name", "tools"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
)


def objects_with_another(given: list[dict[str, Any]], data: st.DataObject) -> list[dict[str, Any]]:
    each = data.draw(st.integers(0, len(given) - 1))
    changed = with_another(given[each], data)
    return [*given[:each], *([changed] if isinstance(changed, dict) else []), *given[each + 1 :]]


def with_another(value: Any, data: st.DataObject) -> Any:
    if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 3)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, copy = data.draw(st.sampled_from(keys)), value.copy()
        copy[key] = with_another(value[key], data)
        return copy
    return data.draw(ANYTHING)


@hypothesis.given(st.data())
def test_whatever_tools_and_choices_hold_is_taken_or_named(data: st.DataObject) -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "name": "look"}, PATCH, AGENTS, SEARCH, {"type": "shell"}]
    choice = {"type": "allowed_tools", "tools": [{"type": "custom", "name": "apply_patch"}]}
    with suppress(ApiError):  # nothing else is raised
        Toolbox(objects_with_another(tools, data)).choice(with_another(choice, data))


@hypothesis.given(st.data())
def test_whatever_items_hold_is_taken_or_named(data: st.DataObject) -> None:
    provided = [{"type": kind, "id": "x", **dict.fromkeys(fields, "x")} for kind, fields in items.PROVIDED.items()]
    later = {"type": "additional_tools", "tools": [PATCH]}
    given: list[dict[str, Any]] = [{"role": "user", "content": "hello"}, *EXAMPLES, *provided, later]
    with suppress(ApiError):
        read = items.read(objects_with_another(given, data), "resp_1", {}).items
        assert all(isinstance(item["id"], str) for item in read)
        history.messages(None, read, Toolbox([], history.later_tools(read)))


# ---- the answer


class Spoken:
    """A parser whose events the test has made, one for each delta."""

    num_reasoning = 0

    def __init__(self, *events: CallDelta) -> None:
        self._events = list(events)

    def feed(self, delta: CompletionOutput) -> list[CallDelta]:
        del delta
        return [self._events.pop(0)]

    def id_of(self, call: CallDelta) -> str:
        return f"call_{call.index}"


def test_each_kind_of_call_is_written_and_streamed() -> None:
    tools: list[Any] = [AGENTS, PATCH, {"type": "local_shell"}, {"type": "shell"}, SEARCH]
    calls = [
        ("agents__spawn", '{"a": 1}'),
        ("apply_patch", '{"input": "*** \\u00e9"}'),
        ("local_shell", '{"command": ["ls"]}'),
        ("shell", '{"commands": ["ls", "pwd"]}'),
        ("tool_search", '{"query": "x"}'),
        ("unknown", "{}"),
        ("apply_patch", '{"patch": "+x"}'),
    ]
    deltas: list[CallDelta] = []
    for index, (name, arguments) in enumerate(calls):
        parts = [arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]]
        deltas += [CallDelta(index, name, ""), *[CallDelta(index, None, part) for part in parts]]
    log = EventLog()
    response: dict[str, Any] = {"id": "resp_1", "object": "response", "created_at": 1, "model": "demo"}
    response |= {"status": "in_progress", "output": [], "tools": tools}
    response |= {"tool_choice": "auto", "parallel_tool_calls": True}
    parser: Any = Spoken(*deltas)
    output = Output(response, parser, Spelling(None), log=log, shown=OutputStyle(None, False, Toolbox(tools)))
    output.begin()
    for _ in deltas:
        output.feed(CompletionOutput(0, "", [1]))
    tokens = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    output.finish("completed", {**tokens, **details, "output_tokens_details": {"reasoning_tokens": 0}})
    found = check_stream(list(events_in(log.text().decode().splitlines())))["output"]
    assert [item["id"].split("_")[0] for item in found] == ["fc", "ctc", "lsh", "sh", "tsc", "fc", "ctc"]
    assert (found[0]["name"], found[0]["namespace"], found[0]["arguments"]) == ("spawn", "agents", '{"a": 1}')
    assert (found[1]["name"], found[1]["input"]) == ("apply_patch", "*** \N{LATIN SMALL LETTER E WITH ACUTE}")
    assert found[2]["action"]["command"] == ["ls"]
    assert found[3]["action"]["commands"] == ["ls", "pwd"]
    assert found[4]["arguments"] == {"query": "x"}
    assert found[5]["name"] == "unknown"
    assert found[6]["input"] == "+x", "which no delta had before the end"
    assert items.read(found, "resp_2", {}).items == found


def test_a_warning_joins_those_before_it_and_is_bounded() -> None:
    first = warned({}, "ignored", ["a"])
    assert warned(first, "not shown", []) == first
    both = warned(first, "not shown", [f'tools[{number}] "x"\n' for number in range(1000)])["Warning"]
    assert both.startswith('299 vllm-lite "ignored: a", 299 vllm-lite "not shown: tools[0] ?x??, tools[1]')
    assert len(both) < 500
