"""The file format: a file has a run of items, consecutive KV blocks of one group of one chain, or one recurrent state.

    page 0      magic, length and checksum of the header, the header (msgpack), zeros up to 4096
    then        the items, `item_bytes` each, in the layout of the pool

The checksum of an item covers its key and its bytes, so that an item in a wrong place is detected. It is the 64-bit
XXH3, at 30 GB/s a core; zlib's CRC-32 at 2.6 GB/s would take twice as long as the read.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

MAGIC = b"vllkv\x00\x00\x02"
"""First bytes of a file; the last byte is the version of this format."""
PAGE = 4096
MAX_ITEMS = 64
"""Maximum number of items in a file: a chat of 20,000 tokens has about twenty files, and the header fits into a
page."""
MAX_KEY_BYTES = 40
MAX_ITEM_BYTES = 1 << 32
_START = struct.Struct("<8sIQ")


class Foreign(ValueError):
    """A file of another format version, model or layout."""


class Damaged(ValueError):
    """A file that is truncated, or whose header or items are corrupt."""


class RunHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Header of a file: the `keys` of its items in order, with a checksum for each."""

    fingerprint: Annotated[bytes, Meta(max_length=64)]
    item_bytes: Annotated[int, Meta(ge=1, le=MAX_ITEM_BYTES)]
    keys: Annotated[list[Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]], Meta(min_length=1, max_length=MAX_ITEMS)]
    checksums: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_ITEMS)]

    @property
    def file_bytes(self) -> int:
        return PAGE + len(self.keys) * self.item_bytes

    def offset(self, number: int) -> int:
        """Position of item `number` in the file."""
        return PAGE + number * self.item_bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RunHeader).decode


def checksum(key: bytes, item: bytes | memoryview) -> int:
    return xxh3_64_intdigest(item, xxh3_64_intdigest(key))


def name_of(keys: Sequence[bytes]) -> str:
    """File name of a run: equal runs of any engine have the same name."""
    return blake2b(b"".join(len(key).to_bytes(1, "little") + key for key in keys), digest_size=20).hexdigest()


def pack(header: RunHeader) -> bytes:
    """Encode the first page of a file."""
    body = _encode(header)
    page = _START.pack(MAGIC, len(body), xxh3_64_intdigest(body)) + body
    return page.ljust(PAGE, b"\0")


def unpack(page: bytes, file_bytes: int, fingerprint: bytes) -> RunHeader:
    """Decode the first page of a file of `file_bytes` that should be of this model. Raises Foreign or Damaged."""
    header = read_header(page, file_bytes)
    if header.fingerprint != fingerprint:
        raise Foreign("it is of another model")
    return header


def read_header(page: bytes, file_bytes: int) -> RunHeader:
    """Decode the first page of a file of any model. Raises Foreign or Damaged."""
    if len(page) < PAGE:
        raise Damaged(f"it has {len(page)} bytes, less than its header")
    magic, length, found = _START.unpack_from(page)
    if magic != MAGIC:
        raise Foreign("it is not KV of this version")
    body = page[_START.size : _START.size + length]
    if len(body) < length or xxh3_64_intdigest(body) != found:
        raise Damaged("its header is not the one that was written")
    try:
        header = _decode(body)
    except msgspec.MsgspecError as error:
        raise Damaged(f"its header cannot be read: {error}") from error
    if len(header.checksums) != len(header.keys):
        raise Damaged("its header lacks checksums")
    if file_bytes != header.file_bytes:
        raise Damaged(f"it has {file_bytes} bytes, expected {header.file_bytes}")
    return header
