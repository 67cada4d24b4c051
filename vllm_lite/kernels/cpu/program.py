"""Programs: kernel calls that are recorded once and made again by one call, without Python, torch or an allocation.

Recording runs Python code as usual, only that native kernels are not called: their arguments are kept, addresses and
numbers, and the code sees that all went well. So it must not look at anything that a kernel computes; memory whose
address is kept must stay where it is, and what changes from one run to the next must be read from it.

An operation of torch would be carried out once, while recording, and be missing in the program. So recording refuses
all of them but those that only make views.
"""

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
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
    """A step to record that is more than calls of recordable kernels."""


class Program:
    """Keeps calls in their order. It knows addresses only: its owner must keep what they point to."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._names: list[str] = []
        self._packed = np.empty(0, np.uint64)
        self._arguments = (0, 0)
        self._stops: list[tuple[int, int]] = []
        """Words and calls before each."""
        self._run = function("vllm_lite_run_program", (pointer, int64), int64)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> list[str]:
        """The names of the functions, in the order of the calls."""
        return list(self._names)

    @property
    def first_arguments(self) -> list[int]:
        """The first of each call's, as a word; 0 of a call without any."""
        firsts, at = [], 0
        for _ in self._names:
            count = self._words[at + 1]
            firsts.append(self._words[at + 2] if count else 0)
            at += 2 + count
        return firsts

    def record(self, run: Callable[[], None]) -> None:
        """Append the calls that `run` makes. Raises NotRecordable at the first thing in it that cannot be a part."""
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
        """Make the calls. RuntimeError if one could not do its work, as with an id that does not exist."""
        self._check(self._run(*self._arguments))

    def stop(self) -> None:
        """While it is recorded: mark a place where `replay_with` calls something."""
        self._stops.append((len(self._words), len(self._names)))

    def replay_with(self, between: Sequence[Callable[[], object]]) -> None:
        """As replay, with a call at each mark."""
        address, words_before, calls_before = self._packed.ctypes.data, 0, 0
        for (words, calls), call in zip(self._stops, between, strict=True):
            self._check(self._run(address + 8 * words_before, calls - calls_before), calls_before)
            call()
            words_before, calls_before = words, calls
        self._check(self._run(address + 8 * words_before, len(self) - calls_before), calls_before)

    def profile(self) -> NDArray[np.int64]:  # [num_calls]
        """As replay; returns the nanoseconds that each call took."""
        times_ns = np.zeros(len(self) + 1, np.int64)
        run = function("vllm_lite_profile_program", (pointer, int64, pointer), int64)
        self._check(run(*self._arguments, times_ns.ctypes.data))
        return np.diff(times_ns)

    def _check(self, failed: int, calls_before: int = 0) -> None:
        if failed != _DONE:
            call = calls_before + failed
            raise RuntimeError(f"call {call} of {len(self)} of a recorded step failed, {self._names[call]}")


def _recorded_address(name: str) -> int:
    try:
        recorded = getattr(library(), f"{name}_recorded")
    except AttributeError:
        raise NotRecordable(f"{name} cannot be recorded") from None
    return int(ctypes.cast(recorded, pointer).value or 0)


def _word(argtype: Any, value: Any) -> int:
    """An argument as csrc/cpu/program.h reads it."""
    if argtype is float32:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if argtype not in (pointer, int32, int64):
        raise NotRecordable(f"arguments of type {argtype.__name__} cannot be recorded")
    if value is not None and not isinstance(value, int):
        raise NotRecordable(f"an argument is a {type(value).__name__}, not an address or a number")
    return (value or 0) & 0xFFFF_FFFF_FFFF_FFFF


class _OnlyViews(TorchDispatchMode):
    """Refuses all operations but views. An allocation is refused, too: nothing would keep the memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer to torch's question to a mode: True would load its compiler with the first operation, one second of a
        request."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.name not in _VIEWS:  # noqa: SLF001 (torch has no public name for it)
            raise NotRecordable(f"{func} is an operation of torch")
        return func(*args, **kwargs or {})
