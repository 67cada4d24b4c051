"""PrefixRouter: which of several engines gets a request. A pure policy, for `-dp N` and for replicas of Ray Serve.

It knows of each engine which blocks of KV it has in its prefix cache, by their hashes: from the engine's KV events,
and because it sent it the prompts, which events have not said yet or will not. What it gets besides are the loads;
nothing in here waits, looks at the time or draws.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

MAX_HASHED_BLOCKS = 1024
"""The beginning of a longer prompt decides: hashing this many blocks takes a millisecond."""
SLACK = 4
EXCESS = 0.25
"""An engine that has all of a prompt gets it with less than so many requests more than the least loaded one has: SLACK,
or this share of them if that is more. One that has half of it, with half as many."""
EVICTION = 2.0
"""What a block counts that has to be evicted for a prompt, against one that need not be computed: others may want it
again, and an engine with room to spare is better filled."""

E = TypeVar("E", bound=Hashable)


_NOTHING: OrderedDict[Hashable, None] = OrderedDict()


class RoutingChoice(NamedTuple, Generic[E]):
    """The engine for a request, and how many of the prompt's first blocks it is thought to have."""

    engine: E
    num_cached: int


class PrefixRouter(Generic[E]):
    """Sends a request to the engine where the most is gained: the share of its prompt that is cached there, less what
    has to be evicted for it, less the requests which that engine has more than the least loaded one. So an engine that
    has nothing of it gets it if it has less to do, and a beginning that all share does not draw all to one engine.

    Requests with the same affinity (a session, a cache salt) go to the same engine, within the same bounds: which one
    that is follows from their names alone, so that several routers agree that know nothing of each other.
    """

    def __init__(self, slack: int = SLACK, excess: float = EXCESS) -> None:
        self._slack = slack
        self._excess = excess
        self.cached: dict[E, set[Hashable]] = {}
        """What each engine has said that it has."""
        self._sent: dict[E, OrderedDict[Hashable, None]] = {}
        """What each was sent and has said nothing of, the least recently used first."""
        self._capacity: dict[E, int] = {}

    @property
    def engines(self) -> tuple[E, ...]:
        return tuple(self.cached)

    def add(self, engine: E, num_blocks: int) -> None:
        """Know an engine whose cache holds `num_blocks`. One that is known keeps what it has."""
        self.cached.setdefault(engine, set())
        self._sent.setdefault(engine, OrderedDict())
        self._capacity[engine] = num_blocks
        self._forget_beyond(engine)

    def remove(self, engine: E) -> None:
        """Forget an engine that has ended. An unknown one is ignored."""
        for known in (self.cached, self._sent, self._capacity):
            known.pop(engine, None)

    def choose(
        self, hashes: Sequence[Hashable], loads: Mapping[E, int], affinity: str | None = None
    ) -> RoutingChoice[E]:
        """Choose one of the engines in `loads`, which has the number of requests that each of them works on. `hashes`
        are those of the prompt's full blocks. Raises ValueError if there is none."""
        if not loads:
            raise ValueError("there is no engine to choose from")
        least = min(loads.values())
        bound = max(self._slack, self._excess * least)
        cached = {engine: self.num_cached(engine, hashes) for engine in loads}
        if affinity is not None:
            allowed = [engine for engine, load in loads.items() if load - least <= bound]
            chosen = max(allowed, key=lambda engine: _rank(engine, affinity))
        else:
            tie = str(hashes[0]) if hashes else ""  # idle engines share out what begins differently

            def gain(engine: E) -> tuple[float, int, bytes]:
                gained = self._share_gained(engine, cached[engine], len(hashes))
                return gained - (loads[engine] - least) / bound, -loads[engine], _rank(engine, tie)

            chosen = max(loads, key=gain)
        return RoutingChoice(chosen, cached[chosen])

    def _share_gained(self, engine: E, num_cached: int, num_blocks: int) -> float:
        """Gain by the cache of `engine`, as a share of the prompt: 1 if all of it is there, 0 if nothing is and nothing
        has to be evicted."""
        if not num_blocks:
            return 0.0
        room = self._capacity.get(engine, 0) - len(self.cached.get(engine, ())) - len(self._sent.get(engine, ()))
        num_evicted = max(0, num_blocks - num_cached - room)
        return (num_cached - EVICTION * num_evicted) / num_blocks

    def num_cached(self, engine: E, hashes: Sequence[Hashable]) -> int:
        """Count how many of the first blocks of a prompt `engine` has, as far as is known here."""
        cached, sent = self.cached.get(engine, _NOTHING), self._sent.get(engine, _NOTHING)
        missing = (index for index, block in enumerate(hashes) if block not in cached and block not in sent)
        return next(missing, len(hashes))

    # ---- what the engines have

    def stored(self, engine: E, hashes: Sequence[Hashable]) -> None:
        """An engine has these blocks now, or will soon, since it was sent their prompt."""
        sent = self._sent.get(engine)
        if sent is None:
            return
        cached = self.cached[engine]
        for block in reversed(hashes):  # the end of a prompt is dropped before its beginning, as engines do
            if block not in cached:
                sent[block] = None
                sent.move_to_end(block)
        self._forget_beyond(engine)

    def announced(self, engine: E, hashes: Sequence[Hashable]) -> None:
        """An engine has said that it has these blocks. It will say when it drops them."""
        cached, sent = self.cached.get(engine), self._sent.get(engine, _NOTHING)
        if cached is not None:
            cached.update(hashes)
            for block in hashes:
                sent.pop(block, None)

    def dropped(self, engine: E, hashes: Sequence[Hashable]) -> None:
        """An engine has evicted these blocks."""
        cached, sent = self.cached.get(engine, set()), self._sent.get(engine, _NOTHING)
        cached.difference_update(hashes)
        for block in hashes:
            sent.pop(block, None)

    def retain(self, engine: E, blocks: AbstractSet[Hashable]) -> None:
        """An engine has none but these, and perhaps not all of them."""
        known = (*self.cached.get(engine, ()), *self._sent.get(engine, ()))
        self.dropped(engine, [block for block in known if block not in blocks])

    def cleared(self, engine: E) -> None:
        """An engine has an empty cache, because it was emptied or because another took its place."""
        if engine in self.cached:
            self.cached[engine].clear()
            self._sent[engine].clear()

    def _forget_beyond(self, engine: E) -> None:
        sent = self._sent[engine]
        while len(sent) > self._capacity[engine]:
            sent.popitem(last=False)

    def check_integrity(self) -> None:
        """Raises AssertionError if an engine was sent more than it can have, or something is known twice."""
        if not self.cached.keys() == self._sent.keys() == self._capacity.keys():
            raise AssertionError(f"engines {set(self.cached)} have caches, {set(self._capacity)} capacities")
        for engine, sent in self._sent.items():
            if len(sent) > self._capacity[engine]:
                raise AssertionError(f"engine {engine} was sent {len(sent)} blocks and holds {self._capacity[engine]}")
            if both := self.cached[engine] & sent.keys():
                raise AssertionError(f"engine {engine} has said that it has {both}, which are only thought of")


def _rank(engine: Hashable, name: str) -> bytes:
    """The place of an engine in the order that belongs to `name` (rendezvous hashing): without one engine, only the
    names move that were its own."""
    return blake2b(f"{engine}\0{name}".encode(errors="surrogatepass"), digest_size=8).digest()
