"""BatchSource: the interface of a batch's inputs."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch.line_bits import LineBits
from vllm_lite.tools.batch.rows import Entry, repeated


class Survey(NamedTuple):
    """Summary of an input: its number of rows, a digest of its content, and the lines with a repeated custom_id."""

    num_rows: int
    digest: str
    repeated: LineBits


class BatchSource(Protocol):
    """A source of rows. It is read twice in the same order, for the survey and for sending, and rows are not kept."""

    def survey(self) -> Survey: ...

    def entries(self) -> Iterator[Entry]: ...


def entries_of(source: BatchSource, survey: Survey) -> Iterator[Entry]:
    """The rows of `source`; rows with a repeated custom_id are bad rows."""
    for entry in source.entries():
        yield repeated(entry) if entry.line in survey.repeated else entry


def is_parquet(path: str) -> bool:
    return path.endswith((".parquet", ".pq"))


def check_local(path: str, flag: str) -> None:
    """Raises ConfigError if `path` is a URL."""
    if "://" in path:
        raise ConfigError(f"{flag} must be a file on this machine, got {path!r}; download or upload it yourself")
