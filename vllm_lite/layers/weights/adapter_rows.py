"""The adapters of a step's rows, at fixed addresses, which recorded steps read.

There are two sets of rows: all tokens of the step and, after `gather`, the rows that were kept. Layers use the
`current` set. An LM head that takes some of the last rows at a time has a third.
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
    """The adapter slots of a step's rows, in the form that the layers of one device need."""

    def begin_step(self, slots: Slots) -> None:
        """Begin a step. slots: [num_tokens], NO_SLOT for rows without an adapter."""
        ...

    def repeat_step(self) -> None:
        """Begin a step with the slots of the step before."""
        ...

    def gather(self, wanted: torch.Tensor) -> None:
        """Make `wanted`: int64 [k] the current rows, of a step that is not captured."""
        ...


class Grouped(NamedTuple):
    """Rows grouped by slot: slot i has rows[starts[i]:starts[i + 1]]."""

    rows: torch.Tensor  # int32 [max_num_tokens], those with an adapter
    starts: torch.Tensor  # int32 [num_slots + 1]

    @classmethod
    def empty(cls, num_slots: int, max_num_tokens: int) -> "Grouped":
        return cls(torch.zeros(max_num_tokens, dtype=torch.int32), torch.zeros(num_slots + 1, dtype=torch.int32))

    def to(self, device: torch.device) -> "Grouped":
        return Grouped(*(each.to(device) for each in self))

    def fill(self, slots: Slots) -> None:
        """Group rows by `slots`; the rows of a slot remain in order."""
        rows, starts = self.rows.numpy(), self.starts.numpy()
        order = slots.argsort(kind="stable")
        ends = slots[order].searchsorted(np.arange(len(starts)))
        rows[: len(order) - ends[0]] = order[ends[0] :]
        starts[:] = ends - ends[0]


class GroupedRows:
    """Rows grouped by slot, for the CPU's kernel."""

    def __init__(self, num_slots: int, max_num_tokens: int) -> None:
        self.all, self.kept, self.selected = (Grouped.empty(num_slots, max_num_tokens) for _ in range(3))
        self.current = self.all
        self._slots = self._left = np.zeros(0, np.int64)
        """Slots of all rows, and of the rows that the last layer keeps."""

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
        """Make some of the rows that the last layer keeps the current ones."""
        self.current = self.selected
        if len(self._slots):
            self.selected.fill(self._left[which])


class LaunchedRows:
    """Rows grouped by slot on the device, for a GPU's kernels, and the scratch memory that layers share."""

    def __init__(self, num_slots: int, max_num_tokens: int, device: torch.device) -> None:
        self.all, self.kept = (Grouped.empty(num_slots, max_num_tokens).to(device) for _ in range(2))
        self.current = self.all
        self.is_idle = False
        """See AdapterMask.is_idle."""
        self._slots = torch.full((max_num_tokens,), NO_SLOT, dtype=torch.int32, device=device)
        self._numbers = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._width = 0

    def reserve(self, width: int) -> None:
        """Reserve `width` float32 of scratch per row. Every layer calls this before the first step."""
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
        """See AdapterRows.gather. Does not wait for the device; rows without an adapter are before the first slot's."""
        self.current = self.kept
        slots, order = self._slots[wanted].sort(stable=True)
        self.kept.rows[: len(wanted)] = order
        self.kept.starts.copy_(torch.searchsorted(slots, self._numbers))


class AdapterMask:
    """Mask for matrix products over all slots at once, on any device: 1 in the column of a row's slot."""

    def __init__(self, num_slots: int, max_num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.all, self.kept = torch.zeros(2, max_num_tokens, num_slots, dtype=dtype, device=device)
        self.current = self._left = self.all
        """Mask of the current rows, and of the rows that the last layer keeps."""
        self.is_idle = False
        """Whether no row has an adapter. False while a step is captured, whose replays may have some."""
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
