"""The weights come from disk while the workers import torch. A hint to the system: what is missing is read later."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from vllm_lite.checkpoint.gguf.files import gguf_files
from vllm_lite.errors import ModelError
from vllm_lite.runtime.machine import memory_limit_bytes

REQUEST_BYTES = 1 << 20
"""The system ignores what is above its own limit, which is about this."""


def start_reading_ahead(folder: str) -> threading.Thread:
    """Read the weights in `folder` into the system's cache, at most half of the memory: more would drop the first.

    Not in a worker: a thread would have to take turns with its imports.
    """
    thread = threading.Thread(target=_read, args=(Path(folder),), name="read ahead", daemon=True)
    thread.start()
    return thread


def _files(folder: Path) -> list[Path]:
    with suppress(ModelError):  # who loads them says what is wrong
        return gguf_files(folder) or sorted(folder.glob("model*.safetensors"))
    return []


def _read(folder: Path) -> None:
    left = memory_limit_bytes() // 2
    for file in _files(folder):
        with suppress(OSError), file.open("rb") as stream:
            size = min(left, os.fstat(stream.fileno()).st_size)
            left -= size
            for at in range(0, size, REQUEST_BYTES):
                os.posix_fadvise(stream.fileno(), at, REQUEST_BYTES, os.POSIX_FADV_WILLNEED)
