"""Finds the token after an assistant's text in a chat template: it closes the message, so a model ends an answer with
it.

It is found by rendering chats whose texts are marks. Not every such token ends an answer: formats with channels close
one part of an answer by a token and continue with the next part (gpt-oss and Solar by <|end|>). So tokens between the
thinking and the text of an assistant, or between its text and its calls, are inner ones. The template comes with the
checkpoint, so it is rendered in a process with limits of time and memory, once at a start.
"""

import re
import socket
from collections.abc import Collection, Sequence
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

import msgspec

from vllm_lite.client.text.templates import template_process
from vllm_lite.client.text.templates.template_process import Answer, Render, Rendered, RenderSettings
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.templates.template_trials import ASSISTANT, SAMPLE_TOOL, USER, Message
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.frames import frame, read_frame
from vllm_lite.transport.time_slice import usual_slices

WAIT_S = 60.0
"""Deadline for a process that was stopped, or on a hanging machine. The template's own time has a smaller limit."""
MAX_CHARS = 1024 * 1024
PREFIX_CHARS = 2
"""Characters of a token's beginning that a template must contain to be able to write it: it may build tokens from
parts, such as '<|' + role + '|>'."""
_ASKED, _THOUGHT, _SAID, _CALLED, _NEXT = "qzaskedzq", "qzthoughtzq", "qzsaidzq", "qzcalledzq", "qznextzq"
_USER: Message = {"role": USER, "content": _ASKED}
_SPOKEN: Message = {"role": ASSISTANT, "content": _SAID}
_REASONED = {**_SPOKEN, **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"f": _CALLED}}}
LAST, EARLIER, THINKING, CALLING = "last", "earlier", "thinking", "calling"
CHATS: dict[str, Sequence[Message]] = {
    LAST: (_USER, _SPOKEN),
    EARLIER: (_USER, _SPOKEN, {"role": USER, "content": _NEXT}),
    THINKING: (_USER, _REASONED),
    CALLING: (_USER, {**_SPOKEN, "tool_calls": [_CALL]}),
}
"""Chats to render. In the first one the answer is the last message, in the second one it is not: some templates close
it in only one of them, or in different ways. The others show the tokens between the parts of an answer."""

logger = log.get(__name__)


class Closing(NamedTuple):
    """The token that closes an assistant's message, or None, and the tokens within a message."""

    token: str | None = None
    inner: frozenset[str] = frozenset()


def may_write(template: TemplateSource, tokens: Collection[str]) -> bool:
    """Whether `template` may write one of `tokens`: it contains the beginning of one, or a variable with one."""
    variables = {name for name, text in template.special_tokens.items() if text in tokens}
    return any(each in template.texts for each in {token[:PREFIX_CHARS] for token in tokens} | variables)


def find_closing(template: TemplateSource, tokens: Collection[str], known: Collection[str] = ()) -> Closing:
    """Find the one of `tokens` that closes an assistant's message in chats by `template`. Tokens that are `known` to
    end answers have priority. There is none if the template refuses all of the chats, or takes too much time."""
    spelled = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    if not spelled:
        return Closing()
    pattern = re.compile("|".join(map(re.escape, spelled)))
    texts = rendered_by(template)
    parts = (texts.get(THINKING, ""), _THOUGHT, _SAID), (texts.get(CALLING, ""), _SAID, _CALLED)
    inner = frozenset(token for part in parts for token in pattern.findall(_between(*part)))
    for name in (LAST, EARLIER):
        behind = _between(texts.get(name, ""), _SAID, _NEXT if name == EARLIER else None)
        token = _closer(behind, pattern, inner, known, is_last=name == LAST)
        if token is not None:
            return Closing(token, inner)
    return Closing(None, inner)


def _closer(
    behind: str, pattern: "re.Pattern[str]", inner: Collection[str], known: Collection[str], *, is_last: bool
) -> str | None:
    """Return the token that closes an answer, out of those in `behind`, the text after the answer: the first one, or a
    `known` one that follows it directly. If there is text around the first one, the tokens are markup; then it is the
    last one, if the prompt ends with it."""
    found = [each for each in pattern.finditer(behind) if each[0] not in inner]
    if not found:
        return None
    first, last = found[0], found[-1]
    rest = behind[first.end() :].lstrip()
    if behind[: first.start()].strip() or (rest and not pattern.match(rest)):
        return last[0] if is_last and not behind[last.end() :].strip() else None
    row = [first]
    row += [each for before, each in pairwise(found) if before is row[-1] and before.end() == each.start()]
    return next((each[0] for each in row if each[0] in known), first[0])


def _between(text: str, begin: str, end: str | None) -> str:
    """The part of `text` between two marks, or after the first if `end` is None; "" if a mark is missing."""
    _, found, behind = text.rpartition(begin)
    if end is None or not found:
        return behind if found else ""
    part, found, _ = behind.partition(end)
    return part if found else ""


def rendered_by(template: TemplateSource) -> dict[str, str]:
    """Render CHATS, with a tool and without, and omit those that the template refuses."""
    asked = [
        Render(list(map(dict, chat)), False, False, {}, MAX_CHARS, tools)
        for name, chat in CHATS.items()
        for tools in ([[SAMPLE_TOOL], None] if name == CALLING else [None, [SAMPLE_TOOL]])
    ]
    answers = _asked(template, asked)
    texts = {}
    for name, pair in zip(CHATS, zip(answers[::2], answers[1::2], strict=True), strict=False):
        if taken := [each.text for each in pair if isinstance(each, Rendered)]:
            texts[name] = taken[0]
    return texts


def _asked(template: TemplateSource, asked: Sequence[Render]) -> list[Answer]:
    """Render in a process of the template's own. Returns no answers if the template is invalid, or takes too much."""
    ours, theirs = socket.socketpair()
    with closing(ours):
        with closing(theirs), usual_slices():
            settings, fds = RenderSettings(theirs.fileno()), (theirs.fileno(),)
            child = supervise.spawn(template_process.__name__, settings, "closing token", _forget, fds=fds)
        try:
            ours.settimeout(WAIT_S)
            ours.sendall(b"".join(map(frame, (template, *asked))))
            answers = [msgspec.msgpack.decode(read_frame(ours), type=Answer) for _ in range(1 + len(asked))]
        except (OSError, msgspec.DecodeError):  # the template ended it, or is invalid: later chats will report it
            logger.warning("%s: it cannot be found out which token closes a message", template.name)
            return []
        finally:
            child.stop(0.0)
    return answers[1:]


def _forget(reason: str) -> None:
    """Ignore the end of the process, which its socket reports."""
