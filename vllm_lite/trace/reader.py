"""Reads a trace, record by record."""

from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from vllm_lite.errors import ProtocolError
from vllm_lite.trace.records import MAGIC, MAX_RECORD_BYTES, Header, Record


class TraceReader:
    """Reads the header of the file at `path`, then iterates over all other records. Raises ProtocolError if it is no
    trace.

    If the file ends within a record, for example because its writer was killed, the iteration ends before this record
    and `cut_off` becomes True.
    """

    def __init__(self, path: str) -> None:
        self.cut_off = False
        self._path = path
        self._decode = msgspec.msgpack.Decoder(Record).decode
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise ProtocolError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[Record]:
        with self._file:
            while (record := self._next()) is not None:
                yield record

    def close(self) -> None:
        self._file.close()

    def _read_header(self) -> Header:
        magic = self._file.read(len(MAGIC))
        if magic[:-1] != MAGIC[:-1]:
            raise ProtocolError(f"{self._path}: not a trace; it was not written by --record")
        if magic != MAGIC:
            raise ProtocolError(f"{self._path}: a trace of version {magic[-1]}; this version reads {MAGIC[-1]}")
        header = self._next()
        if not isinstance(header, Header):
            raise ProtocolError(f"{self._path}: the trace has no header")
        return header

    def _next(self) -> Record | None:
        length = self._file.read(4)
        size = int.from_bytes(length, "little")
        if size > MAX_RECORD_BYTES:
            raise ProtocolError(
                f"{self._path}: damaged, a record of {size} bytes; at most {MAX_RECORD_BYTES} are taken"
            )
        payload = self._file.read(size)
        if len(length) < 4 or len(payload) < size:
            self.cut_off = bool(length)
            return None
        try:
            record: Record = self._decode(payload)
            return record
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{self._path}: damaged, a record does not decode: {error}") from error
