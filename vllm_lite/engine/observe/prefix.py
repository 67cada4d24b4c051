"""Explains which blocks of a prompt are cached, and why the first other one is not.

Nothing changes: no block is referenced or moved in an eviction order, nothing is counted, and no trace records the
hashes. The work is done in slices, between which the engine's loop goes on.
"""

from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import msgspec

from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import PrefixHit
from vllm_lite.engine.blocks.tails import PromptTails
from vllm_lite.engine.blocks.tier import Tier
from vllm_lite.engine.intake import Intake
from vllm_lite.engine.observe.conversations import RecentConversation
from vllm_lite.engine.observe.recorder import RecordingHasher
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.engine.sequence import Sequence
from vllm_lite.engine.states.slots import StateSlots
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.transfers import STATE
from vllm_lite.protocol.view import MissReason, NearestPrompt, PrefixSeen
from vllm_lite.runtime import log
from vllm_lite.runtime.prefix_hash import PrefixHasher

SLICE_BLOCKS = 256
"""Number of blocks that are hashed or looked up in a slice, which takes a fraction of a millisecond."""
COMPARED = 1024
"""Number of tokens that are compared at once."""
SLICE_PROMPTS = 1
"""Number of remembered prompts that a slice compares."""
CONTEXT = 12
"""Number of tokens before and after a difference that are shown."""
MAX_ASKED = 64
"""Maximum number of questions that wait, or are being answered, with their prompts."""
DEVICE, HOST, DISK = 1, 2, 3

_logger = log.get(__name__)

Slices = Generator[None, None, PrefixSeen]


class Common(NamedTuple):
    """A remembered prompt, and the number of first tokens that it has in common with the one in question."""

    prompt: RecentConversation
    num_tokens: int


def explain(scheduler: Scheduler, request: Request) -> Slices:
    """Explain the prompt of a request that the scheduler does not know."""
    kv, sequence = scheduler.kv, request.sequences[0]
    empty = PrefixSeen(sequence.num_prompt, kv.block_size)
    if not kv.is_caching or not any(part.keeps for part in kv.parts):
        return msgspec.structs.replace(empty, miss="caching_is_off")
    if sequence.unscored:
        return msgspec.structs.replace(empty, miss="prompt_is_scored")
    hasher = kv.hasher.inner if isinstance(kv.hasher, RecordingHasher) else kv.hasher
    yield from _hash(sequence, hasher)
    cached = BlockTiers(kv, sequence)
    yield from cached.look_up()
    own, other = yield from _nearest(scheduler, sequence)
    num_blocks = cached.longest(HOST)
    num_tokens = cached.with_tail(num_blocks, hasher)
    num_hit = max(num_blocks, cached.longest(DISK))
    on_disk = min(num_hit * kv.block_size, sequence.num_prompt - 1) - num_tokens if num_hit > num_blocks else 0
    tiers = cached.tiers()
    return PrefixSeen(
        num_prompt=sequence.num_prompt,
        block_size=kv.block_size,
        num_cached=min(num_tokens, sequence.num_prompt - 1),
        num_on_disk=max(0, on_disk),
        tiers=tiers,
        num_hit_blocks=num_hit,
        miss=_reason(scheduler, sequence, num_hit, tiers, own, other),
        nearest=None if own is None else _shown(own),
    )


def _hash(sequence: Sequence, hasher: PrefixHasher) -> Iterator[None]:
    sequence.hash_root = hasher.root(sequence.request.extra_keys)
    size = SLICE_BLOCKS * hasher.block_size
    for end in range(size, sequence.num_prompt + size, size):
        sequence.hash_blocks(hasher, min(end, sequence.num_prompt))
        yield


class BlockTiers:
    """The tiers of all blocks of a sequence, in every group, and of the states at their ends; 0: in none."""

    def __init__(self, kv: KVCacheManager, sequence: Sequence) -> None:
        self._kv, self._sequence = kv, sequence
        self._blocks, self._disk = kv.part(KVBlocks), kv.optional_part(DiskTier)
        self._by_group = [(group, bytearray()) for group in self._blocks.groups]
        slots = kv.optional_part(StateSlots)
        self._store = None if slots is None else slots.store
        self._states = bytearray()

    def look_up(self) -> Iterator[None]:
        """Find all of them, slice by slice. States that are published when the next step begins count, as that looks
        prompts up later."""
        hashes, store = self._sequence.block_hashes, self._store
        coming = set() if store is None else {left.key for left in store.unpublished}
        for start in range(0, len(hashes), SLICE_BLOCKS):
            some = hashes[start : start + SLICE_BLOCKS]
            for group, tiers in self._by_group:
                tiers.extend(self._tier(each + group.key, self._blocks.find, self._blocks.host) for each in some)
            if store is not None:
                keys = [each + STATE for each in some]
                self._states += bytes(DEVICE if each in coming else self._tier(each, store.find) for each in keys)
            yield

    def _tier(self, key: bytes, find: Callable[[bytes], int | None], host: Tier | None = None) -> int:
        place = find(key)
        if place is not None:
            return DEVICE if host is None or place < host.first_id else HOST
        return DISK if self._disk is not None and key in self._disk.index else 0

    def longest(self, slowest: int) -> int:
        """Number of blocks from which the sequence can continue if only tiers up to `slowest` are read. The same as
        that of KVCacheManager.find_cached(), but in the time of a few searches for a byte."""
        sequence, size = self._sequence, self._kv.block_size
        missing = bytes(tier == 0 or tier > slowest for tier in range(DISK + 1))
        by_group = [(group, tiers.translate(missing.ljust(256))) for group, tiers in self._by_group]
        states, most = self._states.translate(missing.ljust(256)), (sequence.num_tokens - 1) // size
        length, agreed = len(sequence.block_hashes), -1
        while length != agreed:
            agreed = length
            for group, lacks in by_group:
                if group.window is None:
                    length = lacks.find(1, 0, length) if 1 in lacks[:length] else length
                else:
                    has = [None if lack else DEVICE for lack in lacks]
                    length = group.longest_hit(length, sequence.num_tokens, has.__getitem__)
            if self._store is not None:
                length = states.rfind(0, 0, min(length, most)) + 1
        return length

    def with_tail(self, num_blocks: int, hasher: PrefixHasher) -> int:
        """Number of tokens that a hit of `num_blocks` in memory has with the tail of the next block. The manager's own
        hasher may be recorded."""
        kv, sequence = self._kv, self._sequence
        num_tokens = num_blocks * kv.block_size
        last = min(num_tokens, sequence.num_tokens - 1)
        if any(HOST in tiers[group.first_needed(last) : num_blocks] for group, tiers in self._by_group):
            return num_tokens
        hit = PrefixHit(num_tokens, kv.no_hit().found, num_tokens)
        found = PromptTails(kv.parts, lambda: hasher).longer(sequence, hit).num_tokens
        keys = [(mark, key) for mark, key in (sequence.tail_keys or {}).items() if found < mark < sequence.num_tokens]
        groups, tails = self._blocks.groups, self._blocks.tails
        new = [mark for mark, key in keys if all(tails.is_new(key + group.key) for group in groups)]
        return max((mark for mark in new if mark < num_tokens + kv.block_size), default=found)

    def tiers(self) -> bytes:
        """The slowest tier of each block; 0 if a group lacks it that reads all blocks, or all lack it. A group with a
        window may not need it."""
        rows = [(group.window is None, tiers) for group, tiers in self._by_group] or [(True, self._states)]
        whole = [tiers for is_whole, tiers in rows if is_whole]
        slowest = [max(column) for column in zip(*(tiers for _, tiers in rows), strict=True)]
        for tiers in whole:
            slowest = [most if tier else 0 for most, tier in zip(slowest, tiers, strict=True)]
        return bytes(slowest)


def _nearest(scheduler: Scheduler, sequence: Sequence) -> Generator[None, None, tuple[Common | None, Common | None]]:
    """The remembered prompts with the longest common prefix: one that can share blocks, as it has the same cache salt
    and adapter, and one that cannot. Of equally near ones the latest."""
    tokens, keys = sequence.tokens, sequence.request.extra_keys
    best: dict[bool, Common] = {}
    for number, prompt in enumerate(list(scheduler.meter.conversations.remembered())):
        is_own = prompt.extra_keys == keys
        common = Common(prompt, num_common(tokens, prompt.tokens or array("I")))
        if is_own not in best or common.num_tokens > best[is_own].num_tokens:
            best[is_own] = common
        if number % SLICE_PROMPTS == SLICE_PROMPTS - 1:
            yield
    return best.get(True), best.get(False)


def num_common(first: "array[int]", second: "array[int]") -> int:
    """Number of tokens in the common prefix. Slices are compared as bytes, which takes no time for each token."""
    end = min(len(first), len(second))
    for low in range(0, end, COMPARED):
        high = min(low + COMPARED, end)
        one, other = first[low:high].tobytes(), second[low:high].tobytes()
        if one != other:
            return low + next(at for at in range(high - low) if one[4 * at : 4 * at + 4] != other[4 * at : 4 * at + 4])
    return end


def _reason(
    scheduler: Scheduler, sequence: Sequence, block: int, tiers: bytes, own: Common | None, other: Common | None
) -> MissReason:
    """The reason why `block`, the first without a hit, has none."""
    size, has_states = scheduler.kv.block_size, scheduler.kv.optional_part(StateSlots) is not None
    if block >= (sequence.num_prompt - has_states) // size:  # a state behind the last token cannot compute it again
        return "all_cached"
    if tiers[block]:
        return "not_continuable"
    end = (block + 1) * size
    if own is not None and own.num_tokens >= end:
        return _reason_gone(scheduler, own.prompt, end)
    if other is not None and other.num_tokens >= end:
        return "other_keys"
    if own is None or own.num_tokens < block * size:
        return "unknown"
    return "longer" if own.num_tokens == len(own.prompt.tokens or ()) else "differs"


def _reason_gone(scheduler: Scheduler, prompt: RecentConversation, end: int) -> MissReason:
    """The reason why the block up to token `end` of a remembered prompt is not cached."""
    live = scheduler.requests.get(prompt.request_id)
    if live is not None and any(each.num_surely_computed < end for each in live.sequences):
        return "being_computed"
    num_tokens = len(prompt.tokens or ())
    if end == num_tokens > prompt.latest_prompt:  # the KV of an output's last token is never computed
        return "longer"
    return "evicted" if prompt.num_resets == scheduler.kv.pool.num_resets else "cache_was_emptied"


def _shown(common: Common) -> NearestPrompt:
    prompt, start = common.prompt, max(0, common.num_tokens - CONTEXT)
    context = (prompt.tokens or array("I"))[start : common.num_tokens + CONTEXT + 1]
    return NearestPrompt(prompt.request_id, prompt.external_id, common.num_tokens, start, context.tobytes())


class PrefixQuestions:
    """The questions of clients about prompts, answered in their order, one slice at a time."""

    def __init__(self, scheduler: Scheduler, intake: Intake) -> None:
        self._scheduler = scheduler
        self._intake = intake
        self._asked: deque[tuple[Generate | None, Callable[[PrefixSeen], object]]] = deque()
        self._slices: Slices | None = None

    @property
    def is_on(self) -> bool:
        return bool(self._asked)

    def ask(self, message: Generate, reply: Callable[[PrefixSeen], object]) -> None:
        """Take a question, which is refused, in its turn, if MAX_ASKED wait: clients expect answers in order."""
        self._asked.append((message if len(self._asked) < MAX_ASKED else None, reply))

    def advance(self) -> None:
        """Do one slice of the oldest question, and answer it if that was the last."""
        if not self._asked:
            return
        message, reply = self._asked[0]
        try:
            if self._slices is None:
                self._slices = self._begun(message)
            next(self._slices)
            return
        except StopIteration as done:
            seen: PrefixSeen = done.value
        except RequestError as error:
            seen = PrefixSeen(error=str(error))
        except Exception as error:  # a fault of ours must not end the engine, whose requests have no part in it
            _logger.exception("a prompt could not be explained")
            seen = PrefixSeen(error=f"the prompt could not be explained: {type(error).__name__}: {error}")
        self._slices = None
        self._asked.popleft()
        reply(seen)

    def _begun(self, message: Generate | None) -> Slices:
        if message is None:
            raise RequestError(f"{MAX_ASKED} questions about prompts waited already; ask again later")
        return explain(self._scheduler, self._intake.unstarted(b"", message))
