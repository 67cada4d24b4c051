"""Blocks that move between a pool and files: in place on a CPU, and through a buffer on a device."""

import errno
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cpu.test_cache_engine import make_engine
from tests.deadlines import scaled
from vllm_lite.kv_disk import store
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
    Transferred,
)
from vllm_lite.worker.disk import transfers
from vllm_lite.worker.disk.items import DeviceItems, HostItems, TieredItems
from vllm_lite.worker.disk.opening import pools_of
from vllm_lite.worker.disk.transfers import DiskTransfers, Moving
from vllm_lite.worker.memory.touch_ahead import take_pages

NUM_ITEMS = 120
KEYS = [bytes([number]) * 32 + b"\0" for number in range(1, 9)]


def pool(dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randint(0, 255, (NUM_ITEMS, 3, 64 * dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    return values.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", [HostItems, DeviceItems])
def test_bytes_go_from_one_pool_to_another(
    tmp_path: Path, dtype: torch.dtype, kind: type[HostItems | DeviceItems]
) -> None:
    source, target = pool(dtype, 1), pool(dtype, 2)
    store, ids, places = DiskStore(tmp_path, b"m", (0, 1), 10**9), [3, 9, 4, 19, 1], [7, 2, 8, 11, 5]
    assert store.write(KEYS[:5], ids, kind(source))
    before = target.clone()
    assert store.read(KEYS[:5], places, kind(target)) == (set(), 5 * source[0].nbytes)
    as_bytes = source.view(torch.uint8), target.view(torch.uint8)
    assert torch.equal(as_bytes[1][places], as_bytes[0][ids])
    others = [index for index in range(NUM_ITEMS) if index not in places]
    assert torch.equal(as_bytes[1][others], before.view(torch.uint8)[others])


@pytest.mark.parametrize("kind", [HostItems, DeviceItems])
def test_one_write_takes_blocks_of_device_and_host(tmp_path: Path, kind: type[HostItems | DeviceItems]) -> None:
    source, host, target = pool(torch.bfloat16, 1), pool(torch.bfloat16, 2), pool(torch.bfloat16, 3)
    items = TieredItems(kind(source), HostItems(host), NUM_ITEMS)
    store, ids = DiskStore(tmp_path, b"m", (0, 1), 10**9), [3, NUM_ITEMS, NUM_ITEMS + 7, 4, NUM_ITEMS + 1]
    assert store.write(KEYS[:5], ids, items)
    into = TieredItems(kind(target), HostItems(host), NUM_ITEMS)
    assert store.read(KEYS[:5], [1, 2, 3, 4, 5], into) == (set(), 5 * source[0].nbytes)
    expected = torch.stack([source[3], host[0], host[7], source[4], host[1]])
    assert torch.equal(target[1:6].view(torch.uint8), expected.view(torch.uint8))


def test_a_worker_writes_from_the_pool_of_a_global_id(tmp_path: Path) -> None:
    cache = make_engine()
    for number, block in enumerate((*cache.pool, *cache.host_pool)):
        block.fill_(float(number))
    items, _ = pools_of(cache)
    ids = [2, cache.num_blocks, 1, cache.num_blocks + 1]
    found = [torch.frombuffer(view, dtype=cache.pool.dtype)[0].item() for view in items.to_write(ids)]
    assert found == ids


class Shelf:
    """Vectors by digest, as the part of a step keeps them."""

    def __init__(self) -> None:
        self.held: dict[bytes, torch.Tensor] = {}
        self.get = self.held.get

    def room(self, medium: LoadEncoded) -> torch.Tensor:
        return torch.empty(medium.num_tokens, 24)

    def put(self, medium: LoadEncoded, vectors: torch.Tensor) -> None:
        self.held[medium.digest] = vectors


class Worker:
    """The transfers of one rank over two pools, and their answers."""

    def __init__(self, folder: Path, seed: int, rank: int = 0) -> None:
        self.blocks, self.states = pool(torch.bfloat16, seed), pool(torch.float32, seed)
        self.disk = DiskTransfers(lambda: DiskStore(folder, b"m", (rank, 2), 10**9), rank, 1)
        self.disk.start()
        self.disk.use(lambda: (HostItems(self.blocks), HostItems(self.states)))
        self.ended: dict[int, Transferred] = {}
        self.known: set[bytes] = set()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + scaled(10.0)
        while not holds():
            assert time.monotonic() < deadline_s
            for answer in self.disk.take():
                if isinstance(answer, StoredKeys):
                    self.known = (self.known | set(answer.added)) - set(answer.removed)
                else:
                    self.ended[answer.ticket] = answer
            time.sleep(0.001)

    def run(self, message: Moving) -> Transferred:
        self.disk.submit(message)
        self.until(lambda: message.ticket in self.ended)
        return self.ended[message.ticket]


def test_a_later_worker_loads_announced_blocks_and_states(tmp_path: Path) -> None:
    first, state = Worker(tmp_path, 1), b"x" * 32 + STATE
    assert first.run(StoreBlocks(1, KEYS, list(range(8)))).failed == ()
    assert first.run(StoreBlocks(2, [state], [5])).failed == ()
    first.disk.close(scaled(5.0))
    second = Worker(tmp_path, 2)
    second.until(lambda: second.known == {*KEYS, state})
    answer = second.run(LoadBlocks(7, [*KEYS[2:5], state, b"unknown"], [1, 2, 3, 4, 6]))
    assert answer.failed == (4,)
    assert answer.num_bytes == 3 * first.blocks[0].nbytes + first.states[0].nbytes
    assert torch.equal(second.blocks[1:4].view(torch.uint8), first.blocks[2:5].view(torch.uint8))
    assert torch.equal(second.states[4].view(torch.uint8), first.states[5].view(torch.uint8))
    second.disk.submit(ForgetStored(None))
    second.until(lambda: not second.known)
    assert second.run(LoadBlocks(8, KEYS[:1], [1])).failed == (0,)
    second.disk.close(scaled(5.0))


def test_room_for_blocks_that_are_found_is_made_before_there_is_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, made = Worker(tmp_path, 1), queue.SimpleQueue[int]()
    first.run(StoreBlocks(1, KEYS, list(range(8))))
    first.run(StoreBlocks(2, [b"x" * 32 + STATE], [5]))
    first.disk.close(scaled(5.0))
    pages = take_pages(100, 5000)
    assert pages is not None
    monkeypatch.setattr(pages, "make", made.put)
    again = DiskTransfers(lambda: DiskStore(tmp_path, b"m", (0, 2), 10**9), 0, 1, pages)
    again.start()
    assert made.get(timeout=scaled(5.0)) == 8 * 5000
    again.close(scaled(5.0))


def test_room_is_made_for_blocks_that_another_engine_writes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "LOOK_S", 0.01)
    made, pages = queue.SimpleQueue[int](), take_pages(100, 5000)
    assert pages is not None
    monkeypatch.setattr(pages, "make", made.put)
    first, second = Worker(tmp_path, 1), Worker(tmp_path, 2)
    second.disk.close(scaled(5.0))
    second.disk = DiskTransfers(lambda: DiskStore(tmp_path, b"m", (0, 2), 10**9), 0, 1, pages)
    second.disk.start()
    second.disk.use(lambda: (HostItems(second.blocks), None))
    first.run(StoreBlocks(1, KEYS[:5], list(range(5))))
    assert made.get(timeout=scaled(5.0)) == 5 * 5000
    second.until(lambda: set(KEYS[:5]) <= second.known)
    loaded = second.run(LoadBlocks(1, KEYS[:5], list(range(5)))).num_bytes
    first.run(StoreBlocks(2, KEYS[5:], list(range(3))))
    assert made.get(timeout=scaled(5.0)) == 8 * 5000 - loaded, "for what has not been in memory yet"
    for worker in (first, second):
        worker.disk.close(scaled(5.0))


def test_vectors_go_from_one_shelf_to_another(tmp_path: Path) -> None:
    """Vectors that the step's part drops meanwhile are still written. Vectors of another size are not loaded."""
    first, second, key = Worker(tmp_path, 1), Worker(tmp_path, 2), b"x" * 32 + MEDIUM
    shelves = Shelf(), Shelf()
    for worker, shelf in zip((first, second), shelves, strict=True):
        worker.disk._shelf = shelf
    digest = bytes(32)
    assert first.run(StoreEncoded(1, key, digest)).failed == (0,), "nobody has computed them"
    kept = shelves[0].held[digest] = torch.randn(7, 24)
    first.disk.submit(StoreEncoded(2, key, digest))
    del shelves[0].held[digest]
    first.until(lambda: 2 in first.ended)
    assert first.ended[2].failed == ()
    second.until(lambda: key in second.known)
    assert second.run(LoadEncoded(1, key, digest, 7)).failed == ()
    assert torch.equal(shelves[1].held[digest], kept)
    assert second.run(LoadEncoded(2, key, bytes([1]) * 32, 8)).failed == (0,), "it has 7 vectors"
    assert second.run(LoadEncoded(3, key, digest, 7)).failed == (0,), "the file was none of these"
    assert list(shelves[1].held) == [digest]
    for worker in (first, second):
        worker.disk.close(scaled(5.0))


def test_a_long_load_is_shared_by_two_threads_and_answered_once(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 1)
    keys = [number.to_bytes(2, "big") * 16 + b"\0" for number in range(100)]
    for start in range(0, 100, 10):
        worker.run(StoreBlocks(1 + start, keys[start : start + 10], list(range(10))))
    answer = worker.run(LoadBlocks(1000, [*keys, b"no"], list(range(101))))
    assert answer.failed == (100,)
    assert worker.disk.usage().num_queued == 0
    assert worker.disk.usage().loaded_bytes == 100 * worker.blocks[0].nbytes
    worker.disk.close(scaled(5.0))


def test_a_tier_that_cannot_be_opened_fails_each_transfer_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> DiskStore:
        raise OSError("no such disk")

    worker = Worker(tmp_path, 1)
    worker.disk.close(scaled(5.0))
    worker.disk = DiskTransfers(refuse, 0, 1)
    worker.disk.start()
    worker.disk.use(lambda: (HostItems(worker.blocks), None))
    assert worker.run(LoadBlocks(1, KEYS[:2], [1, 2])).failed == (0, 1)
    assert worker.run(StoreBlocks(2, KEYS[:2], [1, 2])).failed == (0, 1)
    assert "the KV cache on disk is off: no such disk" in caplog.text
    worker.disk.close(scaled(5.0))


def test_each_reason_for_failed_writes_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, reasons = Worker(tmp_path, 1), [errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EDQUOT]
    monkeypatch.setattr(store, "PAUSE_S", 0.0)

    def refuse(*_: object) -> int:
        raise OSError(reasons[0], os.strerror(reasons[0]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        for ticket, _ in enumerate(list(reasons), 1):
            assert worker.run(StoreBlocks(ticket, KEYS[ticket : ticket + 1], [1])).failed == (0,)
            del reasons[0]
    assert worker.run(StoreBlocks(9, KEYS, list(range(8)))).failed == ()
    assert [caplog.text.count(why) for why in ("No space left", "quota exceeded", "nothing can be")] == [1, 1, 2]
    worker.disk.close(scaled(5.0))


def test_ranks_other_than_the_first_report_only_the_end_of_transfers(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 1, rank=1)
    assert worker.run(StoreBlocks(1, KEYS, list(range(8)))).rank == 1
    assert not worker.known
    worker.disk.close(scaled(5.0))
