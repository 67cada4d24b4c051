"""Media as the encoder reads them, and the entries of a step, engine -> worker, that compute, move and free vectors.

Vectors are never on the wire: the workers compute and keep them, and the engine decides which ones, and how long.
"""

from typing import Annotated

from msgspec import Meta

from vllm_lite.protocol import Message

MAX_CONTENT_BYTES = 128 * 1024 * 1024
"""Maximum bytes of the contents of all media of one prompt."""

MIN_ROOM = 8192
"""Minimum room of the workers, in vectors; with more tokens per step, as many vectors as these."""

GROWTH_ASIDE = 0.15
"""Maximum growth of a decode step's time, as a share, by media computed aside and tokens of media, without
max_itl_ms."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class MediaContent(Message):
    """The encoder's input for all media with this digest: colors, of one byte each."""

    digest: Digest
    content: bytes


class Encode(Message, tag=13):
    """Compute the vectors of a medium before the forward pass, and keep them until FreeEncoded."""

    digest: Digest
    num_tokens: int
    content: bytes
    grid: tuple[int, ...] = ()


class EncodeAside(Message, tag=17):
    """Like Encode, but in pieces beside later steps, so that sequences that decode do not stall. `ModelOutput.encoded`
    reports that the vectors are complete. A step that reads them before computes the rest at once."""

    digest: Digest
    num_tokens: int
    content: bytes
    grid: tuple[int, ...] = ()


class FreeEncoded(Message, tag=14):
    """Drop the vectors of these media, on device or host."""

    digests: list[Digest]


class DemoteEncoded(Message, tag=15):
    """Move the vectors of these media to host memory. No step reads them before PromoteEncoded."""

    digests: list[Digest]


class PromoteEncoded(Message, tag=16):
    """Move the vectors of these media back to the device, before the forward pass."""

    digests: list[Digest]
