"""The pools as items that files are read into and written from: in a CPU's memory they are used where they are."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_lite.kv_disk.store import PART_BYTES


class HostItems:
    """The rows of a pool in a CPU's memory, [num_items, ...], contiguous."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._rows = pool.flatten(1).view(torch.uint8).numpy()
        self.item_bytes: int = self._rows.shape[1]

    def after(self, event: Any) -> None:
        """The steps before have been run: a CPU's are done when the next message is read."""

    def to_write(self, ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._rows[index]) for index in ids]

    def to_fill(self, ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._rows[index]) for index in ids]

    def filled(self, ids: Sequence[int]) -> None:
        """Their bytes are where they belong."""


class DeviceItems:
    """The rows of a pool on a GPU, by way of a small pinned buffer and a stream of its own. One thread uses it."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._rows = pool.flatten(1).view(torch.uint8)
        self.item_bytes: int = self._rows.shape[1]
        count = max(1, PART_BYTES // self.item_bytes)
        self._room = torch.empty((count, self.item_bytes), dtype=torch.uint8, pin_memory=pool.is_cuda)
        self._views = self._room.numpy()
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None

    def after(self, event: Any) -> None:
        """Copies that are asked for from now on run behind `event`, which the steps before have recorded."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def to_write(self, ids: Sequence[int]) -> list[memoryview]:
        self._copy([(self._room[place], self._rows[index]) for place, index in enumerate(ids)])
        return [memoryview(self._views[place]) for place in range(len(ids))]

    def to_fill(self, ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._views[place]) for place in range(len(ids))]

    def filled(self, ids: Sequence[int]) -> None:
        self._copy([(self._rows[index], self._room[place]) for place, index in enumerate(ids)])

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (destination, source), and wait for that."""
        with torch.cuda.stream(self._stream):  # None: there is no GPU, and nothing changes
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def items_of(pool: torch.Tensor) -> HostItems | DeviceItems:
    """Items of a pool, for one thread."""
    return HostItems(pool) if pool.device.type == "cpu" else DeviceItems(pool)
