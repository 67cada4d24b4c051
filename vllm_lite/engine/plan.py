"""What a step is made of, before and after the workers run it, and what the scheduler is told once."""

from typing import NamedTuple

from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import FinishReason, PromptLogprobs, TokenLogprobs
from vllm_lite.protocol.step import Entry


class Produced(NamedTuple):
    """What one step gave one sample. `reason` is None while it goes on."""

    request: Request
    sample: int
    start: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    reason: FinishReason | None = None
    error: str | None = None
    logprob: float | None = None
    prompt: PromptLogprobs | None = None


class Rates(NamedTuple):
    """What was measured, for choosing between moving KV and computing it again."""

    prefill_tokens_per_s: float = 0.0
    swap_blocks_per_s: float = 0.0


class Options(NamedTuple):
    """Limits and ways of one scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 10**9
    chunked_prefill: bool = True
    preemption: str = "recompute"
    num_drafts: int = 0
    generation: int = 0


class Handles:
    """Small integers under which workers know sequences; the one given back last is taken first."""

    __slots__ = ("_free", "_num")

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num = 0

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._num += 1
        return self._num - 1

    def give_back(self, handle: int) -> None:
        self._free.append(handle)


class Plan:
    """The step that is being made.

    budget         tokens that are left of it
    room           as many of them are for others than the first prompt under way
    shortest       what the shortest of those others lacks, if one is left: no newcomer that lacks as much is cut
    prompts        running sequences that lack more than one token
    born           samples of the prompts that it completes; each gets its first token from it, too, if it can
    draftable      sequences that got one token, with the places of their entries, and may draft more
    is_cut         the waiting sequence looked at last does not come in because it would be cut
    num_looked_up  tokens of waiting sequences that were looked up in the prefix cache
    """

    __slots__ = (
        "born",
        "budget",
        "draftable",
        "entries",
        "is_cut",
        "num_looked_up",
        "num_preempted",
        "prompts",
        "room",
        "sampling",
        "shortest",
    )

    def __init__(self, budget: int) -> None:
        self.budget = self.room = budget
        self.shortest: int | None = None
        self.is_cut = False
        self.entries: list[Entry] = []
        self.sampling: list[Sequence] = []
        self.prompts: list[Sequence] = []
        self.born: list[Sequence] = []
        self.draftable: list[tuple[int, Sequence]] = []
        self.num_looked_up = self.num_preempted = 0

    def take(self, num_tokens: int) -> None:
        self.budget -= num_tokens
        self.room = max(0, self.room - num_tokens)


def prefers_swap(mode: str, rates: Rates, kv: KVCacheManager, victim: Sequence) -> bool:
    """Whether moving its blocks out and in costs less than computing them again; `mode` may have decided already."""
    if mode != "auto":
        return mode == "swap"
    if not rates.prefill_tokens_per_s or not rates.swap_blocks_per_s:
        return False
    num_blocks = kv.num_blocks(victim.num_computed, 1)
    return 2 * num_blocks / rates.swap_blocks_per_s < victim.num_computed / rates.prefill_tokens_per_s
