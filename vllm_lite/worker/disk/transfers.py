"""DiskTransfers: loads and stores beside the steps, by threads that rarely hold the GIL.

Two threads load, since requests wait for that. One thread of the lowest priority stores, and scans the directory for
files of other engines. Reads, writes and checksums release the GIL and use the blocks in place. Memory does not grow
with the transfers, whose number the engine bounds.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from vllm_lite.kv_disk.store import DiskStore
from vllm_lite.protocol.transfers import (
    MEDIUM,
    STATE,
    ForgetStored,
    LoadBlocks,
    LoadEncoded,
    StoreBlocks,
    StoredKeys,
    StoreEncoded,
    TierUsage,
    Transfer,
    TransferAnswer,
    Transferred,
)
from vllm_lite.runtime import log
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.worker.disk.items import AnyItems
from vllm_lite.worker.disk.media_items import MediaShelf, one_item
from vllm_lite.worker.memory.touch_ahead import TouchAhead

NUM_READERS = 2
LEAST_PART = 32
"""Minimum blocks per part when a load is divided between the threads."""
LOOK_S = 1.0
"""Seconds between scans of the directory."""
KEYS_PER_MESSAGE = 4096
FIRST_LOOK_S = 10.0
"""Maximum seconds that a start waits for the first scan. Files found after that serve later requests only."""
LOOKING_PRIORITY = 10
"""Niceness of the first scan, and of allocating memory for the files found: the start waits for them."""
LOWEST_PRIORITY = 19
SAY_AGAIN_S = 600.0
"""Seconds before the log repeats the same reason why nothing can be written."""

logger = log.get(__name__)

Pools = tuple[AnyItems, AnyItems | None]
"""Items of the blocks, and of the recurrent states if the model has any."""


Moving = LoadBlocks | StoreBlocks | LoadEncoded | StoreEncoded


class _Job:
    """A running transfer, with `left` parts to do."""

    def __init__(self, message: Moving, event: Any, num_parts: int = 1, vectors: torch.Tensor | None = None) -> None:
        self.message = message
        self.event = event
        self.vectors = vectors
        """Media vectors to be written, or None."""
        self.began_s = time.monotonic()
        self.left = num_parts
        self.failed: set[int] = set()
        self.num_bytes = 0


class DiskTransfers:
    """Transfers of one worker. `announced` is set when there are answers to take."""

    def __init__(
        self,
        make_store: Callable[[], DiskStore],
        rank: int,
        generation: int,
        pages: TouchAhead | None = None,
    ) -> None:
        """`make_store` is called by a thread, since it reads pages of the checkpoint. `pages` is memory for blocks:
        while weights are loaded, a thread allocates as much of it as files are found. Filling unallocated memory would
        take ten times as long."""
        self.pages = pages
        self.announced = Wakeup()
        self._make_store = make_store
        self._make_pools: Callable[[], Pools] | None = None
        self._shelf: MediaShelf | None = None
        self._name = rank, generation
        self._loads: queue.SimpleQueue[tuple[_Job, Sequence[int]] | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[_Job | ForgetStored | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._answers: list[Transferred] = []
        self._store: DiskStore | None = None
        self._is_open = threading.Event()
        """Set when the store is open, or has failed to open."""
        self._has_pools = threading.Event()
        self._has_looked = threading.Event()
        self._is_closing = False
        self._said: tuple[str, float] | None = None
        """(reason, time) of the last log line that nothing can be written."""
        self._num_queued = 0
        self._num_found = 0
        """Number of files for which memory has been allocated."""
        self._usage = {"loaded_bytes": 0, "stored_bytes": 0, "load_s": 0.0, "store_s": 0.0}
        targets = [self._write, *[self._read] * NUM_READERS]
        self._threads = [
            threading.Thread(target=target, name=f"disk {number}", daemon=True) for number, target in enumerate(targets)
        ]

    def start(self) -> None:
        """Start the threads, and the first scan of the directory."""
        for thread in self._threads:
            thread.start()

    def use(self, make_pools: Callable[[], Pools], shelf: MediaShelf | None = None) -> None:
        """Set the pools; each thread calls `make_pools` for items of its own. Called once, before the first transfer.
        `shelf` has the media vectors of a model that takes media."""
        self._make_pools, self._shelf = make_pools, shelf
        self._has_pools.set()

    def await_first_look(self) -> None:
        """Wait for the first scan, for at most FIRST_LOOK_S: otherwise requests that waited for the workers, such as a
        chat after a sleep, would be scheduled before their KV is found."""
        self._has_looked.wait(FIRST_LOOK_S)

    def _await_pools(self) -> Pools | None:
        """Wait for the pools; None: the worker ends before."""
        self._has_pools.wait()
        return None if self._make_pools is None else self._make_pools()

    # ---- the worker's thread

    def submit(self, message: Transfer, device: torch.device | None = None) -> None:
        """Begin a transfer, after the steps that have been run, or launched on a GPU."""
        if isinstance(message, ForgetStored):
            self._stores.put(message)
            return
        is_gpu = device is not None and device.type == "cuda"
        event = torch.cuda.current_stream(device).record_event() if is_gpu else None
        with self._lock:
            self._num_queued += 1
        if isinstance(message, StoreBlocks):
            self._stores.put(_Job(message, event))
            return
        if isinstance(message, StoreEncoded):
            vectors = None if self._shelf is None else self._shelf.get(message.digest)
            self._stores.put(_Job(message, event, vectors=vectors))  # kept by the job, even if the StepPart drops them
            return
        if isinstance(message, LoadEncoded):
            self._loads.put((_Job(message, event), range(1)))
            return
        count = len(message.keys)
        size = max(LEAST_PART, -(-count // NUM_READERS))
        parts = [range(start, min(count, start + size)) for start in range(0, count, size)]
        job = _Job(message, event, len(parts))
        for part in parts:
            self._loads.put((job, part))

    def take(self) -> list[TransferAnswer]:
        """Take the answers to be sent: ended transfers, and on rank 0 also changes of the stored keys."""
        self.announced.clear()
        with self._lock:
            ended, self._answers = self._answers, []
        store, (rank, generation) = self._store, self._name
        if store is None or rank != 0:
            return list(ended)
        answers: list[TransferAnswer] = []
        changes = store.take_changes()
        if changes.added or changes.removed or ended:
            usage = self.usage()
            for start in range(0, len(changes.added) or 1, KEYS_PER_MESSAGE):
                added = changes.added[start : start + KEYS_PER_MESSAGE]
                answers.append(StoredKeys(rank, generation, added, [] if start else changes.removed, usage))
        return [*answers, *ended]

    def usage(self) -> TierUsage:
        store = self._store
        errors = {} if store is None else {**store.errors, **store.dropped}
        return TierUsage(
            num_bytes=0 if store is None else store.num_bytes,
            num_queued=self._num_queued,
            errors=errors,
            **self._usage,  # type: ignore[arg-type]
        )

    def close(self, timeout_s: float) -> None:
        """Finish running writes within `timeout_s`. Files are complete or do not exist."""
        self._is_closing = True
        self._has_pools.set()
        self._stores.put(None)
        for _ in range(NUM_READERS):
            self._loads.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # ---- the threads

    def _read(self) -> None:
        self._is_open.wait()
        if (pools := self._await_pools()) is None:
            return
        while (item := self._loads.get()) is not None:
            job, places = item
            failed, num_bytes, began_s = set(places), 0, time.monotonic()
            if (store := self._store) is not None and not self._is_closing:
                try:
                    failed, num_bytes = self._read_part(store, job, places, pools)
                except Exception:  # a bug counts as a miss, too, and is logged
                    logger.exception("a load failed")
            with self._lock:
                self._usage["load_s"] += time.monotonic() - began_s
                self._usage["loaded_bytes"] += num_bytes
            self._done(job, failed, num_bytes)

    def _read_part(self, store: DiskStore, job: _Job, places: Sequence[int], pools: Pools) -> tuple[set[int], int]:
        if not isinstance(job.message, LoadBlocks):
            return self._read_vectors(store, job)
        keys, ids = job.message.keys, job.message.ids
        failed, num_bytes = set[int](), 0
        for items, chosen in _by_pool(pools, keys, places):
            if items is None:
                failed.update(chosen)
                continue
            items.after(job.event)
            lost, count = store.read([keys[place] for place in chosen], [ids[place] for place in chosen], items)
            failed.update(chosen[number] for number in lost)
            num_bytes += count
        return failed, num_bytes

    def _read_vectors(self, store: DiskStore, job: _Job) -> tuple[set[int], int]:
        if not isinstance(message := job.message, LoadEncoded) or self._shelf is None:
            return {0}, 0
        vectors = self._shelf.room(message)
        items = one_item(vectors)
        items.after(job.event)
        failed, num_bytes = store.read([message.key], [0], items)
        if not failed:
            self._shelf.put(message, vectors)
        return failed, num_bytes

    def _write(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOOKING_PRIORITY)
        try:
            self._store = self._make_store()
        except Exception as error:
            logger.warning("the KV cache on disk is off: %s", error)
        self._is_open.set()
        self._say_refusal()
        looked_s = self._look()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        if (pools := self._await_pools()) is None:
            return
        while True:
            try:
                item = self._stores.get(timeout=LOOK_S)
            except queue.Empty:
                looked_s = self._look()
                continue
            if item is None:
                return
            if isinstance(item, ForgetStored):
                self._forget(item)
            else:
                self._write_run(item, pools)
            if time.monotonic() - looked_s > LOOK_S:
                looked_s = self._look()

    def _look(self) -> float:
        if self._store is not None:
            with suppress(OSError):
                self._store.look(lambda: self._is_closing)
            self.announced.set()
        self._has_looked.set()
        self._make_room()
        return time.monotonic()

    def _make_room(self) -> None:
        """Allocate memory for newly found blocks."""
        store, pages = self._store, self.pages
        if store is None or pages is None or store.num_found == self._num_found:
            return
        self._num_found = store.num_found
        found = store.keys()
        count = sum(not key.endswith((STATE, MEDIUM)) for key in found)
        known_bytes = int(self._usage["loaded_bytes"] + self._usage["stored_bytes"])
        pages.make(max(0, count * pages.block_bytes - known_bytes))

    def _forget(self, message: ForgetStored) -> None:
        if self._store is not None:
            if message.keys is None:
                self._store.clear()
            else:
                self._store.forget(message.keys)
            self.announced.set()

    def _write_run(self, job: _Job, pools: Pools) -> None:
        began_s, num_bytes = time.monotonic(), 0
        if self._store is not None:
            try:
                keys, ids, items = _to_write(job, pools)
                if items is not None:
                    items.after(job.event)
                    num_bytes = self._store.write(keys, ids, items)
            except Exception:
                logger.exception("a run of blocks was not written")
        self._say_refusal()
        with self._lock:
            self._usage["store_s"] += time.monotonic() - began_s
            self._usage["stored_bytes"] += num_bytes
        count = len(job.message.keys) if isinstance(job.message, StoreBlocks) else 1
        self._done(job, set() if num_bytes else set(range(count)), num_bytes)

    def _say_refusal(self) -> None:
        """Log why nothing can be written to disk, unless the same reason was logged lately. Without the line, the lack
        of cache hits would go unexplained."""
        refusal = None if self._store is None else self._store.refusal
        if self._store is None or refusal is None:
            return
        self._store.refusal = None
        why, now_s = refusal.strerror or str(refusal), time.monotonic()  # without the file's name, which varies
        if self._said is None or self._said[0] != why or now_s - self._said[1] > SAY_AGAIN_S:
            self._said = why, now_s
            logger.warning("nothing can be written to the KV cache on disk, what is there is still read: %s", refusal)

    def _done(self, job: _Job, failed: set[int], num_bytes: int) -> None:
        """Record that a part of a transfer is done, and queue the answer after the last part."""
        with self._lock:
            job.left -= 1
            job.failed |= failed
            job.num_bytes += num_bytes
            if job.left:
                return
            self._num_queued -= 1
            took_s = time.monotonic() - job.began_s
            answer = Transferred(*self._name, job.message.ticket, tuple(sorted(job.failed)), job.num_bytes, took_s)
            self._answers.append(answer)
        self.announced.set()


def _to_write(job: _Job, pools: Pools) -> tuple[Sequence[bytes], Sequence[int], AnyItems | None]:
    """Keys, ids and items of a run to write; no items: the contents have been dropped."""
    message = job.message
    if isinstance(message, StoreBlocks):
        ((items, _),) = _by_pool(pools, message.keys, range(len(message.keys)))
        return message.keys, message.ids, items
    if isinstance(message, StoreEncoded) and job.vectors is not None:
        return [message.key], [0], one_item(job.vectors)
    return [], [], None


def _by_pool(pools: Pools, keys: Sequence[bytes], places: Iterable[int]) -> list[tuple[AnyItems | None, list[int]]]:
    """Split places by pool: those of blocks, and those of states."""
    blocks, states = list[int](), list[int]()
    for place in places:
        (states if keys[place].endswith(STATE) else blocks).append(place)
    return [(items, chosen) for items, chosen in zip(pools, (blocks, states), strict=True) if chosen]
