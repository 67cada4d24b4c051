"""Media as an encoder reads them, and the entries of a step, engine -> worker, by which it does.

Vectors are never on the wire: the workers make and keep them, the engine decides which, and until when.
"""

from typing import Annotated

from msgspec import Meta

from vllm_lite.protocol import Message

MAX_CONTENT_BYTES = 128 * 1024 * 1024
"""Most bytes of all the media of one prompt, as the encoder reads them."""

MIN_ROOM = 8192
"""Vectors that workers hold in any case; where a step computes more tokens, as many as these."""

GROWTH_ASIDE = 0.15
"""Media that are computed aside and the tokens of media together may make a step longer by this share of what next
tokens alone take, where no goal is given."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class MediaContent(Message):
    """Colors, of one byte each, which the encoder reads for all media with this digest."""

    digest: Digest
    content: bytes


class Encode(Message, tag=13):
    """Compute the vectors of a medium before the forward pass, and keep them until a FreeEncoded."""

    digest: Digest
    num_tokens: int
    content: bytes
    grid: tuple[int, ...] = ()


class EncodeAside(Message, tag=17):
    """As Encode, but in pieces beside the steps to come, so that the sequences that decode in them are not held up:
    `ModelOutput.encoded` says when the vectors are there. A step that reads them before has the rest computed at
    once."""

    digest: Digest
    num_tokens: int
    content: bytes
    grid: tuple[int, ...] = ()


class FreeEncoded(Message, tag=14):
    """Forget the vectors of these media, wherever they are."""

    digests: list[Digest]


class DemoteEncoded(Message, tag=15):
    """Move the vectors of these media to the host's memory. No step reads them before they are back."""

    digests: list[Digest]


class PromoteEncoded(Message, tag=16):
    """Move the vectors of these media back to the device, before the forward pass."""

    digests: list[Digest]
