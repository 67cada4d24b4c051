"""Engine -> worker -> engine, once per step, or once for several short steps. Sequences are small integer handles,
never request ids.

SchedulerOutput carries full data for sequences that the workers have not seen and diffs for those they have, so its
size does not grow with context length. Sampled tokens are not sent back: the worker keeps them.
Both directions carry (generation, step), so that nothing stale is applied after the workers were restarted.
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
"""The engine's number of an adapter; 0: none. Numbers are never reused."""
BlockIds = list[list[int]]
"""Block ids per KV group; `[]` means none for any group."""


class BlockOp(IntEnum):
    """Kind of a block op: (op, src, dst) over global block ids, executed strictly in order."""

    COPY = 1
    SWAP_OUT = 2
    SWAP_IN = 3
    STATE_OUT = 4
    """Moves recurrent states between slots, which have ids of their own: first the device's, then the host's."""
    STATE_IN = 5


class NewRequest(Message, tag=1):
    """A sequence that the workers have not seen.

    Positions [num_computed, num_computed + num_tokens) are computed in this step. Below `num_cached` the KV is
    cached and must not be written: on a hit of the whole prompt num_cached = num_computed + 1 = its length, so that
    the last token's query is recomputed and nothing is written. With `pooling` it is never sampled. `adapter` has been
    loaded before. Drafts may come from answers of requests with the same `draft_group`. `media` are the media among
    the prompt's tokens.
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
    """Compute the next `num_tokens` positions of a known sequence; `new_block_ids` are appended to its tables."""

    handle: Handle
    num_tokens: int
    new_block_ids: BlockIds


class Resume(Message, tag=3):
    """Continue a preempted sequence: `block_ids` replace its tables, computing continues at `num_computed`."""

    handle: Handle
    num_computed: int
    num_cached: int
    num_tokens: int
    block_ids: BlockIds


class Fork(Message, tag=4):
    """Copy `parent`'s first `num_tokens` tokens, and the tables of the blocks that hold them, to a new sequence
    `child`. Nothing is computed; a Continue of the child follows, in this step or a later one."""

    parent: Handle
    child: Handle
    sampling: Sampling
    num_tokens: int
    num_computed: int
    num_cached: int


class Preempt(Message, tag=5):
    """Remove a sequence from the batch, with its blocks; its tokens are kept for Resume."""

    handle: Handle


class Finish(Message, tag=6):
    """Drop a sequence; its handle may be reused by a later entry."""

    handle: Handle


class Draft(Message, tag=7):
    """Like a Continue of one token, but the worker may draft up to `max_drafts` tokens after it, and keeps those that
    are accepted. Blocks for all of them are allocated."""

    handle: Handle
    max_drafts: int
    new_block_ids: BlockIds


class SureDrafts(Message, tag=18):
    """The price of drafts in this step, for a drafter that can tell how sure they are. It proposes those that are right
    with a chance of `min_odds` or more, but none if all of them are expected to bring fewer than `min_gain` tokens
    beyond `min_odds` for each. Without this entry all drafts may be proposed."""

    min_odds: float
    min_gain: float


class ReplaceBlock(Message, tag=8):
    """Set entry `index` of the table of `group` to `block_id`: a shared block was copied before it is written."""

    handle: Handle
    group: int
    index: int
    block_id: int


class SetToken(Message, tag=9):
    """Replace the sequence's last token, which the worker sampled, by `token_id`, the choice of beam search."""

    handle: Handle
    token_id: int


class States(Message, tag=12):
    """Slots of a sequence's recurrent state. Its next step reads the state from slot `source` (0: the state before the
    first token) and writes it to slot `live`. For each of `saves`, (position, slot) in order, the state after
    `position` tokens is saved in `slot` when it is computed."""

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
    | SureDrafts
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
    """One step: execute `block_ops`, apply `entries` in order, run one forward pass, and sample the sequences whose
    last token it computed."""

    generation: int
    step: int
    block_ops: list[tuple[int, int, int]]
    entries: list[Entry]


NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
"""Error of a sequence whose KV must not be reused either."""


class ModelOutput(Message, tag=20):
    """Sampled tokens, as u32, of the sequences whose last token the step computed, in the order of their entries.

    `counts` is the number of tokens of each of them, None: one each. A sequence gets none if its grammar is still being
    compiled; its last position is then computed again without writing its KV. A pooled sequence gets none; its result
    is in `pooled`, unless it is in `failed`. `logprobs` has one item per token where requested; `prompts` has the
    logprobs of prompt tokens that this step computed. `failed` has the sequences whose logits were not finite
    (NOT_FINITE), whose rules left no token, or whose grammar failed, with the reason; their token is ignored. `drafted`
    has one item per item of `counts`: the number of drafts; None if there were none. `forced` is the number of these,
    the first ones, that the grammar forced. `encoded` are media of EncodeAside entries whose vectors are complete now.
    `other_s` is the time in seconds of the step that the next step of the same sequences does not take: that of media,
    infinite if the device computes them asynchronously, and of programs that were recorded for it.
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
    other_s: float = 0.0


class Steps(Message, tag=11):
    """Several steps, to be run in order and answered in one message."""

    steps: list[SchedulerOutput]


class StepOutputs(Message, tag=21):
    """The results of the steps of a Steps message, in their order."""

    outputs: list[ModelOutput]
