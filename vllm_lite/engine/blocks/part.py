"""CachePart: one kind of contents that the cache keeps for a sequence, such as its KV or its recurrent state.

The manager owns the state that all parts share (tokens, hashes, number of computed and cached tokens) and calls the
parts in their order. The first part counts the blocks of an admission, and it alone may refuse grow(), swap_out() or
swap_in(). The others announce their limits beforehand, by admission(), may_swap_out() or can_fork(). A part has a pool
of its own and knows no other part.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.blocks.verdict import OK, Admission
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import Entry, ModelOutput

Found = TypeVar("Found")
"""A part's contents of a cached prefix: tables of block ids, or a state's slot."""
Found_co = TypeVar("Found_co", covariant=True)
Op = tuple[int, int, int]
"""(op, source, destination) of the block program."""


class PrefixHit(NamedTuple):
    """The longest cached prefix of a sequence from which all parts can continue."""

    num_tokens: int
    found: tuple[Any, ...]
    """Contents per part, in the manager's order."""
    reach: int
    """Cached tokens of the first part: more than `num_tokens` where another part lacks its contents."""
    tail: bytes = b""
    """Key of the cached tail of the next block, which ends at `num_tokens`. Empty: the hit ends with a full block."""


class Growth(NamedTuple):
    """Blocks that a sequence got: new ids per group ([] if none), and further entries for the workers."""

    new_ids: list[list[int]]
    entries: Many[Entry] = ()


class Forgotten(NamedTuple):
    """Number of cached blocks that were dropped from the index of each tier."""

    num_blocks: int = 0
    num_host_blocks: int = 0


class Search(Protocol[Found_co]):
    """Looks up the cached prefix of one sequence in one part, without taking references."""

    def longest(self, num_blocks: int) -> int:
        """The largest number of blocks, at most `num_blocks`, after which the sequence could continue."""

    def find(self, num_blocks: int) -> Found_co:
        """The part's contents of a prefix of `num_blocks`, a number that longest() has returned."""


class StoringPart(Protocol):
    """A part whose contents workers move to and from a disk tier, while steps go on."""

    def learn(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Update the keys that can be loaded from the tier."""

    def ended(self, ticket: int, failed: Collection[int] = ()) -> None:
        """Complete a transfer. `failed` are the indices of its items that could not be moved."""

    def give_up(self, ticket: int) -> None:
        """Let no sequence wait any longer for a load that takes too long."""


class CachePart(ABC, Generic[Found]):
    """The default methods are those of a part that is always available, moves nothing and never lacks room."""

    pool: BlockPool
    keeps = True
    """Whether sequences keep anything in this part."""
    watermark_blocks = 0
    """Blocks that admission leaves free."""
    acts_by_blocks = False
    """Whether grow() has to be called at every end of a block, even if the first part has room for more."""
    is_asked_by_blocks = False
    """Whether another part acts by blocks; set by the manager on the first part, which then limits `num_slots`."""
    wants_marks = False
    """Whether clients should send marks: positions where prompts are likely to diverge."""
    has_tails = False
    """Whether a sequence can continue in the middle of a block."""

    @property
    def storing(self) -> StoringPart | None:
        """The part itself, if it keeps contents on a disk tier."""
        return None

    # ---- the step

    @abstractmethod
    def begin_step(self) -> None:
        """Start the next step: slots and blocks that the previous step moved or freed become available."""

    @property
    def is_moving(self) -> bool:
        """Whether the step being scheduled moves or copies anything."""
        return False

    @property
    def is_freeing(self) -> bool:
        """Whether the next step can use something that this one cannot, even if nothing is computed in between."""
        return False

    @property
    def is_aside(self) -> bool:
        """Whether workers compute something beside the steps, which slows the steps down."""
        return False

    def take_entries(self) -> list[Entry]:
        """Take the part's entries for the workers, which are sent with the step being scheduled."""
        return []

    def take_ops(self) -> list[Op]:
        """Take the block ops of the step being scheduled; the next step starts without any."""
        return []

    def drop_ops(self) -> None:
        """Drop the block ops of the step being scheduled, and the moves that the previous step had to postpone."""
        self.take_ops()

    # ---- sizes

    def max_tokens(self, limit: int, chunk: int) -> int:  # noqa: ARG002
        """Length of the longest sequence, at most `limit`, that can be admitted again after any preemption."""
        return limit

    def num_blocks(self, num_tokens: int, chunk: int) -> int:  # noqa: ARG002
        """Maximum number of blocks that a sequence of `num_tokens` holds at once, computed `chunk` tokens at a time."""
        return 0

    def num_full_blocks(self, num_tokens: int) -> int:  # noqa: ARG002
        """Number of blocks that `num_tokens` fill, in all groups."""
        return 0

    def num_moved(self, num_tokens: int) -> int:  # noqa: ARG002
        """Cost of moving the part's contents of `num_tokens`, in KV blocks."""
        return 0

    # ---- lookup and admission

    @abstractmethod
    def register(self, sequence: Sequence) -> None:
        """Prepare a new sequence, which holds nothing yet."""

    @abstractmethod
    def search(self, sequence: Sequence) -> Search[Found]:
        """Start a prefix lookup for a sequence whose tokens are hashed."""

    @abstractmethod
    def nothing(self) -> Found:
        """The lookup result of a sequence without a cached prefix."""

    def num_on_host(self, found: Found) -> int | None:  # noqa: ARG002
        """Number of tokens of `found` that have to be moved from the host tier; None: there is no host tier."""
        return None

    def next_keys(self, sequence: Sequence, num_blocks: int) -> list[bytes]:  # noqa: ARG002
        """Keys of the blocks that would extend a cached prefix of `num_blocks`."""
        return []

    def has_any(self, keys: Iterable[bytes]) -> bool:  # noqa: ARG002
        """Whether any of `keys`, which next_keys() returned, is cached by now."""
        return False

    @property
    def supply(self) -> int:
        """Number that has to grow before a waiting sequence can lack fewer blocks."""
        return 0

    def admission(self, sequence: Sequence, found: Found, chunk: int) -> Admission:  # noqa: ARG002
        """Whether the sequence may be admitted with all its tokens."""
        return OK

    def may_admit(self, sequence: Sequence, found: Found, num_tokens: int, *, in_parts: bool) -> bool:  # noqa: ARG002
        """Whether this step may move the blocks that the admission takes. If not, start moves for a later step."""
        return True

    @abstractmethod
    def admit(self, sequence: Sequence, hit: PrefixHit, found: Found, num_tokens: int) -> bool:
        """Reference `found` and allocate the rest. False: the sequence is parked until more of it is loaded."""

    def note_admission(self, hit: PrefixHit, found: Found) -> list[tuple[str, dict[str, int]]]:  # noqa: ARG002
        """Update counters for a sequence that was admitted, or parked, with this hit. Returns the decisions to report,
        with their numbers."""
        return []

    def arrival_entries(self, sequence: Sequence) -> list[Entry]:  # noqa: ARG002
        """Entries that the workers need for an admitted sequence, beside its blocks."""
        return []

    # ---- growing

    def reachable(self, sequence: Sequence, start: int, count: int) -> int:  # noqa: ARG002
        """Number of the `count` tokens from `start` on that this step can compute; reserves what they need for it."""
        return count

    def uncut(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Number of tokens that the sequence must at some time compute in one step; 0: it can be cut anywhere."""
        return 0

    @abstractmethod
    def grow(self, sequence: Sequence, num_tokens: int) -> Growth | None:
        """Make room to compute up to `num_tokens`. None: there is no room; only the first part may return it."""

    def most_drafts(self, sequence: Sequence, count: int) -> int:  # noqa: ARG002
        """Number of drafts, at most `count`, that a step may schedule after position `num_computed`."""
        return count

    def take_result(self, result: ModelOutput) -> None:
        """Read the fields of a step's result that concern this part."""

    @abstractmethod
    def publish(self, sequence: Sequence, first: int, last: int) -> None:
        """Add the contents of blocks [first, last) of the sequence, which are hashed and final, to the prefix cache."""

    def publish_tail(self, sequence: Sequence, number: int, key: bytes) -> None:
        """Add the tokens of block `number` before a mark to the prefix cache, under `key`."""

    def has_tail(self, key: bytes) -> bool:  # noqa: ARG002
        """Whether the tail of this key is cached; only called for parts with `has_tails`."""
        return True

    def forget_tails(self, keys: Iterable[bytes]) -> None:
        """Remove tails from the prefix cache."""

    # ---- sharing and leaving

    @abstractmethod
    def can_fork(self, parent: Sequence, position: int, num_scheduled: int) -> bool:
        """Whether a child can continue at `position`, which the parent has computed. The step being scheduled computes
        `num_scheduled` tokens of the parent."""

    @abstractmethod
    def fork(self, parent: Sequence, child: Sequence, num_scheduled: int) -> Many[Entry]:
        """Share the parent's contents of the child's tokens. Returns entries for the workers about the parent."""

    @abstractmethod
    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Release all that the sequence holds; `forget` also removes it from the prefix cache, on all tiers."""

    # ---- swapping

    def num_stored(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Number of tokens that could be loaded from a disk tier if the sequence were released now."""
        return 0

    @property
    def parked(self) -> Many[Sequence]:
        """Sequences that wait with contents on the host or in transfer, in the order in which they were parked."""
        return ()

    def may_swap_out(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Whether the part's contents of the sequence can be swapped out and used again."""
        return True

    @abstractmethod
    def swap_out(self, sequence: Sequence) -> bool:
        """Begin to move the sequence's contents to the host. False: nothing has changed; only the first part may
        return it."""

    @abstractmethod
    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence holds anything, on any tier."""

    @abstractmethod
    def holds_device(self, sequence: Sequence) -> bool:
        """Whether a parked sequence still holds something on the device."""

    @abstractmethod
    def push_out(self, sequence: Sequence) -> bool:
        """Move to the host what a parked sequence still holds on the device. False: nothing could be moved."""

    def swap_in_admission(self, sequence: Sequence, chunk: int) -> Admission:  # noqa: ARG002
        """Whether a parked sequence may be admitted."""
        return OK

    @abstractmethod
    def swap_in(self, sequence: Sequence, num_tokens: int, *, in_parts: bool = True) -> bool:
        """Load what is on the host, and make room for `num_tokens`. False: later steps load the rest; only the first
        part may return it."""

    # ---- forgetting and reporting

    @abstractmethod
    def reset(self) -> Forgotten:
        """Empty the prefix cache of this part. Sequences keep what they hold."""

    def forget_stored(self) -> None:
        """Drop everything on the disk tier, which other engines may use, too."""

    def measured(self, prefill_tokens_per_s: float, load_blocks_per_s: float) -> None:
        """Use these rates from now on; 0 means not known."""

    @abstractmethod
    def count(self, stats: Stats) -> None:
        """Write the part's gauges and counters to `stats`."""

    @abstractmethod
    def check_integrity(self, sequences: Many[Sequence]) -> None:
        """Raise RuntimeError if an invariant of the part is broken. `sequences` are all the unfinished ones."""


class SidePart(CachePart[Found]):
    """A part in which sequences hold no blocks, such as the disk tier. Its contents can be loaded or computed again, so
    no sequence waits for room in it, and nothing is shared or swapped."""

    def begin_step(self) -> None:
        """Do nothing: no step moves or frees anything here."""

    def register(self, sequence: Sequence) -> None:
        """Do nothing: there is nothing to prepare."""

    def admit(self, sequence: Sequence, hit: PrefixHit, found: Found, num_tokens: int) -> bool:  # noqa: ARG002
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth | None:  # noqa: ARG002
        return None

    def publish(self, sequence: Sequence, first: int, last: int) -> None:
        """Do nothing: sequences hold no blocks here."""

    def can_fork(self, parent: Sequence, position: int, num_scheduled: int) -> bool:  # noqa: ARG002
        return True

    def fork(self, parent: Sequence, child: Sequence, num_scheduled: int) -> Many[Entry]:  # noqa: ARG002
        return ()

    def swap_out(self, sequence: Sequence) -> bool:  # noqa: ARG002
        return True

    def holds(self, sequence: Sequence) -> bool:  # noqa: ARG002
        return False

    def holds_device(self, sequence: Sequence) -> bool:  # noqa: ARG002
        return False

    def push_out(self, sequence: Sequence) -> bool:  # noqa: ARG002
        return False

    def swap_in(self, sequence: Sequence, num_tokens: int, *, in_parts: bool = True) -> bool:  # noqa: ARG002
        return True

    def reset(self) -> Forgotten:
        """Drop nothing: contents of a disk tier stay."""
        return Forgotten()
