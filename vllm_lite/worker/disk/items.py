"""Items: rows of a pool as buffers that files are read into and written from; in a CPU's memory without a copy."""

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
        """Do nothing: on a CPU, earlier steps are done when the next message is read."""

    def to_write(self, ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._rows[index]) for index in ids]

    def to_fill(self, ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._rows[index]) for index in ids]

    def filled(self, ids: Sequence[int]) -> None:
        """Do nothing: the bytes were read into the pool itself."""


class DeviceItems:
    """The rows of a pool on a GPU, through a small pinned buffer and a stream of its own. For one thread."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._rows = pool.flatten(1).view(torch.uint8)
        self.item_bytes: int = self._rows.shape[1]
        count = max(1, PART_BYTES // self.item_bytes)
        self._room = torch.empty((count, self.item_bytes), dtype=torch.uint8, pin_memory=pool.is_cuda)
        self._views = self._room.numpy()
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None

    def after(self, event: Any) -> None:
        """Let later copies wait for `event`, which was recorded after the steps before."""
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
        """Copy (destination, source) pairs, and wait for the copies."""
        with torch.cuda.stream(self._stream):  # None: there is no GPU, and nothing changes
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


class TieredItems:
    """Blocks of two tiers by global id: those from `first_host_id` on are on the host. Only device blocks are
    filled."""

    def __init__(self, own: HostItems | DeviceItems, host: HostItems, first_host_id: int) -> None:
        self.item_bytes = own.item_bytes
        self._own = own
        self._host = host
        self._first = first_host_id
        self.after, self.to_fill, self.filled = own.after, own.to_fill, own.filled

    def to_write(self, ids: Sequence[int]) -> list[memoryview]:
        first = self._first
        own = iter(self._own.to_write([index for index in ids if index < first]))
        host = iter(self._host.to_write([index - first for index in ids if index >= first]))
        return [next(own if index < first else host) for index in ids]


def items_of(pool: torch.Tensor) -> HostItems | DeviceItems:
    """The items of a pool, for one thread."""
    return HostItems(pool) if pool.device.type == "cpu" else DeviceItems(pool)


AnyItems = HostItems | DeviceItems | TieredItems
"""The items of a pool, or of two."""
