"""Runs `scripts/gpu_check` with parts that are forked from this process, which has imported torch: in a process of its
own, each part would spend most of its time on that."""

import os
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "gpu" / "check"), str(ROOT)]

import gpu_check_parts  # noqa: E402

LOOK_S = 0.01


class Forked:
    """The part of Popen that gpu_check_parts uses, for a Python script."""

    def __init__(self, command: list[str], *, cwd: Path, env: dict[str, str], stderr: IO[str], **_: Any) -> None:
        self.returncode: int | None = None
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(write_end, 1)
            os.dup2(stderr.fileno(), 2)
            os.chdir(cwd)
            os.environ.update(env)
            os._exit(_run(command[1:]))
        os.close(write_end)
        self.stdout = os.fdopen(read_end)

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (timeout or 0.0)
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if timeout is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("a part", timeout or 0.0)
            else:
                time.sleep(LOOK_S)
        return self.returncode


def _run(argv: list[str]) -> int:
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    names = {"Popen": Forked, "PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    setattr(gpu_check_parts, "subprocess", SimpleNamespace(**names))  # noqa: B010
    runpy.run_path(str(ROOT / "scripts" / "gpu_check"), run_name="__main__")
