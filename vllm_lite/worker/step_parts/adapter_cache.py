"""AdapterCache: the adapters in a worker's memory, and those of them in the slots that the layers read.

The engine has adapters loaded and dropped, and never gives a step more different ones than there are slots. Slots are
assigned here, by all ranks alike; the least recently used adapter is evicted.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lite.checkpoint.tensors.lora import read_lora
from vllm_lite.errors import ModelError, ProtocolError
from vllm_lite.layers.weights.adapter_rows import NO_SLOT
from vllm_lite.layers.weights.lora import Adapters, LoadedAdapter
from vllm_lite.protocol.step import AdapterNumber, Entry, Fork, Handle, NewRequest
from vllm_lite.worker.batch.part import StepPart
from vllm_lite.worker.batch.rows import Rows, SequenceState
from vllm_lite.worker.batch.step_inputs import StepInputs

NO_ADAPTER = 0


class AdapterCache(StepPart):
    """Column: the number of each row's adapter. Not thread-safe: adapters are loaded and dropped between steps."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._loaded: dict[AdapterNumber, LoadedAdapter] = {}
        self._slot_of: dict[AdapterNumber, int] = {}
        """Adapter -> slot, the least recently used first."""
        self._free = list(range(adapters.limits.num_slots))
        self._last: NDArray[np.int64] | None = None
        """Adapters of the previous step, if it only decoded."""
        self._number_of: dict[Handle, AdapterNumber] = {}  # of sequences with an adapter
        self._numbers = np.zeros(0, np.int64)  # [max_num_seqs]

    def load(self, number: AdapterNumber, name: str, path: str) -> None:
        """Read an adapter. Raises ModelError, in one sentence, if it cannot be served."""
        if number in self._loaded:
            raise ProtocolError(f"adapter {number} is loaded already")
        label = f"adapter {name!r} ({path})"
        try:
            checkpoint = read_lora(path)
        except ModelError as error:
            raise ModelError(f"adapter {name!r}: {error}") from error
        self._loaded[number] = self._adapters.read(checkpoint, label)

    def drop(self, number: AdapterNumber) -> None:
        """Drop an adapter that no sequence uses any more, if it is loaded."""
        self._vacate(number)
        self._loaded.pop(number, None)

    # ---- the rows

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        self._numbers = np.zeros(rows.max_num_seqs, np.int64)

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        number = self._number_of.get(entry.parent, NO_ADAPTER) if isinstance(entry, Fork) else entry.adapter
        if number != NO_ADAPTER:
            self._number_of[sequence.handle] = number

    def close(self, sequence: SequenceState) -> None:
        self._number_of.pop(sequence.handle, None)

    def add(self, row: int, sequence: SequenceState, tokens: NDArray[Any]) -> None:  # noqa: ARG002
        self._numbers[row] = self._number_of.get(sequence.handle, NO_ADAPTER)

    def remove(self, row: int, last: int) -> None:
        self._numbers[row] = self._numbers[last]

    # ---- a step

    def build(self, inputs: StepInputs) -> None:
        inputs.adapters = self._numbers[inputs.rows]

    def prepare(self, inputs: StepInputs) -> None:
        """Put the step's adapters into slots, and set the slot of each token."""
        numbers, rows = inputs.adapters, self._adapters.rows
        if numbers is None:
            return
        is_decode = inputs.num_tokens == len(numbers)
        if is_decode and numbers is self._last:
            rows.repeat_step()
            return
        self._last = numbers if is_decode else None
        wanted, index = np.unique(numbers, return_inverse=True)
        slots = np.array(self._slots(wanted.tolist()), np.int64)[index]
        rows.begin_step(slots if is_decode else slots.repeat(inputs.num_scheduled))

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:  # noqa: ARG002
        return False  # the host updates the adapter rows in each step

    def _slots(self, numbers: list[AdapterNumber]) -> list[int]:
        """Slots of several different adapters; those that lack one are loaded into slots of unused ones."""
        for number in numbers:
            if number != NO_ADAPTER and (slot := self._slot_of.pop(number, None)) is not None:
                self._slot_of[number] = slot
        return [NO_SLOT if number == NO_ADAPTER else self._slot(number, numbers) for number in numbers]

    def _slot(self, number: AdapterNumber, keep: Iterable[AdapterNumber]) -> int:
        if (slot := self._slot_of.get(number)) is not None:
            return slot
        if number not in self._loaded:
            raise ProtocolError(f"a step has adapter {number}, which is not loaded")
        if not self._free:
            victim = next((each for each in self._slot_of if each not in keep), None)
            if victim is None:
                raise ProtocolError(f"a step has more than {self._adapters.limits.num_slots} adapters (max_loras)")
            self._vacate(victim)
        slot = self._slot_of[number] = self._free.pop()
        self._adapters.put(slot, self._loaded[number], None)
        return slot

    def _vacate(self, number: AdapterNumber) -> None:
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            self._adapters.put(slot, None, self._loaded[number])
            self._free.append(slot)
            self._last = None

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every slot is free or has one adapter that is loaded. For tests."""
        taken = sorted([*self._slot_of.values(), *self._free])
        if taken != list(range(self._adapters.limits.num_slots)) or not self._slot_of.keys() <= self._loaded.keys():
            raise RuntimeError(f"slots {self._slot_of}, free {self._free}, loaded {list(self._loaded)}")
