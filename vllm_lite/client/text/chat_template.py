"""A checkpoint's chat template: messages in, the text of a prompt out, the same text that transformers makes.

The template comes with the model, so it runs in a sandbox that lets it change nothing it is given. A request cannot
bring a template, only plain data for its variables. The time of a rendering is not bounded here: the server renders in
a process whose time is (template_process.py).
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm_lite.client.text.surrogates import without_halves
from vllm_lite.client.text.template_source import TemplateSource
from vllm_lite.errors import ModelError, RequestError

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables that the server sets, besides the names of special tokens."""

Message = Mapping[str, Any]
"""{"role": ..., "content": text, ...}"""
Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}"""


class ChatTemplate:
    """A compiled template and the special tokens that it may name. Rendering is safe in any thread."""

    def __init__(self, found: TemplateSource) -> None:
        """Raises ModelError for a text that is no Jinja."""
        self.name = found.name
        self.special_tokens = found.special_tokens
        try:
            self._template = self._for_tools = _environment().from_string(found.source)
            if found.for_tools is not None:
                self._for_tools = _environment().from_string(found.for_tools)
        except Exception as error:  # besides its own errors: too deep, too large, blocks that Python cannot nest
            raise ModelError(f"{self.name}: the chat template cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: str | Path, template: str | Path | None = None) -> "ChatTemplate | None":
        """Compile the template that TemplateSource.load finds; None if there is none. Raises ModelError."""
        found = TemplateSource.load(folder, template)
        return None if found is None else cls(found)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """Make the prompt for `messages`, in which the model is shown `tools`.

        `add_generation_prompt` ends it where the answer begins; `continue_final_message` ends it inside the last
        message, to be continued. `variables` are further values for the template. Raises RequestError, also for an
        error that the template itself raises.
        """
        variables = variables or {}
        if taken := sorted(variables.keys() & (RESERVED | self.special_tokens.keys())):
            raise RequestError(f"chat_template_kwargs cannot set {taken[0]!r}, which the server sets")
        mark = ""
        if continue_final_message:
            mark = os.urandom(16).hex()  # random, so that no message contains it
            messages = _marked(messages, mark, add_generation_prompt=add_generation_prompt)
        try:
            text = (self._for_tools if tools else self._template).render(
                **self.special_tokens,
                **variables,
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # whatever a template does wrong; what it raises on purpose is a TemplateError
            raise RequestError(f"the model's chat template does not take these messages: {error}") from error
        return _cut(text, mark) if mark else text


def with_read_arguments(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bring the `tool_calls` of a message into the form that templates expect: arguments are an object, not its JSON.

    What is no JSON object stays as it is, and so does one with integers that no message carries, of over 64 bits.
    """
    read = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = _read_arguments(function["arguments"].encode())
                msgspec.msgpack.encode(arguments)
            except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError, OverflowError):
                arguments = function["arguments"]
            function = {**function, "arguments": arguments}
        read.append({**call, "function": function})
    return read


def _read_arguments(data: bytes) -> dict[str, Any]:
    """Raises MsgspecError or RecursionError. A model may have written half a surrogate pair."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        return msgspec.json.decode(without_halves(data), type=dict[str, Any])


# ---- what it may use, and how it is rendered


class _Generation(Extension):
    """{% generation %} marks what an assistant wrote, for training. Here it is a block like any other."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Make the sandbox: what a template may use is Jinja's own and what transformers adds to it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    # the class dict itself has methods that a template does not need
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now, dict=_dict)
    del environment.globals["lipsum"]
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the prompt has the local date


def _dict(*pairs: Any, **items: Any) -> dict[str, Any]:
    return dict(*pairs, **items)


def _marked(messages: Sequence[Message], mark: str, *, add_generation_prompt: bool) -> list[Message]:
    """Append `mark` to the last message, where the text of the prompt is to end."""
    if add_generation_prompt:
        raise RequestError("continue_final_message needs add_generation_prompt=false, as the answer has begun already")
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise RequestError("continue_final_message needs a last message with a text to continue")
    last = messages[-1]
    return [*messages[:-1], {**last, "content": last["content"] + mark + " "}]


def _cut(text: str, mark: str) -> str:
    """Cut `text` at `mark`. If the template trimmed the space behind it, the space before it is trimmed too."""
    place = text.rfind(mark)
    if place < 0:
        raise RequestError("continue_final_message: the model's chat template leaves the last message out")
    kept = text[place + len(mark) :].startswith(" ")
    return text[:place] if kept else text[:place].rstrip()
