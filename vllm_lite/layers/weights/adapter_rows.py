"""The adapters of a step's rows, in memory that stays: recorded steps read it.

There are two sets of rows: those of all tokens of the step and, once `gather` was called, those that go on. Layers ask
for the `current` one. An LM head that takes some of the last ones at a time has a third.
"""

from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

NO_SLOT = -1
"""The slot of a row without an adapter."""
Slots = NDArray[np.int64]


class AdapterRows(Protocol):
    """The slots of a step's rows, as the layers of one device want them."""

    def begin_step(self, slots: Slots) -> None:
        """slots: [num_tokens], NO_SLOT where there is none."""
        ...

    def repeat_step(self) -> None:
        """A step with the slots of the one before begins."""
        ...

    def gather(self, wanted: torch.Tensor) -> None:
        """From here on the rows are those `wanted`: int64 [k], of a step that is not captured."""
        ...


class Grouped(NamedTuple):
    """Rows by slot: slot i has rows[starts[i]:starts[i + 1]]."""

    rows: torch.Tensor  # int32 [max_num_tokens], those with an adapter
    starts: torch.Tensor  # int32 [num_slots + 1]

    @classmethod
    def empty(cls, num_slots: int, max_num_tokens: int) -> "Grouped":
        return cls(torch.zeros(max_num_tokens, dtype=torch.int32), torch.zeros(num_slots + 1, dtype=torch.int32))

    def to(self, device: torch.device) -> "Grouped":
        return Grouped(*(each.to(device) for each in self))

    def fill(self, slots: Slots) -> None:
        """In each slot rows are in their order."""
        rows, starts = self.rows.numpy(), self.starts.numpy()
        order = slots.argsort(kind="stable")
        ends = slots[order].searchsorted(np.arange(len(starts)))
        rows[: len(order) - ends[0]] = order[ends[0] :]
        starts[:] = ends - ends[0]


class GroupedRows:
    """For the CPU's kernel, which takes each adapter's rows together."""

    def __init__(self, num_slots: int, max_num_tokens: int) -> None:
        self.all, self.kept, self.selected = (Grouped.empty(num_slots, max_num_tokens) for _ in range(3))
        self.current = self.all
        self._slots = self._left = np.zeros(0, np.int64)
        """Slots of all rows, and of those that the last layer leaves."""

    def begin_step(self, slots: Slots) -> None:
        self._slots = self._left = slots
        self.current = self.all
        self.all.fill(slots)

    def repeat_step(self) -> None:
        self.current, self._left = self.all, self._slots

    def gather(self, wanted: torch.Tensor) -> None:
        self.current = self.kept
        if len(self._slots):  # a step that only warms up has none
            self._left = self._slots[wanted.numpy()]
            self.kept.fill(self._left)

    def select(self, which: slice | Slots) -> None:
        """From here on the rows are some of those that the last layer leaves."""
        self.current = self.selected
        if len(self._slots):
            self.selected.fill(self._left[which])


class LaunchedRows:
    """For a GPU's kernels: as GroupedRows, on the device, and the scratch that the layers have in common."""

    def __init__(self, num_slots: int, max_num_tokens: int, device: torch.device) -> None:
        self.all, self.kept = (Grouped.empty(num_slots, max_num_tokens).to(device) for _ in range(2))
        self.current = self.all
        self.is_idle = False
        """See AdapterMask.is_idle."""
        self._slots = torch.full((max_num_tokens,), NO_SLOT, dtype=torch.int32, device=device)
        self._numbers = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._width = 0

    def reserve(self, width: int) -> None:
        """A layer will want so many float32 of each row. All of them have said so before the first step."""
        self._width = max(self._width, width)

    @cached_property
    def hidden(self) -> torch.Tensor:  # float32 [max_num_tokens, the widest layer's]
        return torch.zeros(len(self._slots), self._width, device=self._slots.device)

    def begin_step(self, slots: Slots) -> None:
        self.current, self.is_idle = self.all, not (slots >= 0).any()
        host = Grouped.empty(len(self._numbers) - 1, len(slots))
        host.fill(slots)
        own = torch.from_numpy(slots.astype(np.int32))
        for to, values in ((self._slots, own), (self.all.rows, host.rows), (self.all.starts, host.starts)):
            on_host = to.device.type == "cpu"
            to[: len(values)].copy_(values if on_host else values.pin_memory(), non_blocking=not on_host)

    def repeat_step(self) -> None:
        self.current = self.all

    def gather(self, wanted: torch.Tensor) -> None:
        """Nothing waits for the device. Rows without an adapter stand before those of the first slot."""
        self.current = self.kept
        slots, order = self._slots[wanted].sort(stable=True)
        self.kept.rows[: len(wanted)] = order
        self.kept.starts.copy_(torch.searchsorted(slots, self._numbers))


class AdapterMask:
    """For matrix products of any device, over all slots at once: a mask has 1 in the column of a row's slot."""

    def __init__(self, num_slots: int, max_num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.all, self.kept = torch.zeros(2, max_num_tokens, num_slots, dtype=dtype, device=device)
        self.current = self._left = self.all
        """The mask of the rows now, and of those that the last layer leaves."""
        self.is_idle = False
        """No row has an adapter. False where a step is captured, whose rows may have some later."""
        self._columns = np.arange(num_slots)

    def begin_step(self, slots: Slots) -> None:
        self.current = self._left = self.all
        self.is_idle = not (slots >= 0).any()
        mask = torch.from_numpy(slots[:, None] == self._columns)
        on_host = self.all.device.type == "cpu"
        self.all[: len(slots)].copy_(mask if on_host else mask.pin_memory(), non_blocking=not on_host)
        self.all[len(slots) :].zero_()  # rows that pad a captured step

    def repeat_step(self) -> None:
        self.current = self._left = self.all

    def gather(self, wanted: torch.Tensor) -> None:
        self.current = self._left = self.kept
        self.kept[: len(wanted)] = self.all[wanted]

    def select(self, which: slice | Slots) -> None:
        """See GroupedRows.select."""
        self.current = self._left[which]
