"""Logging: one line per fact a user wants to know, on stderr, with the process that says it."""

import logging
import os
import sys
import time

MOMENTS_VARIABLE = "VLLM_LITE_MOMENTS"


class _SafeHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A closed pipe or a full disk under the log must never stop the service."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def setup(process: str, level: str = "info") -> None:
    """Send this process's records of `vllm_lite` to stderr, named `process` ("engine", "worker 0")."""
    handler = _SafeHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {process:<8} %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("vllm_lite")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def get(name: str) -> logging.Logger:
    return logging.getLogger(name)


def moment(process: str, text: str) -> None:
    """Note that `process` has done `text`, in the file that VLLM_LITE_MOMENTS names, for `vllm-lite bench startup`."""
    if path := os.environ.get(MOMENTS_VARIABLE):
        with open(path, "a") as file:  # one short line: writers do not mix
            file.write(f"{time.monotonic()}\t{process}\t{text}\n")
