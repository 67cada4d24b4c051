"""Part of `gpu_check`: the cases of one file of tests/kernels, on the GPU or with the emulator, in this process."""

import importlib
import time
from typing import TYPE_CHECKING

from gpu_check_parts import emit, parser_of

if TYPE_CHECKING:
    import torch

    from vllm_lite.kernels.cuda.launcher import Launcher

SAY_EVERY_S = 5.0


def open_launcher(emulate: bool) -> "tuple[Launcher, torch.device]":
    """Return the launcher that runs kernels here, and the device of their tensors."""
    import torch

    if emulate:
        from tests.kernels.emulator import EmulatorLauncher

        return EmulatorLauncher(), torch.device("cpu")
    from vllm_lite.kernels.cuda.cupy_launcher import CupyLauncher

    torch.cuda.set_device(0)
    return CupyLauncher(), torch.device("cuda", 0)


def usable(device: "torch.device") -> bool:
    """Whether the device still works. After an illegal access it fails every call until the process ends."""
    import torch

    if device.type == "cpu":
        return True
    try:
        torch.cuda.synchronize(device)
        return bool(torch.ones(1, device=device).item() == 1)
    except Exception:
        return False


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name", help="module in tests/kernels")
    parser.add_argument("--max-cases", type=int, default=0)
    parser.add_argument("--only", default="", help="numbers of cases, separated by commas")
    arguments = parser.parse_args()
    try:
        cases = importlib.import_module(f"tests.kernels.{arguments.name}").CASES
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("tests", "vllm_lite"):
            raise
        emit(skipped=f"its cases need {error.name}, which is not installed", finished=True)
        return
    cases = cases[: arguments.max_cases or None]
    only = {int(number) for number in arguments.only.split(",") if number}
    launcher, device = open_launcher(arguments.emulate)
    said_s = time.monotonic()
    for index, (name, case) in enumerate(cases):
        if index < arguments.first or (only and index not in only):
            continue
        emit(begin=index, case=name)
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            emit(say=f"case {index + 1} of {len(cases)}")
        try:
            case(launcher, device)
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:1000]
        still = usable(device)
        if problem or not still:
            emit(case=name, failed=problem or "the device reports an error behind it", usable=still)
        else:
            emit(passed=name)
        if not still:
            return
    emit(say=f"{len(cases)} cases done", finished=True)


if __name__ == "__main__":
    main()
