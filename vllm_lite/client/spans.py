"""Spans of a prompt, text and media, and the flat form in which a prompt travels."""

from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import msgspec

from vllm_lite.errors import ContextLengthError, RequestError
from vllm_lite.protocol.api import Welcome
from vllm_lite.protocol.encoder import MAX_CONTENT_BYTES, MediaContent
from vllm_lite.protocol.spans import MAX_MEDIA, Media


class Text(NamedTuple):
    """A span of text: its token ids."""

    token_ids: Sequence[int]


class ShownMedia(NamedTuple):
    """A medium, with what an encoder reads of it, and its tokens where others than the placeholder are among them."""

    media: Media
    content: bytes
    token_ids: Sequence[int] = ()


Span = Text | Media | ShownMedia


class FlatPrompt(NamedTuple):
    """A prompt as it travels."""

    token_ids: list[int]
    media: tuple[Media, ...]
    contents: tuple[MediaContent, ...]


def flatten(spans: Sequence[Span], limits: Welcome) -> FlatPrompt:
    """The token ids of a whole prompt, with the model's placeholder for each token of a medium, the media with their
    places, and the different contents of those that are shown. Raises RequestError for anything but spans, and for a
    medium of a kind that the model does not accept."""
    num_tokens = sum(map(_num_tokens, spans))
    if num_tokens >= limits.max_model_len:  # before the ids are written out
        raise ContextLengthError(limits.max_model_len, num_tokens, None)
    token_ids, media, contents = list[int](), list[Media](), dict[bytes, bytes]()
    for each in spans:
        span = each.media if isinstance(each, ShownMedia) else each
        if isinstance(each, ShownMedia):
            contents[each.media.digest] = each.content
        if isinstance(span, Text):
            token_ids += span.token_ids
        else:
            media.append(msgspec.structs.replace(span, start=len(token_ids)))
            placeholder = _placeholder(span.kind, limits.placeholders)
            own = each.token_ids if isinstance(each, ShownMedia) else ()
            token_ids += own or [placeholder] * span.num_tokens
    if len(media) > MAX_MEDIA:
        raise RequestError(f"a prompt may have at most {MAX_MEDIA} media, got {len(media)}")
    total = sum(map(len, contents.values()))
    if total > MAX_CONTENT_BYTES:
        raise RequestError(f"the prompt's images take {total} bytes as tiles; at most {MAX_CONTENT_BYTES} are taken")
    return FlatPrompt(token_ids, tuple(media), tuple(starmap(MediaContent, contents.items())))


def _num_tokens(span: Any) -> int:
    if isinstance(span, Text):
        return len(span.token_ids)
    if isinstance(span, ShownMedia):
        if len(span.token_ids) not in (0, span.media.num_tokens):
            raise RequestError(f"a medium of {span.media.num_tokens} tokens has {len(span.token_ids)} token ids")
        return span.media.num_tokens
    if isinstance(span, Media):
        return span.num_tokens
    raise RequestError(f"a span of a prompt must be a Text or a Media, got {type(span).__name__}")


def _placeholder(kind: str, placeholders: Mapping[str, int]) -> int:
    token_id = placeholders.get(kind)
    if token_id is None:
        takes = f"text and {', '.join(sorted(placeholders))}" if placeholders else "text only"
        raise RequestError(f"the prompt has a medium of kind {kind!r}; this model takes {takes}")
    return token_id
