"""Writers of tool calls, one for each format of tests/response_transcripts.py, with the format's literals."""

import json
import re
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def each(before: str, behind: str, between: str = "\n", **around: str) -> Callable[[list[Call]], str]:
    """Write a call as `before`, its arguments as JSON, `behind`; NAME in `before` is its name, INDEX its number."""

    def write(calls: list[Call]) -> str:
        texts = [
            before.replace("NAME", name).replace("INDEX", str(index)) + dumps(arguments) + behind
            for index, (name, arguments) in enumerate(calls)
        ]
        return around.get("begin", "") + between.join(texts) + around.get("end", "")

    return write


def listed(name_key: str, arguments_key: str, begin: str, end: str) -> Callable[[list[Call]], str]:
    return lambda calls: begin + dumps([{name_key: name, arguments_key: args} for name, args in calls]) + end


def python(begin: str, end: str) -> Callable[[list[Call]], str]:
    def one(call: Call) -> str:
        return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"

    return lambda calls: begin + "[" + ", ".join(map(one, calls)) + "]" + end


def tagged(begin: str, tag: str, end: str, first: str = "", last: str = "") -> Callable[[list[Call]], str]:
    def one(call: Call) -> str:
        def shown(value: Any) -> str:
            return value if isinstance(value, str) else dumps(value)

        tags = "".join(tag.replace("KEY", key).replace("VALUE", shown(value)) for key, value in call[1].items())
        return begin.replace("NAME", call[0]) + tags + end

    return lambda calls: first + "\n".join(map(one, calls)) + last


def minimax_m3(calls: list[Call]) -> str:
    ns = "]<]minimax[>["

    def shown(value: Any) -> str:
        if value in ({}, []) or not isinstance(value, (dict, list)):
            return value if isinstance(value, str) else dumps(value)
        pairs = value.items() if isinstance(value, dict) else [("item", item) for item in value]
        return "".join(f"{ns}<{key}>{shown(item)}{ns}</{key}>" for key, item in pairs)

    def one(call: Call) -> str:
        return f'{ns}<invoke name="{call[0]}">{shown(call[1]) if call[1] else ""}{ns}</invoke>\n'

    return f"{ns}<tool_call>\n{''.join(map(one, calls))}{ns}</tool_call>"


def command_r(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        return f'    {{\n        "tool_name": "{call[0]}",\n        "parameters": {dumps(call[1])}\n    }}'

    return "Action:\n```json\n[\n" + ",\n".join(map(one, calls)) + "\n]```"


def muse_glimmer(calls: list[Call]) -> str:
    """Write each call as a message to its tool."""
    write = in_block("atem:function_calls", "atem:")
    return "<|eom|><|start|>assistant".join(f" to={call[0]}<|message|>{write([call])}" for call in calls)


def kimi_k3(calls: list[Call]) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object", list: "array"}

    def one(index: int, call: Call) -> str:
        tags = "".join(
            f'<|open|>argument key="{key}" type="{kinds.get(type(value), "null")}"<|sep|>'
            f"{value if isinstance(value, str) else dumps(value)}<|close|>argument<|sep|>"
            for key, value in call[1].items()
        )
        return f'<|open|>call tool="{call[0]}" index="{index}"<|sep|>{tags}<|close|>call<|sep|>'

    written = "".join(one(index, call) for index, call in enumerate(calls, start=1))
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|>"


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(item, quote) for item in value) + "]"
    return dumps(value)


def gemma(begin: str, quote: str, end: str) -> Callable[[list[Call]], str]:
    return lambda calls: "".join(f"{begin}call:{name}{gemma_value(args, quote)}{end}" for name, args in calls)


def in_block(block: str, prefix: str, kinds: tuple[str, str] = ("", "")) -> Callable[[list[Call]], str]:
    """Write all calls in one block of invoke and parameter tags, whose names begin with `prefix`. `kinds` are written
    behind the name of a text and of a value of JSON."""

    def shown(key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        text = value if is_text else dumps(value)
        return f'<{prefix}parameter name="{key}"{kinds[0 if is_text else 1]}>{text}</{prefix}parameter>\n'

    def one(call: Call) -> str:
        tags = "".join(shown(key, value) for key, value in call[1].items())
        return f'<{prefix}invoke name="{call[0]}">\n{tags}</{prefix}invoke>\n'

    return lambda calls: f"<{block}>\n{''.join(map(one, calls))}</{block}>"


def minicpm(calls: list[Call]) -> str:
    def shown(value: Any) -> str:
        text = value if isinstance(value, str) else dumps(value)
        return f"<![CDATA[{text}]]>" if isinstance(value, str) and re.search("[<&\n]", text) else text

    def one(call: Call) -> str:
        tags = "".join(f'<param name="{key}">{shown(value)}</param>' for key, value in call[1].items())
        return f'<function name="{call[0]}">{tags}</function>'

    return "\n".join(map(one, calls))


def thinks(begin: str, end: str) -> Callable[[str], str]:
    return lambda text: f"{begin}\n{text}\n{end}\n\n"
