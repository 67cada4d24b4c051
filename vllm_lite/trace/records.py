"""The records of a trace, in chronological order. Each is one msgpack array; writer.py frames them.

The record of a call to the scheduler has the block digests that the call asked for, HASH_BYTES each, in order. Replay
returns them to the scheduler again, and so needs no token of any prompt. Requests have numbers in order of arrival.
"""

from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAGIC = b"vltrace\x0c"
"""First bytes of the file. The last byte is the version of the format."""
HASH_BYTES = 8
"""Bytes of a digest that are recorded, enough to tell any two blocks of a trace apart."""
MAX_RECORD_BYTES = 16 * 1024 * 1024
MAX_CAUSE_CHARS = 500


class Code(IntEnum):
    """Reasons for which a sequence was served or not. FIELDS names the numbers of each decision."""

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

Decision = Annotated[list[int], Meta(min_length=3)]
"""[code, request, sample, one number for each of FIELDS[code]]. DRAFTED has further numbers: how many drafts were
accepted at the first place, at the second, ..."""


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Header(_Record, frozen=True, tag=0):
    """Everything that determines a scheduler, its policy and its pools. `wall_s` is the time of day at `clock_s`.

    `tensor_parallel_size` is information only: each rank has a part of every block, and no decision depends on the
    number of ranks. So are `life` and `launch`: engines that replaced each other share a launch, and `life` counts
    them.
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
    """Vectors that the encoder computes in a step, vectors that the device cache holds, and vectors that the host cache
    holds; None: the model has no encoder."""
    whole_media: bool = False
    kv_cache_preload: float = 0.0


class Params(_Record, frozen=True):
    """Parameters of a request that decisions depend on. `beam` is (length_penalty, early_stopping)."""

    n: int
    min_tokens: int
    priority: int
    user: str | None
    beam: tuple[float, bool] | None
    scored: bool
    """Its prompt has logprobs, so at first none of it was taken from the cache."""
    is_guided: bool = False
    """It follows a grammar, which may draft tokens."""
    is_pooled: bool = False
    """It is a pooling request: it ends with its prompt and generates nothing."""
    adapter: int = 0
    """The number of its adapter; 0: none."""


class Arrival(_Record, frozen=True, tag=1):
    """A request was queued. The record has numbers of tokens only; `num_output` tokens had been generated before.

    `samples`: (index, number of output tokens) of each sample, if several samples had tokens already.
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
    """For each medium: its first position, its number of tokens, the bytes of its content, and a number for this
    content."""


class Forked(_Record, frozen=True, tag=2):
    """`child` started from the tokens of a live request."""

    parent: int
    child: Arrival


class Aborted(_Record, frozen=True, tag=3):
    """A client ended a request, or only the given `samples` of it.

    `is_replaced`: the client has sent the request again, and the next record is its new arrival. `decisions`: its
    drafts, by sample.
    """

    number: int
    clock_s: float
    samples: list[int] = []
    hashes: bytes = b""
    is_replaced: bool = False
    decisions: list[Decision] = []


class Expired(_Record, frozen=True, tag=4):
    """The deadlines of these requests had passed at `clock_s`. `decisions`: their drafts, by sample."""

    clock_s: float
    numbers: list[int]
    decisions: list[Decision] = []


class RatesMeasured(_Record, frozen=True, tag=5):
    """New rates, by which preemption and drafts are decided from here on."""

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
    known_rows: int = 0


class Step(_Record, frozen=True, tag=6):
    """schedule() was called. `digest` is the digest of its step, empty if there was nothing to compute."""

    clock_s: float
    digest: bytes
    num_entries: int
    num_tokens: int
    num_block_ops: int
    hashes: bytes
    decisions: list[Decision]


class Result(_Record, frozen=True, tag=7):
    """update() was called for the oldest step in flight, with these tokens of `token_bytes` bytes each.

    `candidates`: the most likely next tokens of each beam, by its position among the step's samples.
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
    """Numbers of the media that the workers have encoded beside steps."""


class PolicyFault(_Record, frozen=True, tag=8):
    """The policy returned an invalid answer; from here on requests are served in order of arrival."""

    what: str


class CacheReset(_Record, frozen=True, tag=9):
    """The prefix cache was emptied; with `stored` also the cache on disk."""

    clock_s: float
    hashes: bytes
    stored: bool = False


class Kept(_Record, frozen=True):
    """Progress of an unfinished request when its workers die: the output tokens of all its unfinished samples, and the
    number of prompt tokens that have logprobs (Request.num_scored)."""

    number: int
    num_output: int
    num_scored: int


class WorkersLost(_Record, frozen=True, tag=10):
    """All workers have died, or, with `are_ended`, the engine ended them to sleep or to load other weights. `cause` is
    the reason, cut to MAX_CAUSE_CHARS; `kept` has all unfinished requests."""

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
    """`are_held`: from here on, new requests wait until the earlier ones have ended. Otherwise this ends."""

    clock_s: float
    are_held: bool


class AdapterChanged(_Record, frozen=True, tag=13):
    """The workers have loaded an adapter or dropped it. `digest` is the digest of its files, cut to HASH_BYTES, or
    empty if it is unknown."""

    clock_s: float
    number: int
    is_loaded: bool
    digest: bytes = b""


class DiskKeys(_Record, frozen=True, tag=14):
    """The keys of contents that were added to the disk, and of those removed from it: digests cut to HASH_BYTES, each
    with the rest of its key."""

    added: list[bytes]
    removed: list[bytes]


class TransferEnded(_Record, frozen=True, tag=15):
    """A transfer from or to the disk ended; the contents at the positions `failed` were not transferred. `is_late`: the
    transfer takes too long, and nothing waits for it any longer."""

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
    """Drop the high bytes of u32 token ids that are zero in all of them. Returns the packed ids and the bytes of
    each."""
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
