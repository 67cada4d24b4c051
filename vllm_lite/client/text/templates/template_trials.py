"""Trials of a chat template: short conversations that show which roles and which forms of a content it renders.

Each text in a trial is a mark. A trial succeeds if the result has every mark, and of a part nothing but its text: a
template that prints a list as Python or JSON does not support parts. Each trial is rendered once, when its result is
needed.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from jinja2 import nodes

from vllm_lite.client.text.templates.template_syntax import looks_into_content, names_role

Message = Mapping[str, Any]
"""{"role": ..., "content": text or parts, ...}"""
TextPart = dict[str, str]
"""{"type": "text", "text": ...}"""
Try = Callable[[Sequence[Message]], str]
"""Renders a conversation. Raises an error if the template refuses it."""
Form = Literal["text", "part", "parts", "empty"]
"""Forms of a content: a text, a list of one part, a list of several parts, a text without letters."""

DEVELOPER, SYSTEM, USER, ASSISTANT, TOOL = "developer", "system", "user", "assistant", "tool"
SAMPLE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}
"""A tool for trials."""
MAX_TRIAL_S = 0.05
"""Maximum processor time of one trial, in seconds. A template that takes more is not tried again, and gets messages
unchanged: its time is limited, and real renderings have priority."""
_ONE, _OTHER, _LEAK = "qzonezq", "qzotherzq", "qzleakzq"
_CALL_ID = "call00000"
"""Nine letters and digits, which all templates accept as an id."""
_HELLO = {"role": USER, "content": "Hello"}
_ANSWER = {"role": ASSISTANT, "content": "Hello"}
_CALLING = {
    "role": ASSISTANT,
    "content": "",
    "tool_calls": [{"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}],
}

_RESULT = {"role": TOOL, "content": _ONE, "tool_call_id": _CALL_ID, "name": "f"}
_AFTER_CALL: dict[str, list[Message]] = {
    TOOL: [_HELLO, _CALLING, _RESULT],
    USER: [_HELLO, _CALLING, {"role": USER, "content": _ONE}],
}


def text_part(text: str) -> TextPart:
    """A text part in the form of templates."""
    return {"type": "text", "text": text}


class TemplateTrials:
    """Tries one template, with tools or without."""

    def __init__(self, parse: Callable[[], nodes.Template], attempt: Try) -> None:
        """`parse` creates the template's syntax tree when it is needed, and `attempt` renders a conversation."""
        self._parse = parse
        self._attempt = attempt
        self._found: dict[tuple[str, str], bool] = {}
        self._roles: dict[bool, str] = {}
        self._is_slow = False

    @cached_property
    def looks_inside(self) -> bool:
        """Whether the template may support contents other than texts; if not, contents need not be tried."""
        return looks_into_content(self._parse())

    def takes(self, form: Form, role: str) -> bool:
        """Whether the template renders a content in this form, in a message of `role`."""
        key = (form, role)
        if key not in self._found:
            marks = {"empty": [], "parts": [_ONE, _OTHER]}.get(form, [_ONE])
            message = {"role": role, "content": _content(form, marks)}
            before, after = list[Message](), [_HELLO]
            if role in (USER, ASSISTANT):
                before, after = [_HELLO] if role == ASSISTANT else [], []
            elif role in (TOOL, "function"):
                before, after = [_HELLO, _CALLING], []
                message |= {"tool_call_id": _CALL_ID, "name": "f"}
            chats = [[*before, message, *after], [*map(_in_parts, before), message, *map(_in_parts, after)]]
            self._found[key] = any(self._comes_out(chat, marks) for chat in chats[: 1 + bool(before or after)])
        return self._found[key]

    def takes_apart(self, role: str, other: str) -> bool:
        """Whether two messages of these roles at the beginning are both rendered."""
        key = (role, other)
        if key not in self._found:
            chat = [{"role": role, "content": _ONE}, {"role": other, "content": _OTHER}, _HELLO]
            self._found[key] = self._comes_out(chat, [_ONE, _OTHER])
        return self._found[key]

    def developer_role(self, *, is_later: bool) -> str:
        """The role under which a developer's message is rendered, at the beginning or later in a chat."""
        if is_later not in self._roles:
            known = [DEVELOPER, SYSTEM] if names_role(self._parse(), DEVELOPER) else [SYSTEM, DEVELOPER]
            self._roles[is_later] = next(self._written(*known, USER, is_later=is_later), SYSTEM)
        return self._roles[is_later]

    @cached_property
    def result_role(self) -> str:
        """The role under which a tool's result is rendered: its own, or a user's for a template that refuses tools."""
        if any(self._attempted(chat) is not None for chat in _forms(_AFTER_CALL[TOOL])):
            return TOOL
        return USER if self._takes_chat(_AFTER_CALL[USER], [_ONE]) else TOOL

    @cached_property
    def refuses_user_after_result(self) -> bool:
        """Whether a tool's result is rendered, but not with a user's message after it."""
        chat = _AFTER_CALL[TOOL]
        both = [*chat, {"role": USER, "content": _OTHER}]
        return not self._takes_chat(both, [_ONE, _OTHER]) and self._takes_chat(chat, [_ONE])

    # ---- inside

    def _written(self, *roles: str, is_later: bool) -> Iterator[str]:
        """Yield those of `roles` that come out. A later message must not take the place of the system's first, unless
        there cannot be one."""
        first = {"role": SYSTEM, "content": _OTHER}
        starts: list[list[Message]] = [[first, _HELLO, _ANSWER], [_HELLO, _ANSWER]] if is_later else [[]]
        for start in starts:
            marks = [_ONE, _OTHER] if first in start else [_ONE]
            for role in roles:
                messages = ({"role": role, "content": content} for content in (_ONE, [text_part(_ONE)]))
                if any(self._comes_out([*start, message, _HELLO], marks) for message in messages):
                    yield role

    def _takes_chat(self, chat: Sequence[Message], marks: Sequence[str]) -> bool:
        return any(self._comes_out(form, marks) for form in _forms(chat))

    def _comes_out(self, chat: Sequence[Message], marks: Sequence[str]) -> bool:
        text = self._attempted(chat)
        return text is not None and all(mark in text for mark in marks) and _LEAK not in text

    def _attempted(self, chat: Sequence[Message]) -> str | None:
        """The rendered conversation; None if the template refuses it, or is slow."""
        if self._is_slow:
            return None
        began_s = time.thread_time()
        try:
            return self._attempt(chat)
        except Exception:  # any error of the template for a conversation that it refuses
            return None
        finally:
            self._is_slow = time.thread_time() - began_s > MAX_TRIAL_S


def _forms(chat: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """The conversation in texts, and in lists of parts."""
    return chat, [*map(_in_parts, chat)]


def _in_parts(message: Message) -> Message:
    """Convert the message for a template that accepts only lists of parts."""
    return {**message, "content": [text_part(message["content"])]}


def _content(form: Form, marks: Sequence[str]) -> str | list[TextPart]:
    if form in ("empty", "text"):
        return "".join(marks)
    return [{**text_part(mark), "leak": _LEAK} for mark in marks]
