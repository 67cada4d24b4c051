"""Parquet input and output, with pyarrow: a table of requests, and a table of answers."""

import os
from collections.abc import Iterator
from hashlib import file_digest
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch.batch_source import Survey
from vllm_lite.tools.batch.line_bits import IdFinder
from vllm_lite.tools.batch.row_mapper import RowMapper
from vllm_lite.tools.batch.rows import Entry

ROWS_AT_ONCE = 1024
BYTES_AT_ONCE = 16 << 20
COLUMNS = ("id", "custom_id", "status_code", "request_id", "body", "error")
"""Columns of the output; `body` and `error` are JSON texts, as their fields depend on the route."""


def load_pyarrow() -> Any:
    """Import pyarrow. Raises ConfigError if it is missing."""
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise ConfigError("Parquet files need pyarrow: pip install 'vllm-lite[parquet]'") from error


class ParquetInput:
    """A Parquet file of requests, or of prompts."""

    def __init__(self, path: str, mapper: RowMapper) -> None:
        """Raises ConfigError if the file is not Parquet, or columns are missing."""
        self._path = path
        self._mapper = mapper
        self._arrow = load_pyarrow()
        self._file = self._open()
        self._columns = mapper.columns(self._file.schema_arrow.names, repr(path))

    def survey(self) -> Survey:
        with open(self._path, "rb") as file:
            digest = file_digest(file, "blake2b").hexdigest()
        ids = IdFinder()
        for number, row in self._rows(self._columns[:1]):
            given = row.get(self._mapper.id_column or "custom_id")
            if isinstance(given, str | int) and str(given):
                ids.add(number, str(given))
        return Survey(self._file.metadata.num_rows, digest, ids.repeated())

    def entries(self) -> Iterator[Entry]:
        for number, row in self._rows(self._columns):
            yield self._mapper.request(number, row)

    def _rows(self, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        try:
            for batch in self._open().iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (OSError, self._arrow.ArrowException) as error:
            raise ConfigError(f"{self._path!r} cannot be read after row {number}: {error}") from error

    def _open(self) -> Any:
        try:
            return self._arrow.parquet.ParquetFile(self._path)
        except (OSError, self._arrow.ArrowException) as error:
            raise ConfigError(f"{self._path!r} cannot be read as Parquet: {error}") from error


def write_parquet(lines: Path, path: Path) -> None:
    """Write the answers in `lines`, a file of JSON lines, to a new Parquet file, and sync it to disk."""
    arrow = load_pyarrow()
    kinds = {"status_code": arrow.int32()}
    schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in COLUMNS])
    with arrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer, lines.open("rb") as file:
        taken, num_bytes = list[dict[str, Any]](), 0
        for line in file:
            taken.append(_row(line))
            num_bytes += len(line)
            if len(taken) == ROWS_AT_ONCE or num_bytes > BYTES_AT_ONCE:
                writer.write_table(arrow.Table.from_pylist(taken, schema))
                taken, num_bytes = [], 0
        if taken:
            writer.write_table(arrow.Table.from_pylist(taken, schema))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Line(msgspec.Struct):
    """A line of the output; bodies are not parsed."""

    id: str
    custom_id: str | None
    response: "_Response | None"
    error: msgspec.Raw


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


_DECODER = msgspec.json.Decoder(_Line)


def _row(data: bytes) -> dict[str, Any]:
    line = _DECODER.decode(data)
    response = line.response
    error = bytes(line.error).decode()
    return {
        "id": line.id,
        "custom_id": line.custom_id,
        "status_code": response and response.status_code,
        "request_id": response and response.request_id,
        "body": response and bytes(response.body).decode(),
        "error": None if error == "null" else error,
    }
