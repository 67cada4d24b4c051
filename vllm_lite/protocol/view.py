"""Client <-> engine: a view of the engine's present state for viewers: live requests, KV blocks and conversations.

A view is bounded, so that the engine's loop answers within about a millisecond: the first MAX_ROWS requests, MAX_SEEN
blocks from any id on, and the latest MAX_CONVERSATIONS conversations.
"""

from typing import Annotated, Literal

from msgspec import Meta

from vllm_lite.protocol import Message

MAX_ROWS = 128
"""Maximum requests in a view."""
MAX_SEEN = 4096
"""Maximum blocks in a view."""
MAX_TABLE = 256
"""Maximum entries of a block table in a view."""
MAX_CONVERSATIONS = 16
"""Maximum conversations in a view."""
IS_CACHED = 0x80
"""Bit of a cached block in `EngineView.blocks`; the other seven bits are its number of references."""
MAX_REFERENCES = 0x7F


class GetView(Message, tag="get_view"):
    """Ask for a view with the KV blocks from `first_block` on; answered by EngineView."""

    first_block: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class GetBlock(Message, tag="get_block"):
    """Ask for the content of a KV block; answered by BlockContent."""

    block: Annotated[int, Meta(ge=0, lt=2**31)]


class RequestRow(Message):
    """A live request, represented by its first running sample, or its first waiting one.

    `reason` is the reason why it waits, as in AdmissionState, None if it runs; `place` is the number of samples before
    it in the queue. `table` has at most MAX_TABLE physical blocks of that sample's first group, little-endian u32; it
    holds `num_blocks` on the device and `num_host_blocks` on the host. `num_output` counts the tokens of all samples.
    """

    request_id: str
    external_id: str
    status: Literal["waiting", "running", "preempted", "swapped"]
    reason: str | None
    place: int | None
    num_samples: int
    num_prompt: int
    num_cached: int
    num_computed: int
    num_output: int
    num_preemptions: int
    age_s: float
    num_blocks: int
    num_host_blocks: int
    table: bytes


class StepWork(Message):
    """Drafts and block moves of a step: at most `num_drafts` drafts, and blocks that it copies, or moves to the host
    and back. In the latest step with a result `num_drafted` tokens were drafted, and `num_right` of them accepted.
    """

    num_drafts: int = 0
    num_copies: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_drafted: int = 0
    num_right: int = 0


class ConversationRow(Message):
    """A conversation: requests whose prompts each begin with the full blocks of the previous one, as in a chat. Of the
    `num_prompt` prompt tokens `num_cached` were cached. The ids are those of the latest request, which was admitted
    `age_s` ago; `number` is that of the conversation.
    """

    number: int
    request_id: str
    external_id: str
    num_requests: int
    num_prompt: int
    num_cached: int
    age_s: float


class EngineView(Message, tag="view"):
    """View of the engine. `rows` has the running requests, then the waiting ones in the order of the queue;
    `num_requests` counts all. `blocks` has one byte per block from `first_block` on: number of references, and
    IS_CACHED; after the device's `num_blocks` follow `num_host_blocks` on the host. `step` is the latest step, with
    `step_tokens` tokens, `step_prefill` of them of prompts; `step_samples` sequences get a token from it.
    `conversations` has the latest first.
    """

    step: int
    step_tokens: int
    step_prefill: int
    step_samples: int
    num_requests: int
    rows: list[RequestRow]
    num_blocks: int
    block_size: int
    first_block: int
    blocks: bytes
    work: StepWork = StepWork()
    conversations: tuple[ConversationRow, ...] = ()
    num_host_blocks: int = 0


class BlockContent(Message, tag="block"):
    """Content of a block: its hash (empty: not cached), the tiers that have the same content, and its KV `group`.
    `references` is None if there is no such block.
    """

    block: int
    references: int | None = None
    hash: bytes = b""
    group: int = 0
    tiers: tuple[Literal["device", "host", "disk"], ...] = ()


MissReason = Literal[
    "caching_is_off",
    "prompt_is_scored",
    "all_cached",
    "being_computed",
    "not_continuable",
    "evicted",
    "cache_was_emptied",
    "other_keys",
    "differs",
    "longer",
    "unknown",
]
"""Reasons for the first block without a hit. "all_cached": there is none, as only full blocks are cached and the last
token is always computed. "being_computed": by a live request. "not_continuable": its KV is cached, but not all that
computing the next token needs: a recurrent state, or KV in another window. "evicted" and "cache_was_emptied": an
earlier prompt had this block. "other_keys": one with another cache salt or adapter has it. "differs": from the nearest
prompt, within this block; "longer": the nearest prompt ends there. "unknown": no remembered prompt reaches the block.
"""


class NearestPrompt(Message):
    """The remembered prompt, with its output, that has the most tokens in common with the one in question: the first
    `num_common`. `context` has the tokens around that position from `start` on, u32, and nothing beyond its end."""

    request_id: str
    external_id: str
    num_common: int
    start: int
    context: bytes


class PrefixSeen(Message, tag="prefix"):
    """Blocks of a prompt that are cached now. `tiers` has one byte for each full block: 0 for none, or 1 for the
    device, 2 for the host and 3 for the disk, the slowest one that is needed. The request would get `num_cached` tokens
    from memory, and after them `num_on_disk` from the disk, if loading takes less time than computing. `miss` is the
    reason why it would get no more. `error`: why the request would be refused; nothing else is set then.
    """

    num_prompt: int = 0
    block_size: int = 0
    num_cached: int = 0
    num_on_disk: int = 0
    tiers: bytes = b""
    num_hit_blocks: int = 0
    miss: MissReason = "unknown"
    nearest: NearestPrompt | None = None
    error: str | None = None


Look = GetView | GetBlock
Seen = EngineView | BlockContent | PrefixSeen
