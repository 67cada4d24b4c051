"""Sequence: the engine's state of one sample of a request; the unit of scheduling. Workers know it by its handle."""

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
"""Value of `next_tail` without a mark: larger than any token position."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """`num_computed` grows up to `num_tokens`; there is no other notion of prefill or decode. The KV manager owns
    `tables`, the hashes and the cached, parked or shared KV; Queues owns `status` and `handle`.

    num_tokens     tokens that the engine knows
    num_pending    tokens that steps in flight will add, if all their drafts are right; the workers know them before the
                   engine does
    num_computed   positions whose KV is in the cache once every step sent so far has run, if all their drafts are right
    num_drafted    drafts in steps in flight, all of which may be wrong
    drafts_right   accepted drafts, decayed per step; `drafts_wrong`: first rejected drafts of a step, likewise
    num_cached     positions whose KV came from the cache and must not be written again
    num_slots      positions that can be computed without another call to the KV manager
    unscored       the prompt still has to be scored (prompt_logprobs) or pooled as a whole: no prefix cache reads
    num_inherited  output tokens that the sequence began with
    max_len        maximum number of tokens, prompt included
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
    drafts_hold: bool = False
    """Whether the latest step that asked for its drafts had some, and all were right."""
    num_cached: int = 0
    num_slots: int = 0
    tables: list[BlockTable] = field(default_factory=list)
    host_ids: list[list[int]] | None = None
    """Host blocks of a parked (swapped-out) sequence, [group][logical block]: global ids of pinned blocks, or the null
    block. `tables` then have the same lengths, with the null block for each block that is not on the device."""
    state: "StatePlace | None" = None
    """Slot of its recurrent state, if the model has recurrent layers and the sequence holds a slot."""
    hash_root: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    num_hashed_blocks: int = 0
    tail_keys: dict[int, bytes] | None = None
    """Mark -> key of the tokens between the start of its block and the mark. None: not computed yet."""
    next_tail: int = NO_TAIL
    """First mark of the prompt whose tail is not cached yet; the tail is published once the mark is computed."""
    num_passed: int = 0
    """Later arrivals that were admitted while this sequence waited."""
    num_demoting: int = 0
    """Consecutive steps that did not admit the sequence because its blocks would evict cached ones, demoted first."""
    lookup: Lookup | None = None
    """Latest prefix lookup and admission verdict of a waiting sequence."""
    forks_state: bool = False
    """Whether other samples fork from the recurrent state before the last prompt token; that token is then computed in
    a step of its own."""
    prompt_end: int = field(init=False)
    """Length of a prompt that ends with a medium, else 0. Below it even a single token is scheduled as a prompt chunk,
    since its vector must be ready."""
    grammar_is_ready: bool = field(init=False)
    """Whether the sequence has no grammar, or the grammar is known to be compiled. Until then at most one of its steps
    is in flight, because that step may return no token."""
    last_token_s: float | None = None
    """Time of the latest token of a sequence that does not get one in every step."""

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
        """Number of known tokens that the next step may compute; without_last() says which one is held back."""
        return self.without_last(self.num_tokens - self.num_computed)

    def without_last(self, count: int) -> int:
        """`count` remaining tokens, less the last one if samples fork from the state before it (`forks_state`)."""
        return count - 1 if self.forks_state and count > 1 and self.request.unforked else count

    def hash_blocks(self, hasher: PrefixHasher, num_tokens: int) -> None:
        """Extend `block_hashes` to all blocks that the first `num_tokens` tokens fill."""
        if num_tokens // hasher.block_size > len(self.block_hashes):
            tokens = memoryview(self.tokens).cast("B")
            hasher.extend(self.block_hashes, self.hash_root, tokens, num_tokens, self.request.media)
            tokens.release()  # an exported array cannot grow

    def finish_reason(self, token: int) -> FinishReason | None:
        """Reason why `token`, the last one appended, ends the sequence, or None. A stop token wins over the length.
        Clients, which have the text, apply stop strings."""
        if token in self.stop_ids and self.num_output >= self.request.params.min_tokens:
            return "stop"
        return "length" if self.num_tokens >= self.max_len else None

    def may_draft(self, end: int) -> bool:
        """Whether drafts may follow position `end` - 1. Not for a beam, whose next token is not the likeliest; a new
        fork, whose first step must not write KV; or a prompt that other samples are about to fork from."""
        request = self.request
        return request.beam is None and end > self.num_cached and not request.unforked and request.pooling is None

    @property
    def num_surely_computed(self) -> int:
        """`num_computed`, if all drafts in flight are wrong."""
        return self.num_computed - self.num_drafted

    def schedule_drafts(self, count: int) -> None:
        """Account for `count` draft tokens of this sequence in the step being scheduled."""
        self.num_pending += count
        self.num_computed += count
        self.num_drafted += count

    def roll_back_drafts(self, count: int) -> None:
        """Undo schedule_drafts() for a step whose result has arrived; the caller appends the accepted drafts as tokens.
        If the sequence was preempted since, lose_blocks() has already undone `num_computed`."""
        self.num_pending -= count
        if self.num_drafted:
            self.num_computed -= count
            self.num_drafted -= count

    def discard_sampled(self, num_tokens: int) -> None:
        """Account for `num_tokens` tokens that a step sampled past the end of the sequence. Its recurrent state
        includes them."""
        if num_tokens and self.state is not None:
            self.state.is_ahead = True

    def withhold_token(self) -> None:
        """Account for a step that returned no token because the grammar is still being compiled: the last position is
        computed again without writing its KV. After a preemption it is computed again anyway."""
        self.num_pending -= 1
        if self.num_computed == self.num_tokens:
            self.num_computed -= 1
            self.num_cached = max(self.num_cached, self.num_tokens)

    def sampling(self) -> Sampling:
        """Sampling parameters as the workers get them."""
        beam, params = self.request.beam, self.request.params
        num_candidates = None if beam is None else beam.num_candidates
        return params.for_worker(self.index, self.num_prompt, self.stop_ids, num_candidates, unscored=self.unscored)

    def lose_blocks(self) -> None:
        """Prepare for preemption. Positions of drafts in flight count as not computed; a prompt whose scores are all
        computed is not scored again."""
        if self.num_drafted and self.state is not None:
            self.state.is_ahead = True
        self.num_computed, self.num_drafted = self.num_surely_computed, 0
        self.unscored = self.unscored and self.num_computed < self.num_prompt - 1

    def lose_workers(self) -> None:
        """Forget handle and steps in flight after the workers died. The caller takes the blocks away."""
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
