"""Native collectives of ranks that share memory. Kernels: csrc/cpu/collectives.cpp; csrc/cpu/rank_group.cpp has the
waits of ranks for each other. The reference is a sum of tensors.

Calls return a status instead of raising, because a recorded call runs without Python: DONE, or the reason for which it
failed. After a failed call all later ones fail as well.
"""

import ctypes
import mmap
import os
from typing import NamedTuple

import torch

from vllm_lite.kernels.cpu.dtypes import DTYPES, FLOATS
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.runtime.group_memory import CONTROL_BYTES

DONE, ENDED, TIMED_OUT, DIFFERS, TAKEN = -1, 1, 2, 3, 4
"""`Status` in csrc/cpu/rank_group.h: the call succeeded; the group has ended; a rank did not arrive in time; another
rank makes a different call; another process has this rank already."""
SLOT_BYTES = 1 << 20
"""Maximum bytes that one collective call exchanges at once; longer tensors are sent in pieces. Measured on two cores: 1
MB takes half as long in one piece as in four, perhaps because data in another core's own cache is slower to read."""


class Waits(NamedTuple):
    """Seconds for which a waiting rank first spins and then yields its core, before it sleeps."""

    spin_s: float
    yield_s: float

    @classmethod
    def among(cls, world: int, num_cpus: int) -> "Waits":
        """The times that were measured to be best for `world` ranks on `num_cpus`.

        With a CPU for each rank, the other ranks are running and arrive soon. A rank that yields its CPU then loses a
        whole time slice, 4 ms, to any other process that wants the CPU, while a rank that sleeps runs again as soon as
        it is woken. With fewer CPUs, a spinning rank keeps the awaited rank from running, and yielding lets it run
        soonest.
        """
        return cls(50e-6, 0.0) if world <= num_cpus else cls(0.0, 20e-6)


class _Record(ctypes.Structure):
    """The same record as RankGroup in csrc/cpu/rank_group.h."""

    _fields_ = (
        ("control", pointer),
        ("slots", pointer),
        ("slot_bytes", int64),
        ("spin_ns", int64),
        ("yield_ns", int64),
        ("timeout_ns", int64),
        ("rank", int32),
        ("world", int32),
        ("waits_for", int32),
        ("missing", int32),
        ("failed", int32),
        ("unused", int32),
    )


class RankGroup:
    """One rank's view of the memory that it shares with the others.

    Programs keep the address of its record: it must live as long as they do.
    """

    def __init__(self, memory: int, rank: int, world: int, timeout_s: float, waits: Waits) -> None:
        """`memory`: the descriptor of the group's memory, which may be closed once `join` has returned."""
        most = int(function("vllm_lite_group_max_ranks", (), int32)())
        if not (2 <= world <= most and 0 <= rank < world):
            raise ValueError(f"a group in shared memory has 2 to {most} ranks, got rank {rank} of {world}")
        self._memory = memory
        self._control = mmap.mmap(memory, CONTROL_BYTES)
        self._rows = torch.empty(0, dtype=torch.uint8)
        times_ns = (int(1e9 * seconds) for seconds in (*waits, timeout_s))
        self._record = _Record(_address(self._control), None, SLOT_BYTES, *times_ns, rank, world)
        self._group = ctypes.addressof(self._record)
        self._join = function("vllm_lite_group_join", (pointer, int64), int64)
        self._end = function("vllm_lite_group_end", (pointer,))
        self._all_reduce = function("vllm_lite_all_reduce", (pointer, int32, int64, pointer), int64)
        self._all_gather = function("vllm_lite_all_gather", (pointer, int64, pointer, pointer), int64)
        self._broadcast = function("vllm_lite_broadcast", (pointer, int32, int64, pointer), int64)
        self._barrier = function("vllm_lite_barrier", (pointer,), int64)

    def join(self, shared_bytes: int) -> int:
        """Wait for all other ranks and map the rest of the memory, with `shared_bytes` for `rows`. Returns DIFFERS if
        another rank has another world or other `shared_bytes`."""
        status = int(self._join(self._group, shared_bytes))
        if status != DONE:
            return status
        # All ranks are known to want the same size, so none makes the file shorter than another one has mapped it.
        world, rank = self._record.world, self._record.rank
        slots_bytes = world * 2 * SLOT_BYTES
        total_bytes = CONTROL_BYTES + slots_bytes + shared_bytes
        os.ftruncate(self._memory, total_bytes)
        mapped = mmap.mmap(self._memory, total_bytes)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps `mapped` alive
        slots = whole[CONTROL_BYTES : CONTROL_BYTES + slots_bytes]
        slots.view(world, -1)[rank].zero_()  # memory is on the NUMA node of the thread that first writes it
        self._record.slots = slots.data_ptr()
        self._rows = whole[CONTROL_BYTES + slots_bytes :]
        return DONE

    def rows(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor [num_rows, num_columns] at the beginning of the memory that all ranks share."""
        num_bytes, most = num_rows * num_columns * dtype.itemsize, len(self._rows)
        if num_bytes > most:
            raise ValueError(
                f"ranks share {most} bytes for rows, got [{num_rows}, {num_columns}] of {dtype}: {num_bytes}"
            )
        return self._rows[:num_bytes].view(dtype).view(num_rows, num_columns)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether x begins in the shared memory of `rows`."""
        return 0 <= x.data_ptr() - self._rows.data_ptr() < len(self._rows)

    def all_reduce(self, x: torch.Tensor) -> int:
        """Replace x, contiguous and of one of FLOATS, by its sum over all ranks."""
        if x.dtype not in FLOATS or not x.is_contiguous():
            raise ValueError(
                f"an all-reduce takes contiguous tensors of float32, bfloat16 or float16, got {x.dtype} "
                f"{list(x.shape)} with strides {list(x.stride())}"
            )
        return int(self._all_reduce(self._group, DTYPES[x.dtype], x.numel(), x.data_ptr()))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> int:
        """Write every rank's x to out [world, *x.shape]; both are contiguous."""
        _check_contiguous(x)
        return int(self._all_gather(self._group, x.nbytes, x.data_ptr(), out.data_ptr()))

    def broadcast(self, x: torch.Tensor, source: int) -> int:
        """Replace x, contiguous, by the x of rank `source`."""
        _check_contiguous(x)
        if not 0 <= source < self._record.world:
            raise ValueError(f"a broadcast comes from one of the {self._record.world} ranks, got {source}")
        return int(self._broadcast(self._group, source, x.nbytes, x.data_ptr()))

    def barrier(self) -> int:
        """Return when all ranks have called it. Data that they wrote to shared memory before can then be read."""
        return int(self._barrier(self._group))

    def end(self) -> None:
        """Make all ranks leave their calls at once. From any thread."""
        self._end(self._group)

    def leave(self) -> None:
        """Make this rank's later calls fail. The memory is freed when nothing uses it any more."""
        self._record.failed = self._record.failed or ENDED

    @property
    def waits_for(self) -> int | None:
        """The rank that this one waits for at the moment. From any thread."""
        return self._record.waits_for - 1 if self._record.waits_for else None

    @property
    def missing(self) -> int | None:
        """The rank that this one was waiting for when a call failed."""
        return self._record.missing - 1 if self._record.missing else None

    @property
    def has_ended(self) -> bool:
        """Whether a rank or the engine has ended the group."""
        return self._ended_word() != 0

    @property
    def ended_by(self) -> int | None:
        """The rank that ended the group first; None if the engine ended it, or if it has not ended."""
        word = self._ended_word()
        return word - 1 if 0 < word <= self._record.world else None

    def _ended_word(self) -> int:
        return int.from_bytes(self._control[:4], "little")  # see runtime/group_memory.py


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def _check_contiguous(x: torch.Tensor) -> None:
    if not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(f"ranks exchange contiguous tensors in the memory of the CPU, got strides {list(x.stride())}")
