"""Programs: kernel calls that are recorded once and then repeated by one call, without Python, torch or an allocation.

While recording, Python code runs as usual but native kernels are not called: the recorder stores their arguments, which
are addresses and numbers, and returns success. So the code must not look at the results of kernels, memory whose
address is stored must not move, and values that change from run to run must be read from such memory.

An operation of torch would run once, while recording, and be missing in the program. So recording refuses all
operations of torch except those that only make views.
"""

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_lite.kernels.cpu.library import Function, float32, function, int32, int64, library, pointer, recorded_by

_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "expand",
        "narrow",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
    )
)
_DONE = -1
"""Return value of a recordable function that has done its work."""


class NotRecordable(RuntimeError):
    """A step cannot be recorded, because it does more than call recordable kernels."""


class Program:
    """A sequence of recorded calls. It stores addresses only: its owner must keep the memory they point to."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._names: list[str] = []
        self._packed = np.empty(0, np.uint64)
        self._arguments = (0, 0)
        self._stops: list[tuple[int, int]] = []
        """Numbers of words and of calls before each stop."""
        self._run = function("vllm_lite_run_program", (pointer, int64), int64)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> list[str]:
        """The names of the functions, in the order of the calls."""
        return list(self._names)

    @property
    def first_arguments(self) -> list[int]:
        """The first argument of each call as a word; 0 if a call has none."""
        firsts, at = [], 0
        for _ in self._names:
            count = self._words[at + 1]
            firsts.append(self._words[at + 2] if count else 0)
            at += 2 + count
        return firsts

    def record(self, run: Callable[[], None]) -> None:
        """Append the calls that `run` makes. Raises NotRecordable at the first operation that cannot be recorded."""
        with recorded_by(self._add), _OnlyViews():  # type: ignore[no-untyped-call]
            run()
        self._packed = np.array(self._words, np.uint64)
        self._arguments = (self._packed.ctypes.data, len(self._names))

    def _add(self, called: Function, args: tuple[Any, ...]) -> int:
        address = _recorded_address(called.name)
        if len(args) != len(called.argtypes):
            raise TypeError(f"{called.name} takes {len(called.argtypes)} arguments, got {len(args)}")
        self._words += address, len(args)
        self._words += map(_word, called.argtypes, args)
        self._names.append(called.name)
        return _DONE

    def replay(self) -> None:
        """Make the calls. Raises RuntimeError if one failed, for example because of an id that does not exist."""
        self._check(self._run(*self._arguments))

    def stop(self) -> None:
        """While recording: mark a point at which `replay_with` calls a function."""
        self._stops.append((len(self._words), len(self._names)))

    def replay_with(self, between: Sequence[Callable[[], object]]) -> None:
        """Make the calls as `replay` does, and call the next function of `between` at each stop."""
        address, words_before, calls_before = self._packed.ctypes.data, 0, 0
        for (words, calls), call in zip(self._stops, between, strict=True):
            self._check(self._run(address + 8 * words_before, calls - calls_before), calls_before)
            call()
            words_before, calls_before = words, calls
        self._check(self._run(address + 8 * words_before, len(self) - calls_before), calls_before)

    def profile(self) -> NDArray[np.int64]:  # [num_calls]
        """Make the calls as `replay` does. Returns the nanoseconds that each call took."""
        times_ns = np.zeros(len(self) + 1, np.int64)
        run = function("vllm_lite_profile_program", (pointer, int64, pointer), int64)
        self._check(run(*self._arguments, times_ns.ctypes.data))
        return np.diff(times_ns)

    def _check(self, failed: int, calls_before: int = 0) -> None:
        if failed != _DONE:
            raise _failure(self._names, calls_before + failed)


Sizes = tuple[int, ...]
"""Sizes of a step, such as its numbers of tokens and of sequences."""


class SizedProgram:
    """A program for steps of any sizes, made of programs that were recorded for steps of a few sizes.

    All of them must make the same calls. Each word, an address or a number, must be the same in all, or grow with one
    of the sizes, evenly. A replay computes the words that depend on the sizes of its step. The largest and the smallest
    step are recorded, and some in the middle, so code that takes another way for some of the sizes is noticed.
    """

    def __init__(self, recorded: Sequence[tuple[Sizes, Program]]) -> None:
        """Raises NotRecordable if the programs are not of this form."""
        sizes, programs = [sizes for sizes, _ in recorded], [program for _, program in recorded]
        self._names = programs[0].names
        if any(other.names != self._names for other in programs):
            raise NotRecordable("steps of other sizes make other calls")
        words = np.array([program._words for program in programs], np.uint64).view(np.int64)  # noqa: SLF001
        self._packed = words[0].copy()
        self._fixed: list[tuple[int, int]] = []
        """(index of a size, its value in all recorded steps): other values are not known."""
        self._parts: list[tuple[int, NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]] = []
        """(index of a size, indices of the words that depend on it, their values at 0, by how much they grow)."""
        changes, is_known = words[1:] - words[0], (words == words[0]).all(axis=0)
        for index, values in enumerate(zip(*sizes, strict=True)):
            steps = np.array(values[1:]) - values[0]
            if not steps.any():
                self._fixed.append((index, values[0]))
                continue
            largest = int(np.abs(steps).argmax())
            growth = changes[largest] // steps[largest]
            at = np.flatnonzero(~is_known & (changes == steps[:, None] * growth).all(axis=0))
            is_known[at] = True
            self._parts.append((index, at, words[0, at] - growth[at] * values[0], growth[at]))
        if not is_known.all():
            raise NotRecordable(f"an argument of {self._name_at(int(is_known.argmin()))} does not grow evenly")
        self._run = function("vllm_lite_run_program", (pointer, int64), int64)
        self._arguments = (self._packed.ctypes.data, len(self._names))

    @staticmethod
    def sizes_to_record(least: Sizes, most: Sizes) -> list[Sizes]:
        """Sizes of the steps from which the program for all between `least` and `most` can be made, the largest first.
        Raises NotRecordable if they are too close together."""
        inside = [tuple(low + (high - low) // part for low, high in zip(least, most, strict=True)) for part in (2, 8)]
        return list(dict.fromkeys((most, least, _between(least, most), *inside)))

    def __len__(self) -> int:
        return len(self._names)

    def fits(self, sizes: Sizes) -> bool:
        """Whether it can be replayed for a step of these sizes: not if one differs that was the same in all recorded
        steps."""
        return all(sizes[index] == value for index, value in self._fixed)

    def replay(self, sizes: Sizes) -> None:
        """Make the calls for a step of these sizes, which it `fits`. Raises RuntimeError if one failed."""
        for index, at, start, growth in self._parts:
            self._packed[at] = start + growth * sizes[index]
        failed = self._run(*self._arguments)
        if failed != _DONE:
            raise _failure(self._names, failed)

    def _name_at(self, word: int) -> str:
        """Name of the call that has a word. The second word of each call counts those that follow."""
        call = at = 0
        while word >= (at := at + 2 + int(self._packed[at + 1])):
            call += 1
        return self._names[call]


def _between(least: Sizes, most: Sizes) -> Sizes:
    """Sizes of a third step: each lies at another fraction of its range, so that growth with one is none with
    another. Raises NotRecordable if the ranges are too small for that."""
    chosen, fractions = list(least), set[Fraction]()
    for index in sorted(range(len(least)), key=lambda index: most[index] - least[index]):
        if (width := most[index] - least[index]) == 0:
            continue
        free = next((step for step in range(width + 1) if Fraction(step, width) not in fractions), None)
        if free is None:
            raise NotRecordable("the largest step is too small")
        fractions.add(Fraction(free, width))
        chosen[index] += free
    return tuple(chosen)


def _failure(names: Sequence[str], call: int) -> RuntimeError:
    return RuntimeError(f"call {call} of {len(names)} of a recorded step failed, {names[call]}")


def _recorded_address(name: str) -> int:
    try:
        recorded = getattr(library(), f"{name}_recorded")
    except AttributeError:
        raise NotRecordable(f"{name} cannot be recorded") from None
    return int(ctypes.cast(recorded, pointer).value or 0)


def _word(argtype: Any, value: Any) -> int:
    """Encode an argument as csrc/cpu/program.h reads it."""
    if argtype is float32:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if argtype not in (pointer, int32, int64):
        raise NotRecordable(f"arguments of type {argtype.__name__} cannot be recorded")
    if value is not None and not isinstance(value, int):
        raise NotRecordable(f"an argument is a {type(value).__name__}, not an address or a number")
    return (value or 0) & 0xFFFF_FFFF_FFFF_FFFF


class _OnlyViews(TorchDispatchMode):
    """Refuses all operations of torch except views. Allocations are refused, too, because nothing would keep the
    memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because True would make torch load its compiler at the first operation, which takes one second
        of a request."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.name not in _VIEWS:  # noqa: SLF001 (torch has no public name for it)
            raise NotRecordable(f"{func} is an operation of torch")
        return func(*args, **kwargs or {})
