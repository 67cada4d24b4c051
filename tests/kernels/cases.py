"""Cases of the kernels: functions of a launcher and a device, without pytest. Each `*_cases.py` has a list of them."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_lite.kernels.cuda.launcher import Arg, Launcher

Case = Callable[[Launcher, torch.device], None]


class Launch(NamedTuple):
    kernel: str
    """Name of the kernel with its template arguments."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    scalars: Sequence[Arg]
    shared_bytes: int

    @property
    def name(self) -> str:
        return self.kernel.partition("<")[0]


class Recorder:
    """A launcher that records the kernels that are requested and launched. It runs them only if `launcher` is given."""

    multiprocessor_bytes = 228 * 1024

    def __init__(self, launcher: Launcher | None = None) -> None:
        self.launcher = launcher
        self.names: dict[tuple[str, str], None] = {}
        """(source, instantiation) of every kernel that was requested."""
        self.launches: list[Launch] = []

    def kernel(self, source: str, name: str) -> Callable[..., None]:
        self.names[source, name] = None

        def launch(
            grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Arg], shared_bytes: int = 0
        ) -> None:
            scalars = [arg for arg in args if not isinstance(arg, torch.Tensor)]
            self.launches.append(Launch(name, grid, block, scalars, shared_bytes))
            if self.launcher is not None:
                self.launcher.kernel(source, name)(grid, block, args, shared_bytes)

        return launch


@cache
def all_cases() -> dict[str, dict[str, Case]]:
    """File -> name -> case."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("*_cases.py"))
    return {file: dict(import_module(f"tests.kernels.{file}").CASES) for file in files}


def needed_by(cases: Iterable[Case]) -> dict[str, list[str]]:
    """Source -> instantiations that the cases need, for a launcher that can build many at once."""
    recorder, needed = Recorder(), dict[str, list[str]]()
    for run_case in cases:
        try:
            run_case(recorder, torch.device("cpu"))
        except (AssertionError, IndexError, ValueError):  # nothing has been computed
            pass
    for source, name in recorder.names:
        needed.setdefault(source, []).append(name)
    return needed
