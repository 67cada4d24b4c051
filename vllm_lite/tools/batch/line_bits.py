"""A bit set of an input's lines, and detection of repeated custom_ids."""

from array import array
from hashlib import blake2b

NUM_BUCKETS = 256
DIGEST_BYTES = 16


class LineBits:
    """A set of lines, with one bit for each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = 0

    def __contains__(self, line: int) -> bool:
        place = line >> 3
        return place < len(self._bits) and bool(self._bits[place] & 1 << (line & 7))

    def add(self, line: int) -> None:
        place = line >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1 - len(self._bits), len(self._bits))))
        if line not in self:
            self.count += 1
            self._bits[place] |= 1 << (line & 7)


class IdFinder:
    """Finds repeated custom_ids. It keeps 20 bytes per row, in buckets that are compared one at a time."""

    def __init__(self) -> None:
        self._digests = [bytearray() for _ in range(NUM_BUCKETS)]
        self._lines = [array("I") for _ in range(NUM_BUCKETS)]

    def add(self, line: int, custom_id: str) -> None:
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
        self._digests[digest[0]] += digest
        self._lines[digest[0]].append(line)

    def repeated(self) -> LineBits:
        """Lines whose custom_id is on an earlier line."""
        found = LineBits()
        for digests, lines in zip(self._digests, self._lines, strict=True):
            seen: set[bytes] = set()
            for place, line in enumerate(lines):
                digest = bytes(digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
                if digest in seen:
                    found.add(line)
                seen.add(digest)
        return found
