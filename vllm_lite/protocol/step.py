"""Engine -> worker -> engine, once per step. Sequences are small integer handles, never request ids.

SchedulerOutput carries full data for sequences that the workers have not seen and diffs for those they have, so its
size does not grow with context length. Decode tokens never travel down: the worker keeps what it sampled.
Both directions carry (epoch, step): after a restart nothing stale is applied.
"""

from enum import IntEnum

import msgspec

from vllm_lite.protocol.api import TokenBytes, TokenLogprobs

Handle = int
BlockIds = list[list[int]]
"""Block ids per KV group; `[]` means none for any group."""


class BlockOp(IntEnum):
    """One instruction of the block program: (op, src, dst) over global block ids, executed strictly in order."""

    COPY = 1
    SWAP_OUT = 2
    SWAP_IN = 3


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Sampling(_Entry):
    """What the sampler needs to know of a sequence. `child` is its index among the samples of one prompt."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    child: int = 0
    logprobs: int | None = None
    min_tokens_until: int = 0
    """Sequence length before which no token of `stop_ids` may be sampled; 0 = no such rule."""
    stop_ids: tuple[int, ...] = ()


class NewRequest(_Entry, tag=1):
    """A sequence that the workers have not seen.

    Positions [num_computed, num_computed + num_tokens) are computed in this step. Below `num_cached` the KV is
    already there and must not be written: on a hit of the whole prompt num_cached = num_computed + 1 = its length,
    so that the last token's query is recomputed and nothing is written.
    """

    handle: Handle
    tokens: TokenBytes
    num_prompt_tokens: int
    sampling: Sampling
    num_computed: int
    num_cached: int
    num_tokens: int
    block_ids: BlockIds


class Continue(_Entry, tag=2):
    """A known sequence computes its next `num_tokens` positions; `new_block_ids` are appended to its tables."""

    handle: Handle
    num_tokens: int
    new_block_ids: BlockIds


class Resume(_Entry, tag=3):
    """A preempted sequence comes back: `block_ids` replace its tables, computing goes on from `num_computed`."""

    handle: Handle
    num_computed: int
    num_cached: int
    num_tokens: int
    block_ids: BlockIds


class Fork(_Entry, tag=4):
    """`child` becomes a copy of `parent` with its own index of randomness; computes nothing.

    `block_ids` are its tables; `[]` means the parent's own, block for block.
    """

    parent: Handle
    child: Handle
    child_index: int
    block_ids: BlockIds


class Preempt(_Entry, tag=5):
    """The sequence leaves the batch and loses its blocks; its tokens are kept for Resume."""

    handle: Handle


class Finish(_Entry, tag=6):
    """Forget the sequence; its handle may be reused by a later entry."""

    handle: Handle


Entry = NewRequest | Continue | Resume | Fork | Preempt | Finish


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=10):
    """One step: run `block_ops`, apply `entries` in order, one forward pass, sample what is caught up."""

    epoch: int
    step: int
    block_ops: list[tuple[int, int, int]]
    entries: list[Entry]


class ModelOutput(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=20):
    """Sampled tokens, as u32, of the sequences that were caught up, in the order of their entries.

    `counts` tells how many tokens each of them got, None = one each. `logprobs` runs parallel to the tokens where
    asked for. `failed` names sequences whose logits were not finite; their token is to be ignored.
    """

    epoch: int
    step: int
    tokens: TokenBytes
    counts: list[int] | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    failed: list[tuple[Handle, str]] | None = None
