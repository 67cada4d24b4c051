"""DiskStore: runs of one rank of one model, in files that engines with the same fingerprint share.

    DIR/<fingerprint>/<rank>-<world>/<first two digits>/<name>

A file appears complete, by rename, and is never changed, so readers need no lock: they check each item after reading
it. A file that does not match its name or its place is removed and counted. One thread writes and scans the directory;
several may read.
"""

import errno
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_lite.kv_disk.folders import RankFolders
from vllm_lite.kv_disk.format import (
    MAX_ITEMS,
    PAGE,
    Damaged,
    Foreign,
    RunHeader,
    checksum,
    name_of,
    pack,
    unpack,
)
from vllm_lite.kv_disk.usage import DRAFT_PREFIX, is_file_name, remove_file, sweep

TOUCH_S = 60.0
"""Minimum seconds between two updates of a file's time of use."""
SWEEP_S = 30.0
"""Seconds between two scans of all files, including those of other engines."""
PAUSE_S = 10.0
"""Seconds without writes after the disk has failed one."""
RECENT_NS = 2_000_000_000
"""A folder that changed within this time may change again within the same tick of its timestamps."""
LARGEST = 0.5
"""Maximum share of the quota for one run: a larger one would evict all others, and is not written."""
WRITTEN = 1 / 64
"""Share of the quota written by this engine that triggers a new scan: others may have written as much."""
SPARE = 4 * WRITTEN
"""Share of the quota kept free for writes of other engines between scans."""
PART_BYTES = 4 << 20
"""Bytes of items written at a time."""
READ_BYTES = 1 << 20
"""Bytes of items read at a time, and checked while they are in the cache of the core that read them."""


_LACKING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE))
"""Errors that are not the file's fault: it is kept, and found again by the next scan."""


class Items(Protocol):
    """Memory of items, by their ids."""

    item_bytes: int

    def to_write(self, ids: Sequence[int]) -> list[memoryview]:
        """Return the bytes of items, to write them to a file."""
        ...

    def to_fill(self, ids: Sequence[int]) -> list[memoryview]:
        """Return memory to read the bytes of items into."""
        ...

    def filled(self, ids: Sequence[int]) -> None:
        """Complete a read: the memory last returned for these items has their bytes."""
        ...


class Changes(NamedTuple):
    """Keys that became available since the last call, those of the latest files first, and keys that became unavailable
    at some time; a key may be both."""

    added: list[bytes]
    removed: list[bytes]


class _File:
    __slots__ = ("keys", "name", "num_bytes", "used_s")

    def __init__(self, name: str, keys: Sequence[bytes], num_bytes: int, used_s: float) -> None:
        self.name = name
        self.keys = tuple(keys)
        self.num_bytes = num_bytes
        self.used_s = used_s


class DiskStore:
    """The store below `root`, a directory that check_directory() has accepted."""

    def __init__(
        self,
        root: Path,
        fingerprint: bytes,
        place: tuple[int, int],
        quota_bytes: int,
        clock: Callable[[], float] = time.time,
        *,
        about: str = "",
    ) -> None:
        """`place` is (rank, world size); `about` describes the model to people. Raises OSError."""
        self.root = root
        self.folders = RankFolders(root, fingerprint, place, about)
        self.quota_bytes = quota_bytes
        self._most_bytes = int((1 - SPARE) * quota_bytes)
        self.num_bytes = 0
        """Bytes of all files below the root, by the last scan and this engine's writes."""
        self.dropped = Counter[str]()
        """Number of removed files by reason: damaged (or truncated), foreign, unreadable, evicted."""
        self.errors = Counter[str]()
        """Number of failed system calls by kind: read, write."""
        self.refusal: OSError | None = None
        """The last write error."""
        self._fingerprint = blake2b(b"%s %d %d" % (fingerprint, *place), digest_size=32).digest()
        """Includes the rank, so that a file moved from another rank is foreign as well."""
        self.clock = clock
        self._lock = threading.Lock()
        self.num_found = 0
        """Number of files found so far that other or earlier engines have written."""
        self._files: dict[str, _File] = {}
        self._by_part: dict[str, dict[str, _File]] = {}  # the same files by part
        self._places: dict[bytes, tuple[_File, int]] = {}
        self._seen: dict[str, int] = {}  # part -> its modification time when it was listed
        self._taken: set[str] = set()
        """Names whose paths are taken by something that is not a file of ours and cannot be removed, such as a folder;
        skipped."""
        self._added: list[bytes] = []
        self._removed: list[bytes] = []
        self._swept_s = self._paused_until_s = 0.0
        self._num_drafts = self._num_written = 0

    # ---- index

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def keys(self) -> list[bytes]:
        """All keys that can be read."""
        with self._lock:
            return list(self._places)

    def take_changes(self) -> Changes:
        by_file: dict[_File, list[bytes]] = {}
        with self._lock:
            for key in self._added:
                if (place := self._places.get(key)) is not None:
                    by_file.setdefault(place[0], []).append(key)
            removed, self._added, self._removed = self._removed, [], []
        files = sorted(by_file, key=lambda file: file.used_s, reverse=True)
        return Changes([key for file in files for key in by_file[file]], removed)

    def look(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Scan the parts that have changed since the last scan: at first all, later those with files of other engines.
        `stop` ends it early; the next scan continues."""
        parts = self.folders.parts()
        for gone in self._by_part.keys() - set(parts):  # somebody has removed the model, or the whole directory
            self._found(gone, set())
            self._seen.pop(gone, None)
        for part in parts:
            if stop():
                return
            folder = self.folders.part(part)
            try:
                changed_ns = os.stat(folder).st_mtime_ns
                if self._seen.get(part) == changed_ns:
                    continue
                names = {entry for entry in os.listdir(folder) if is_file_name(entry)}
            except OSError:
                continue
            is_settled = abs(time.time_ns() - changed_ns) > RECENT_NS
            self._seen[part] = changed_ns if is_settled else 0
            self._found(part, names)
        now_s = self.clock()
        if abs(now_s - self._swept_s) > SWEEP_S:
            self.sweep()

    def _found(self, part: str, names: set[str]) -> None:
        """Update the index of a part, whose files are `names`."""
        with self._lock:
            gone = [file for name, file in self._by_part.get(part, {}).items() if name not in names]
        for file in gone:
            self._forget(file)
        self._taken -= {taken for taken in self._taken if taken[:2] == part and taken not in names}
        for new in names - self._files.keys() - self._taken:
            self._take_up(new)

    def _take_up(self, name: str) -> None:
        """Index a file that another or an earlier engine has written."""
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            status = _status(descriptor)
            header = self._header(os.pread(descriptor, PAGE, 0), status.st_size, name)
            self._index(_File(name, header.keys, status.st_size, status.st_mtime))
            self.num_found += 1
        except (OSError, Foreign, Damaged) as error:
            self._drop(name, error)
        finally:
            os.close(descriptor)

    def _header(self, page: bytes, num_bytes: int, name: str) -> RunHeader:
        header = unpack(page, num_bytes, self._fingerprint)
        if name_of(header.keys) != name:
            raise Damaged("its name is that of another file")
        return header

    def _index(self, file: _File) -> None:
        with self._lock:
            if file.name in self._files:
                return
            self._files[file.name] = file
            self._by_part.setdefault(file.name[:2], {})[file.name] = file
            for number, key in enumerate(file.keys):
                if key not in self._places:
                    self._places[key] = file, number
                    self._added.append(key)

    def _forget(self, file: _File) -> None:
        """Remove a file from the index; it has been removed from disk, or will be."""
        with self._lock:
            if self._files.pop(file.name, None) is None:
                return
            of_part = self._by_part[file.name[:2]]
            del of_part[file.name]
            if not of_part:
                del self._by_part[file.name[:2]]
            for key in file.keys:
                if (place := self._places.get(key)) is not None and place[0] is file:
                    del self._places[key]
                    self._removed.append(key)

    def _drop(self, name: str, error: Exception) -> None:
        """Remove an invalid file, and count it."""
        known = self._files.get(name)
        if known is not None:
            self._forget(known)
        kind = type(error).__name__.lower() if isinstance(error, Foreign | Damaged) else "unreadable"
        if isinstance(error, FileNotFoundError) or name in self._taken:
            return
        if isinstance(error, OSError) and error.errno in _LACKING:
            self._seen.pop(name[:2], None)
            return
        self.dropped[kind] += 1
        if not remove_file(self._path(name)) and os.path.lexists(self._path(name)):
            self._taken.add(name)

    def _path(self, name: str) -> str:
        return os.path.join(self.folders.part(name), name)

    # ---- reading

    def read(self, keys: Sequence[bytes], ids: Sequence[int], items: Items) -> tuple[set[int], int]:
        """Read the contents of `keys` into the items `ids`. Returns the indices that failed, whose items have undefined
        contents, and the number of bytes read."""
        failed, num_bytes = set[int](), 0
        runs: dict[str, list[tuple[int, int]]] = {}
        for index, key in enumerate(keys):
            place = self._places.get(key)
            if place is None:
                failed.add(index)
            else:
                runs.setdefault(place[0].name, []).append((index, place[1]))
        for name, places in runs.items():
            try:
                num_bytes += self._read_file(name, places, keys, ids, items)
            except (OSError, Foreign, Damaged) as error:
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):  # evicted by another engine
                    self.errors["read"] += 1
                self._drop(name, error)
                failed.update(index for index, _ in places)
        return failed, num_bytes

    def _read_file(
        self, name: str, places: list[tuple[int, int]], keys: Sequence[bytes], ids: Sequence[int], items: Items
    ) -> int:
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = _status(descriptor)
            header = self._header(os.pread(descriptor, PAGE, 0), status.st_size, name)
            if header.item_bytes != items.item_bytes:
                raise Foreign(f"its items have {header.item_bytes} bytes, expected {items.item_bytes}")
            for part in _parts(places, max(1, READ_BYTES // items.item_bytes)):
                chosen = [ids[index] for index, _ in part]
                rooms = items.to_fill(chosen)
                _fill(descriptor, rooms, header.offset(part[0][1]))
                for (index, number), room in zip(part, rooms, strict=True):
                    if header.keys[number] != keys[index] or checksum(keys[index], room) != header.checksums[number]:
                        raise Damaged(f"item {number} is not the one that was written")
                items.filled(chosen)
            self._used(descriptor, status.st_mtime)
        finally:
            os.close(descriptor)
        return len(places) * items.item_bytes

    def _used(self, descriptor: int, used_s: float) -> None:
        now_s = self.clock()
        if abs(now_s - used_s) > TOUCH_S:
            with suppress(OSError):
                os.utime(descriptor, (now_s, now_s))

    # ---- writing

    def write(self, keys: Sequence[bytes], ids: Sequence[int], items: Items) -> int:
        """Write a run of at most MAX_ITEMS items. Returns the file's bytes, 0 if it was not written."""
        now_s = self.clock()
        size = PAGE + len(keys) * items.item_bytes
        if 0 < self._paused_until_s - now_s <= PAUSE_S or size > LARGEST * self.quota_bytes:
            return 0
        if self.num_bytes + size > self._most_bytes:
            self.sweep(size)
        name = name_of(keys)
        if name in self._files:
            return size
        if name in self._taken:
            return 0
        self._num_drafts += 1
        own = f"{DRAFT_PREFIX}{os.getpid()}-{threading.get_native_id()}-{self._num_drafts}"
        draft = os.path.join(self.folders.part(name), own)
        try:
            self.folders.make(name)
            self._write_file(draft, keys, ids, items)
            os.rename(draft, self._path(name))
        except IsADirectoryError as error:  # not the disk's fault: other files can be written
            remove_file(draft)
            self._drop(name, Foreign(str(error)))
            return 0
        except OSError as error:
            self.refused(error)
            remove_file(draft)
            return 0
        self.num_bytes += size
        self._num_written += size
        self._index(_File(name, keys, size, now_s))
        if self._num_written > WRITTEN * self.quota_bytes:
            self.sweep()
        return size

    def refused(self, error: OSError) -> None:
        """Record a write error, and pause writes for PAUSE_S."""
        self.errors["write"] += 1
        self.refusal = error
        self._paused_until_s = self.clock() + PAUSE_S

    def _write_file(self, draft: str, keys: Sequence[bytes], ids: Sequence[int], items: Items) -> None:
        """Write a draft file. The header, which has the checksums, is written last; nobody reads the file before its
        rename."""
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            at, checksums = PAGE, []
            for start in range(0, len(ids), step := max(1, PART_BYTES // items.item_bytes)):
                parts = items.to_write(ids[start : start + step])
                checksums += [checksum(key, part) for key, part in zip(keys[start : start + step], parts, strict=True)]
                _write_all(descriptor, parts, at)
                at += len(parts) * items.item_bytes
            header = RunHeader(self._fingerprint, items.item_bytes, list(keys), checksums)
            _write_all(descriptor, [memoryview(pack(header))], 0)
        finally:
            os.close(descriptor)

    # ---- forgetting

    def forget(self, keys: Iterable[bytes]) -> int:
        """Remove the files that have any of `keys`. Returns their number."""
        files = {place[0] for key in keys if (place := self._places.get(key)) is not None}
        for file in files:
            self._forget(file)
            remove_file(self._path(file.name))
            self.num_bytes -= file.num_bytes
        return len(files)

    def clear(self) -> int:
        """Remove all files of this rank of this model. Returns their number."""
        with suppress(OSError):  # if that fails, remove the known files
            self.look()
        return self.forget(self.keys())

    def sweep(self, room_bytes: int = 0) -> None:
        """Scan the files of all engines, and remove the least recently used ones beyond the quota."""
        self._swept_s = now_s = self.clock()
        self._num_written = 0
        self.num_bytes, gone = sweep(self.root, self._most_bytes - room_bytes, now_s)
        if gone:
            self.dropped["evicted"] += len(gone)
        for path in gone:
            known = self._files.get(os.path.basename(path))
            if known is not None and self._path(known.name) == path:
                self._forget(known)

    def check_integrity(self) -> None:
        """Raise RuntimeError if the index contradicts itself."""
        for key, (file, number) in self._places.items():
            if file.keys[number] != key or self._files.get(file.name) is not file:
                raise RuntimeError(f"key {key.hex()[:16]} is said to lie in {file.name}, where it does not")
        for file in self._files.values():
            if not 0 < len(file.keys) <= MAX_ITEMS:
                raise RuntimeError(f"file {file.name} is said to have {len(file.keys)} items")


def _status(descriptor: int) -> os.stat_result:
    """Status of an open file. Raises Foreign if it is not a regular file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Foreign("it is not a file")
    return status


def _parts(places: list[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Split pairs (index, number) into parts of at most `most` with consecutive numbers in the file."""
    part: list[tuple[int, int]] = []
    for place in sorted(places, key=lambda each: each[1]):
        if part and (place[1] != part[-1][1] + 1 or len(part) == most):
            yield part
            part = []
        part.append(place)
    if part:
        yield part


def _fill(descriptor: int, rooms: list[memoryview], offset: int) -> None:
    """Read consecutive bytes of a file into `rooms`. Raises Damaged if the file is too short."""
    left = rooms
    while left:
        count = os.preadv(descriptor, left[:MAX_ITEMS], offset)
        if count <= 0:
            raise Damaged("it has become shorter")
        offset += count
        left = _behind(left, count)


def _write_all(descriptor: int, parts: list[memoryview], offset: int) -> None:
    left = parts
    while left:
        count = os.pwritev(descriptor, left[:MAX_ITEMS], offset)
        offset += count
        left = _behind(left, count)


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The rest of `buffers` after their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
