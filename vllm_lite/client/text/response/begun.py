"""The part of a prompt that belongs to the message already: thinking that a template opens, an answer to go on with."""

from vllm_lite.client.text.response.template import Format

MAX_PREFIX_CHARS = 65_536
"""How much of the end of a prompt is looked at."""


def message_begun(response_format: Format, prefix: str) -> str:
    """Return the text of the prompt `prefix` behind its last anchor, with marks for tokens; where there is no anchor, a
    literal of the reasoning at its very end."""
    marks = response_format.marks
    text = marks.literal(prefix[-MAX_PREFIX_CHARS:])
    anchor = response_format.anchor
    if anchor is not None:
        try:
            ends = [found.end() for found in anchor.pattern.finditer(text, timeout=anchor.seconds)]
        except TimeoutError:
            ends = []
        if ends:
            return text[ends[-1] :]
    end = text.rstrip()
    opening, closing = map(marks.literal, response_format.thinking or ("", ""))
    if opening and end.endswith(opening):
        return text[len(end) - len(opening) :]
    if closing and end.endswith(closing):
        return opening + text[len(end) - len(closing) :]
    return ""
