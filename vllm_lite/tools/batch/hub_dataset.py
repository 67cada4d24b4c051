"""Data sets, read with the library `datasets`: datasets:ID?name=CONFIG&split=SPLIT&revision=COMMIT.

ID is an id of the hub, or a folder or loader's name for `load_dataset`; a folder needs no network. The library keeps
the rows in memory-mapped files, from which they are read the second time.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.tools.batch.batch_source import Survey
from vllm_lite.tools.batch.line_bits import IdFinder
from vllm_lite.tools.batch.row_mapper import RowMapper
from vllm_lite.tools.batch.rows import Bad, Entry

OPTIONS = ("name", "split", "revision")
DEFAULT_SPLIT = "train"


class HubDataset:
    """One split of a data set."""

    def __init__(self, given: str, mapper: RowMapper) -> None:
        """Load it. Raises ConfigError if that fails, or if columns are missing."""
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ConfigError("datasets:ID needs the library datasets: pip install 'vllm-lite[datasets]'") from error
        name, _, query = given.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        if unknown := sorted(options.keys() - {*OPTIONS}):
            known = ", ".join(OPTIONS)
            raise ConfigError(f"datasets:{given} has the option {unknown[0]!r}; known are {known}")
        try:
            rows = load_dataset(name, **{"split": DEFAULT_SPLIT, **options})
        except Exception as error:  # the library, its readers and the network raise many types
            raise ConfigError(f"datasets:{given} cannot be loaded: {_first_line(error)}") from error
        self._mapper = mapper
        self._rows = rows.select_columns(mapper.columns(rows.column_names, f"datasets:{given}"))

    def survey(self) -> Survey:
        digest, ids, num_rows = blake2b(digest_size=16), IdFinder(), 0
        for entry in self.entries():
            num_rows += 1
            digest.update(msgspec.json.encode(tuple(entry)))
            if entry.custom_id is not None:
                ids.add(entry.line, entry.custom_id)
        return Survey(num_rows, digest.hexdigest(), ids.repeated())

    def entries(self) -> Iterator[Entry]:
        for number, row in enumerate(self._rows, 1):
            yield self._request(number, row)

    def _request(self, number: int, row: Any) -> Entry:
        if not isinstance(row, dict):
            return Bad(number, None, "invalid_request", f"the row is not a struct, but {type(row).__name__}")
        return self._mapper.request(number, row)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0][:300]
