"""ReportedBlocks: the blocks in an engine's prefix cache, from its KV events, for routers."""

import os
import tempfile
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec

from vllm_lite.engine.blocks.events import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored
from vllm_lite.ray.messages import HASH_BYTES, Summary
from vllm_lite.runtime import log
from vllm_lite.runtime.nested_settings import KVEventsConfig
from vllm_lite.transport.subscriber import Subscriber
from vllm_lite.transport.zmq import answers

MAX_REPORTED = 2048
"""Maximum number of blocks in a report, 16 KB: Serve's controller sends the reports of all replicas to all routers."""
LOOK_S = 0.5
SOCKET = "vl-kv-"
"""Prefix of the names of private_endpoint()'s sockets."""

logger = log.get(__name__)


def can_follow(config: KVEventsConfig) -> bool:
    """Whether events in this format are sufficient. A user may choose another format for another consumer."""
    return config.event_format == "array" and config.hash_format == "bytes"


def private_endpoint() -> str:
    """A socket for the events of one engine on this machine. Removes sockets of engines that were killed, as Ray kills
    a replica's children."""
    folder = Path(tempfile.gettempdir())
    for path in folder.glob(f"{SOCKET}*"):
        if not answers(f"ipc://{path}"):
            with suppress(OSError):  # another user's, or already removed
                path.unlink()
    return f"ipc://{folder}/{SOCKET}{os.urandom(8).hex()}"


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class ReportedBlocks:
    """Applies the events of one engine, in a thread of its own. After a missed event, all blocks before are
    forgotten."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._is_whole = True
        """Whether no batch was missed since the cache was last empty."""
        self._next_number = 0
        self._lock = threading.Lock()
        self._decode = msgspec.msgpack.Decoder(_Batch).decode
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, subscriber: Subscriber) -> None:
        """Apply the events that `subscriber` receives; it is closed with this."""
        self._thread = threading.Thread(target=self._run, args=(subscriber,), name="KV events", daemon=True)
        self._thread.start()

    def apply(self, number: int, payload: bytes) -> None:
        """Apply a batch. An engine that replaces another numbers its batches from 0."""
        batch = self._decode(payload)
        with self._lock:
            if number != self._next_number:
                self._blocks.clear()
                self._is_whole = number == 0
            self._next_number = number + 1
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self._blocks.clear()
            self._is_whole = True
            return
        if event.medium not in (None, MEDIUM):  # an event of the host tier or the disk
            return
        for block in event.block_hashes:
            if not isinstance(block, bytes):
                continue
            if isinstance(event, BlockStored):
                self._blocks[block[:HASH_BYTES]] = None
            else:
                self._blocks.pop(block[:HASH_BYTES], None)

    def summary(self) -> Summary:
        with self._lock:
            newest = [block for block, _ in zip(reversed(self._blocks), range(MAX_REPORTED), strict=False)]
            return Summary(self._num_blocks, b"".join(newest), self._is_whole and len(newest) == len(self._blocks))

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, subscriber: Subscriber) -> None:
        try:
            while not self._closing.is_set():
                if (batch := subscriber.recv(LOOK_S)) is not None:
                    self.apply(*batch)
        except msgspec.MsgspecError as error:
            logger.warning("KV events make no sense, and are not followed any more: %s", error)
            with self._lock:
                self._blocks.clear()
                self._is_whole = False
        finally:
            subscriber.close()
