"""The records of a trace, in the order in which things happened. One msgpack array each; writer.py frames them.

A record of a call to the scheduler holds the block digests that the call asked for, HASH_BYTES each, in order: replay
hands them out again, and so needs no token of any prompt. Requests are named by their number in order of arrival.
"""

from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAGIC = b"vltrace\x0c"
"""First bytes of the file; the last of them is the version of this module."""
HASH_BYTES = 8
"""Bytes of a digest that are recorded: enough to distinguish any two."""
MAX_RECORD_BYTES = 16 * 1024 * 1024
MAX_CAUSE_CHARS = 500


class Code(IntEnum):
    """Why a sequence was served or was not. FIELDS names the numbers that come with each."""

    ADMITTED = 1
    SWAPPED_IN = 2
    CHUNKED = 3
    WAITS_FOR_BLOCKS = 4
    WAITS_FOR_SWAP = 5
    WAITS_FOR_BUDGET = 6
    WAITS_FOR_ROW = 7
    PREEMPTED = 8
    FINISHED = 9
    TRIED = 10
    CONVICTED = 11
    WAITS_FOR_TRIAL = 12
    WAITS_FOR_ADAPTER = 13
    WAITS_FOR_STATE = 14
    STATE_MISSING = 15
    STATE_LOADED = 16
    WAITS_FOR_LOAD = 17
    LOADED = 18
    DRAFTED = 19
    WAITS_FOR_ENCODER = 20
    PROMOTED = 21
    LOADED_MEDIA = 22


FIELDS: dict[Code, tuple[str, ...]] = {
    Code.ADMITTED: ("tokens", "cached", "blocks"),
    Code.SWAPPED_IN: ("tokens", "cached", "blocks"),
    Code.CHUNKED: ("tokens", "left"),
    Code.WAITS_FOR_BLOCKS: ("need", "free", "watermark"),
    Code.WAITS_FOR_SWAP: ("need", "free", "watermark"),
    Code.WAITS_FOR_BUDGET: ("budget",),
    Code.WAITS_FOR_ROW: ("rows",),
    Code.PREEMPTED: ("for", "by"),
    Code.FINISHED: ("reason", "tokens"),
    Code.TRIED: ("deaths", "others"),
    Code.CONVICTED: ("deaths",),
    Code.WAITS_FOR_TRIAL: (),
    Code.WAITS_FOR_ADAPTER: (),
    Code.WAITS_FOR_STATE: ("need", "free", "watermark"),
    Code.STATE_MISSING: ("kv", "state"),
    Code.STATE_LOADED: ("state",),
    Code.WAITS_FOR_LOAD: ("need", "free", "watermark"),
    Code.LOADED: ("tokens",),
    Code.DRAFTED: ("method", "drafts", "tokens", "accepted"),
    Code.WAITS_FOR_ENCODER: (),
    Code.PROMOTED: ("tokens",),
    Code.LOADED_MEDIA: ("media",),
}
WAITS = {code for code in Code if code.name.startswith("WAITS_FOR_")}
WAYS = ("recompute", "swap", "disk")
"""Ways to preempt a sequence: values of "by"."""
REASONS = ("stop", "length", "abort", "error")
"""Reasons for which a sequence ends: values of "reason"."""
METHODS = ("forced", "ngram", "suffix", "self", "draft_model", "mtp", "eagle3")
"""Drafters: values of "method"."""

Decision = list[int]
"""[code, request, sample, one number for each of FIELDS[code]]. Behind those of DRAFTED follow the numbers of right
drafts by their place: of the first ones, of the second, ..."""


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Header(_Record, frozen=True, tag=0):
    """Everything that determines a scheduler, its policy and its pools. `wall_s` is the time of day at `clock_s`.

    `tensor_parallel_size` is for the reader: each rank has a part of every block, and no decision depends on how many.
    So are `life` and `launch`: the engines that were started one after the other in place of each other share a launch.
    """

    engine_version: str
    clock_s: float
    wall_s: float
    options: dict[str, Any]
    policy: str
    num_blocks: int
    num_host_blocks: int
    block_size: int
    caching: bool
    windows: tuple[int | None, ...]
    watermark: float
    max_swap_blocks_per_step: int
    swap_blocks_per_s: float
    tensor_parallel_size: int
    launch: str
    life: int
    num_state_slots: int = 0
    num_host_states: int = 0
    max_moved_states: int = 1
    has_disk: bool = False
    encoder: tuple[int, int, int] | None = None
    """The vectors that an encoder computes in a step, those that are held, and those on the host; None: it has none."""
    whole_media: bool = False
    kv_cache_preload: float = 0.0


class Params(_Record, frozen=True):
    """The parameters of a request on which decisions depend. `beam` is (length_penalty, early_stopping)."""

    n: int
    min_tokens: int
    priority: int
    user: str | None
    beam: tuple[float, bool] | None
    scored: bool
    """Its prompt was scored, so nothing of it was taken from the cache at first."""
    is_guided: bool = False
    """It follows a grammar, so it may draft."""
    is_pooled: bool = False
    """It generates nothing and ends with its prompt."""
    adapter: int = 0
    """The number of its adapter; 0: none."""


class Arrival(_Record, frozen=True, tag=1):
    """A request was queued. Its tokens are only counted: `num_output` were generated before it came.

    `samples` are (index, number of output tokens) of each, if it came with several that had tokens.
    """

    number: int
    request_id: str
    clock_s: float
    num_prompt: int
    num_output: int
    max_len: int
    stop_ids: list[int]
    deadline_s: float | None
    params: Params
    hashes: bytes
    samples: list[tuple[int, int]] = []
    marks: list[int] = []
    """Positions at which the messages of its prompt end, for a model with recurrent layers."""
    media: list[tuple[int, int, int, int]] = []
    """Each medium of it: where it begins, its tokens, the bytes of its content, and a number that stands for that."""


class Forked(_Record, frozen=True, tag=2):
    """`child` starts from the tokens of a live request."""

    parent: int
    child: Arrival


class Aborted(_Record, frozen=True, tag=3):
    """A request was ended by its client, or those of its `samples`; no samples means all.

    `is_replaced`: its client has sent it again, and it arrives anew in the next record. `decisions`: its drafts, by
    sample.
    """

    number: int
    clock_s: float
    samples: list[int] = []
    hashes: bytes = b""
    is_replaced: bool = False
    decisions: list[Decision] = []


class Expired(_Record, frozen=True, tag=4):
    """The deadlines of these requests had passed at `clock_s`. `decisions`: their drafts, of each sample."""

    clock_s: float
    numbers: list[int]
    decisions: list[Decision] = []


class RatesMeasured(_Record, frozen=True, tag=5):
    """The rates that preemption and drafts are decided by, from now on."""

    prefill_tokens_per_s: float
    swap_blocks_per_s: float
    step_s: float = 0.0
    row_s: float = 0.0
    load_blocks_per_s: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    row_factors: tuple[float, ...] = ()
    alone_s: float = 0.0
    token_s: float = 0.0


class Step(_Record, frozen=True, tag=6):
    """schedule() was called. `digest` is of the step it made, empty if there was nothing to compute."""

    clock_s: float
    digest: bytes
    num_entries: int
    num_tokens: int
    num_block_ops: int
    hashes: bytes
    decisions: list[Decision]


class Result(_Record, frozen=True, tag=7):
    """update() was called for the oldest step in flight, with these tokens of `token_bytes` bytes each.

    `candidates` are the likeliest next tokens of each beam, by its place among the step's samples.
    """

    clock_s: float
    tokens: bytes
    token_bytes: Annotated[int, Meta(ge=1, le=4)]
    counts: list[int] | None
    failed: list[tuple[int, str]] | None
    candidates: list[tuple[int, list[tuple[int, float]]]] | None
    hashes: bytes
    decisions: list[Decision]
    drafted: list[int] | None = None
    forced: list[int] | None = None
    encoded: list[int] | None = None
    """Numbers of the media that the workers have computed aside."""


class PolicyFault(_Record, frozen=True, tag=8):
    """The policy gave an invalid answer; from here on it is first come, first served."""

    what: str


class CacheReset(_Record, frozen=True, tag=9):
    """All that was cached was forgotten, with `stored` also what is kept on disk."""

    clock_s: float
    hashes: bytes
    stored: bool = False


class Kept(_Record, frozen=True):
    """Progress of an unfinished request when its workers die: the output tokens of all its samples that go on, and the
    number of its prompt tokens that are scored (Request.num_scored)."""

    number: int
    num_output: int
    num_scored: int


class WorkersLost(_Record, frozen=True, tag=10):
    """All workers had died, or `are_ended`: the engine sleeps, or is to load other weights. `cause` says why, cut to
    MAX_CAUSE_CHARS; `kept` holds all unfinished requests."""

    clock_s: float
    cause: str
    kept: list[Kept]
    hashes: bytes
    decisions: list[Decision]
    are_ended: bool = False


class WorkersReplaced(_Record, frozen=True, tag=11):
    """The workers of `generation` took over."""

    clock_s: float
    generation: int
    swap_blocks_per_s: float


class Newcomers(_Record, frozen=True, tag=12):
    """From now on requests that come are held until those before them have ended; or they no longer are."""

    clock_s: float
    are_held: bool


class AdapterChanged(_Record, frozen=True, tag=13):
    """The workers have an adapter from now on, or have it no more. `digest` has HASH_BYTES of that of its files; it is
    empty where that is not known."""

    clock_s: float
    number: int
    is_loaded: bool
    digest: bytes = b""


class DiskKeys(_Record, frozen=True, tag=14):
    """The disk has these contents from now on, and those no more: digests of HASH_BYTES, with what follows them."""

    added: list[bytes]
    removed: list[bytes]


class TransferEnded(_Record, frozen=True, tag=15):
    """A transfer from or to the disk ended, but for the contents at the places `failed`; or it `is_late`: nobody waits
    for it any longer."""

    ticket: int
    failed: list[int] = []
    is_late: bool = False


Record = (
    Header
    | Arrival
    | Forked
    | Aborted
    | Expired
    | RatesMeasured
    | Step
    | Result
    | PolicyFault
    | CacheReset
    | WorkersLost
    | WorkersReplaced
    | Newcomers
    | AdapterChanged
    | DiskKeys
    | TransferEnded
)


def pack_tokens(tokens: bytes) -> tuple[bytes, int]:
    """u32 token ids without the high bytes that none of them uses, and the bytes that are left of each."""
    width = 4
    while width > 1 and not any(tokens[width - 1 :: 4]):
        width -= 1
    packed = bytearray(len(tokens) // 4 * width)
    for lane in range(width):
        packed[lane::width] = tokens[lane::4]
    return bytes(packed), width


def unpack_tokens(packed: bytes, width: int) -> bytes:
    """Inverse of pack_tokens."""
    tokens = bytearray(len(packed) // width * 4)
    for lane in range(width):
        tokens[lane::4] = packed[lane::width]
    return bytes(tokens)
