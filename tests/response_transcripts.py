"""Outputs as each format writes them: twenty messages, rendered by a small writer per format.

A message is a list of parts: ("think", text), ("text", text), ("calls", [(name, arguments), ...]). A writer knows the
literals of one format. The added tokens of its vocabulary are spelled in the text and cut out where pieces are made.
"""

# ruff: noqa: RUF001 - DeepSeek's literals have such letters

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.call_writers import (
    Call,
    command_r,
    dumps,
    each,
    gemma,
    in_block,
    kimi_k3,
    listed,
    minicpm,
    minimax_m3,
    muse_glimmer,
    python,
    tagged,
    thinks,
)
from vllm_lite.client.text.response.events import CallDelta, Event, OutputPiece, ReasoningDelta
from vllm_lite.client.text.response.parser import ResponseParser
from vllm_lite.client.text.response.template import Format

Part = tuple[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "text": {"type": "string"},
                    "deep": {"type": "object"},
                    "list": {"type": "array"},
                    "flag": {"type": "boolean"},
                    "none": {"type": "null"},
                    "size": {"type": "number"},
                },
            },
        },
    }
    for name in ("get_weather", "now", "files.write-all")
]
PARIS: Call = ("get_weather", {"city": "Paris", "days": 3})
DEEP: Call = ("get_weather", {"deep": {"a": [1, {"b": [None, True]}], "c": {}}, "list": [[], "x", -1.5e3]})
UNICODE: Call = ("files.write-all", {"text": "Grüße 猫🙂 \"quoted\" 'single' back\\slash\ttab\nline, end"})
LITERALS: Call = ("files.write-all", {"text": "</tool> [TOOL] {not} json, (x=1) ] } <b>"})
EMPTY: Call = ("now", {})
SCALARS: Call = ("get_weather", {"flag": True, "none": None, "size": 0.25, "days": -7, "city": ""})

MESSAGES: dict[str, list[Part]] = {
    "plain": [("text", "Just text, with {braces} and [brackets] and 1 < 2.")],
    "empty": [],
    "unicode text": [("text", "Ça va? 猫🙂 — “oui”")],
    "paragraphs": [("text", 'One.\n\nTwo:\n- a\n- b\n\n```json\n{"a": 1}\n```\n\nEnd.')],
    "one call": [("calls", [PARIS])],
    "text and call": [("text", "Let me look.\n\n"), ("calls", [PARIS])],
    "parallel": [("calls", [PARIS, EMPTY, DEEP])],
    "same call twice": [("calls", [PARIS, PARIS])],
    "nested": [("calls", [DEEP])],
    "unicode call": [("calls", [UNICODE])],
    "literals in a string": [("calls", [LITERALS])],
    "no arguments": [("calls", [EMPTY])],
    "scalars": [("calls", [SCALARS])],
    "reasoning": [("think", "First this.\nThen that."), ("text", "Done.")],
    "reasoning and call": [("think", "I need the weather."), ("calls", [PARIS])],
    "reasoning, text, calls": [("think", "Hm."), ("text", "Sure."), ("calls", [PARIS, UNICODE])],
    "empty reasoning": [("think", ""), ("text", "Done.")],
    "unknown tool": [("calls", [("not_a_tool", {"x": 1})])],
    "many calls": [("calls", [PARIS, EMPTY] * 6)],
    "long string": [("calls", [("files.write-all", {"text": "lorem ipsum, " * 60 + "end"})])],
}


@dataclass(frozen=True)
class Writer:
    """Writer of one format. `names` are its parsers for calls and for reasoning."""

    names: tuple[str | None, str | None]
    tokens: tuple[str, ...]
    calls: Callable[[list[Call]], str]
    think: Callable[[str], str] | None = None
    special: bool = True
    text_first: bool = True
    """Whether calls may follow text."""

    def write(self, message: list[Part]) -> str | None:
        """Render a message; None if the format cannot say it."""
        out, has_text = "", False
        for kind, value in message:
            if kind == "think":
                if self.think is None:
                    return None
                out += self.think(value)
            elif kind == "text":
                has_text = True
                out += value
            elif has_text and not self.text_first:
                return None
            else:
                out += self.calls(value)
        return out


THINK = thinks("<think>", "</think>")
THINK_TOKENS = ("<think>", "</think>")
CALL_TOKENS = ("<tool_call>", "</tool_call>")
V3 = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
V3_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
KIMI = ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
COHERE = ("THINKING", "ACTION", "RESPONSE")
HY3 = ("tool_calls", "tool_call", "arg_key", "arg_value")
SOLAR_CALL = tuple(f"tool_call:{part}" for part in ("begin", "name", "args", "end"))
SOLAR = ("begin", "end", "think", "content", "tool_calls", "calls", *SOLAR_CALL)
HERMES = each('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")

WRITERS: dict[str, Writer] = {
    "hermes": Writer(("hermes", "qwen3"), CALL_TOKENS + THINK_TOKENS, HERMES, THINK, special=False),
    "hermes, text": Writer(("hermes", "qwen3"), (), HERMES, THINK),
    "qwen3_coder": Writer(
        ("qwen3_coder", "qwen3"),
        CALL_TOKENS + THINK_TOKENS,
        tagged("<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"),
        THINK,
        special=False,
    ),
    "glm45": Writer(
        ("glm45", "glm45"),
        (*CALL_TOKENS, *THINK_TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        tagged("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>"),
        THINK,
        special=False,
    ),
    "llama3_json": Writer(
        ("llama3_json", None), ("<|python_tag|>",), each('{"name": "NAME", "parameters": ', "}", "; "), text_first=False
    ),
    "pythonic": Writer(("pythonic", None), (), python("", ""), text_first=False),
    "lfm2": Writer(
        ("lfm2", None),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        python("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "mistral": Writer(
        ("mistral", "mistral"),
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        each("[TOOL_CALLS]NAME[ARGS]", "", ""),
        thinks("[THINK]", "[/THINK]"),
    ),
    "mistral, list": Writer(
        ("mistral", "mistral"), ("[TOOL_CALLS]",), listed("name", "arguments", "[TOOL_CALLS] ", "")
    ),
    "deepseek_v3": Writer(
        ("deepseek_v3", "deepseek_v3"),
        V3 + V3_CALL,
        each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            begin=V3[0],
            end=V3[1],
        ),
        THINK,
    ),
    "deepseek_v31": Writer(
        ("deepseek_v31", "deepseek_v3"),
        V3 + V3_CALL + THINK_TOKENS,
        each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "", begin=V3[0], end=V3[1]),
        THINK,
    ),
    "kimi_k2": Writer(
        ("kimi_k2", "kimi_k2"),
        tuple(f"<|tool_call{name}|>" for name in KIMI),
        each(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
        THINK,
    ),
    "openai": Writer(
        ("openai", "openai_gptoss"),
        HARMONY,
        each("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "<|call|>", "<|start|>assistant"),
        lambda text: f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma4": Writer(
        ("gemma4", "gemma4"),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
        lambda text: f"<|channel>thought\n{text}\n<channel|>",
    ),
    "granite": Writer(
        ("granite", "granite"),
        ("<|tool_call|>",),
        listed("name", "arguments", "<|tool_call|>", ""),
        lambda text: f"Here is my thought process:\n{text}\n\nHere is my response:\n",
    ),
    "cohere": Writer(
        ("cohere_command3", "cohere_command3"),
        tuple(f"<|{edge}_{name}|>" for name in COHERE for edge in ("START", "END")),
        listed("tool_name", "parameters", "<|START_ACTION|>", "<|END_ACTION|>"),
        thinks("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "jamba": Writer(("jamba", None), (), listed("name", "arguments", "<tool_calls>", "</tool_calls>")),
    "hunyuan": Writer(
        ("hunyuan_a13b", "hunyuan_a13b"), (), listed("name", "arguments", "<tool_calls>", "</tool_calls>"), THINK
    ),
    "nemotron": Writer(
        ("nemotron_json", "qwen3"),
        ("<TOOLCALL>", "</TOOLCALL>"),
        listed("name", "arguments", "<TOOLCALL>", "</TOOLCALL>"),
        THINK,
    ),
    "apertus": Writer(
        ("apertus", "apertus"),
        tuple(f"<|{name}_{edge}|>" for name in ("tools", "inner") for edge in ("prefix", "suffix")),
        lambda calls: f"<|tools_prefix|>{dumps([{name: arguments} for name, arguments in calls])}<|tools_suffix|>",
        thinks("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "seed_oss": Writer(
        ("seed_oss", "seed_oss"),
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        tagged(
            "<seed:tool_call>\n<function=NAME>\n",
            "<parameter=KEY>VALUE</parameter>\n",
            "</function>\n</seed:tool_call>",
        ),
        thinks("<seed:think>", "</seed:think>"),
    ),
    "ernie45": Writer(
        ("ernie45", "ernie45"),
        (*CALL_TOKENS, *THINK_TOKENS, "<response>", "</response>"),
        each('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
        THINK,
    ),
    "gigachat3": Writer(
        ("gigachat3", None),
        ("<|function_call|>", "<|message_sep|>", "<|role_sep|>"),
        each('<|function_call|>{"name": "NAME", "arguments": ', "}", ""),
    ),
    "gigachat3, role": Writer(
        ("gigachat3", None),
        ("<|message_sep|>", "<|role_sep|>"),
        each('<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "NAME", "arguments": ', "}", ""),
    ),
    "minimax_m2": Writer(
        ("minimax_m2", "minimax_m2"),
        ("<minimax:tool_call>", "</minimax:tool_call>", *THINK_TOKENS),
        in_block("minimax:tool_call", ""),
        THINK,
        special=False,
    ),
    "deepseek_v32": Writer(
        ("deepseek_v32", "deepseek_v32"),
        ("｜DSML｜", *THINK_TOKENS),
        in_block("｜DSML｜function_calls", "｜DSML｜", (' string="true"', ' string="false"')),
        THINK,
        special=False,
    ),
    "deepseek_v4": Writer(
        ("deepseek_v4", "deepseek_v4"),
        ("｜DSML｜", *THINK_TOKENS),
        in_block("｜DSML｜tool_calls", "｜DSML｜", (' string="true"', ' string="false"')),
        THINK,
        special=False,
    ),
    "functiongemma": Writer(
        ("functiongemma", None),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    ),
    "phi4_mini": Writer(("phi4_mini_json", None), (), listed("name", "arguments", "functools", "")),
    "phi4_mini, tokens": Writer(
        ("phi4_mini_json", None),
        ("<|tool_call|>", "<|/tool_call|>"),
        listed("name", "arguments", "<|tool_call|>", "<|/tool_call|>"),
    ),
    "xlam": Writer(("xlam", None), (), listed("name", "arguments", "", ""), text_first=False),
    "xlam, fenced": Writer(("xlam", None), (), listed("name", "arguments", "```json\n", "\n```"), text_first=False),
    "internlm": Writer(
        ("internlm", None),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        each('<|action_start|><|plugin|>\n{"name": "NAME", "arguments": ', "}<|action_end|>", ""),
    ),
    "functionary_v31": Writer(("functionary_v31", None), (), each("<function=NAME>", "</function>", "")),
    "functionary_v32": Writer(("functionary_v32", None), (), each(">>>NAME\n", "", "")),
    "granite_20b_fc": Writer(
        ("granite_20b_fc", None), (), each('<function_call> {"name": "NAME", "arguments": ', "}", "")
    ),
    "command_r": Writer(("command_r", None), (), command_r),
    "kimi_k3": Writer(
        ("kimi_k3", "kimi_k3"),
        ("<|open|>", "<|close|>", "<|sep|>"),
        kimi_k3,
        thinks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    "hy_v3": Writer(
        ("hy_v3", "hy_v3"),
        (
            *(f"<{end}{name}:opensource>" for name in (*HY3, "think") for end in ("", "/")),
            "<tool_sep:opensource>",
        ),
        tagged(
            "<tool_call:opensource>NAME<tool_sep:opensource>\n",
            "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n",
            "</tool_call:opensource>",
            "<tool_calls:opensource>\n",
            "\n</tool_calls:opensource>",
        ),
        thinks("<think:opensource>", "</think:opensource>"),
    ),
    "solar_open": Writer(
        ("solar_open", "solar_open"),
        tuple(f"<|{name}|>" for name in SOLAR),
        each(
            "<|tool_call:begin|>a1b2c3d4INDEX<|tool_call:name|>NAME<|tool_call:args|>",
            "<|tool_call:end|>",
            "",
            begin="<|tool_calls|>",
            end="<|calls|>",
        ),
        thinks("<|think|>", "<|end|><|begin|>assistant<|content|>"),
    ),
    "muse_glimmer": Writer(
        ("muse_glimmer", "muse_glimmer"),
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        muse_glimmer,
        lambda text: f" to=self<|message|>{text}<|eom|><|start|>assistant to=user<|message|>",
    ),
    "minimax_m3": Writer(
        ("minimax_m3", "minimax_m3"),
        ("]<]minimax[>[", "<mm:think>", "</mm:think>"),
        minimax_m3,
        thinks("<mm:think>", "</mm:think>"),
    ),
    "minicpm5": Writer(("minicpm5", "qwen3"), (), minicpm, THINK),
}


# ---- reading them


@dataclass
class Message:
    """Message that all events of an output make together, and their order: text, or the number of a call."""

    reasoning: str
    content: str
    calls: list[list[str]]
    order: list[tuple[str, str | int]]

    def add(self, event: Event) -> None:
        if isinstance(event, CallDelta):
            if event.name is not None:
                assert event.index == len(self.calls), "calls come in order, each with its name once"
                self.calls.append([event.name, ""])
                self.order.append(("call", event.index))
            assert self.order[-1] == ("call", event.index), "nothing comes inside a call"
            self.calls[event.index][1] += event.arguments
            return
        assert event.text
        kind = "reasoning" if isinstance(event, ReasoningDelta) else "content"
        setattr(self, kind, getattr(self, kind) + event.text)
        if self.order and self.order[-1][0] == kind:
            self.order[-1] = (kind, f"{self.order[-1][1]}{event.text}")
        else:
            self.order.append((kind, event.text))


def ids_of(tokens: tuple[str, ...]) -> dict[str, int]:
    return {token: 1000 + place for place, token in enumerate(tokens)}


def pieces_of(text: str, ids: dict[str, int], rng: random.Random | None = None, most: int = 12) -> list[OutputPiece]:
    """Cut `text` into its added tokens and, between them, random parts; whole ones without `rng`."""
    pattern = "|".join(re.escape(token) for token in sorted(ids, key=len, reverse=True))
    pieces: list[OutputPiece] = []
    for part in re.split(f"({pattern})", text) if ids else [text]:
        if part in ids:
            pieces.append(OutputPiece(part, ids[part]))
            continue
        place = 0
        while place < len(part):
            size = rng.randint(1, most) if rng else len(part)
            pieces.append(OutputPiece(part[place : place + size]))
            place += size
    return pieces


def read(
    response_format: Format, pieces: list[OutputPiece], prefix: str = "", tools: list[dict[str, Any]] | None = TOOLS
) -> Message:
    """Feed pieces one by one and put the events together."""
    parser = ResponseParser(response_format, prefix, tools)
    message = Message("", "", [], [])
    for events in [*(parser.feed([piece]) for piece in pieces), parser.finish()]:
        for before, event in pairwise(events):
            assert type(before) is not type(event) or isinstance(event, CallDelta), "a run is one event"
        for event in events:
            message.add(event)
    return message
