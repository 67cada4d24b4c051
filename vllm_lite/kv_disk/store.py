"""DiskStore: the runs of one rank of one model, in files that other engines with the same fingerprint read and write.

    DIR/<fingerprint>/<rank>-<world>/<first two digits>/<name>

A file appears by rename or not at all, and is never written again, so no reader has to lock anything: it opens a whole
file, and checks each item after it was read. A file that is not what its name and its place say is removed and counted.
One thread writes and looks at the directory, several may read.
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
"""A file's time of use is written at most so often."""
SWEEP_S = 30.0
"""How often all files are counted, those that other engines have written included."""
PAUSE_S = 10.0
"""How long nothing is written after the disk has refused something."""
RECENT_NS = 2_000_000_000
"""A folder that has changed so recently may change again within the same tick of its clock."""
LARGEST = 0.5
"""A run that takes more than this share of the quota is not written: it would push out all others."""
WRITTEN = 1 / 64
"""All files are counted again when this share of the quota was written since: others may write as much."""
SPARE = 4 * WRITTEN
"""This share of the quota stays free, for what several engines write until they count again."""
PART_BYTES = 4 << 20
"""Items are written in parts of so many bytes."""
READ_BYTES = 1 << 20
"""They are read in parts of so many, and checked while the core that has read them has them in a cache of its own."""


_LACKING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE))
"""Refusals that say nothing against a file: it stays, and is found again by the next look."""


class Items(Protocol):
    """Memory that items are read into and written from, by their ids."""

    item_bytes: int

    def to_write(self, ids: Sequence[int]) -> list[memoryview]:
        """The bytes of items, to be written to a file."""
        ...

    def to_fill(self, ids: Sequence[int]) -> list[memoryview]:
        """Room for the bytes of items."""
        ...

    def filled(self, ids: Sequence[int]) -> None:
        """The room that was given last for these items has their bytes."""
        ...


class Changes(NamedTuple):
    """Keys that can be found since the last look, those of the latest files first, and keys that could not for some
    time; one may be both."""

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
    """`root` is a directory that check_directory() has passed."""

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
        """`place` is the rank and how many there are; `about` says to people whose KV it is. Raises OSError."""
        self.root = root
        self.folders = RankFolders(root, fingerprint, place, about)
        self.quota_bytes = quota_bytes
        self._most_bytes = int((1 - SPARE) * quota_bytes)
        self.num_bytes = 0
        """Bytes of all files below the root, as far as this engine knows."""
        self.dropped = Counter[str]()
        """Files that were removed, by reason: damaged (or cut), foreign, unreadable, evicted."""
        self.errors = Counter[str]()
        """What the system has refused: reading and writing."""
        self.refusal: OSError | None = None
        """The last one of writing."""
        self._fingerprint = blake2b(b"%s %d %d" % (fingerprint, *place), digest_size=32).digest()
        """A file that was moved here from another rank is as foreign as one of another model."""
        self.clock = clock
        self._lock = threading.Lock()
        self.num_found = 0
        """Files that others have written, or earlier lives, and that were found so far."""
        self._files: dict[str, _File] = {}
        self._by_part: dict[str, dict[str, _File]] = {}  # the same files by their folders
        self._places: dict[bytes, tuple[_File, int]] = {}
        self._seen: dict[str, int] = {}  # folder -> its time when it was listed
        self._taken: set[str] = set()
        """Names in whose places lies what is none of ours and cannot be removed, such as a folder: it is let alone."""
        self._added: list[bytes] = []
        self._removed: list[bytes] = []
        self._swept_s = self._paused_until_s = 0.0
        self._num_drafts = self._num_written = 0

    # ---- what is there

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def keys(self) -> list[bytes]:
        """All that can be found."""
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
        """List the folders that have changed since the last look: at first all, later those with files of other
        engines. `stop` ends it early; the next look goes on."""
        parts = self.folders.parts()
        for gone in self._by_part.keys() - set(parts):  # somebody has removed the model, or all
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
        """These are the files of a folder."""
        with self._lock:
            gone = [file for name, file in self._by_part.get(part, {}).items() if name not in names]
        for file in gone:
            self._forget(file)
        self._taken -= {taken for taken in self._taken if taken[:2] == part and taken not in names}
        for new in names - self._files.keys() - self._taken:
            self._take_up(new)

    def _take_up(self, name: str) -> None:
        """Index a file that another engine, or an earlier one, has written."""
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
        """Take a file out of the index; it is gone, or about to be."""
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
        """Remove a file that is not what it should be, and count it."""
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
        """Fill the items `ids` with the contents of `keys`. Returns the numbers of those that failed, whose items may
        hold anything, and the bytes that were read."""
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
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):  # which others evicted
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
        """Write a run of at most MAX_ITEMS items. Returns its bytes, 0 if it could not be written."""
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
        except IsADirectoryError as error:  # the disk has refused nothing: all else can be written
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
        """The disk has refused something: nothing is written for a while."""
        self.errors["write"] += 1
        self.refusal = error
        self._paused_until_s = self.clock() + PAUSE_S

    def _write_file(self, draft: str, keys: Sequence[bytes], ids: Sequence[int], items: Items) -> None:
        """The header, which has the checksums, is written last; until it is renamed nobody reads the file."""
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
        """Remove the files that hold any of these contents. Returns their number."""
        files = {place[0] for key in keys if (place := self._places.get(key)) is not None}
        for file in files:
            self._forget(file)
            remove_file(self._path(file.name))
            self.num_bytes -= file.num_bytes
        return len(files)

    def clear(self) -> int:
        """Remove all files of this rank of this model. Returns their number."""
        with suppress(OSError):  # then what is known of goes
            self.look()
        return self.forget(self.keys())

    def sweep(self, room_bytes: int = 0) -> None:
        """Count what all engines have written, and remove what was not used for longest if it is too much."""
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
    """Raises Foreign for what is no file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Foreign("it is no file")
    return status


def _parts(places: list[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Cut (index, number) into parts that are consecutive in the file, of `most` each."""
    part: list[tuple[int, int]] = []
    for place in sorted(places, key=lambda each: each[1]):
        if part and (place[1] != part[-1][1] + 1 or len(part) == most):
            yield part
            part = []
        part.append(place)
    if part:
        yield part


def _fill(descriptor: int, rooms: list[memoryview], offset: int) -> None:
    """Read consecutive bytes of a file into `rooms`. Raises Damaged if there are too few."""
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
    """The rest of `buffers` behind their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
