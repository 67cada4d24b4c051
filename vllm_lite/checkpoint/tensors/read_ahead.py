"""Reads weights from disk into the page cache while the workers import torch. Only a hint: the rest is read later."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from vllm_lite.checkpoint.gguf.files import gguf_files
from vllm_lite.errors import ModelError
from vllm_lite.runtime.machine import memory_limit_bytes

REQUEST_BYTES = 1 << 20
"""Bytes per request; the system ignores more than its limit of about this."""


def start_reading_ahead(folder: str) -> threading.Thread:
    """Read the weights in `folder` into the page cache, up to half of the memory: more would evict the first ones.

    Not called in a worker, where the thread would compete with imports for the GIL.
    """
    thread = threading.Thread(target=_read, args=(Path(folder),), name="read ahead", daemon=True)
    thread.start()
    return thread


def _files(folder: Path) -> list[Path]:
    with suppress(ModelError):  # the loader reports errors
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
