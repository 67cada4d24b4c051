"""Client <-> engine: the engine as it is at a moment, for who watches it: its live requests, and its KV blocks.

Both are bounded, so that the engine's loop answers within about a millisecond, however much there is to see: the
first MAX_ROWS requests, and MAX_SEEN blocks from any one on.
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
IS_CACHED = 0x80
"""Bit of a block that a prefix hit can find; the other seven count its references."""
MAX_REFERENCES = 0x7F


class GetView(Message, tag="get_view"):
    """Asks for a view, with the KV blocks from `first_block` on; answered by EngineView."""

    first_block: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class RequestRow(Message):
    """A live request, by its first sample that runs, or the first one that waits.

    `reason` is what it waits for, as in AdmissionState, None if it runs; `place` counts those before it in the queue.
    `table` has the physical blocks of the first group of that sample, little-endian u32, MAX_TABLE at most, of
    `num_blocks`; `num_host_blocks` are in host memory. `num_output` counts the tokens of all samples.
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


class EngineView(Message, tag="view"):
    """`rows` are those of the requests that run, and then of those that wait, in the order of the queue; `num_requests`
    counts all. `blocks` has a byte for each block from `first_block` on: references, and IS_CACHED. `step` is the
    latest one; it has `step_tokens` tokens, `step_prefill` of them of prompts, for `step_samples` sequences.
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
