"""Sequence: the engine's state of one sample of a request. It is what the scheduler schedules and a handle names."""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from vllm_lite.engine.blocks.table import BlockTable
from vllm_lite.engine.blocks.verdict import Lookup
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.stats import FinishReason
from vllm_lite.protocol.step import Continue
from vllm_lite.runtime.prefix_hash import PrefixHasher

if TYPE_CHECKING:
    from vllm_lite.engine.request import Request
    from vllm_lite.engine.states.place import StatePlace


NO_TAIL = 2**63
"""A position larger than that of any token: there is no mark."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """`num_computed` grows up to `num_tokens`; there is no other notion of prefill or decode. The KV manager owns the
    tables and hashes, and what of the KV is cached, parked on the host or shared; Queues the status and the handle.

    num_tokens     tokens known here
    num_pending    tokens that steps in flight will add, if all their drafts are right; the workers know them before the
                   engine does
    num_computed   positions whose KV is in the cache once every step sent so far has run, if all their drafts are right
    num_drafted    drafts in steps in flight, all of which may be wrong
    drafts_right   earlier drafts that were right, and first ones that were wrong, with a weight that falls by steps
    num_cached     positions whose KV was there already and must not be written again
    num_slots      positions that can be computed without asking the KV manager
    unscored       its prompt is to be scored (prompt_logprobs) or pooled as a whole, and not all of it is: takes
                   nothing from the cache
    num_inherited  output tokens with which it began
    max_len        where the sequence ends at the latest
    """

    request: "Request"
    index: int
    tokens: "array[int]"
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    max_len: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    unscored: bool = field(init=False)
    num_inherited: int = 0
    status: Status = Status.WAITING
    handle: int = -1
    decode_entry: Continue | None = None
    num_pending: int = 0
    num_computed: int = 0
    num_drafted: int = 0
    drafts_right: float = 0.0
    drafts_wrong: float = 0.0
    num_cached: int = 0
    num_slots: int = 0
    tables: list[BlockTable] = field(default_factory=list)
    host_ids: list[list[int]] | None = None
    """The host blocks of a parked sequence, per group and logical block: the global id of the pinned block, or the null
    block for none. Its tables are as long, with the null block for what is not on the device."""
    state: "StatePlace | None" = None
    """Where its state is, if the model has recurrent layers and it holds a slot."""
    hash_root: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    num_hashed_blocks: int = 0
    tail_keys: dict[int, bytes] | None = None
    """By each mark of its prompt the key of the tokens of its block before it; None: nobody has asked for them."""
    next_tail: int = NO_TAIL
    """The first mark of its prompt behind what others can find: when it is computed, they find what is before it."""
    num_passed: int = 0
    """The number of later arrivals that were admitted while it waited."""
    num_demoting: int = 0
    """Steps in a row that did not admit it, because they first had to demote what its blocks evict."""
    lookup: Lookup | None = None
    """The last prefix lookup and admission verdict, while it waits."""
    forks_state: bool = False
    """Whether samples are to fork from its state before its last token, which is therefore computed by itself."""
    prompt_end: int = field(init=False)
    """Positions up to which a single token is computed as a chunk of the prompt, too: where the prompt ends with a
    medium, whose vectors have to be there, its length, and else 0."""
    grammar_is_ready: bool = field(init=False)
    """Whether its grammar is known to be compiled, or it has none. Until then one step of it is in flight at most: that
    step may give it no token."""
    last_token_s: float | None = None
    """The time of its last token, if it does not get one in every step."""

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt = request.num_prompt
        self.num_tokens = len(self.tokens)
        self.max_len = request.max_len
        self.stop_ids = request.stop_ids
        self.unscored = self.index == 0 and request.lacks_scores
        self.prompt_end = self.num_prompt if request.media and request.media[-1].end == self.num_prompt else 0
        self.grammar_is_ready = not request.is_guided

    @property
    def seen_by_workers(self) -> bool:
        return self.handle >= 0

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    def num_missing(self) -> int:
        """The number of tokens that are known here and not computed yet, without one that is to be computed by
        itself."""
        return self.without_last(self.num_tokens - self.num_computed)

    def without_last(self, count: int) -> int:
        """Number of the last `count` tokens that one step may compute together."""
        return count - 1 if self.forks_state and count > 1 and self.request.unforked else count

    def hash_blocks(self, hasher: PrefixHasher, num_tokens: int) -> None:
        """Let `block_hashes` have all blocks that the first `num_tokens` fill."""
        if num_tokens // hasher.block_size > len(self.block_hashes):
            tokens = memoryview(self.tokens).cast("B")
            hasher.extend(self.block_hashes, self.hash_root, tokens, num_tokens, self.request.media)
            tokens.release()  # an exported array cannot grow

    def finish_reason(self, token: int) -> FinishReason | None:
        """Whether `token`, the last one appended, ends the sequence. A stop token wins over the length. Stop strings
        are for the client, which has the text."""
        if token in self.stop_ids and self.num_output >= self.request.params.min_tokens:
            return "stop"
        return "length" if self.num_tokens >= self.max_len else None

    def may_draft(self, end: int) -> bool:
        """A beam may not, since its next token is not the likeliest; nor a new fork, which must not write in its first
        step, nor a prompt that others are about to fork from."""
        request = self.request
        return request.beam is None and end > self.num_cached and not request.unforked and request.pooling is None

    @property
    def num_surely_computed(self) -> int:
        """`num_computed`, if all drafts in flight are wrong."""
        return self.num_computed - self.num_drafted

    def drafts(self, count: int) -> None:
        """The step being scheduled has `count` drafts of it."""
        self.num_pending += count
        self.num_computed += count
        self.num_drafted += count

    def take_back(self, count: int) -> None:
        """Undo what drafts() assumed of a step whose result is here: the right drafts are added as tokens. A sequence
        that was preempted since computes them again."""
        self.num_pending -= count
        if self.num_drafted:
            self.num_computed -= count
            self.num_drafted -= count

    def ends_before(self, num_tokens: int) -> None:
        """It ends `num_tokens` before the last token of its step; its recurrent state already includes those."""
        if num_tokens and self.state is not None:
            self.state.is_ahead = True

    def get_nothing(self) -> None:
        """A step gave it no token, as its grammar is still being compiled: its last position is computed again, and not
        written again. A sequence that was preempted since is computed again anyway."""
        self.num_pending -= 1
        if self.num_computed == self.num_tokens:
            self.num_computed -= 1
            self.num_cached = max(self.num_cached, self.num_tokens)

    def sampling(self) -> Sampling:
        """The parameters by which workers sample it."""
        beam, params = self.request.beam, self.request.params
        num_candidates = None if beam is None else beam.num_candidates
        return params.for_worker(self.index, self.num_prompt, self.stop_ids, num_candidates, unscored=self.unscored)

    def lose_blocks(self) -> None:
        """It is about to be preempted, and computed again later, also what drafts in flight compute; a prompt that is
        scored is not scored again."""
        if self.num_drafted and self.state is not None:
            self.state.is_ahead = True
        self.num_computed, self.num_drafted = self.num_surely_computed, 0
        self.unscored = self.unscored and self.num_computed < self.num_prompt - 1

    def lose_workers(self) -> None:
        """No worker knows it any more, and no step in flight will add a token. The caller takes its blocks."""
        self.handle, self.decode_entry = -1, None
        self.num_pending = self.num_drafted = 0
        self.lookup = None
        self.unscored = self.index == 0 and self.request.lacks_scores
        self.grammar_is_ready = not self.request.is_guided

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}[{self.index}], {self.status.value}, "
            f"{self.num_computed}/{self.num_tokens} tokens computed)"
        )
