"""Converts messages to the forms that a chat template accepts. No template declares them: template_trials.py finds
them.

Where all is well a message stays as it is given, which is how transformers hands it to the template:

role `developer`    stays for a template that names it; otherwise it becomes `system`. Where a template writes no system
                    message, as many do in the middle of a chat, it stays if it comes out, or becomes `user`
a tool's result     becomes a user's text for a template that refuses tools. A user's text after a result becomes a part
                    of it where the template refuses the two
instructions        of a system or developer at the beginning stay apart if the template writes each of them; otherwise
                    they become one message
a list of parts     stays a list where the template writes every part of it for that role; otherwise the texts are
                    joined by newlines
a text              stays a text, unless the template knows nothing but lists for that role
"""

from collections.abc import Sequence
from itertools import pairwise

from vllm_lite.client.text.templates.template_trials import (
    DEVELOPER,
    SYSTEM,
    TOOL,
    USER,
    Message,
    TemplateTrials,
    TextPart,
    text_part,
)


def fitted(messages: Sequence[Message], trials: TemplateTrials) -> list[Message]:
    """Return messages in forms that the template renders. It may still refuse their order, or leave some out."""
    start = _num_instructions(messages)
    known = [_with_known_role(each, trials, is_later=place >= start) for place, each in enumerate(messages)]
    first = known[: _num_instructions(known)]
    pairs = {(one["role"], other["role"]) for one, other in pairwise(first)}
    if all(map(_has_text, first)) and not all(trials.takes_apart(*pair) for pair in pairs):
        known[: len(first)] = [_as_one(first)]
    return [_with_known_content(each, trials) for each in _with_known_results(known, trials)]


def plain(messages: Sequence[Message]) -> list[Message]:
    return [{**each, "content": _text_of(each["content"])} if _is_list(each) else each for each in messages]


def has_lists(messages: Sequence[Message]) -> bool:
    """Whether a content is a list of parts."""
    return any(map(_is_list, messages))


# ---- the parts of a message


def _with_known_role(message: Message, trials: TemplateTrials, *, is_later: bool) -> Message:
    if message.get("role") != DEVELOPER:
        return message
    return {**message, "role": trials.developer_role(is_later=is_later)}


def _with_known_results(messages: Sequence[Message], trials: TemplateTrials) -> Sequence[Message]:
    if not any(each.get("role") == TOOL for each in messages):
        return messages
    are_users = trials.result_role == USER
    joins = are_users or trials.refuses_user_after_result
    made, is_after_result = list[Message](), False
    for message in messages:
        is_result = message.get("role") == TOOL and _has_text(message)
        new = {"role": USER, "content": message["content"]} if is_result and are_users else message
        is_joined = joins and is_after_result and new.get("role") == USER and _has_text(new)
        made[-1:] = [_as_one([made[-1], new])] if is_joined else [*made[-1:], new]
        is_after_result = is_result or is_joined
    return made


def _with_known_content(message: Message, trials: TemplateTrials) -> Message:
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str) or not (content or content == "") or not _has_text(message):
        return message
    if content == "" and (not trials.looks_inside or trials.takes("empty", role)):
        return message
    if not trials.looks_inside:
        return {**message, "content": _text_of(content)} if _is_list(message) else message
    if _is_list(message) and trials.takes("parts", role):
        return message
    if trials.takes("text", role):
        return {**message, "content": _text_of(content)} if _is_list(message) else message
    # a template that accepts neither has refused the trial for another reason: the content is passed unchanged
    return {**message, "content": [text_part(_text_of(content))]} if trials.takes("part", role) else message


def _text_of(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _num_instructions(messages: Sequence[Message]) -> int:
    """Number of messages of the system or a developer at the beginning."""
    roles = (SYSTEM, DEVELOPER)
    return next((place for place, each in enumerate(messages) if each.get("role") not in roles), len(messages))


def _as_one(messages: Sequence[Message]) -> Message:
    """Join messages into one: texts by an empty line, lists of parts into one list."""
    if has_lists(messages):
        lists = [each["content"] if _is_list(each) else [text_part(each["content"])] for each in messages]
        return {**messages[0], "content": [part for parts in lists for part in parts]}
    return {**messages[0], "content": "\n\n".join(each["content"] for each in messages)}


def _is_list(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content)


def _has_text(message: Message) -> bool:
    return isinstance(message.get("content"), str) or _is_list(message)
