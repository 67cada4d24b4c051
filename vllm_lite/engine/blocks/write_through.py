"""WriteThrough: writes the KV of prompts and answers that have ended to the disk tier, in the background.

A chain is the list of blocks of a sequence whose prompt or answer has ended. The blocks stay in the pool, where other
sequences find them, and are pinned only while a worker writes them, a bounded number at a time. Blocks that were
demoted meanwhile are written from the host. If a block has left memory before it is written, it and its successors are
not written; a chain that ends while too many wait is dropped. Contents that were missed in this way are written when
they are demoted to the host, since they may leave memory next. Recurrent states are written as soon as they are cached.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.tier_index import TierIndex
from vllm_lite.protocol.transfers import STATE, ForgetStored, StoreBlocks, Ticket, Transfer

if TYPE_CHECKING:
    from vllm_lite.engine.states.store import StateStore

MAX_RUN = 64
"""Maximum blocks of one StoreBlocks message, and so of one file."""
SHARE = 8
"""1 / SHARE of the pool's blocks may be pinned while they are written."""
MAX_CHAINS = 256
MAX_STATES = 3
"""Maximum states written per chain: the ones at the largest positions."""


class WrittenRun(NamedTuple):
    """Blocks of one group, or states, that one message writes."""

    keys: list[bytes]
    ids: list[int]
    are_states: bool


class WriteThrough:
    """Writes contents that are missing in `index`, the keys of the tier."""

    def __init__(self, blocks: KVBlocks, states: "StateStore | None", index: TierIndex) -> None:
        self.index = index
        self.messages: list[Transfer] = []
        """Transfer messages that have not been sent yet."""
        self.num_dropped = 0
        """Number of chains that were not written, or only in part."""
        self.max_blocks = max(2, blocks.pool.num_usable // SHARE)
        self._max_run = min(MAX_RUN, self.max_blocks // 2)
        self._blocks = blocks
        self._states = states
        self._chains: deque[tuple[list[bytes], Iterator[WrittenRun]]] = deque()
        self._with_states: list[list[bytes]] = []
        self._runs: dict[Ticket, WrittenRun] = {}
        self._writing: set[bytes] = set()
        self._missed: set[bytes] = set()
        """Keys of contents in memory whose write was dropped or failed."""
        self._unwanted: set[bytes] = set()
        """Forgotten keys that must not enter `index` again until the tier has confirmed their removal."""
        self.next_ticket: Callable[[], Ticket] = iter(range(1, 2**53)).__next__

    @property
    def num_writing(self) -> int:
        """Number of blocks and states that are being written, and pinned."""
        return len(self._writing)

    @property
    def num_waiting(self) -> int:
        """Number of chains that are not completely written."""
        return len(self._chains)

    def pinned(self, *, states: bool) -> list[list[int]]:
        """Block ids, or state slots, of each run that is being written."""
        return [run.ids for run in self._runs.values() if run.are_states is states]

    def is_kept(self, key: bytes) -> bool:
        """Whether the tier has the contents of `key`, or they are being written."""
        return key in self.index or key in self._writing

    def add(self, hashes: list[bytes], *, is_urgent: bool = False) -> None:
        """Queue the chain with these block hashes, all cached. `is_urgent`: write it before others, since its sequence
        was preempted and will need it again."""
        if self._states is not None:
            self._with_states.append(hashes)
        last = hashes[-1:]
        if all(self.is_kept(block_hash + group.key) for block_hash in last for group in self._blocks.groups):
            return  # then its earlier blocks are kept, too
        chain = hashes, self._runs_of(hashes)
        if len(self._chains) >= MAX_CHAINS:
            self.num_dropped += 1
            self._miss(self._keys_of(hashes))
        elif is_urgent:
            self._chains.appendleft(chain)
        else:
            self._chains.append(chain)
        self.go_on()

    def demoted(self, keys: Iterable[bytes]) -> None:
        """Queue those of `keys` whose write was missed: the step being scheduled demotes them to the host."""
        if not self._missed:
            return
        hashes = list(dict.fromkeys(key[:-1] for key in keys if key in self._missed))
        if hashes and len(self._chains) < MAX_CHAINS:
            self._missed.difference_update(self._keys_of(hashes))
            self._chains.append((hashes, self._runs_of(hashes)))

    def write_states(self) -> None:
        """Begin to write the cached states of ended chains. Called at the beginning of a step."""
        chains, self._with_states = self._with_states, []
        store = self._states
        if store is None:
            return
        for hashes in chains:
            keys = [block_hash + STATE for block_hash in reversed(hashes)]
            found = [(key, slot) for key in keys if (slot := store.pool.get_cached_block(key)) is not None]
            for key, slot in found[:MAX_STATES]:
                if not self.is_kept(key):
                    store.pool.touch((slot,))
                    self._begin(WrittenRun([key], [slot], are_states=True))

    @property
    def has_states(self) -> bool:
        return bool(self._with_states)

    def go_on(self) -> None:
        """Begin to write as many runs as may be pinned: in total a share of the pool, and per run at most half of the
        free blocks, so that a preemption still frees blocks for others."""
        blocks = self._blocks
        while self._chains and len(self._writing) + self._max_run <= self.max_blocks:
            hashes, runs = self._chains[0]
            run = next(runs, None)
            if run is None:
                self._chains.popleft()
            elif not blocks.may_pin(run.ids):
                self._chains[0] = hashes, self._runs_of(hashes)  # looked up again later: blocks may have moved
                return
            else:
                blocks.pin(run.ids)
                self._begin(run)

    def ended(self, ticket: Ticket, failed: Iterable[int]) -> None:
        """Complete a run that a worker has written, except the keys at the indices `failed`."""
        run = self._runs.pop(ticket, None)
        if run is None:
            return
        lost = {run.keys[place] for place in failed}
        self._writing.difference_update(run.keys)
        self._unwanted -= lost
        if not run.are_states:
            self._miss(lost)
        written = set(run.keys) - lost
        if unwanted := self._unwanted & written:
            self.messages.append(ForgetStored(sorted(unwanted)))
        self.index.gain(written - unwanted)
        self._unpin(run)
        self.go_on()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove these keys from the tier, whether they are written already, being written or queued."""
        keys = set(keys)
        self._missed -= keys
        self._unwanted |= keys & (self._writing | self.index)
        self._chains = deque(chain for chain in self._chains if keys.isdisjoint(self._keys_of(chain[0])))
        if stored := keys & self.index:
            self.index.lose(stored)
            self.messages.append(ForgetStored(sorted(stored)))

    def forget_all(self) -> None:
        """Remove all keys from the tier, those of other engines included."""
        self.stop()
        self._unwanted |= self._writing | self.index
        self.index.lose(self.index)
        self.messages.append(ForgetStored(None))

    def learn(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Update `index` by what the tier has reported."""
        removed = set(removed)
        self.index.lose(removed)
        self._unwanted -= removed
        self.index.gain(key for key in added if key not in self._unwanted)

    def stop(self) -> None:
        """Drop all queued chains; runs that are being written go on."""
        self._chains.clear()
        self._missed.clear()
        self._with_states = []

    def lose(self) -> None:
        """Drop all chains and runs after the workers were lost."""
        self.stop()
        self.messages = []
        runs, self._runs = self._runs, {}
        self._writing, self._unwanted = set(), set()
        for run in runs.values():
            self._unpin(run)

    # ---- inside

    def _begin(self, run: WrittenRun) -> None:
        ticket = self.next_ticket()
        self._runs[ticket] = run
        self._writing.update(run.keys)
        self.messages.append(StoreBlocks(ticket, run.keys, run.ids))

    def _miss(self, keys: Iterable[bytes]) -> None:
        """Add those of `keys` that are in memory to `_missed`, which is pruned of others when it grows large."""
        find = self._blocks.find
        self._missed.update(key for key in keys if not self.is_kept(key) and find(key) is not None)
        if len(self._missed) > 2 * self._blocks.pool.num_blocks:
            self._missed = {key for key in self._missed if find(key) is not None}

    def _unpin(self, run: WrittenRun) -> None:
        if not run.are_states:
            self._blocks.unpin(run.ids)
        elif self._states is not None:
            self._states.let_go(run.ids)

    def _keys_of(self, hashes: Sequence[bytes]) -> Iterator[bytes]:
        return (block_hash + group.key for block_hash in hashes for group in self._blocks.groups)

    def _runs_of(self, hashes: list[bytes]) -> Iterator[WrittenRun]:
        """Generate the runs of a chain. Each looks up its blocks, on device or host, when it is about to be written."""
        find = self._blocks.find
        groups = self._blocks.groups
        open_groups = list(groups)
        for start in range(0, len(hashes), self._max_run):
            for group in list(open_groups):
                keys: list[bytes] = []
                ids: list[int] = []
                for block_hash in hashes[start : start + self._max_run]:
                    key = block_hash + group.key
                    block_id = None if self.is_kept(key) else find(key)
                    if block_id is not None:
                        keys.append(key)
                        ids.append(block_id)
                        continue
                    if not self.is_kept(key) and group.window is None:
                        open_groups.remove(group)  # blocks after a lost one can never be found
                        break
                    if keys:
                        yield WrittenRun(keys, ids, are_states=False)
                        keys, ids = [], []
                if keys:
                    yield WrittenRun(keys, ids, are_states=False)
        self.num_dropped += len(groups) - len(open_groups)
