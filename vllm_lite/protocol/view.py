"""Client <-> engine: the engine as it is at a moment, for who watches it: its live requests, and its KV blocks.

All is bounded, so that the engine's loop answers within about a millisecond, however much there is to see: the first
MAX_ROWS requests, MAX_SEEN blocks from any one on, and the latest MAX_CONVERSATIONS conversations.
"""

from typing import Annotated, Literal

from msgspec import Meta

from vllm_lite.protocol import Message

MAX_ROWS = 128
"""The most requests in a view."""
MAX_SEEN = 4096
"""The most blocks in a view."""
MAX_TABLE = 256
"""The most entries of a block table in a view."""
MAX_CONVERSATIONS = 16
"""The most conversations in a view."""
IS_CACHED = 0x80
"""Bit of a block that a prefix hit can find; the other seven count its references."""
MAX_REFERENCES = 0x7F


class GetView(Message, tag="get_view"):
    """Asks for a view, with the KV blocks from `first_block` on; answered by EngineView."""

    first_block: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class GetBlock(Message, tag="get_block"):
    """Asks what a KV block holds; answered by BlockContent."""

    block: Annotated[int, Meta(ge=0, lt=2**31)]


class RequestRow(Message):
    """A live request, by its first sample that runs, or the first one that waits.

    `reason` is what it waits for, as in AdmissionState, None if it runs; `place` counts those before it in the queue.
    `table` has the physical blocks of the first group of that sample, little-endian u32, MAX_TABLE at most, of
    `num_blocks` on the device and `num_host_blocks` in host memory. `num_output` counts the tokens of all samples.
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
    """The work of a step besides tokens that are certain: `num_drafts` tokens that may be drafted, and blocks that it
    copies, or moves to the host and back. Of the latest step with a result `num_drafted` tokens were drafted, and
    `num_right` of them were right.
    """

    num_drafts: int = 0
    num_copies: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_drafted: int = 0
    num_right: int = 0


class ConversationRow(Message):
    """Requests each of which began with the whole blocks of the prompt before it, as those of a chat do, or one prompt
    again and again. Of their `num_prompt` prompt tokens `num_cached` were found in the cache. The ids are those of the
    latest, which was admitted `age_s` ago; `number` counts conversations.
    """

    number: int
    request_id: str
    external_id: str
    num_requests: int
    num_prompt: int
    num_cached: int
    age_s: float


class EngineView(Message, tag="view"):
    """`rows` are those of the requests that run, and then of those that wait, in the order of the queue; `num_requests`
    counts all. `blocks` has a byte for each block from `first_block` on: references, and IS_CACHED; behind the device's
    `num_blocks` come `num_host_blocks` in host memory. `step` is the latest one; it has `step_tokens` tokens,
    `step_prefill` of them of prompts, for `step_samples` sequences. Of `conversations` the latest comes first.
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
    """The content of a block, by its hash, and the tiers that have it; no hash if no prompt can find it. `group` is the
    group of layers whose KV it is. `references` is None if there is no such block.
    """

    block: int
    references: int | None = None
    hash: bytes = b""
    group: int = 0
    tiers: tuple[Literal["device", "host", "disk"], ...] = ()


Look = GetView | GetBlock
Seen = EngineView | BlockContent
