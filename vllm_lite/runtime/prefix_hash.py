"""Content hashes of full blocks, chained over all blocks before, so that equal hashes mean equal prefixes.

A hash is blake2b-256 over (parent digest, token ids as little-endian u32, keys of the spans in the block). Everything
else on which KV depends (cache salt, adapter, ...) goes into the root of the chain, as does a seed, which each process
draws at random unless it is configured: no client can predict or probe another process's hashes.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Protocol

DIGEST_BYTES = 32
_end = attrgetter("end")


class KeyedSpan(Protocol):
    """Placeholder tokens [start, end) for content with this digest, such as an image: their ids are the same for all
    content."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def digest(self) -> bytes: ...


class PrefixHasher:
    """Hashes blocks of `block_size` tokens."""

    def __init__(self, block_size: int, seed: str | None = None) -> None:
        self.block_size = block_size
        self._seed = os.urandom(DIGEST_BYTES) if seed is None else seed.encode()

    def root(self, extra_keys: Sequence[str] = ()) -> bytes:
        """Parent digest of the first block. Keys are length-prefixed, so that ("ab", "c") and ("a", "bc") differ."""
        state = blake2b(len(self._seed).to_bytes(8, "little") + self._seed, digest_size=DIGEST_BYTES)
        for key in extra_keys:
            data = key.encode()
            state.update(len(data).to_bytes(8, "little") + data)
        return state.digest()

    def extend(
        self,
        hashes: list[bytes],
        root: bytes,
        tokens: memoryview,
        num_tokens: int,
        spans: Sequence[KeyedSpan] = (),
    ) -> None:
        """Append to `hashes` the digests of the blocks that `num_tokens` fill and that have none yet.

        `tokens` are the sequence's ids as bytes, four per token; `spans` are sorted and do not overlap.
        """
        block_bytes = 4 * self.block_size
        parent = hashes[-1] if hashes else root
        blocks = range(len(hashes) * block_bytes, num_tokens // self.block_size * block_bytes, block_bytes)
        if spans:
            for start in blocks:
                content = parent + tokens[start : start + block_bytes]
                content += span_keys(spans, start // 4, self.block_size)
                parent = blake2b(content, digest_size=DIGEST_BYTES).digest()
                hashes.append(parent)
            return
        for start in blocks:
            parent = blake2b(parent + tokens[start : start + block_bytes], digest_size=DIGEST_BYTES).digest()
            hashes.append(parent)

    def tail(self, parent: bytes, tokens: bytes, number: int, spans: Sequence[KeyedSpan] = ()) -> bytes:
        """Digest of the partial block `number` with these tokens, after `parent`."""
        content = parent + len(tokens).to_bytes(8, "little") + tokens
        content += span_keys(spans, number * self.block_size, self.block_size)
        return blake2b(content, digest_size=DIGEST_BYTES).digest()


def span_keys(spans: Sequence[KeyedSpan], first: int, block_size: int) -> bytes:
    """Keys of the spans that overlap the block which begins at token `first`: the digest, start and end of each,
    relative to `first`. Empty for a block without placeholders."""
    keys = b""
    for span in spans[bisect_right(spans, first, key=_end) :]:
        if span.start >= first + block_size:
            break
        keys += span.digest + b"".join((at - first).to_bytes(8, "little", signed=True) for at in (span.start, span.end))
    return keys
