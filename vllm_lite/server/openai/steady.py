"""Removes parts of system messages that agents change with every request, which would defeat the prefix cache.

Claude Code begins its first system text with `x-anthropic-billing-header: key=value; ...`, which is meant for
Anthropic's proxies, and writes `<total_tokens>N tokens left</total_tokens>` on lines or parts of their own. Gateways
pass both on to every API, so they are removed here, for the messages of all APIs. User messages are never changed.
"""

import re

import msgspec

from vllm_lite.server.openai.bodies import ChatMessage, Part

_ROLES = ("system", "developer")
_PAIR = r"[\w.-]+=[^;\s]*"
_HEADER = re.compile(rf"\s*x-anthropic-billing-header:[ \t]*(?:{_PAIR}(?:;[ \t]*{_PAIR})*;?)?\s*", re.IGNORECASE)
_MARK = "<total_tokens>"
_LEFT = re.compile(r"\s*<total_tokens>[\d_,. ]+tokens left</total_tokens>\s*")


def steady(text: str) -> str:
    """Remove a billing header at the start of a system text, and lines that only say how many tokens are left."""
    if (header := _HEADER.match(text)) is not None:
        text = text[header.end() :]
    if _MARK in text:
        text = "\n".join(line for line in text.split("\n") if not _LEFT.fullmatch(line))
    return text


def steady_message(message: ChatMessage) -> ChatMessage | None:
    """Apply steady() to a system or developer message, and drop parts that become empty; None if the whole message
    does. Other messages are returned unchanged."""
    if message.role not in _ROLES or message.content is None:
        return message
    if isinstance(message.content, str):
        text = steady(message.content)
        changed: str | list[str | Part] = text
        is_gone = not text.strip() and text != message.content
    else:
        changed = [part for each in message.content if (part := _part(each)) is not None]
        is_gone = not changed and bool(message.content)
    return None if is_gone else msgspec.structs.replace(message, content=changed)


def _part(part: str | Part) -> str | Part | None:
    given = part if isinstance(part, str) else part.text
    if given is None or (text := steady(given)) == given:
        return part
    if not text.strip():
        return None
    return text if isinstance(part, str) else msgspec.structs.replace(part, text=text)
