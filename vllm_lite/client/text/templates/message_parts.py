"""Converts the parts of a message's content, in the formats of all APIs, to the texts that templates expect.

Besides text, a content may have parts of an earlier answer: a refusal, which is a text, and the thinking before the
answer, which has its own field.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vllm_lite.client.text.templates.template_trials import TextPart
from vllm_lite.errors import RequestError

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part with text -> the field of its text."""
THOUGHTS = {"thinking": "thinking", "reasoning": "text"}
"""Type of a part with thinking, of Anthropic, Mistral and others -> its field, which may also be a list of texts."""
UNREADABLE = ("redacted_thinking",)
"""Parts that only the server that wrote them could read."""

IMAGES = ("image_url", "input_image", "image", "image_pil")
"""Parts with an image: OpenAI's in chats and responses, Anthropic's, and those of chats in Python."""

TakeImage = Callable[[Mapping[str, Any], str], None]
"""Called with each image part, and the name of the content that contains it."""

MAY_BE_EMPTY = ("assistant", "tool", "function")
"""Roles whose messages may have null as content: messages with calls only, and tools that answer nothing."""
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with an answer's thinking in templates."""


def reasoning_fields(thought: str, *, calls_behind_text: bool = False) -> dict[str, str]:
    """The reasoning before an answer, under all names in templates. The template of gpt-oss calls it `thinking`, and
    refuses it if the answer has both text and calls."""
    names = THOUGHT_NAMES[:-1] if calls_behind_text else THOUGHT_NAMES
    return dict.fromkeys(names, thought) if thought else {}


class Content(NamedTuple):
    """The texts of a content's parts; one text if it was not a list. `parts`: all parts, if there are images."""

    texts: str | list[str]
    reasoning: str = ""
    parts: list[TextPart] | None = None

    @property
    def text(self) -> str:
        return self.texts if isinstance(self.texts, str) else "\n".join(self.texts)

    @property
    def for_template(self) -> str | list[TextPart]:
        """The text, or the parts in the form of templates. A content without words is an empty text."""
        if self.parts is not None:
            return self.parts
        return [{"type": "text", "text": text} for text in self.texts] if isinstance(self.texts, list) else self.texts


def read_parts(parts: Iterable[Any], where: str, take_image: TakeImage | None = None) -> Content:
    """Read the texts of all parts, which are texts or dicts with a type, and join their thinking. Images are passed to
    `take_image`; without it they are refused. `where`: name of the content in errors. Raises RequestError for any other
    part."""
    texts, thoughts, all_parts, has_images = list[str](), list[str](), list[TextPart](), False
    for place, part in enumerate(parts):
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if isinstance(part, str):
            texts.append(part)
        elif kind in TEXTS:
            texts.append(_field(part, TEXTS[kind], where))
        elif kind in THOUGHTS:
            thoughts.append(_thought(part, THOUGHTS[kind], where))
            continue
        elif kind in IMAGES:
            if take_image is None:
                raise RequestError(f"{where}[{place}] is {kind!r}; no images are supported here, only text is")
            take_image(part, f"{where}[{place}]")
            has_images = True
            all_parts.append({"type": "image"})
            continue
        elif kind in UNREADABLE:
            continue
        else:
            known = "only text is" if take_image is None else "only text and images are"
            raise RequestError(f"{where} holds {(kind or type(part).__name__)[:60]!r}; {known} supported")
        all_parts.append({"type": "text", "text": texts[-1]})
    return Content(texts or "", "\n".join(thoughts), all_parts if has_images else None)


def _thought(part: Mapping[str, Any], field: str, where: str) -> str:
    inner = part.get(field)
    if isinstance(inner, list):
        return "\n".join(_field(each, "text", f"{where}.{field}") for each in inner if isinstance(each, Mapping))
    return _field(part, field, where)


def _field(part: Mapping[str, Any], field: str, where: str) -> str:
    value = part.get(field)
    if not isinstance(value, str):
        raise RequestError(f"{where} holds {part.get('type')!r} without a text as its {field!r}")
    return value
