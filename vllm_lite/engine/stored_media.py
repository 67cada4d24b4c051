"""StoredMedia: media vectors on disk, so that a medium which any engine has computed needs no second tower run.

Vectors are written when they have been computed. Their key is made of the medium's digest and the request's extra keys
(seed, salt, adapter). If a waiting sequence's next media are on disk and not with the workers, it is not admitted yet:
their vectors are loaded, and the verdict is LATER. A sequence waits once; vectors that fail to load, are late or find
no room are computed. The disk tier has the index and sends the messages.
"""

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many
from functools import partial
from typing import NamedTuple

from vllm_lite.engine.blocks.disk_tier import ARRIVING, DiskTier
from vllm_lite.engine.blocks.part import PrefixHit, SidePart
from vllm_lite.engine.blocks.verdict import OK, Admission
from vllm_lite.engine.encoder_cache import EncoderCache
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import Entry
from vllm_lite.protocol.transfers import MEDIUM, ForgetStored, LoadEncoded, StoreEncoded, Ticket
from vllm_lite.runtime.prefix_hash import PrefixHasher


class MediaHit(NamedTuple):
    """Media that a sequence reads next, as many as fit; vectors of those in `lacking` are only on disk."""

    next_media: Many[Media] = ()
    lacking: Many[Media] = ()
    is_loading: bool = False
    num_loaded: int = 0
    """Number of media whose vectors were loaded for the sequence while it waited."""


class StoredMedia(SidePart[MediaHit]):
    """Keeps keys and digests; the encoder cache counts the room, the workers hold the vectors."""

    keeps = False

    def __init__(
        self, encoder: EncoderCache, tier: DiskTier, block_size: int, hasher: Callable[[], PrefixHasher]
    ) -> None:
        """`hasher` returns the manager's PrefixHasher, which a recorder may replace."""
        self.pool = tier.pool
        self.num_loaded = 0
        """Number of media loaded from disk since the start."""
        self._encoder = encoder
        self._tier = tier
        self._block_size = block_size
        self._hasher = hasher
        self._keys: dict[Sequence, dict[bytes, bytes]] = {}
        """Sequence -> digest -> key, of media that may be loaded for the sequence and written."""
        self._due: list[tuple[bytes, Media]] = []
        """(key, medium) of media that the step being scheduled computes and that are to be written."""
        self._stores: dict[Ticket, tuple[bytes, int]] = {}
        """Ticket -> (key, number of vectors), of running writes."""
        self._unwanted: set[bytes] = set()
        """Keys of running writes that must be forgotten when they end."""
        self._loads: dict[Ticket, tuple[bytes, Media]] = {}
        self._waits: dict[Sequence, set[Ticket]] = {}
        self._tried: dict[Sequence, dict[bytes, bool]] = {}
        """Sequence -> digest -> whether it was loaded, for each load that has ended."""
        encoder.on_encode = self._encoded

    # ---- written

    def _encoded(self, sequence: Sequence, medium: Media) -> None:
        """Queue the write of vectors that the step being scheduled computes, unless they are on disk or being
        written."""
        key = self._key(sequence, medium)
        if key is None or not sequence.request.has_lasting_keys:
            return
        on_the_way = [*self._stores.values(), *((other, each.num_tokens) for other, each in self._due)]
        if key in self._tier.index or any(key == other for other, _ in on_the_way):
            return
        if sum(count for _, count in on_the_way) + medium.num_tokens > self._encoder.sizes.room:
            self._tier.writes.num_dropped += 1
        else:
            self._due.append((key, medium))

    def take_entries(self) -> list[Entry]:
        """Start the writes of vectors that the step being scheduled computes, which follow it. There are no entries."""
        due, self._due = self._due, []
        for key, medium in due:
            ticket = self._tier.move(self, partial(StoreEncoded, key=key, digest=medium.digest))
            self._stores[ticket] = key, medium.num_tokens
        return []

    def drop_ops(self) -> None:
        """Forget all loads and writes after the workers were lost."""
        self._due = []
        self._stores, self._loads, self._waits, self._tried = {}, {}, {}, {}
        self._unwanted = set()

    # ---- found

    def search(self, sequence: Sequence) -> "MediaSearch":
        return MediaSearch(self, sequence)

    def nothing(self) -> MediaHit:
        return MediaHit()

    def hit(self, sequence: Sequence, num_blocks: int) -> MediaHit:
        """Look up the media that the sequence reads after a cached prefix of `num_blocks`."""
        if sequence in self._waits:
            return MediaHit(is_loading=True)
        tried = self._tried.get(sequence, {})
        num_loaded = sum(tried.values())
        if not sequence.request.media or not self._tier.index:
            return MediaHit(num_loaded=num_loaded)
        media = list(self._next(sequence, num_blocks))
        has, index = self._encoder.has, self._tier.index
        lacking = [
            each
            for each in media
            if not has(each.digest) and each.digest not in tried and self._key(sequence, each) in index
        ]
        return MediaHit(media, lacking, num_loaded=num_loaded)

    def _next(self, sequence: Sequence, num_blocks: int) -> Iterator[Media]:
        """Media after a prefix of `num_blocks`, without duplicates, as many as fit into the encoder cache."""
        position, room = min(num_blocks * self._block_size, sequence.num_tokens - 1), self._encoder.sizes.room
        seen = set[bytes]()
        for medium in sequence.request.media:
            if medium.end <= position or medium.digest in seen:
                continue
            room -= medium.num_tokens
            if room < 0:
                return
            seen.add(medium.digest)
            yield medium

    def admission(self, sequence: Sequence, found: MediaHit, chunk: int) -> Admission:  # noqa: ARG002
        return ARRIVING if found.is_loading else OK

    def may_admit(self, sequence: Sequence, found: MediaHit, num_tokens: int, *, in_parts: bool) -> bool:  # noqa: ARG002
        """Whether to admit the sequence without loading. False: loads have been started."""
        return not found.lacking or not self._begin_loads(sequence, found)

    def _begin_loads(self, sequence: Sequence, found: MediaHit) -> bool:
        """Start to load the lacking vectors, and let the sequence wait. False: there is no room for any."""
        for medium in found.next_media:
            self._encoder.touch(medium.digest)  # so that they do not evict each other
        by_digest = {medium.digest: ticket for ticket, (_, medium) in self._loads.items()}
        waits = set[Ticket]()
        for medium in found.lacking:
            digest, key = medium.digest, self._key(sequence, medium)
            if (ticket := by_digest.get(digest)) is None:
                if key is None or not self._encoder.expect(medium):
                    break
                load = partial(LoadEncoded, key=key, digest=digest, num_tokens=medium.num_tokens, grid=medium.grid)
                ticket = self._tier.move(self, load)
                self._loads[ticket] = key, medium
            waits.add(ticket)
        if waits:
            self._waits[sequence] = waits
        return bool(waits)

    def note_admission(self, hit: PrefixHit, found: MediaHit) -> list[tuple[str, dict[str, int]]]:  # noqa: ARG002
        return [("loaded_media", {"media": found.num_loaded})] if found.num_loaded else []

    # ---- ends of transfers

    def ended(self, ticket: Ticket, failed: Collection[int]) -> None:
        if (store := self._stores.pop(ticket, None)) is not None:
            self._stored(store[0], is_there=not failed)
        elif (load := self._loads.pop(ticket, None)) is not None:
            key, medium = load
            self._encoder.arrived(medium.digest, is_there=not failed)
            if failed:
                self._tier.num_failed += 1
                self._tier.index.lose((key,))
            else:
                self.num_loaded += 1
            self._wait_no_more(ticket, medium.digest, is_there=not failed)

    def _stored(self, key: bytes, *, is_there: bool) -> None:
        if key in self._unwanted:
            self._unwanted.discard(key)
            self._tier.index.lose((key,))
            self._tier.writes.messages.append(ForgetStored([key]))
        elif is_there:
            self._tier.index.gain((key,))

    def give_up(self, ticket: Ticket) -> None:
        if (load := self._loads.get(ticket)) is not None:
            self._encoder.give_up(load[1].digest)
            self._wait_no_more(ticket, load[1].digest, is_there=False)

    def _wait_no_more(self, ticket: Ticket, digest: bytes, *, is_there: bool) -> None:
        for sequence, tickets in list(self._waits.items()):
            if ticket in tickets:
                tickets.discard(ticket)
                self._tried.setdefault(sequence, {})[digest] = is_there
                if not tickets:
                    del self._waits[sequence]

    # ---- sequences, which hold nothing of it

    def register(self, sequence: Sequence) -> None:
        request = sequence.request
        is_open = request.pooling is None and request.params.prompt_logprobs is None
        if request.media and self.pool.enable_caching and is_open:
            digests, root = dict.fromkeys(medium.digest for medium in request.media), self._hasher().root
            self._keys[sequence] = {each: root((*request.extra_keys, each.hex())) + MEDIUM for each in digests}

    def _key(self, sequence: Sequence, medium: Media) -> bytes | None:
        """Key of a medium; None for a sequence that was not registered, such as a fork: its parent loads the media."""
        return self._keys.get(sequence, {}).get(medium.digest)

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:  # noqa: ARG002
        self._waits.pop(sequence, None)
        self._tried.pop(sequence, None)
        if sequence.status is Status.FINISHED:
            self._keys.pop(sequence, None)

    # ---- forgetting and reporting

    def forget_stored(self) -> None:
        """Let vectors that are being written be forgotten when their writes end."""
        self._due = []
        self._unwanted.update(key for key, _ in self._stores.values())

    def count(self, stats: Stats) -> None:
        stats.loaded_media = self.num_loaded

    def check_integrity(self, sequences: Many[Sequence]) -> None:
        """Raise RuntimeError if a sequence waits for a load that does not exist, or has ended itself."""
        waiting = {ticket for tickets in self._waits.values() for ticket in tickets}
        if not waiting <= self._loads.keys() or not {*self._waits, *self._keys} <= set(sequences):
            raise RuntimeError("a sequence waits for vectors that are not on their way, or is gone")


class MediaSearch:
    """Looks up the stored vectors that one sequence reads next."""

    def __init__(self, part: StoredMedia, sequence: Sequence) -> None:
        self._part = part
        self._sequence = sequence

    def longest(self, num_blocks: int) -> int:
        """All `num_blocks`: missing vectors are computed."""
        return num_blocks

    def find(self, num_blocks: int) -> MediaHit:
        return self._part.hit(self._sequence, num_blocks)
