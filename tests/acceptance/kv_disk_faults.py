"""Injects faults into KV on disk, and reads from it; `python -m tests.acceptance.kv_disk_check` does so 10,000 times.

The bytes of an item follow from its key, the model and the rank, so that each that is served can be checked; keys are
those of prompts with and without salts and adapters. A fault may cost hits, never more: an item that is served has its
own bytes, nothing raises, and the files keep to the quota.
"""

import errno
import os
import random
import signal
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

from vllm_lite.kv_disk.format import PAGE
from vllm_lite.kv_disk.store import DiskStore
from vllm_lite.kv_disk.usage import held_files
from vllm_lite.runtime.prefix_hash import PrefixHasher

ITEM_BYTES = 3000
QUOTA = 40 * (PAGE + 8 * ITEM_BYTES)
NUM_CHAINS = 24
MAX_BLOCKS = 24
LONGEST = MAX_BLOCKS + 12
MODELS = (b"model", b"other model", b"model in float16")


OWNERS = ((), ("salt",), ("lora", "digest"), ("lora", "digest", "salt"), ("lora", "other"), ("other salt",))
"""Keys that keep equal prompts apart: consecutive chains have different ones."""


@cache
def keys_of(chain: int) -> list[bytes]:
    """Keys of a chain's blocks. Six consecutive chains have the same prompt and different owners."""
    prompt, owner = divmod(chain, len(OWNERS))
    hasher, hashes = PrefixHasher(1, "seed"), list[bytes]()
    tokens = array("I", range(1000 * prompt, 1000 * prompt + LONGEST))
    hasher.extend(hashes, hasher.root(OWNERS[owner]), memoryview(tokens).cast("B"), LONGEST, ())
    return [block_hash + b"\0" for block_hash in hashes]


def key_of(chain: int, number: int) -> bytes:
    """Key of a block."""
    return keys_of(chain)[number]


def content(key: bytes, model: bytes, place: tuple[int, int]) -> bytes:
    one = blake2b(key + model + repr(place).encode(), digest_size=60).digest()
    return one * (ITEM_BYTES // len(one))


class Memory:
    """Items by number, as in a worker's pool."""

    item_bytes = ITEM_BYTES

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.items = [bytearray(each) for each in contents]

    def to_write(self, ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.items[index]) for index in ids]

    def to_fill(self, ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.items[index]) for index in ids]

    def filled(self, ids: Sequence[int]) -> None:
        pass


class FileFaults:
    """Faults of the files of one directory; `draw` makes all random choices."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        self.root = root
        self.draw = draw

    def file(self) -> Path | None:
        files = [Path(held.path) for held in held_files(self.root)]
        return self.draw.choice(files) if files else None

    @contextmanager
    def changed(self) -> Iterator[bytearray]:
        """The bytes of a file, to be changed in place."""
        path = self.file()
        data = bytearray(path.read_bytes() if path is not None and path.is_file() else b"")
        yield data
        if path is not None and path.is_file():
            path.write_bytes(data)

    def bit_flipped(self) -> None:
        with self.changed() as data:
            if data:
                data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)

    def header_flipped(self) -> None:
        with self.changed() as data:
            if data:
                data[self.draw.randrange(min(len(data), 400))] ^= 1 << self.draw.randrange(8)

    def items_swapped(self) -> None:
        with self.changed() as data:
            if len(data) >= PAGE + 2 * ITEM_BYTES:
                first, second = slice(PAGE, PAGE + ITEM_BYTES), slice(PAGE + ITEM_BYTES, PAGE + 2 * ITEM_BYTES)
                data[first], data[second] = data[second], data[first]

    def truncated(self) -> None:
        with self.changed() as data:
            del data[self.draw.randrange(len(data) + 1) :]

    def grown(self) -> None:
        with self.changed() as data:
            data.extend(bytes(self.draw.randrange(1, 5000)))

    def zeroed(self) -> None:
        """Zero some pages, as if the disk had not written them before a power failure."""
        with self.changed() as data:
            start = self.draw.randrange(len(data) + 1) // PAGE * PAGE
            data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))

    def moved(self) -> None:
        """Replace a file by another one, possibly of another model or rank."""
        one, other = self.file(), self.file()
        if one is not None and other is not None:
            with suppress(OSError):
                one.replace(other)

    def replaced(self) -> None:
        """Replace a file by a folder, a pipe or a link."""
        path = self.file()
        if path is None:
            return
        with suppress(OSError):
            path.unlink()
            kind = self.draw.randrange(3)
            if kind == 0:
                os.mkfifo(path)
            elif kind == 1:
                path.symlink_to("/dev/zero")
            else:
                path.mkdir()

    def removed(self) -> None:
        if (path := self.file()) is not None:
            with suppress(OSError):
                path.unlink()

    @property
    def kinds(self) -> list[Callable[[], None]]:
        names = "bit_flipped header_flipped items_swapped truncated grown zeroed moved replaced removed"
        return [getattr(self, name) for name in names.split()]


class Faults(FileFaults):
    """Injects faults into a directory that engines use."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        super().__init__(root, draw)
        self.now_s = 1_000_000.0
        self.counts = Counter[str]()
        self.stores = [self.open(model, place) for model in MODELS for place in ((0, 1), (0, 2), (1, 2))]

    def open(self, model: bytes, place: tuple[int, int]) -> tuple[DiskStore, bytes, tuple[int, int]]:
        return DiskStore(self.root, model, place, QUOTA, lambda: self.now_s), model, place

    # ---- what engines do

    def engine(self) -> tuple[DiskStore, bytes, tuple[int, int]]:
        return self.stores[0] if self.draw.random() < 0.6 else self.draw.choice(self.stores)

    def write(self) -> None:
        store, model, place = self.engine()
        chain, first = self.draw.randrange(NUM_CHAINS), self.draw.randrange(MAX_BLOCKS)
        count = self.draw.randint(1, 8)
        keys = [key_of(chain, number) for number in range(first, first + count)]
        written = store.write(keys, range(count), Memory([content(key, model, place) for key in keys]))
        self.counts["written" if written else "not written"] += 1

    def read(self) -> None:
        store, model, place = self.engine()
        if self.draw.random() < 0.3:
            store.look()
        if (known := store.keys()) and self.draw.random() < 0.7:
            keys = self.draw.choices(known, k=12)
        else:
            chain, first = self.draw.randrange(NUM_CHAINS), self.draw.randrange(MAX_BLOCKS)
            keys = [key_of(chain, number) for number in range(first, first + 12)]
        memory = Memory([bytes(ITEM_BYTES)] * len(keys))
        failed, _ = store.read(keys, range(len(keys)), memory)
        for index, key in enumerate(keys):
            if index in failed:
                self.counts["missed"] += 1
            elif bytes(memory.items[index]) == content(key, model, place):
                self.counts["right"] += 1
            else:
                self.counts["WRONG"] += 1
        store.check_integrity()

    def check_quota(self) -> None:
        self.stores[0][0].sweep()
        if sum(held.num_bytes for held in held_files(self.root)) > QUOTA:
            self.counts["OVER QUOTA"] += 1

    # ---- faults

    def clock_set(self) -> None:
        self.now_s += self.draw.choice([-1e6, -1000.0, 15.0, 1000.0, 1e6])

    def restarted(self) -> None:
        index = self.draw.randrange(len(self.stores))
        before, model, place = self.stores[index]
        self.counts.update(before.dropped)
        self.stores[index] = self.open(model, place)
        self.stores[index][0].look()

    @contextmanager
    def refusing(self, name: str, code: int, after: int) -> Iterator[None]:
        """The system call `name` fails with `code`, from the call `after` on; one before is cut short."""
        call, left = getattr(os, name), [after]

        def refuse(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
            if left[0] == 0 and name == "pwritev" and len(args[1]) > 1:  # type: ignore[arg-type]
                return call(args[0], args[1][:1], args[2])  # type: ignore[index]
            return call(*args, **kwargs)

        setattr(os, name, refuse)
        try:
            yield
        finally:
            setattr(os, name, call)

    def disk_full(self) -> None:
        with self.refusing("pwritev", errno.ENOSPC, self.draw.randrange(4)):
            self.write()
        self.now_s += 20.0

    def read_only(self) -> None:
        with self.refusing("open", errno.EROFS, 0):
            self.write()
        self.now_s += 20.0

    def unreadable(self) -> None:
        with self.refusing("preadv", errno.EIO, self.draw.randrange(3)):
            self.read()

    def not_renamed(self) -> None:
        with self.refusing("rename", errno.EIO, 0):
            self.write()
        self.now_s += 20.0

    def killed(self) -> None:
        """Kill another engine while it writes; sometimes it is a real process, killed by SIGKILL."""
        if self.draw.random() < 0.02:
            child = os.fork()
            if child == 0:
                while True:
                    self.write()
            time.sleep(self.draw.random() * 0.01)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self.counts["killed"] += 1
            return
        path = self.file()
        if path is not None and path.is_file():
            data = path.read_bytes()
            (path.parent / f".draft-1-1-{self.draw.randrange(10**9)}").write_bytes(
                data[: self.draw.randrange(len(data) + 1)]
            )

    def two_writers(self) -> None:
        _, model, place = self.engine()
        for store, *_ in (self.open(model, place), self.open(model, place)):
            keys = [key_of(1, number) for number in range(5)]
            store.write(keys, range(5), Memory([content(key, model, place) for key in keys]))

    def forgotten(self) -> None:
        store = self.engine()[0]
        chain = self.draw.randrange(NUM_CHAINS)
        store.forget([key_of(chain, number) for number in range(MAX_BLOCKS)])

    @property
    def kinds(self) -> list[Callable[[], None]]:
        names = "clock_set restarted disk_full read_only unreadable not_renamed killed two_writers forgotten"
        return [*super().kinds, *(getattr(self, name) for name in names.split())]


def run(root: Path, count: int, seed: int = 0) -> Counter[str]:
    """Inject `count` faults. Returns counts of results; "WRONG" and "OVER QUOTA" must not be among them."""
    draw = random.Random(seed)
    faults = Faults(root, draw)
    for number in range(count):
        for _ in range(draw.randint(1, 4)):
            faults.write()
        draw.choice(faults.kinds)()
        for _ in range(draw.randint(1, 4)):
            faults.read()
        if number % 50 == 49:
            faults.check_quota()
    for store, *_ in faults.stores:
        faults.counts.update(store.dropped)
    return faults.counts
