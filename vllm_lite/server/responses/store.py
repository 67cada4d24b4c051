"""ResponseStore: ended and background responses in SQLite, in memory or in a file, bounded in number and bytes.

The store knows no API keys. A record's `owner` is a digest of the key and the response's id, so only a request with the
same key finds it. Its `holder` is a digest of the key alone: beyond the limits, the holder with the most loses its
oldest, so that nobody can evict the responses of others. Without keys all share one holder.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log
from vllm_lite.server.openai.errors import ApiError

MAX_RESPONSES = 16_384
BUSY_S = 5.0
"""Seconds for which another API server may lock the file."""
_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses(
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL,
    holder TEXT NOT NULL DEFAULT '')
"""
_INDEX = "CREATE INDEX IF NOT EXISTS holdings ON responses(holder, place, size)"
"""Without the index, each response beyond the limit would read the whole file: the column is stored after the data."""
_FROM_1 = "ALTER TABLE responses ADD COLUMN holder TEXT NOT NULL DEFAULT ''"
HOLDER_OF_THE_MOST = "SELECT holder FROM responses GROUP BY holder ORDER BY {} DESC, max(place) LIMIT 1"
"""Query of the holder with the largest count(*) or sum(size)."""

T = TypeVar("T")
logger = log.get(__name__)


class StoredResponse(msgspec.Struct, frozen=True):
    """One response. Its id is the name of its call (auth.name_of), in files of earlier versions the bare id.

    response  the response object, as JSON
    items     its own input items, a JSON list; earlier ones are its `previous` response's
    events    the events of its stream, compressed by zlib; b"" without a stream
    first     the sequence number of the first of these events
    status    the response's status; "" in records of the first format: read it from the response
    """

    id: str
    owner: str
    previous: str | None
    is_background: bool
    response: bytes
    items: bytes
    events: bytes = b""
    first: int = 0
    holder: str = ""
    status: str = ""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + len(self.events) + 512


_record = msgspec.msgpack.Decoder(StoredResponse)


class ResponseStore:
    """Keeps records by id. A file may be shared by several API servers, and outlives them. The methods raise ApiError
    if the database fails."""

    def __init__(self, path: str | None, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        """Open or create the file at `path`; None: the records are in memory. Raises ConfigError if it cannot be
        used."""
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses-store")
        try:
            if path is not None:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._file = self._thread.submit(self._open, path or ":memory:").result(4 * BUSY_S)
        except (OSError, sqlite3.Error, TimeoutError) as error:
            self._thread.shutdown(wait=False)
            raise ConfigError(f"responses_store {path!r} cannot be used: {error}; name another file") from error

    def _open(self, path: str) -> sqlite3.Connection:
        file = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        file.execute("PRAGMA journal_mode=WAL")
        file.execute("PRAGMA synchronous=NORMAL")
        with file:
            file.execute("BEGIN IMMEDIATE")  # other API servers open it at the same time
            version = file.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, 1, _VERSION):
                raise sqlite3.DatabaseError(f"its format is {version}, and this server knows {_VERSION}")
            file.execute(_SCHEMA if version != 1 else _FROM_1)
            file.execute(_INDEX)
            file.execute(f"PRAGMA user_version={_VERSION}")
        return file

    async def get(self, response_id: str) -> StoredResponse | None:
        return await self._run(lambda: self._get(response_id))

    async def put(self, record: StoredResponse) -> None:
        """Store a record, or replace the one with its id. Beyond the limits, the oldest records of the largest holder
        are dropped; a record larger than the whole store is not stored."""
        await self._run(lambda: self._put(record))

    async def delete(self, response_id: str) -> bool:
        """Delete a record. Returns whether it existed."""
        return await self._run(lambda: self._delete(response_id))

    def close(self) -> None:
        self._thread.submit(self._file.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            logger.error("the store of responses failed: %s", error)
            raise ApiError(500, "the store of responses failed; the server's log says why") from error

    def _get(self, response_id: str) -> StoredResponse | None:
        row = self._file.execute("SELECT data FROM responses WHERE id = ?", (response_id,)).fetchone()
        return None if row is None else _record.decode(row[0])

    def _put(self, record: StoredResponse) -> None:
        data = msgspec.msgpack.encode(record)
        with self._file:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.execute("DELETE FROM responses WHERE id = ?", (record.id,))
            if record.size > self._max_bytes:
                return
            self._file.execute(
                "INSERT INTO responses(id, size, data, holder) VALUES (?, ?, ?, ?)",
                (record.id, record.size, data, record.holder),
            )
            count, size = self._file.execute("SELECT count(*), sum(size) FROM responses").fetchone()
            while count > self._max_responses or size > self._max_bytes:
                by = "count(*)" if count > self._max_responses else "sum(size)"
                (holder,) = self._file.execute(HOLDER_OF_THE_MOST.format(by)).fetchone()
                place, its_size = self._file.execute(
                    "SELECT place, size FROM responses WHERE holder = ? ORDER BY place LIMIT 1", (holder,)
                ).fetchone()
                self._file.execute("DELETE FROM responses WHERE place = ?", (place,))
                count, size = count - 1, size - its_size

    def _delete(self, response_id: str) -> bool:
        return self._file.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount > 0
