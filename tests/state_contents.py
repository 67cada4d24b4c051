"""Checks that every state slot, on the device and the host, has the state that the scheduler expects, by the contents
of a simulated worker."""

from collections import abc

from tests.simulated_worker import SimulatedWorker, StateOf
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.sequence import Sequence
from vllm_lite.engine.states.slots import StateSlots
from vllm_lite.engine.states.store import KEY
from vllm_lite.runtime.prefix_hash import KeyedSpan, PrefixHasher


class RecordingHasher(PrefixHasher):
    """Passes calls to another hasher, and stores the tokens of every digest."""

    def __init__(self, other: PrefixHasher) -> None:
        self.block_size = other.block_size
        self.tokens_of: dict[bytes, tuple[int, ...]] = {}
        self._other = other

    def root(self, extra_keys: abc.Sequence[str] = ()) -> bytes:
        return self._other.root(extra_keys)

    def extend(
        self,
        hashes: list[bytes],
        root: bytes,
        tokens: memoryview,
        num_tokens: int,
        spans: abc.Sequence[KeyedSpan] = (),
    ) -> None:
        first, ids = len(hashes), tokens.cast("I").tolist()
        self._other.extend(hashes, root, tokens, num_tokens, spans)
        for index in range(first, len(hashes)):
            self.tokens_of[hashes[index]] = tuple(ids[: (index + 1) * self.block_size])


class StateContents:
    """Compares all findable states and all sequences' states with what a worker has in these slots, so that a wrong
    state is detected when it is written, not when it is read."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._states = next((part for part in kv.parts if isinstance(part, StateSlots)), None)
        self._hasher = kv.hasher = RecordingHasher(kv.hasher)
        self.num_compared = 0

    def check(self, worker: SimulatedWorker, sequences: abc.Iterable[Sequence]) -> None:
        """Call this when the worker has run every scheduled step; `sequences` are all unfinished ones.

        Ops of decisions between two steps, as for beams, are sent with the next step, which runs them before it
        computes. So slots are compared as they will be after these ops.
        """
        states = self._states
        if states is None or worker.states is None:
            return
        held = dict(worker.states)
        for op, src, dst in states.host.ops if states.host is not None else ():
            assert src in held, f"op {op} is to move slot {src}, in which no state was ever left"
            held[dst] = held[src]
        for slot, key in _found(states):
            wanted, there = self._hasher.tokens_of[key.removesuffix(KEY)], held.get(slot)
            assert there is not None, f"slot {slot} can be found, and nothing was ever left there"
            assert there.tokens == wanted, f"slot {slot} holds the state of {there.tokens}, not {wanted}"
            self.num_compared += 1
        for sequence in sequences:
            self._check_own(held, sequence)

    def _check_own(self, held: dict[int, StateOf], sequence: Sequence) -> None:
        """Check the state from which a running or swapped out sequence continues. The effect of drafts in flight is
        known to the worker only."""
        state, adapter = sequence.state, sequence.request.adapter
        if state is None or state.is_ahead or sequence.num_drafted or not sequence.num_computed:
            return
        place = state.source or state.live if state.host is None else state.host
        there = held.get(place)
        assert there is not None, f"{sequence} goes on in slot {place}, and nothing was ever left there"
        assert there.adapter == (0 if adapter is None else adapter.number), f"{sequence} has the state of another"
        assert len(there.tokens) == sequence.num_computed, f"{sequence} goes on behind {len(there.tokens)} tokens"
        known = min(sequence.num_computed, sequence.num_tokens)  # later ones are in flight
        assert there.tokens[:known] == tuple(sequence.tokens[:known]), f"{sequence} goes on with {there.tokens}"
        self.num_compared += 1


def _found(states: StateSlots) -> abc.Iterable[tuple[int, bytes]]:
    """The slots, on device and host, of states that other sequences can find, now or from the next step on, with their
    keys."""
    yield from ((block.block_id, block.block_hash) for block in states.pool.blocks if block.block_hash is not None)
    yield from ((left.slot, left.key) for left in states.store.unpublished)
    for key in states.histories.demoted:
        place = None if states.host is None else states.host.find(key)
        assert place is not None, "a state has a history on the host, and no place there"
        yield place, key
