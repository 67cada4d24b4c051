"""OpenAI's batch files: one JSON row per line, read one at a time."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch import rows
from vllm_lite.tools.batch.batch_source import Survey
from vllm_lite.tools.batch.line_bits import IdFinder

MAX_LINE_BYTES = 64 << 20
"""Longer lines are bad rows, and their content is not kept."""
CHUNK_BYTES = 1 << 20


class _Named(msgspec.Struct):
    """A row's custom_id; the rest is only checked to be JSON."""

    custom_id: Any = None


class JsonlFile:
    def __init__(self, path: str) -> None:
        self._path = path

    def survey(self) -> Survey:
        """Read the file once. Raises ConfigError if it cannot be read."""
        digest, ids, num_rows = blake2b(digest_size=16), IdFinder(), 0
        for number, line in self._lines(digest):
            num_rows += 1
            try:
                custom_id = rows.decoded(line, _Named).custom_id
            except (msgspec.DecodeError, ValueError, RecursionError):
                continue  # a bad row, without an id
            if isinstance(custom_id, str) and custom_id:
                ids.add(number, custom_id)
        return Survey(num_rows, digest.hexdigest(), ids.repeated())

    def entries(self) -> Iterator[rows.Entry]:
        """Parse the rows one at a time, as they are taken. Raises ConfigError if the file cannot be read."""
        for number, line in self._lines():
            if len(line) > MAX_LINE_BYTES:
                yield rows.Bad(number, None, "invalid_request", f"a line has at most {MAX_LINE_BYTES >> 20} MiB")
            else:
                yield rows.parse(number, line)

    def _lines(self, digest: Any = None) -> Iterator[tuple[int, bytes]]:
        """Numbers and bytes of the nonempty lines; only MAX_LINE_BYTES + 1 bytes of a longer line. Raises
        ConfigError."""
        try:
            yield from self._read_lines(digest)
        except OSError as error:
            raise ConfigError(f"{self._path!r} cannot be read: {error.strerror or error}") from error

    def _read_lines(self, digest: Any) -> Iterator[tuple[int, bytes]]:
        with open(self._path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if digest is not None:
                    digest.update(line)
                rest = line
                while len(line) > MAX_LINE_BYTES and not rest.endswith(b"\n") and (rest := file.readline(CHUNK_BYTES)):
                    if digest is not None:
                        digest.update(rest)
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)  # written by PowerShell and editors of Windows
                if line.strip():
                    yield number, line
