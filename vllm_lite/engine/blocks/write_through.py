"""WriteThrough: hands the contents of chains that have ended to the tier below, in the background.

A chain is the blocks of a sequence whose prompt or answer has ended. Its blocks stay in the pool, where others may find
them, and are pinned only while a worker writes them: a bounded number at a time, the rest later. Those that were moved
to the host meanwhile are written from there. What neither has any more when its turn comes is not written, nor what
continues it; a chain that ends while too many wait is dropped. Of what was dropped, or could not be written, that which
is moved to the host is written then, as it may leave memory next. States lie in the store of slots, and are written as
soon as they can be found there.
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
"""Blocks of one message, and of one file."""
SHARE = 8
"""One of so many blocks of the pool may be pinned for being written."""
MAX_CHAINS = 256
MAX_STATES = 3
"""States of a chain that are written: those behind the most of it."""


class WrittenRun(NamedTuple):
    """Blocks of one group, or states, that are being written."""

    keys: list[bytes]
    ids: list[int]
    are_states: bool


class WriteThrough:
    """Writes what `index`, the contents of the tier, does not have."""

    def __init__(self, blocks: KVBlocks, states: "StateStore | None", index: TierIndex) -> None:
        self.index = index
        self.messages: list[Transfer] = []
        """Transfers that have not been sent yet."""
        self.num_dropped = 0
        """Chains that were not written, or not to their end."""
        self.max_blocks = max(2, blocks.pool.num_usable // SHARE)
        self._max_run = min(MAX_RUN, self.max_blocks // 2)
        self._blocks = blocks
        self._states = states
        self._chains: deque[tuple[list[bytes], Iterator[WrittenRun]]] = deque()
        self._with_states: list[list[bytes]] = []
        self._runs: dict[Ticket, WrittenRun] = {}
        self._writing: set[bytes] = set()
        self._missed: set[bytes] = set()
        """Contents in memory that were to be written, and were not."""
        self._unwanted: set[bytes] = set()
        """Contents that must not be found again until the tier has said that they are gone."""
        self.next_ticket: Callable[[], Ticket] = iter(range(1, 2**53)).__next__

    @property
    def num_writing(self) -> int:
        """Number of blocks and states that are pinned."""
        return len(self._writing)

    @property
    def num_waiting(self) -> int:
        """Number of chains that are not written to their end."""
        return len(self._chains)

    def pinned(self, *, states: bool) -> list[list[int]]:
        """The blocks, or the slots, of each run that is being written."""
        return [run.ids for run in self._runs.values() if run.are_states is states]

    def is_kept(self, key: bytes) -> bool:
        """Whether a content is in the tier, or on its way there."""
        return key in self.index or key in self._writing

    def add(self, hashes: list[bytes], *, is_urgent: bool = False) -> None:
        """A chain has ended, whose blocks can be found. One that `is_urgent` is written first: it gave up its blocks to
        others, and comes back."""
        if self._states is not None:
            self._with_states.append(hashes)
        last = hashes[-1:]
        if all(self.is_kept(block_hash + group.key) for block_hash in last for group in self._blocks.groups):
            return  # and so is what it continues
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
        """The step being scheduled moves these contents to the host: what was missed of them is to be written now."""
        if not self._missed:
            return
        hashes = list(dict.fromkeys(key[:-1] for key in keys if key in self._missed))
        if hashes and len(self._chains) < MAX_CHAINS:
            self._missed.difference_update(self._keys_of(hashes))
            self._chains.append((hashes, self._runs_of(hashes)))

    def write_states(self) -> None:
        """Begin to write the states of ended chains that can be found by now. To be called when a step begins."""
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
        """Begin to write as much of the ended chains as may be pinned: a share of the pool, and at a time half of the
        blocks that are free, so that who has just made room for others made it for them."""
        blocks = self._blocks
        while self._chains and len(self._writing) + self._max_run <= self.max_blocks:
            hashes, runs = self._chains[0]
            run = next(runs, None)
            if run is None:
                self._chains.popleft()
            elif not blocks.may_pin(run.ids):
                self._chains[0] = hashes, self._runs_of(hashes)  # from where it is by then
                return
            else:
                blocks.pin(run.ids)
                self._begin(run)

    def ended(self, ticket: Ticket, failed: Iterable[int]) -> None:
        """A worker has written a run, but for the keys at the places `failed`."""
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
        """Let these contents not be found, whether they are written or about to be."""
        keys = set(keys)
        self._missed -= keys
        self._unwanted |= keys & (self._writing | self.index)
        self._chains = deque(chain for chain in self._chains if keys.isdisjoint(self._keys_of(chain[0])))
        if stored := keys & self.index:
            self.index.lose(stored)
            self.messages.append(ForgetStored(sorted(stored)))

    def forget_all(self) -> None:
        """Let nothing be found that was written by now, by any engine."""
        self.stop()
        self._unwanted |= self._writing | self.index
        self.index.lose(self.index)
        self.messages.append(ForgetStored(None))

    def learn(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """The tier has these contents from now on, and those no more."""
        removed = set(removed)
        self.index.lose(removed)
        self._unwanted -= removed
        self.index.gain(key for key in added if key not in self._unwanted)

    def stop(self) -> None:
        """Begin to write nothing more of the chains that have ended."""
        self._chains.clear()
        self._missed.clear()
        self._with_states = []

    def lose(self) -> None:
        """The workers have gone, and with them what they had to write."""
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
        """Remember which of these are in memory. Those that have left it by then are forgotten where there are many."""
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
        """The runs of a chain, each made when the one before is being written; its blocks are those of that moment, on
        the device or on the host."""
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
                        open_groups.remove(group)  # nobody finds what continues a block that is lost
                        break
                    if keys:
                        yield WrittenRun(keys, ids, are_states=False)
                        keys, ids = [], []
                if keys:
                    yield WrittenRun(keys, ids, are_states=False)
        self.num_dropped += len(groups) - len(open_groups)
