"""The child that test_supervise.py starts."""

import os
import signal
from pathlib import Path

from tests.unit.test_supervise import Settings
from vllm_lite.runtime.supervise import run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import wait

LONGEST_S = 60.0


def main(settings: Settings, stop: Wakeup) -> int:
    if settings.mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if settings.mode == "default":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path(settings.marker).write_text(f"{os.getcwd() if settings.mode == 'where' else os.getpid()}\n")
    if settings.mode == "raise":
        raise RuntimeError("asked to")
    if settings.mode.startswith("return"):
        return int(settings.mode.split()[1])
    wait(LONGEST_S, stop)
    return 7


def cleanup(settings: Settings) -> None:
    Path(settings.marker + ".cleaned").write_text("cleaned\n")


if __name__ == "__main__":
    run_child(main, Settings, graceful=True, cleanup=cleanup)
