"""Sources of a batch's rows, whatever they are read from."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch.line_bits import LineBits
from vllm_lite.tools.batch.rows import Entry, repeated


class Survey(NamedTuple):
    """An input at a glance: its rows, a digest of its contents, and the lines whose custom_id an earlier one has."""

    num_rows: int
    digest: str
    repeated: LineBits


class BatchSource(Protocol):
    """Rows, read twice: once for the survey, once to be sent. Both see them in one order, and neither keeps them."""

    def survey(self) -> Survey: ...

    def entries(self) -> Iterator[Entry]: ...


def entries_of(source: BatchSource, survey: Survey) -> Iterator[Entry]:
    """The rows of `source`, with repeated custom_ids as bad ones."""
    for entry in source.entries():
        yield repeated(entry) if entry.line in survey.repeated else entry


def is_parquet(path: str) -> bool:
    return path.endswith((".parquet", ".pq"))


def check_local(path: str, flag: str) -> None:
    """Raises ConfigError for a URL, which is no local file."""
    if "://" in path:
        raise ConfigError(f"{flag} must be a file on this machine, got {path!r}; download or upload it yourself")
