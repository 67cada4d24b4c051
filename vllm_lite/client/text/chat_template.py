"""A checkpoint's chat template: messages in, the text of a prompt out, the same text that transformers makes.

The template comes with the model, so it runs in a sandbox that lets it change nothing it is given. A request cannot
bring a template, only plain data for its variables. The time of a rendering is not bounded here: the server renders in
a process whose time is (template_process.py).
"""

import json
import os
import re
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

from vllm_lite.errors import ModelError, RequestError

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables that the server sets, besides the names of special tokens."""

_TOOLS = re.compile(r"\btools\b")
Message = Mapping[str, Any]
"""{"role": ..., "content": text, ...}"""
Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}"""


class TemplateSource(msgspec.Struct, frozen=True):
    """A template's Jinja text, the special tokens that it may name, and what errors call it."""

    source: str
    special_tokens: dict[str, str] = {}
    name: str = "template"

    @property
    def takes_tools(self) -> bool:
        """Whether it names the variable `tools`, without which a model is not shown any."""
        return _TOOLS.search(self.source) is not None

    @classmethod
    def load(cls, folder: str | Path, template: str | Path | None = None) -> "TemplateSource | None":
        """Find the template of the checkpoint in `folder`, or take `template`, Jinja or a file with it. The special
        tokens are the checkpoint's. None if there is no template. Raises ModelError."""
        folder = Path(folder)
        config = _read_json(folder / CONFIG_FILE)
        tokens = _special_tokens(_read_json(folder / TOKENS_FILE)) | _special_tokens(config)
        if isinstance(template, str) and any(mark in template for mark in ("{{", "{%")):
            return _checked(cls(template, tokens))
        path = folder / TEMPLATE_FILE if template is None else Path(template)
        if template is not None or path.is_file():
            return _checked(cls(_read(path).decode(errors="replace"), tokens, str(path)))
        source = _default(config.get("chat_template"))
        return None if source is None else _checked(cls(source, tokens, str(folder / CONFIG_FILE)))


class ChatTemplate:
    """A compiled template and the special tokens that it may name. Rendering is safe in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any] | None = None, name: str = "template") -> None:
        """`source` is Jinja, `name` its name in errors. Raises ModelError."""
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # besides its own errors: too deep, too large, blocks that Python cannot nest
            raise ModelError(f"{name}: the chat template cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: str | Path, template: str | Path | None = None) -> "ChatTemplate | None":
        """Compile the template that TemplateSource.load finds; None if there is none. Raises ModelError."""
        found = TemplateSource.load(folder, template)
        return None if found is None else cls(found.source, found.special_tokens, found.name)

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
            text = self._template.render(
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
                arguments = msgspec.json.decode(function["arguments"].encode(), type=dict[str, Any])
                msgspec.msgpack.encode(arguments)
            except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError, OverflowError):
                arguments = function["arguments"]
            function = {**function, "arguments": arguments}
        read.append({**call, "function": function})
    return read


# ---- where it lies: in the checkpoint's folder, in a file, or in what the user wrote


def _checked(found: TemplateSource) -> TemplateSource:
    if len(found.source) > MAX_TEMPLATE_BYTES:
        size, most = len(found.source), MAX_TEMPLATE_BYTES
        raise ModelError(f"{found.name}: the chat template has {size} characters; at most {most} are read")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} for a file that does not exist."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Select the entries of a tokenizer's config that are tokens: texts, or objects that hold one."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _default(template: Any) -> str | None:
    """Select the template of a config, which has one, or several with names."""
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


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
