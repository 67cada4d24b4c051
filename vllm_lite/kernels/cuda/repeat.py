"""RepeatedLaunches: repeats launches with a few other tensors, as the layers of a step hardly differ otherwise.

The first layer's call checks shapes, chooses a kernel and computes its arguments, which takes longer than a launch. Its
launches are recorded, and repeated for the other layers with the tensors that differ.
"""

from collections.abc import Sequence

import torch

from vllm_lite.kernels.cuda.launcher import Arg, Kernel, Launcher

Sizes = tuple[int, int, int]


class RepeatedLaunches:
    """A launcher that records its launches, with the positions of each tensor of `changing` in the arguments."""

    def __init__(self, launcher: Launcher, changing: Sequence[torch.Tensor]) -> None:
        self._launcher = launcher
        self._pointers = [tensor.data_ptr() for tensor in changing]
        self._launches: list[tuple[Kernel, Sizes, Sizes, list[Arg], int, list[tuple[int, int]]]] = []

    @property
    def multiprocessor_bytes(self) -> int:
        return self._launcher.multiprocessor_bytes

    def kernel(self, source: str, name: str) -> Kernel:
        made = self._launcher.kernel(source, name)

        def launch(grid: Sizes, block: Sizes, args: Sequence[Arg], shared_bytes: int = 0) -> None:
            made(grid, block, args, shared_bytes)
            places = [
                (place, self._pointers.index(arg.data_ptr()))
                for place, arg in enumerate(args)
                if isinstance(arg, torch.Tensor) and arg.data_ptr() in self._pointers
            ]
            self._launches.append((made, grid, block, list(args), shared_bytes, places))

        return launch

    def again(self, changed: Sequence[torch.Tensor]) -> None:
        """Repeat the launches with these tensors in place of the first ones. They may differ only in their addresses,
        which are multiples of 16 bytes."""
        for kernel, grid, block, args, shared_bytes, places in self._launches:
            for place, which in places:
                args[place] = changed[which]
            kernel(grid, block, args, shared_bytes)
