"""The encoder cache: the media whose vectors the workers hold, and the budget of vectors that each step may compute.

The engine decides alone: an Encode is sent with the step that first reads a medium, a FreeEncoded before another medium
takes its room. A step computes a prompt up to the first medium whose vectors it cannot have; the next step continues
there. Vectors are needed until all tokens of the medium are computed. After that they stay while there is room, and the
least recently used are dropped first.

If the tokens of a medium attend to each other in both directions (`whole_media`), a step computes all remaining tokens
of the medium or none.

Vectors that leave the device go to the host, if there is room, and return in the step that reads them. The disk tier
may load vectors, too; their room is taken when the load is requested. A running sequence that reaches a medium before
its load has ended does not wait: the vectors are computed.

Where streams must not stall (max_itl_s, and servers on CPUs), a medium is computed aside while other sequences decode:
in pieces beside their steps, one medium at a time. Its prompts wait until the workers report the vectors, or until no
sequence decodes any more. Without max_itl_s, `most_beside` limits the media tokens of such a step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vllm_lite.engine.blocks.part import Forgotten, SidePart
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.sequence import Sequence as Seq
from vllm_lite.engine.sequence import Status
from vllm_lite.protocol.encoder import MIN_ROOM, DemoteEncoded, Encode, EncodeAside, FreeEncoded, PromoteEncoded
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import Entry, ModelOutput

MAX_STEP_BYTES = 32 * 1024 * 1024
"""Maximum bytes of media content in one step: half the limit of a message."""


class EncoderSizes(NamedTuple):
    """Limits, in vectors: `budget` per step (one larger medium is allowed), `room` on the device, `host_room` on the
    host."""

    budget: int
    room: int
    host_room: int = 0


def encoder_sizes(max_num_batched_tokens: int, num_on_host: int = 0) -> EncoderSizes:
    """Limits for steps of `max_num_batched_tokens`: as many vectors per step, and room for the images of some chats."""
    return EncoderSizes(max_num_batched_tokens, max(MIN_ROOM, max_num_batched_tokens), num_on_host)


class EncoderCache(SidePart[None]):
    """Counts vectors. A sequence holds a medium until all its tokens are computed, or the sequence stops running."""

    keeps = False

    def __init__(self, pool: BlockPool, sizes: EncoderSizes, *, whole_media: bool = False) -> None:
        """`whole_media`: no step may end inside a medium."""
        self.pool = pool
        self.sizes = sizes
        self.whole_media = whole_media
        self.num_encoded = 0
        """Number of media computed since the start."""
        self._held: OrderedDict[bytes, int] = OrderedDict()
        """Digest -> number of vectors, for media on the device, the least recently used first."""
        self.on_encode: Callable[[Seq, Media], None] | None = None
        """Called with (first reader, medium) for each medium that the step being scheduled computes, or that has been
        computed aside."""
        self._arriving: set[bytes] = set()
        """Digests in `_held` whose vectors are being loaded from the disk tier."""
        self._on_host: OrderedDict[bytes, int] = OrderedDict()
        """Digest -> number of vectors, for media on the host, the least recently used first."""
        self._readers: dict[Seq, list[Media]] = {}
        self._aside: dict[bytes, tuple[Seq, Media]] = {}
        """Digest -> (first reader, medium), for those of `_held` that are being computed aside."""
        self.others_decode: Callable[[], bool] = lambda: False
        """Whether sequences decode in the step being scheduled that must not stall."""
        self.most_beside: Callable[[], int] | None = None
        """Returns the maximum media tokens of a step beside such sequences; None: no limit."""
        self._given: dict[Seq, int] = {}
        """Media tokens that the step being scheduled gives to each sequence, within `most_beside`."""
        self._doomed: set[bytes] = set()
        """Digests in `_held` to be freed once no sequence reads them."""
        self._entries: list[Entry] = []
        self._budget, self._bytes = sizes.budget, MAX_STEP_BYTES

    # ---- the step

    @property
    def is_aside(self) -> bool:
        return bool(self._aside)

    def begin_step(self) -> None:
        self._given.clear()
        self._budget, self._bytes = self.sizes.budget, MAX_STEP_BYTES
        for sequence, media in list(self._readers.items()):
            left = [each for each in media if each.end > sequence.num_computed]
            if not left or sequence.status is not Status.RUNNING:
                del self._readers[sequence]
            else:
                self._readers[sequence] = left
        if self._doomed:
            self._free(self._doomed - self._read())

    def take_entries(self) -> list[Entry]:
        entries, self._entries = self._entries, []
        return entries

    def drop_ops(self) -> None:
        """Forget all vectors after the workers were lost."""
        self._held.clear()
        self._on_host.clear()
        self._arriving.clear()
        self._aside.clear()
        self._doomed.clear()
        self._readers.clear()
        self._entries.clear()

    def reachable(self, sequence: Seq, start: int, count: int) -> int:
        """Limit `count` to the first medium whose vectors the step cannot have or that it may not cut, and inside a
        medium to the tokens that decoding sequences leave time for. The sequence holds the media that it reads."""
        count = self._readable(sequence, start, count)
        if (
            count <= 0
            or self.most_beside is None
            or self.whole_media
            or sequence.num_output
            or not self.others_decode()
        ):
            return count
        first = next((each.start for each in sequence.request.media if each.end > start), start + count)
        return min(count, first - start) if first > start else self._limited(sequence, count, self.most_beside())

    def _limited(self, sequence: Seq, count: int, most: int) -> int:
        """The part of `count` media tokens that fits into the step's `most`. The first sequence to ask gets half of
        them, and when it asks again those that no other has taken, as prompts share a step's token budget."""
        is_first = not self._given
        self._given.pop(sequence, None)
        least = 0 if sequence.status is Status.RUNNING else 1  # so that it is admitted and does not block the queue
        left = most - (most // 2 if is_first else sum(self._given.values()))
        count = min(count, max(least, left))
        self._given[sequence] = count
        return count

    def _readable(self, sequence: Seq, start: int, count: int) -> int:
        for medium in sequence.request.media if count > 0 else ():
            if medium.end <= start:
                continue
            if medium.start >= start + count:
                break
            is_cut = self.whole_media and medium.end > start + count
            if is_cut or not self._get(sequence, medium):
                return max(0, medium.start - start)
            readers = self._readers.setdefault(sequence, [])
            if medium not in readers:
                readers.append(medium)
        return count

    def uncut(self, sequence: Seq) -> int:
        """Number of tokens of the sequence's next medium, if media are computed whole."""
        if not self.whole_media:
            return 0
        ahead = (each.num_tokens for each in sequence.request.media if each.end > sequence.num_computed)
        return next(ahead, 0)

    def _get(self, sequence: Seq, medium: Media) -> bool:
        """Whether this step can read the vectors: the workers have them, or compute them with it."""
        if medium.digest in self._on_host:
            return self._promote(medium)
        if self.has(medium.digest):
            self._held.move_to_end(medium.digest)
            return self._is_ready(medium.digest)
        is_aside = self.others_decode()
        if is_aside and self._aside:
            return False
        self.give_up(medium.digest)
        content = sequence.request.contents[medium.digest]
        is_first = self._budget == self.sizes.budget
        if not is_first and (medium.num_tokens > self._budget or len(content) > self._bytes):
            return False
        if not self._make_room(medium.num_tokens):
            return False
        self._budget -= medium.num_tokens
        self._bytes -= len(content)
        self._held[medium.digest] = medium.num_tokens
        kind = EncodeAside if is_aside else Encode
        self._entries.append(kind(medium.digest, medium.num_tokens, content, medium.grid))
        self.num_encoded += 1
        if is_aside:
            self._aside[medium.digest] = sequence, medium
        else:
            self._is_computed(sequence, medium)
        return not is_aside

    def _is_ready(self, digest: bytes) -> bool:
        """Whether a step can read vectors that are held. If they are being computed aside and no sequence decodes any
        more, the workers compute the rest with this step."""
        if digest in self._aside and not self.others_decode():
            self.learn([digest])
        return digest not in self._aside

    def take_result(self, result: ModelOutput) -> None:
        if result.encoded:
            self.learn(result.encoded)

    def learn(self, encoded: Iterable[bytes]) -> None:
        """Mark media as computed: the workers have finished them aside, or will with the step being scheduled."""
        for digest in encoded:
            if (found := self._aside.pop(digest, None)) is not None:
                self._is_computed(*found)

    def _is_computed(self, sequence: Seq, medium: Media) -> None:
        if self.on_encode is not None:
            self.on_encode(sequence, medium)

    def _make_room(self, num_tokens: int) -> bool:
        """Drop unread media until `num_tokens` vectors fit. Returns whether they do; a single medium always fits."""
        lacking = sum(self._held.values()) + num_tokens - self.sizes.room
        if lacking <= 0:
            return True
        read, leaving = self._read(), list[bytes]()
        for digest, size in self._held.items():
            if lacking <= 0:
                break
            if digest not in read:
                leaving.append(digest)
                lacking -= size
        if lacking > 0 and len(leaving) < len(self._held):
            return False
        self._demote(leaving)
        return True

    def _demote(self, digests: list[bytes]) -> None:
        """Move media to the host, which drops its least recently used ones. Those that are too large for it, doomed or
        not computed yet are freed."""
        room, on_host = self.sizes.host_room, self._on_host
        gone = self._doomed | self._aside.keys()
        staying = [digest for digest in digests if self._held[digest] <= room and digest not in gone]
        self._free([digest for digest in digests if digest not in staying])
        if not staying:
            return
        for digest in staying:
            on_host[digest] = self._held.pop(digest)
        self._entries.append(DemoteEncoded(sorted(staying)))
        leaving = list[bytes]()
        while sum(on_host.values()) > room:
            leaving.append(on_host.popitem(last=False)[0])
        if leaving:
            self._entries.append(FreeEncoded(sorted(leaving)))

    def _promote(self, medium: Media) -> bool:
        """Move a medium's vectors back to the device. False: there is no room yet."""
        digest, size = medium.digest, self._on_host.pop(medium.digest)  # so that _make_room() does not drop them
        if not self._make_room(size):
            self._on_host[digest] = size
            return False
        self._held[digest] = size
        self._entries.append(PromoteEncoded([digest]))
        return True

    def _read(self) -> set[bytes]:
        """Digests of media that must stay: those that sequences read, and those being loaded."""
        return {medium.digest for media in self._readers.values() for medium in media} | self._arriving

    def _free(self, digests: set[bytes] | list[bytes]) -> None:
        if digests:
            self._entries.append(FreeEncoded(sorted(digests)))
        for digest in digests:
            del self._held[digest]
            self._aside.pop(digest, None)
            self._doomed.discard(digest)

    # ---- vectors from the disk tier

    def has(self, digest: bytes) -> bool:
        """Whether the workers have the vectors, on the device or on the host."""
        return (digest in self._held and digest not in self._arriving) or digest in self._on_host

    def touch(self, digest: bytes) -> None:
        """Mark a medium as just used, wherever its vectors are."""
        for place in (self._held, self._on_host):
            if digest in place:
                place.move_to_end(digest)

    def expect(self, medium: Media) -> bool:
        """Take room for vectors that are about to be loaded. False: there is none, or a FreeEncoded of the same medium
        has not been sent yet."""
        entries = (entry.digests for entry in self._entries if isinstance(entry, FreeEncoded))
        if any(medium.digest in digests for digests in entries) or not self._make_room(medium.num_tokens):
            return False
        self._held[medium.digest] = medium.num_tokens
        self._arriving.add(medium.digest)
        return True

    def give_up(self, digest: bytes) -> None:
        """Stop expecting vectors that are being loaded; they may still arrive."""
        if digest in self._arriving:
            self._arriving.discard(digest)
            self._doomed.discard(digest)
            del self._held[digest]

    def arrived(self, digest: bytes, *, is_there: bool) -> None:
        """Complete a load of vectors. `is_there`: all workers have them. Vectors that are no longer expected are freed
        there."""
        if digest in self._arriving and is_there:
            self._arriving.discard(digest)
            return
        self.give_up(digest)
        if digest not in self._held and digest not in self._on_host:
            self._entries.append(FreeEncoded([digest]))

    # ---- sequences

    def search(self, sequence: Seq) -> "AnyLength":  # noqa: ARG002
        return AnyLength()

    def nothing(self) -> None:
        return None

    def release(self, sequence: Seq, *, forget: bool = False) -> None:  # noqa: ARG002
        self._readers.pop(sequence, None)

    def swap_out(self, sequence: Seq) -> bool:
        self._readers.pop(sequence, None)
        return True

    def holds(self, sequence: Seq) -> bool:
        return sequence in self._readers

    # ---- forgetting and reporting

    def reset(self) -> Forgotten:
        """Drop all media, those that sequences read as soon as they have been read."""
        read = self._read()
        if self._on_host:
            self._entries.append(FreeEncoded(sorted(self._on_host)))
            self._on_host.clear()
        self._free([digest for digest in self._held if digest not in read])
        self._doomed = set(self._held)
        return Forgotten()

    def count(self, stats: Stats) -> None:
        stats.encoded_media = self.num_encoded

    def check_integrity(self, sequences: Sequence[Seq]) -> None:
        lost = self._read() - self._held.keys()  # media that arrive among them
        if self._held.keys() & self._on_host.keys() or sum(self._on_host.values()) > self.sizes.host_room:
            raise RuntimeError("media are on the device and on the host, or more on the host than there is room for")
        if lost or not (self._doomed | self._aside.keys()) <= self._held.keys():
            known = f"{self._doomed} are to be freed, {list(self._aside)} are computed"
            raise RuntimeError(f"media {lost} are read, {known}, not all of them are held")
        if self._aside.keys() & self._arriving:
            raise RuntimeError("media are computed aside and are on their way from a tier below")
        if gone := self._readers.keys() - set(sequences):
            raise RuntimeError(f"{gone} read media and have ended")


class AnyLength:
    """Search that limits no prefix: missing vectors are computed."""

    def longest(self, num_blocks: int) -> int:
        return num_blocks

    def find(self, num_blocks: int) -> None:  # noqa: ARG002
        return None
