"""A fake of CUDA's graph capture: recorded calls have fixed addresses and grids, and Python does not run again.

While `run` is recorded, launches of kernels (of an emulated GPU, or native ones of the CPU in their place) are stored
and not made. Operations of torch are made once, for the shapes of their results, and repeated by every replay, into the
same memory. Copying a value to the host ends the capture, as on a device.

A launch keeps no tensor alive: if nothing else does, the replay raises an error, where a device would read whatever is
in that memory then.
"""

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kernels.emulator import EmulatedKernel, EmulatorLauncher
from vllm_lite.kernels.cpu.library import Function, recorded_by
from vllm_lite.kernels.cuda.launcher import Arg
from vllm_lite.worker.graphs import Graph

_HOST_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
)
_WAITING_OPERATIONS = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "equal")
)
_recorder: "_Recorder | None" = None


class CaptureError(RuntimeError):
    """An operation that would break a capture on a device, or whose replay would compute something wrong."""


class _Address(NamedTuple):
    """A tensor as a launch refers to it, by its address; it does not own the memory."""

    pointer: int
    dtype: torch.dtype
    storage: StorageWeakRef

    def tensor(self, kernel: str) -> torch.Tensor:
        if self.storage.expired():
            raise CaptureError(f"a replayed launch of {kernel} reads memory that was given back")
        if self.pointer == 0:
            return torch.empty(0, dtype=self.dtype)
        memory = (ctypes.c_char * self.dtype.itemsize).from_address(self.pointer)
        return torch.frombuffer(memory, dtype=self.dtype)


class CapturingLauncher:
    """Runs launches at once; while a CudaLikeCapture records, stores them in its graph."""

    def __init__(self, launcher: EmulatorLauncher) -> None:
        self._launcher = launcher
        self.multiprocessor_bytes = launcher.multiprocessor_bytes

    def kernel(self, source: str, name: str) -> Callable[..., None]:
        made = self._launcher.kernel(source, name)

        def launch(
            grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Arg], shared_bytes: int = 0
        ) -> None:
            if _recorder is None:
                made(grid, block, args, shared_bytes)
            else:
                _recorder.add_launch(made, name, (grid, block, shared_bytes), args)

        return launch


class _Recorder:
    """Records what one call does, in order."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], Any]] = []
        self.num_launches = 0

    def add_launch(self, kernel: EmulatedKernel, name: str, sizes: Any, args: Sequence[Arg]) -> None:
        fixed = [
            _Address(arg.data_ptr(), arg.dtype, StorageWeakRef(arg.untyped_storage()))
            if isinstance(arg, torch.Tensor)
            else arg
            for arg in args
        ]
        grid, block, shared_bytes = sizes
        self.num_launches += 1

        def launch() -> None:
            given = [arg.tensor(name) if isinstance(arg, _Address) else arg for arg in fixed]
            kernel(grid, block, given, shared_bytes)

        self.actions.append(launch)

    def add_native(self, called: Function, args: tuple[Any, ...]) -> int:
        self.actions.append(lambda: called(*args))
        return -1  # the status of a kernel that has succeeded

    def add_operation(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]

        def again() -> None:
            for kept, new in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                if new.data_ptr() != kept.data_ptr():
                    kept.copy_(new)

        self.actions.append(again)


class _Operations(TorchDispatchMode):
    """Passes every operation of torch to a recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.name in _WAITING_OPERATIONS or _selects_by_mask(func, args):
            raise CaptureError(f"{func} waits for the device")
        results = func(*args, **kwargs or {})
        self.recorder.add_operation(func, args, kwargs or {}, results)
        return results


def _selects_by_mask(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation is x[mask], whose size depends on the mask's contents."""
    return func._schema.name == "aten::index" and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


class _NoHostReads(TorchFunctionMode):
    """Refuses operations that would wait for a device, and that do not pass through torch's dispatcher on a CPU."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _HOST_READS:
            raise CaptureError(f"Tensor.{func.__name__} waits for the device")
        return func(*args, **kwargs or {})


class CudaLikeGraph:
    """The recorded calls."""

    def __init__(self, recorder: _Recorder) -> None:
        self._actions = recorder.actions
        self.num_launches = recorder.num_launches
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        for action in self._actions:
            action()


class CudaLikeCapture:
    """Stands for CudaCapture on a machine without a GPU."""

    on_demand = False
    spent_s = 0.0

    def __init__(self) -> None:
        self.graphs: list[CudaLikeGraph] = []
        self.piecewise: list[list[CudaLikeGraph]] = []

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        global _recorder
        prepare()
        run()
        recorder = _Recorder()
        _recorder = recorder
        try:
            with recorded_by(recorder.add_native), _NoHostReads(), _Operations(recorder):
                run()
        finally:
            _recorder = None
        self.graphs.append(CudaLikeGraph(recorder))
        return self.graphs[-1]

    def pieces(self, run: Callable[[Callable[[], None]], None]) -> Sequence[Graph]:
        """Record one graph from each cut to the next. Launches during a cut are in no graph."""
        global _recorder
        if gc.isenabled():
            raise CaptureError("a garbage collection could free device memory while something is captured")
        run(lambda: None)
        recorders: list[_Recorder] = []
        with ExitStack() as stack:

            def begin() -> None:
                global _recorder
                recorders.append(recorder := _Recorder())
                _recorder = recorder
                for mode in (recorded_by(recorder.add_native), _NoHostReads(), _Operations(recorder)):
                    stack.enter_context(mode)

            def cut() -> None:
                stack.close()
                begin()

            begin()
            try:
                run(cut)
            finally:
                _recorder = None
        made = [CudaLikeGraph(recorder) for recorder in recorders]
        self.piecewise.append(made)
        return made

    def used_bytes(self) -> int:
        return 0
