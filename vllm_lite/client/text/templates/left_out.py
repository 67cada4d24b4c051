"""Finds messages of a chat that a template leaves out of the prompt without an error: a role that it does not know, a
second system prompt, a text beside calls.

The chat is rendered with a mark for each text and each call: if a mark is missing in the result, its text was left out.
This costs as much as the prompt itself, so the result is remembered for each message in its context: its kind, the
kinds of its neighbours, the first and the last speaker of the chat, and all speakers. If all contexts of a chat are
known and the prompt agrees with the remembered results, nothing is rendered: a chat that grows by similar messages is
not rendered again.

Most templates leave out the thinking before an answer on purpose, so it is not looked for.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec

from vllm_lite.client.text.templates.template_trials import Message

MAX_CONTEXTS = 4096
"""Maximum number of remembered contexts, of 300 bytes each. When it is reached, all are forgotten."""
MAX_SHOWN = 8
"""Maximum number of messages that a sentence names."""
MAX_LEFT_OUT = MAX_SHOWN + 1
"""Maximum number of left-out messages that are found in one chat."""
SURE_CHARS = 16
"""Minimum characters of a text that cannot be in a prompt by chance."""
MAX_ABSENT = 16
"""Maximum number of left-out texts whose absence is checked."""
TAIL_CHARS = 128
"""Characters at the end of a text of which the longest run of words is searched for; no template changes such a run."""

Part = Literal["", "content", "tool_calls"]


class LeftOut(NamedTuple):
    """A message that is not in the prompt, by its index in the chat; or only its content or its calls."""

    place: int
    part: Part = ""


def described(left_out: Sequence[LeftOut], name: Callable[[int], str] = "messages[{}]".format) -> str:
    """Describe what is not in a prompt, in one sentence. `name` returns the name of a message by its index."""
    shown = [f"{name(place)}{'.' if part else ''}{part}" for place, part in left_out[:MAX_SHOWN]]
    if len(left_out) > MAX_SHOWN:
        shown.append("others")
    names = " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]
    verb, pronoun = ("are", "them") if len(shown) > 1 else ("is", "it")
    return f"{names} {verb} not in the prompt: the model's chat template leaves {pronoun} out"


class _Piece(NamedTuple):
    """A text of a message, which is not blank, or the name of one of its calls."""

    part: Part
    text: str


Gone = tuple[bool, ...]
"""Whether each piece of a message is left out."""
_Context = tuple[bytes, str, str, str]


class LeftOutFinder:
    """Finds and remembers what one template leaves out."""

    def __init__(self) -> None:
        self._known: dict[_Context, Gone] = {}
        self.num_renderings = 0

    def find(
        self,
        messages: Sequence[Message],
        text: str,
        settings: Mapping[str, Any],
        render: Callable[[Sequence[Message]], str],
    ) -> tuple[LeftOut, ...]:
        """Return the parts of `messages` that are not in `text`, their prompt. `settings`: everything else that the
        prompt depends on; `render` renders with them. Nothing is found if the template refuses marks."""
        chat = [list(_pieces(message)) for message in messages]
        try:
            contexts = _contexts(messages, chat, settings)
        except (TypeError, OverflowError, RecursionError, UnicodeEncodeError):  # settings that no request can have
            return ()
        known = [self._known.get(context) for context in contexts]
        gone = [each for each in known if each is not None]
        if len(gone) < len(chat) or not _agrees(chat, gone, text):
            gone = self._seen(messages, chat, render)
            if len(self._known) + len(contexts) > MAX_CONTEXTS:
                self._known.clear()
            self._known.update(list(zip(contexts, gone, strict=True))[:MAX_CONTEXTS])
        return tuple(_left_out(chat, gone))[:MAX_LEFT_OUT]

    def _seen(
        self, messages: Sequence[Message], chat: Sequence[Sequence[_Piece]], render: Callable[[Sequence[Message]], str]
    ) -> list[Gone]:
        """Render marks, and find the missing ones."""
        self.num_renderings += 1
        marked = _marked(messages)
        try:
            seen = set(_MARK.findall(render(marked).lower()))
        except Exception:  # any error of the template for texts that it does not expect
            return [(False,) * len(pieces) for pieces in chat]
        return [tuple(piece.text not in seen for piece in _pieces(message)) for message in marked]


def _pieces(message: Message) -> Iterator[_Piece]:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or ()]
    for text in texts:
        if text and not text.isspace():
            yield _Piece("content", text)
    for call in message.get("tool_calls") or ():
        yield _Piece("tool_calls", str(_function(call).get("name")))


def _contexts(
    messages: Sequence[Message], chat: Sequence[Sequence[_Piece]], settings: Mapping[str, Any]
) -> list[_Context]:
    kinds = [_kind(message, pieces) for message, pieces in zip(messages, chat, strict=True)]
    speakers = [f"{message.get('role')} {bool(message.get('tool_calls'))}" for message in messages]
    several = sorted((speaker, min(count, 2)) for speaker, count in Counter(speakers).items())
    more = msgspec.msgpack.encode((settings, several, speakers[:2], speakers[-1:]))
    key, around = blake2b(more, digest_size=16).digest(), ["", *kinds, ""]
    return [(key, around[place], kind, around[place + 2]) for place, kind in enumerate(kinds)]


def _kind(message: Message, pieces: Sequence[_Piece]) -> str:
    """The properties of a message, other than its words, on which a template may depend."""
    content = message.get("content")
    num_parts = -1 if isinstance(content, str) else len(content or ())
    num_calls = len(message.get("tool_calls") or ())
    fields = [name for name, value in message.items() if value and name not in ("role", "content", "tool_calls")]
    return f"{message.get('role')} {num_parts} {len(pieces)} {num_calls} {' '.join(fields)}"


def _agrees(chat: Sequence[Sequence[_Piece]], gone: Sequence[Gone], text: str) -> bool:
    """Whether the pieces that should be in `text` stand in it, and the first others do not. No message may begin before
    the one before it; but some templates write calls, and what tools answered, before the text beside the calls."""
    start = num_absent = 0
    for pieces, are_gone in zip(chat, gone, strict=True):
        places = []
        for piece, is_gone in zip(pieces, are_gone, strict=True):
            words = _words(piece.text)
            if not is_gone:
                places.append(text.find(words, start))
            elif (num_absent := num_absent + 1) <= MAX_ABSENT and len(words) >= SURE_CHARS and words in text:
                return False
        if places and (start := min(places)) < 0:
            return False
    return True


def _words(text: str) -> str:
    """Return the part of a text to search for: words without characters that templates escape, trim or cut."""
    end = text[-TAIL_CHARS:]
    if not end or end.isspace():
        end = text.rstrip()[-TAIL_CHARS:]
    return max((run.strip() for run in _RUN.findall(end)), key=len, default="") or end.strip()


def _left_out(chat: Sequence[Sequence[_Piece]], gone: Sequence[Gone]) -> Iterator[LeftOut]:
    for place, (pieces, are_gone) in enumerate(zip(chat, gone, strict=True)):
        if pieces and all(are_gone):
            yield LeftOut(place)
            continue
        parts = dict.fromkeys(piece.part for piece, is_gone in zip(pieces, are_gone, strict=True) if is_gone)
        yield from (LeftOut(place, part) for part in parts)


# ---- marks

_MARK = re.compile("qz[0-9a-f]{6}zq")
_RUN = re.compile(r"[\w .,:/()-]+")


def _marked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Create messages of the same kinds whose texts and calls are marks."""
    marks = (f"qz{number:06x}zq" for number in range(1 << 24))
    ids: dict[str, str] = {}
    made = []
    for message in messages:
        new = {name: "x" if isinstance(value, str) and value else value for name, value in message.items()}
        content = message.get("content")
        new["role"] = message.get("role")
        if isinstance(content, str):
            new["content"] = _mark(content, marks)
        elif isinstance(content, list):
            new["content"] = [
                {**part, "text": _mark(part["text"], marks)} if "text" in part else part for part in content
            ]
        if message.get("tool_calls"):
            new["tool_calls"] = [_call(call, next(marks), ids) for call in message["tool_calls"]]
        if isinstance(message.get("tool_call_id"), str):
            new["tool_call_id"] = _id(message["tool_call_id"], ids)
        made.append(new)
    return made


def _mark(text: str, marks: Iterator[str]) -> str:
    return next(marks) if text and not text.isspace() else text


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    found = call.get("function")
    return found if isinstance(found, Mapping) else {}


def _call(call: Mapping[str, Any], mark: str, ids: dict[str, str]) -> dict[str, Any]:
    arguments = _function(call).get("arguments")
    given = {"x": "x"} if isinstance(arguments, Mapping) else arguments and "{}"
    new = {"type": "function", "function": {"name": mark, "arguments": given}}
    return new | ({"id": _id(call["id"], ids)} if isinstance(call.get("id"), str) else {})


def _id(given: str, ids: dict[str, str]) -> str:
    """Create an id of nine letters and digits, which all templates accept; equal ids get equal ones."""
    return ids.setdefault(given, f"call{len(ids):05d}")
