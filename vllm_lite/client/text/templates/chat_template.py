"""A checkpoint's chat template: renders messages to the text of a prompt, the same text as transformers.

The template comes with the model, so it runs in a sandbox in which it cannot change its inputs. A request cannot
contain a template, only plain data for its variables. The time of a rendering is not limited here: the server renders
in a process with a time limit (template_process.py).
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm_lite.client.text.surrogates import without_halves
from vllm_lite.client.text.templates.left_out import LeftOut, LeftOutFinder
from vllm_lite.client.text.templates.message_forms import fitted, has_lists, plain
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.templates.template_trials import SAMPLE_TOOL, Message, TemplateTrials
from vllm_lite.errors import ModelError, RequestError

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""Names that no variable may have, besides those of special tokens: what the server sets, and other servers' arguments
of a rendering."""

MAX_LOOKED_AT_S = 0.2
"""Seconds; a prompt that took longer is not rendered again to find left-out messages."""

Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}"""


class Rendering(NamedTuple):
    """A prompt's text, and the messages that are not in it."""

    text: str
    left_out: tuple[LeftOut, ...] = ()


class ChatTemplate:
    """A compiled template and the special tokens that it may name. Rendering is safe in any thread."""

    def __init__(self, found: TemplateSource) -> None:
        """Raises ModelError for invalid Jinja."""
        self.name = found.name
        self.special_tokens = found.special_tokens
        try:
            self.plain = _Variant(found.source, found.special_tokens, None)
            for_tools = found.source if found.for_tools is None else found.for_tools
            self._for_tools = _Variant(for_tools, found.special_tokens, [SAMPLE_TOOL])
        except Exception as error:  # besides its own errors: too deep, too large, blocks that Python cannot nest
            raise ModelError(f"{self.name}: the chat template cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: str | Path, template: str | Path | None = None) -> "ChatTemplate | None":
        """Compile the template that TemplateSource.load finds; None if there is none. Raises ModelError."""
        found = TemplateSource.load(folder, template)
        return None if found is None else cls(found)

    def render(self, messages: Sequence[Message], **settings: Any) -> str:
        """Render the prompt as rendering() does, without looking for left-out messages."""
        return self.rendering(messages, **settings, looks=False).text

    def rendering(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        looks: bool = True,
    ) -> Rendering:
        """Make the prompt for `messages`, in which the model is shown `tools`. A content is a text or a list of text
        parts; the template gets each message in a form that it takes.

        `add_generation_prompt` ends it where the answer begins; `continue_final_message` ends it inside the last
        message, to be continued. `variables` are further values for the template. With `looks`, what of `messages` is
        not in the prompt is found. Raises RequestError, also for an error that the template itself raises.
        """
        variables = variables or {}
        if taken := sorted(variables.keys() & (RESERVED | self.special_tokens.keys())):
            raise RequestError(f"chat_template_kwargs cannot set {taken[0]!r}, which the server sets")
        variant = self._for_tools if tools else self.plain
        for name, value in variables.items():
            if isinstance(value, Mapping | Sequence) and not isinstance(value, str) and not variant.reads(name):
                raise RequestError(
                    f"the chat template does not read {name!r} of chat_template_kwargs; such a value must be a text, a "
                    "number, true, false or null"
                )
        settings = {**variables, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        mark, given = "", messages
        if continue_final_message:
            mark = os.urandom(16).hex()  # random, so that no message contains it
            given = _marked(messages, mark, add_generation_prompt=add_generation_prompt)
        began_s = time.thread_time()
        try:
            text = variant.text(given, settings)
        except Exception as error:  # whatever a template does wrong; what it raises on purpose is a TemplateError
            raise RequestError(f"the model's chat template does not take these messages: {error}") from error
        text = _cut(text, mark) if mark else text
        if not looks or time.thread_time() - began_s > MAX_LOOKED_AT_S:
            return Rendering(text)
        return Rendering(text, variant.left_out(messages, text, settings))


class _Variant:
    """A compiled template for chats with tools, or for chats without, and the results of its trials."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], sample_tools: Sequence[Tool] | None) -> None:
        """`sample_tools`: the tools in trials."""
        self._compiled = _environment().from_string(source)
        self._special_tokens = special_tokens
        self._parse = partial(_environment().parse, source)
        self._sample = {"tools": sample_tools}
        attempt = partial(self._render, settings={**self._sample, "add_generation_prompt": True})
        self._trials = TemplateTrials(self._parse, attempt)
        self.finder = LeftOutFinder()

    def reads(self, name: str) -> bool:
        """Whether the template has a variable `name` that it does not set itself."""
        return name in meta.find_undeclared_variables(self._parse())

    def text(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """Render `messages` in a form that the template takes. Raises whatever the template raises."""
        known = fitted(messages, self._trials)
        try:
            return self._render(known, settings)
        except Exception:  # it accepts lists of parts, but not here
            if not has_lists(known):
                raise
            return self._render(plain(known), settings)

    def left_out(self, messages: Sequence[Message], text: str, settings: Mapping[str, Any]) -> tuple[LeftOut, ...]:
        """Find the messages that are not in `text`, their rendering."""
        settings = {**settings, **self._sample}
        return self.finder.find(messages, text, settings, partial(self.text, settings=settings))

    def _render(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        return self._compiled.render(**self._special_tokens, **settings, messages=messages, documents=None)


def with_read_arguments(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bring the `tool_calls` of a message into the form that templates expect: arguments are an object, not its JSON.

    What is not a JSON object stays as it is, and so does one with integers that no message carries, of over 64 bits.
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
    """Decode arguments, in which a model may have written half a surrogate pair. Raises MsgspecError or
    RecursionError."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        return msgspec.json.decode(without_halves(data), type=dict[str, Any])


# ---- the sandbox, and rendering


class _Generation(Extension):
    """{% generation %}, which marks an assistant's text for training. Here it is a block without effect."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Create the sandbox, in which a template may use Jinja's own functions and those that transformers adds."""
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
    """Append `mark` to the last text of the last message, at which the prompt is to end."""
    if add_generation_prompt:
        raise RequestError("continue_final_message needs add_generation_prompt=false, as the answer has begun already")
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        content += mark + " "
    elif isinstance(content, list) and content and "text" in content[-1]:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark + " "}]
    else:
        raise RequestError("continue_final_message needs a last message with a text to continue")
    return [*messages[:-1], {**messages[-1], "content": content}]


def _cut(text: str, mark: str) -> str:
    """Cut `text` at `mark`. If the template trimmed the space after it, the space before it is trimmed, too."""
    place = text.rfind(mark)
    if place < 0:
        raise RequestError("continue_final_message: the model's chat template leaves the last message out")
    kept = text[place + len(mark) :].startswith(" ")
    return text[:place] if kept else text[:place].rstrip()
