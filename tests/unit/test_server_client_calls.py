"""Calls of tools beside plain functions, and their outputs: there and back, in any pieces, and written in answers."""

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.client_tools import AGENTS, ANY_ITEM, DEEP, PATCH, SEARCH
from tests.response_events import check_stream, checked, events_of
from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.client.text.response.events import CallDelta
from vllm_lite.server.openai.bodies import warned
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.responses import history, items
from vllm_lite.server.responses.called import WrittenCall
from vllm_lite.server.responses.client_tools import CALLS, FORMS, OUTPUTS, decoded
from vllm_lite.server.responses.event_log import EventLog
from vllm_lite.server.responses.output import Output, OutputStyle
from vllm_lite.server.responses.toolbox import ClientTool, Toolbox

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
    """A fake parser that returns given events, one for each delta."""

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
    found = check_stream(events_of(log))["output"]
    assert [item["id"].split("_")[0] for item in found] == ["fc", "ctc", "lsh", "sh", "tsc", "fc", "ctc"]
    assert (found[0]["name"], found[0]["namespace"], found[0]["arguments"]) == ("spawn", "agents", '{"a": 1}')
    assert (found[1]["name"], found[1]["input"]) == ("apply_patch", "*** \N{LATIN SMALL LETTER E WITH ACUTE}")
    assert found[2]["action"]["command"] == ["ls"]
    assert found[3]["action"]["commands"] == ["ls", "pwd"]
    assert found[4]["arguments"] == {"query": "x"}
    assert found[5]["name"] == "unknown"
    assert found[6]["input"] == "+x", "which no delta had before the end"
    assert items.read(found, "resp_2", {}).items == found


def test_warnings_are_appended_to_one_bounded_header() -> None:
    first = warned({}, "ignored", ["a"])
    assert warned(first, "not shown", []) == first
    both = warned(first, "not shown", [f'tools[{number}] "x"\n' for number in range(1000)])["Warning"]
    assert both.startswith('299 vllm-lite "ignored: a", 299 vllm-lite "not shown: tools[0] ?x??, tools[1]')
    assert len(both) < 500
