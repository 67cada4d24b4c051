"""Content hashes of full blocks, chained over everything before them, so that equal hashes mean equal prefixes.

blake2b-256 over (parent digest, token ids as little-endian u32). What else must be equal for KV to be shared (cache
salt, adapter, ...) goes into the root of the chain, as does a seed that every process draws anew unless it is fixed:
no client can predict or probe another process's hashes.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class PrefixHasher:
    """Hashes blocks of `block_size` tokens."""

    def __init__(self, block_size: int, seed: str | None = None) -> None:
        self.block_size = block_size
        self._seed = os.urandom(DIGEST_BYTES) if seed is None else seed.encode()

    def root(self, extra_keys: Sequence[str] = ()) -> bytes:
        """The parent of a first block. Keys are length-prefixed, so that ("ab", "c") and ("a", "bc") differ."""
        state = blake2b(len(self._seed).to_bytes(8, "little") + self._seed, digest_size=DIGEST_BYTES)
        for key in extra_keys:
            data = key.encode()
            state.update(len(data).to_bytes(8, "little") + data)
        return state.digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: memoryview, num_tokens: int) -> None:
        """Append to `hashes` the digests of the blocks that `num_tokens` fill and that are not hashed yet.

        `tokens` holds the sequence's ids as bytes, four per token.
        """
        block_bytes = 4 * self.block_size
        parent = hashes[-1] if hashes else root
        for start in range(len(hashes) * block_bytes, num_tokens // self.block_size * block_bytes, block_bytes):
            parent = blake2b(parent + tokens[start : start + block_bytes], digest_size=DIGEST_BYTES).digest()
            hashes.append(parent)
