"""Writes the file of a trace: MAGIC, then for each record its length as little-endian u32 and its msgpack bytes."""

import os
import stat
from contextlib import suppress

import msgspec

from vllm_lite.trace.records import MAGIC, Record


class TraceWriter:
    """Appends records to a new file that only its owner may read. Every method may raise OSError."""

    def __init__(self, path: str) -> None:
        keep_previous(path)
        self._encode = msgspec.msgpack.Encoder().encode
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb", 1 << 16)  # noqa: SIM115
        self._file.write(MAGIC)

    def write(self, record: Record) -> None:
        payload = self._encode(record)
        self._file.write(len(payload).to_bytes(4, "little") + payload)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def keep_previous(path: str) -> None:
    """Rename an existing trace to PATH.previous, so that a restarted engine does not overwrite the trace of one that
    died."""
    with suppress(FileNotFoundError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            os.replace(path, f"{path}.previous")
