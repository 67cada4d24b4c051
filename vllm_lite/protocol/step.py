"""Engine -> worker -> engine, once per step, or for some short steps together. Sequences are small integer handles,
never request ids.

SchedulerOutput carries full data for sequences that the workers have not seen and diffs for those they have, so its
size does not grow with context length. Decode tokens never travel down: the worker keeps what it sampled.
Both directions carry (generation, step): after the workers were restarted nothing stale is applied.
"""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from vllm_lite.protocol import Message
from vllm_lite.protocol.api import Pooled, PromptLogprobs, TokenBytes, TokenLogprobs
from vllm_lite.protocol.encoder import DemoteEncoded, Digest, Encode, EncodeAside, FreeEncoded, PromoteEncoded
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.pooling import Pooling
from vllm_lite.protocol.spans import PromptMedia

Handle = int
AdapterNumber = int
"""What the engine calls an adapter; 0 is none. A number is never used again."""
BlockIds = list[list[int]]
"""Block ids per KV group; `[]` means none for any group."""


class BlockOp(IntEnum):
    """One instruction of the block program: (op, src, dst) over global block ids, executed strictly in order."""

    COPY = 1
    SWAP_OUT = 2
    SWAP_IN = 3
    STATE_OUT = 4
    """Between slots of recurrent states: ids of their own, those on the host behind those of the device."""
    STATE_IN = 5


class NewRequest(Message, tag=1):
    """A sequence that the workers have not seen.

    Positions [num_computed, num_computed + num_tokens) are computed in this step. Below `num_cached` the KV is
    already there and must not be written: on a hit of the whole prompt num_cached = num_computed + 1 = its length,
    so that the last token's query is recomputed and nothing is written. With `pooling` it is never sampled. `adapter`
    has been loaded before. Answers of requests with the same `draft_group` may be drafted for each other. `media` lie
    among the prompt's tokens.
    """

    handle: Handle
    tokens: TokenBytes
    num_prompt_tokens: int
    sampling: Sampling
    num_computed: int
    num_cached: int
    num_tokens: int
    block_ids: BlockIds
    pooling: Pooling | None = None
    adapter: AdapterNumber = 0
    draft_group: Annotated[bytes, Meta(max_length=16)] = b""
    media: PromptMedia = ()


class Continue(Message, tag=2):
    """A known sequence computes its next `num_tokens` positions; `new_block_ids` are appended to its tables."""

    handle: Handle
    num_tokens: int
    new_block_ids: BlockIds


class Resume(Message, tag=3):
    """A preempted sequence comes back: `block_ids` replace its tables, computing goes on from `num_computed`."""

    handle: Handle
    num_computed: int
    num_cached: int
    num_tokens: int
    block_ids: BlockIds


class Fork(Message, tag=4):
    """`child` becomes a copy of `parent`: its first `num_tokens` tokens, and the blocks that hold them. Computes
    nothing by itself; a Continue of the child follows, in this step or a later one."""

    parent: Handle
    child: Handle
    sampling: Sampling
    num_tokens: int
    num_computed: int
    num_cached: int


class Preempt(Message, tag=5):
    """The sequence leaves the batch and loses its blocks; its tokens are kept for Resume."""

    handle: Handle


class Finish(Message, tag=6):
    """Forget the sequence; its handle may be reused by a later entry."""

    handle: Handle


class Draft(Message, tag=7):
    """Like Continue by one token, but the worker may draft up to `max_drafts` tokens behind it and keep what proves
    right. Blocks for all of them are there."""

    handle: Handle
    max_drafts: int
    new_block_ids: BlockIds


class ReplaceBlock(Message, tag=8):
    """Entry `index` of the table of `group` is now `block_id`: a shared block was copied before it is written."""

    handle: Handle
    group: int
    index: int
    block_id: int


class SetToken(Message, tag=9):
    """The sequence's last token is `token_id` and not what the worker sampled: beam search chose."""

    handle: Handle
    token_id: int


class States(Message, tag=12):
    """Slots for a sequence's state of recurrent layers. The next position it computes begins with what is in slot
    `source`, 0 being the state before the first token, and the state goes on in slot `live`. On the way it is left
    behind the first `position` tokens in `slot`, for each of `saves`, (position, slot) in order."""

    handle: Handle
    source: int
    live: int
    saves: list[tuple[int, int]]


Entry = (
    NewRequest
    | Continue
    | Resume
    | Fork
    | Preempt
    | Finish
    | Draft
    | ReplaceBlock
    | SetToken
    | States
    | Encode
    | EncodeAside
    | FreeEncoded
    | DemoteEncoded
    | PromoteEncoded
)


class SchedulerOutput(Message, tag=10):
    """One step: run `block_ops`, apply `entries` in order, one forward pass, sample what is caught up."""

    generation: int
    step: int
    block_ops: list[tuple[int, int, int]]
    entries: list[Entry]


NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
"""Why a sequence has failed whose KV is not to be trusted either."""


class ModelOutput(Message, tag=20):
    """Sampled tokens, as u32, of the sequences that were caught up, in the order of their entries.

    `counts` says how many tokens each of them got, None = one each. One got none if its grammar is still being
    compiled: its last position is to be computed again, and not written again. One that is pooled gets none, and what
    it asked for is in `pooled`, unless it has `failed`. `logprobs` runs parallel to the tokens
    where asked for; `prompts` has those of the prompt tokens that this step computed. `failed` names sequences whose
    logits were not finite (NOT_FINITE), whose rules left no token or whose grammar failed; their token is to be
    ignored. `drafted` runs parallel to `counts`: how many tokens were drafted for each; None if none were. So does
    `forced`: how many of these, the first, their grammars leave no choice about. `encoded` are media of an EncodeAside
    whose vectors are there from now on, `media_s` is the time that media took of the step, infinite
    where the device computes them while the host goes on.
    """

    generation: int
    step: int
    tokens: TokenBytes
    counts: list[int] | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    failed: list[tuple[Handle, str]] | None = None
    prompts: list[tuple[Handle, PromptLogprobs]] | None = None
    drafted: list[int] | None = None
    pooled: list[tuple[Handle, Pooled]] | None = None
    forced: list[int] | None = None
    encoded: list[Digest] | None = None
    media_s: float = 0.0


class Steps(Message, tag=11):
    """Several steps, to be run one after the other and answered together."""

    steps: list[SchedulerOutput]


class StepOutputs(Message, tag=21):
    """The results of a Steps' steps, in their order."""

    outputs: list[ModelOutput]
