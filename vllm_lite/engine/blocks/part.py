"""CachePart: one kind of thing that the cache keeps for a sequence, such as its KV or its recurrent state.

The manager owns what is common to all parts (tokens, hashes, how far a sequence is computed and cached) and asks the
parts in their order. The first one counts the blocks of an admission. It alone may refuse to grow, to swap out or to
swap in as it is asked; the others say beforehand, in `admission`, `may_swap_out` or `can_fork`, what they cannot do.
A part has a pool of its own and knows no other part.
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
"""The beginning of a sequence as one part has it: tables of block ids, a state's slot."""
Found_co = TypeVar("Found_co", covariant=True)
Op = tuple[int, int, int]
"""(op, source, destination) of the block program."""


class PrefixHit(NamedTuple):
    """The longest cached beginning of a sequence that all parts can go on from."""

    num_tokens: int
    found: tuple[Any, ...]
    """By part, in the manager's order."""
    reach: int
    """Number of tokens that the first part has: more than `num_tokens` where another part cannot go on."""
    tail: bytes = b""
    """The key of what of the next block is cached; it ends at `num_tokens`. Empty: that is the end of a block."""


class Growth(NamedTuple):
    """Blocks that a sequence got: new ids per group ([] if none), and what else the workers have to know of it."""

    new_ids: list[list[int]]
    entries: Many[Entry] = ()


class Forgotten(NamedTuple):
    """Number of blocks that could be found on each tier, and no longer can."""

    num_blocks: int = 0
    num_host_blocks: int = 0


class Search(Protocol[Found_co]):
    """Looks for one sequence's beginning in one part, and changes nothing."""

    def longest(self, num_blocks: int) -> int:
        """The largest number of blocks, at most `num_blocks`, behind which the sequence could go on."""

    def find(self, num_blocks: int) -> Found_co:
        """The beginning of that many blocks, of which `longest` has said that it is there."""


class StoringPart(Protocol):
    """A part whose contents workers move beside steps, to and from a tier that is not memory."""

    def learn(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """These contents can be loaded from now on, and those no more."""

    def ended(self, ticket: int, failed: Collection[int] = ()) -> None:
        """A transfer has ended, but for the contents at the places `failed`."""

    def give_up(self, ticket: int) -> None:
        """Let nobody wait for a load that takes too long."""


class CachePart(ABC, Generic[Found]):
    """Each default is that of a part that is always available, moves nothing and never lacks room."""

    pool: BlockPool
    keeps = True
    """Whether sequences have anything in it at all."""
    watermark_blocks = 0
    """Blocks that admission leaves free."""
    acts_by_blocks = False
    """Whether grow() has to be called at the end of each block, also where the first part has room for more."""
    is_asked_by_blocks = False
    """Whether another part acts by blocks: set by the manager, for the first part to say how far it has room."""
    wants_marks = False
    """Whether clients should say where prompts are likely to part."""
    has_tails = False
    """Whether a sequence can go on in the middle of a block."""

    @property
    def storing(self) -> StoringPart | None:
        """The part itself if it has its contents moved beside steps, and is to hear of it."""
        return None

    # ---- the step

    @abstractmethod
    def begin_step(self) -> None:
        """Start the next step: what the step before moved or freed can be used from now on."""

    @property
    def is_moving(self) -> bool:
        """Whether the step being made moves or copies anything."""
        return False

    @property
    def is_freeing(self) -> bool:
        """Whether the next step can have what this one cannot, though nothing is computed between them."""
        return False

    @property
    def is_aside(self) -> bool:
        """Whether workers compute something beside steps, which take longer by it."""
        return False

    def take_entries(self) -> list[Entry]:
        """Return what else the workers get with the step that has been made."""
        return []

    def take_ops(self) -> list[Op]:
        """Return the block program of the step that has been made; the next one starts empty."""
        return []

    def drop_ops(self) -> None:
        """Forget the block program of the step being scheduled, and what the step before it had to leave."""
        self.take_ops()

    # ---- sizes

    def max_tokens(self, limit: int, chunk: int) -> int:  # noqa: ARG002
        """The longest sequence, at most `limit`, that can always come in again, however often it is preempted."""
        return limit

    def num_blocks(self, num_tokens: int, chunk: int) -> int:  # noqa: ARG002
        """The most blocks that a sequence of `num_tokens` holds at once."""
        return 0

    def num_full_blocks(self, num_tokens: int) -> int:  # noqa: ARG002
        """Number of blocks that `num_tokens` fill."""
        return 0

    def num_moved(self, num_tokens: int) -> int:  # noqa: ARG002
        """Number of blocks that take as long to move as what the part keeps of `num_tokens`."""
        return 0

    # ---- lookup and admission

    @abstractmethod
    def register(self, sequence: Sequence) -> None:
        """Prepare a new sequence, which holds nothing yet."""

    @abstractmethod
    def search(self, sequence: Sequence) -> Search[Found]:
        """Start to look for the beginning of a sequence, whose tokens are hashed."""

    @abstractmethod
    def nothing(self) -> Found:
        """The beginning of a sequence of which nothing is found."""

    def num_on_host(self, found: Found) -> int | None:  # noqa: ARG002
        """Number of tokens of what was found that have to be moved to the device; None: there is no host tier."""
        return None

    def next_keys(self, sequence: Sequence, num_blocks: int) -> list[bytes]:  # noqa: ARG002
        """Keys of what would make a beginning of `num_blocks` longer."""
        return []

    def has_any(self, keys: Iterable[bytes]) -> bool:  # noqa: ARG002
        """Whether any of the `next_keys` can be found by now."""
        return False

    @property
    def supply(self) -> int:
        """Number that grows when a sequence that waits may lack less."""
        return 0

    def admission(self, sequence: Sequence, found: Found, chunk: int) -> Admission:  # noqa: ARG002
        """Whether the sequence may be admitted with all its tokens."""
        return OK

    def may_admit(self, sequence: Sequence, found: Found, num_tokens: int, *, in_parts: bool) -> bool:  # noqa: ARG002
        """Whether this step may move what admitting the sequence takes. If not, it makes that possible later."""
        return True

    @abstractmethod
    def admit(self, sequence: Sequence, hit: PrefixHit, found: Found, num_tokens: int) -> bool:
        """Hold what was found, and allocate. False: the sequence is parked, since some has still to be loaded."""

    def note_admission(self, hit: PrefixHit, found: Found) -> list[tuple[str, dict[str, int]]]:  # noqa: ARG002
        """Count that a sequence holds this hit now, to be admitted as soon as all of it is on the device. Returns the
        decisions to report, with their numbers."""
        return []

    def arrival_entries(self, sequence: Sequence) -> list[Entry]:  # noqa: ARG002
        """Entries that the workers need of a sequence that comes in, beside its blocks."""
        return []

    # ---- growing

    def reachable(self, sequence: Sequence, start: int, count: int) -> int:  # noqa: ARG002
        """Number of the `count` tokens from `start` on that this step can compute, which then has what that takes."""
        return count

    def uncut(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Number of tokens that the sequence has to compute in one step, sooner or later; 0: any number does."""
        return 0

    @abstractmethod
    def grow(self, sequence: Sequence, num_tokens: int) -> Growth | None:
        """Make room to compute up to `num_tokens`. None, which the first part alone may say: there is none."""

    def most_drafts(self, sequence: Sequence, count: int) -> int:  # noqa: ARG002
        """Number of `count` drafts that a step may have which computes `sequence` up to `num_computed` otherwise."""
        return count

    def take_result(self, result: ModelOutput) -> None:
        """Read what the workers say, in the result of a step, of anything but tokens."""

    @abstractmethod
    def publish(self, sequence: Sequence, first: int, last: int) -> None:
        """Let others find what the sequence keeps of its blocks [first, last), which are hashed and final."""

    def publish_tail(self, sequence: Sequence, number: int, key: bytes) -> None:
        """Let others find the first tokens of block `number`, up to a mark, by this key."""

    def has_tail(self, key: bytes) -> bool:  # noqa: ARG002
        """Whether a sequence can go on behind these tokens; asked of parts that `has_tails`."""
        return True

    def forget_tails(self, keys: Iterable[bytes]) -> None:
        """Let these be found no more."""

    # ---- sharing and leaving

    @abstractmethod
    def can_fork(self, parent: Sequence, position: int, num_scheduled: int) -> bool:
        """Whether a child can go on at `position`, which the parent has computed; the step being scheduled computes
        `num_scheduled` tokens of the parent."""

    @abstractmethod
    def fork(self, parent: Sequence, child: Sequence, num_scheduled: int) -> Many[Entry]:
        """Let `child` share what the parent has of its tokens. Returns what the workers have to know of the parent."""

    @abstractmethod
    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Give back all that the sequence holds; with `forget` it cannot be found any more, on any tier."""

    # ---- swapping

    def num_stored(self, sequence: Sequence) -> int:  # noqa: ARG002
        """Number of tokens that a sequence would get back from below memory if it gave up all that it has."""
        return 0

    @property
    def parked(self) -> Many[Sequence]:
        """Sequences that wait with something on the host or on the way, in the order in which they were parked."""
        return ()

    def may_swap_out(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Whether what the part keeps of the sequence is worth moving."""
        return True

    @abstractmethod
    def swap_out(self, sequence: Sequence) -> bool:
        """Begin to move it to the host. False, which the first part alone may say: nothing is changed."""

    @abstractmethod
    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence holds anything, wherever it is."""

    @abstractmethod
    def holds_device(self, sequence: Sequence) -> bool:
        """Whether a parked sequence still holds something on the device."""

    @abstractmethod
    def push_out(self, sequence: Sequence) -> bool:
        """Take from a parked sequence what it holds on the device. False: nothing of it could be moved."""

    def swap_in_admission(self, sequence: Sequence, chunk: int) -> Admission:  # noqa: ARG002
        """Whether a parked sequence may be admitted."""
        return OK

    @abstractmethod
    def swap_in(self, sequence: Sequence, num_tokens: int, *, in_parts: bool = True) -> bool:
        """Load what is on the host, and make room for `num_tokens`. False, which the first part alone may say: more of
        it is loaded by later steps."""

    # ---- forgetting and reporting

    @abstractmethod
    def reset(self) -> Forgotten:
        """Let nothing be found any more. Sequences keep what they hold."""

    def forget_stored(self) -> None:
        """Let nothing be found any more that is kept beside the pools, for other engines as well."""

    def measured(self, prefill_tokens_per_s: float, load_blocks_per_s: float) -> None:
        """Decide by these rates from now on; 0 is one that is not known."""

    @abstractmethod
    def count(self, stats: Stats) -> None:
        """Write the part's gauges and counters."""

    @abstractmethod
    def check_integrity(self, sequences: Many[Sequence]) -> None:
        """Raise RuntimeError if an invariant of the part is broken. `sequences` are all the unfinished ones."""


class SidePart(CachePart[Found]):
    """A part in which sequences hold no blocks, such as a tier below memory: whatever it keeps of them can be loaded or
    computed again, so none waits for room in it, and nothing of it is shared or swapped."""

    def begin_step(self) -> None:
        """As for any part."""

    def register(self, sequence: Sequence) -> None:
        """As for any part."""

    def admit(self, sequence: Sequence, hit: PrefixHit, found: Found, num_tokens: int) -> bool:  # noqa: ARG002
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth | None:  # noqa: ARG002
        return None

    def publish(self, sequence: Sequence, first: int, last: int) -> None:
        """As for any part."""

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
        """As for any part: what is kept beside the pools stays."""
        return Forgotten()
