"""Request: the engine's state of one sequence that a user wants continued."""

from array import array
from enum import Enum

from vllm_lite.engine.block_table import BlockTable
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.step import Continue


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """One sequence. `num_computed` chases `num_tokens`; there is no other notion of prefill or decode.

    num_computed   positions whose KV is in the cache once every step sent so far has run
    num_cached     positions whose KV came from the prefix cache and must not be written again
    num_slots      positions that the allocated blocks can hold
    """

    __slots__ = (
        "block_hashes",
        "client",
        "decode_entry",
        "handle",
        "hash_root",
        "max_len",
        "num_cached",
        "num_cached_at_start",
        "num_computed",
        "num_hashed_blocks",
        "num_prompt",
        "num_slots",
        "num_tokens",
        "params",
        "request_id",
        "seen_by_workers",
        "status",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(self, message: Generate, client: bytes, max_len: int, stop_ids: frozenset[int]) -> None:
        """`message` with its tokens checked and its seed drawn; `max_len` is where the sequence ends at the latest."""
        self.request_id = message.request_id
        self.client = client
        self.params = message.params
        self.tokens = array("I")
        self.tokens.frombytes(message.prompt)
        self.num_prompt = len(self.tokens)
        self.tokens.frombytes(message.output)
        self.num_tokens = len(self.tokens)
        self.max_len = max_len
        self.stop_ids = stop_ids
        self.status = Status.WAITING
        self.handle = -1
        self.seen_by_workers = False
        self.decode_entry: Continue | None = None
        self.table: BlockTable | None = None
        self.hash_root = b""
        self.block_hashes: list[bytes] = []
        self.num_hashed_blocks = 0
        self.num_computed = 0
        self.num_cached = 0
        self.num_cached_at_start: int | None = None
        self.num_slots = 0

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_computed}/{self.num_tokens} tokens computed)"
        )
