"""PrefixRouter: chooses one of several engines for a request. A pure policy, for `-dp N` and for replicas of Ray Serve.

It tracks the block hashes in each engine's prefix cache: from the engine's KV events, and from the prompts that were
sent there, until or unless events report them. The only other input are the loads: the router does not wait, read the
time or draw random numbers.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

MAX_HASHED_BLOCKS = 1024
"""Maximum blocks of a prompt that are hashed, which takes a millisecond; only they count for longer prompts."""
SLACK = 4
EXCESS = 0.25
"""An engine with all of a prompt cached is chosen as long as it has fewer than SLACK requests more than the least
loaded one, or than this share of that one's requests, whichever is more; with half of it cached, half as many."""
EVICTION = 2.0
"""Cost of a block that has to be evicted for a prompt, relative to one that need not be computed: it may be needed
again, and an engine with free room should be filled first."""

E = TypeVar("E", bound=Hashable)


_NOTHING: OrderedDict[Hashable, None] = OrderedDict()


class RoutingChoice(NamedTuple, Generic[E]):
    """The engine for a request, and the number of the prompt's first blocks that it is believed to have."""

    engine: E
    num_cached: int


class PrefixRouter(Generic[E]):
    """Sends a request to the engine with the highest gain: the share of the prompt that is cached there, minus the cost
    of evictions, minus the engine's additional requests beyond those of the least loaded one. So an engine without any
    of the prompt gets it if it is less loaded, and a common prefix does not attract all requests to one engine.

    Requests with the same affinity (a session, a cache salt) go to the same engine, within the same limits. That engine
    follows from the names alone, so that independent routers agree.
    """

    def __init__(self, slack: int = SLACK, excess: float = EXCESS) -> None:
        self._slack = slack
        self._excess = excess
        self.cached: dict[E, set[Hashable]] = {}
        """Engine -> hashes that its events have announced."""
        self._sent: dict[E, OrderedDict[Hashable, None]] = {}
        """Engine -> hashes of prompts sent there that no event has announced, the least recently used first."""
        self._capacity: dict[E, int] = {}

    @property
    def engines(self) -> tuple[E, ...]:
        return tuple(self.cached)

    def add(self, engine: E, num_blocks: int) -> None:
        """Add an engine whose cache holds `num_blocks`. A known engine keeps its hashes."""
        self.cached.setdefault(engine, set())
        self._sent.setdefault(engine, OrderedDict())
        self._capacity[engine] = num_blocks
        self._forget_beyond(engine)

    def remove(self, engine: E) -> None:
        """Remove an engine that has ended. An unknown one is ignored."""
        for known in (self.cached, self._sent, self._capacity):
            known.pop(engine, None)

    def choose(
        self, hashes: Sequence[Hashable], loads: Mapping[E, int], affinity: str | None = None
    ) -> RoutingChoice[E]:
        """Choose one of the engines in `loads` (engine -> number of its requests). `hashes` are those of the prompt's
        full blocks. Raises ValueError without engines."""
        if not loads:
            raise ValueError("there is no engine to choose from")
        least = min(loads.values())
        bound = max(self._slack, self._excess * least)
        cached = {engine: self.num_cached(engine, hashes) for engine in loads}
        if affinity is not None:
            allowed = [engine for engine, load in loads.items() if load - least <= bound]
            chosen = max(allowed, key=lambda engine: _rank(engine, affinity))
        else:
            tie = str(hashes[0]) if hashes else ""  # idle engines share prompts with different beginnings

            def gain(engine: E) -> tuple[float, int, bytes]:
                gained = self._share_gained(engine, cached[engine], len(hashes))
                return gained - (loads[engine] - least) / bound, -loads[engine], _rank(engine, tie)

            chosen = max(loads, key=gain)
        return RoutingChoice(chosen, cached[chosen])

    def _share_gained(self, engine: E, num_cached: int, num_blocks: int) -> float:
        """Gain by the cache of `engine` as a share of the prompt: 1 if all of it is cached, 0 if nothing is and nothing
        has to be evicted."""
        if not num_blocks:
            return 0.0
        room = self._capacity.get(engine, 0) - len(self.cached.get(engine, ())) - len(self._sent.get(engine, ()))
        num_evicted = max(0, num_blocks - num_cached - room)
        return (num_cached - EVICTION * num_evicted) / num_blocks

    def num_cached(self, engine: E, hashes: Sequence[Hashable]) -> int:
        """Number of the first blocks of a prompt that `engine` is believed to have."""
        cached, sent = self.cached.get(engine, _NOTHING), self._sent.get(engine, _NOTHING)
        missing = (index for index, block in enumerate(hashes) if block not in cached and block not in sent)
        return next(missing, len(hashes))

    # ---- contents of the engines' caches

    def stored(self, engine: E, hashes: Sequence[Hashable]) -> None:
        """Record the blocks of a prompt that was sent to an engine, which will have them soon."""
        sent = self._sent.get(engine)
        if sent is None:
            return
        cached = self.cached[engine]
        for block in reversed(hashes):  # a prompt's end is dropped before its beginning, as in engines
            if block not in cached:
                sent[block] = None
                sent.move_to_end(block)
        self._forget_beyond(engine)

    def announced(self, engine: E, hashes: Sequence[Hashable]) -> None:
        """Record blocks that an engine's events have announced; later events will report their removal."""
        cached, sent = self.cached.get(engine), self._sent.get(engine, _NOTHING)
        if cached is not None:
            cached.update(hashes)
            for block in hashes:
                sent.pop(block, None)

    def dropped(self, engine: E, hashes: Sequence[Hashable]) -> None:
        """Record that an engine has evicted these blocks."""
        cached, sent = self.cached.get(engine, set()), self._sent.get(engine, _NOTHING)
        cached.difference_update(hashes)
        for block in hashes:
            sent.pop(block, None)

    def retain(self, engine: E, blocks: AbstractSet[Hashable]) -> None:
        """Drop all blocks of an engine except these, of which it may have only some."""
        known = (*self.cached.get(engine, ()), *self._sent.get(engine, ()))
        self.dropped(engine, [block for block in known if block not in blocks])

    def cleared(self, engine: E) -> None:
        """Record that an engine's cache is empty, because it was reset or the engine was replaced."""
        if engine in self.cached:
            self.cached[engine].clear()
            self._sent[engine].clear()

    def _forget_beyond(self, engine: E) -> None:
        sent = self._sent[engine]
        while len(sent) > self._capacity[engine]:
            sent.popitem(last=False)

    def check_integrity(self) -> None:
        """Raise AssertionError if an engine has more recorded blocks than fit, or a block is recorded twice."""
        if not self.cached.keys() == self._sent.keys() == self._capacity.keys():
            raise AssertionError(f"engines {set(self.cached)} have caches, {set(self._capacity)} capacities")
        for engine, sent in self._sent.items():
            if len(sent) > self._capacity[engine]:
                raise AssertionError(f"engine {engine} was sent {len(sent)} blocks and holds {self._capacity[engine]}")
            if both := self.cached[engine] & sent.keys():
                raise AssertionError(f"engine {engine} has said that it has {both}, which are only thought of")


def _rank(engine: Hashable, name: str) -> bytes:
    """Rank of an engine for `name` by rendezvous hashing: when an engine leaves, only its own names move."""
    return blake2b(f"{engine}\0{name}".encode(errors="surrogatepass"), digest_size=8).digest()
