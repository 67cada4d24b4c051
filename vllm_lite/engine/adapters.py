"""LoRA adapters in the engine: their names and numbers, and which of them the workers have in memory.

The scheduler asks StepAdapters whether a waiting sequence can run beside the running ones; adapters that are missing
for that become `wanted`, and AdapterLoader has the workers load them. No file is read here.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_lite.engine.sequence import Sequence

MAX_ADAPTERS = 10_000
"""Maximum number of adapters that clients may have loaded at the same time."""

KEEP_S = 0.1
"""Seconds for which a newly loaded adapter is not evicted while requests wait for it."""


class Adapter:
    """One adapter, from the first request to load it until it is unloaded and its last request has ended."""

    __slots__ = (
        "digest",
        "is_listed",
        "is_loaded",
        "last_used",
        "loaded_s",
        "name",
        "num_requests",
        "number",
        "parent",
        "path",
    )

    def __init__(self, number: int, name: str, path: str, parent: str | None = None) -> None:
        self.number = number
        """Unique number that is never reused, so that no other adapter finds KV cached with it."""
        self.name, self.path = name, path
        self.parent = parent
        """Base model shown in lists; None: the model's name."""
        self.is_listed = False
        """Whether new requests can name it."""
        self.is_loaded = False
        """Whether the workers have it in memory."""
        self.num_requests = 0
        self.last_used = 0
        self.loaded_s = 0.0
        self.digest: bytes | None = None
        """Digest of its files, which names it in KV on disk. None until workers have read the files; b"" if the digest
        is unknown, or the files have changed between two reads."""

    @property
    def cache_key(self) -> str:
        """Equal for requests whose KV is equal."""
        return self.digest.hex() if self.digest else str(self.number)

    def read_as(self, digest: bytes) -> None:
        """Set the digest of the files that workers have read. If it differs from an earlier one, the adapter keeps only
        its number as a key, since KV of both files may be cached."""
        self.digest = digest if self.digest in (None, digest) else b""

    def __repr__(self) -> str:
        return f"Adapter({self.number}, {self.name!r}, {'loaded' if self.is_loaded else 'not loaded'})"


class AdapterQuota(NamedTuple):
    """Maximum number of different adapters in a step, and in the workers' memory. 0: none are served."""

    in_step: int
    in_memory: int


class AdapterTable:
    """All adapters of an engine."""

    def __init__(self, limits: AdapterQuota) -> None:
        self.limits = limits
        self.by_number: dict[int, Adapter] = {}
        self.wanted: dict[Adapter, None] = {}
        """Adapters to be loaded, or being loaded, in the order in which sequences missed them."""
        self.on_change: Callable[[Adapter], None] | None = None
        """Called when the workers have loaded or dropped an adapter; traces record it, as decisions depend on it."""
        self._by_name: dict[str, Adapter] = {}
        self._unlisted: dict[Adapter, None] = {}
        self._num_made = self._num_used = 0

    # ---- names

    def make(self, name: str, path: str, parent: str | None = None) -> Adapter:
        """Create an adapter, which is not listed yet."""
        self._num_made += 1
        adapter = self.by_number[self._num_made] = Adapter(self._num_made, name, path, parent)
        self._unlisted[adapter] = None
        return adapter

    def forget(self, adapter: Adapter) -> None:
        """Remove an adapter of idle()."""
        del self.by_number[adapter.number], self._unlisted[adapter]

    def numbered(self, number: int) -> Adapter:
        """The adapter of this number, for a replay, which knows no names."""
        adapter = self.by_number.setdefault(number, Adapter(number, f"adapter {number}", ""))
        self._unlisted[adapter] = None
        return adapter

    def get(self, name: str) -> Adapter | None:
        """The listed adapter of this name."""
        return self._by_name.get(name)

    @property
    def listed(self) -> list[Adapter]:
        return list(self._by_name.values())

    def enlist(self, adapter: Adapter) -> Adapter | None:
        """List an adapter under its name. Returns the adapter that had the name before."""
        before = self._by_name.get(adapter.name)
        if before is not None:
            self.delist(before)
        self._by_name[adapter.name] = adapter
        self._unlisted.pop(adapter, None)
        adapter.is_listed = True
        return before

    def delist(self, adapter: Adapter) -> None:
        """Remove an adapter from the list; its requests continue."""
        if self._by_name.get(adapter.name) is adapter:
            del self._by_name[adapter.name]
        self._unlisted[adapter] = None
        adapter.is_listed = False

    def idle(self) -> list[Adapter]:
        """Adapters that are not listed and have no request. Called in every pass of the loop."""
        return [each for each in self._unlisted if not each.num_requests]

    # ---- the workers' memory

    def change(self, adapter: Adapter, *, is_loaded: bool) -> None:
        """Record that the workers have loaded or dropped an adapter."""
        if adapter.is_loaded is not is_loaded:
            adapter.is_loaded = is_loaded
            if self.on_change is not None:
                self.on_change(adapter)
        if is_loaded:
            self.wanted.pop(adapter, None)

    def lose_workers(self) -> None:
        """Mark all adapters as not loaded, without on_change: a trace has the loss of the workers itself."""
        for adapter in self.by_number.values():
            adapter.is_loaded = False

    def victim(self, running: Iterable[Sequence], now_s: float) -> Adapter | None:
        """The adapter to evict for another one: not used by a running sequence, preferably without requests, least
        recently used. None: there is none now. One that requests wait for is spared for KEEP_S after its load, so that
        they can run and two adapters do not evict each other all the time."""
        used = {sequence.request.adapter for sequence in running}
        free = [
            each
            for each in self.by_number.values()
            if each.is_loaded and each not in used and not (each.num_requests and now_s < each.loaded_s + KEEP_S)
        ]
        return min(free, key=lambda each: (each.num_requests > 0, each.last_used), default=None)

    def check_integrity(self) -> None:
        """Raise RuntimeError if the set of unlisted adapters is wrong."""
        unlisted = [each for each in self.by_number.values() if not each.is_listed]
        if set(unlisted) != set(self._unlisted):
            raise RuntimeError(f"{list(self._unlisted)} are said not to be listed, {unlisted} are not")

    # ---- admission

    def of_step(self, running: Iterable[Sequence]) -> "StepAdapters":
        """The room for adapters in a step, beside those of the running sequences."""
        return StepAdapters(self, running)

    def use(self, adapter: Adapter) -> None:
        self._num_used += 1
        adapter.last_used = self._num_used

    def running_and_waiting(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence]
    ) -> tuple[list[str], list[str]]:
        """Names of the adapters of running and of waiting sequences, for metrics."""
        if not self.by_number:
            return [], []
        names = [
            sorted({each.request.adapter.name for each in sequences if each.request.adapter is not None})
            for sequences in (running, waiting)
        ]
        return names[0], names[1]


class StepAdapters:
    """Room for adapters in a step, while sequences are admitted to it."""

    def __init__(self, adapters: AdapterTable, running: Iterable[Sequence]) -> None:
        self._adapters = adapters
        self._running = running
        self._taken: set[Adapter] | None = None

    def has_room_for(self, sequence: Sequence) -> bool:
        """See could_take(). Also adds the sequence's adapter to `wanted` if it is not in memory."""
        adapter = sequence.request.adapter
        if adapter is not None and not adapter.is_loaded:
            self._adapters.wanted[adapter] = None
        return self.could_take(adapter)

    def could_take(self, adapter: Adapter | None) -> bool:
        """Whether an adapter is in memory, and the step has it already or can take one more. None always fits."""
        if adapter is None or not adapter.is_loaded:
            return adapter is None
        if self._taken is None:
            found = (each.request.adapter for each in self._running)
            self._taken = {each for each in found if each is not None}
        return adapter in self._taken or len(self._taken) < self._adapters.limits.in_step

    def add(self, sequence: Sequence) -> None:
        """Count the adapter of a sequence that was admitted to the step."""
        if (adapter := sequence.request.adapter) is not None:
            self._adapters.use(adapter)
            if self._taken is not None:
                self._taken.add(adapter)
