"""Choice of the saved state to evict: the oldest one that a longer state of the same chat supersedes; if there is none,
the one of a chat's last two from which its next prompt is unlikely to continue; otherwise the one whose next use is
expected to be furthest away.

A chat's next prompt continues from the latest state if it repeats the answer, and from a state of the last prompt if it
does not, for example because clients drop reasoning from answers. A chat is expected to do as it did the last time.

LRU would be the worst policy for chats that take turns: with one chat more than fits, each would lose its state just
before its next prompt. A state is used about once, by the chat's next prompt, which leaves a longer one. So histories
belong to chats. The next prompt is expected after the same gap as the last one; an overdue one is expected to take as
long again as it is late. Histories of evicted states are remembered for a while, so that a chat which returns without
its state is known to be worth keeping.

A state from which a second chat continues, such as that of a system prompt, has a history of its own.
"""

from collections.abc import Callable, Iterable
from itertools import chain, islice

REMEMBERED = 16
"""Histories of evicted states that are remembered, per state that fits."""
LOOKED_AT = 256
"""Number of oldest states, and of newest ones, examined for eviction: among chats with equal gaps the next uses that
are furthest away are at either end."""
SMOOTHING = 1 / 16
"""Weight of the latest gap in the typical one."""


class History:
    """Uses of the states of one chat. Time is counted in admitted prompts.

    last       time of the latest use
    gap        time between the latest two uses; None: there was only one
    key        latest state of the chat
    ends       states at the end of its last prompt, the longest last
    began_at   index, from the end of `ends`, of the state from which its latest prompt continued; 0: a later state
    is_shared  history of one state from which several chats continue
    """

    __slots__ = ("_is_new", "began_at", "ends", "gap", "is_shared", "key", "last")

    def __init__(self, now: int, key: bytes | None = None, *, is_shared: bool = False, began_at: int = 0) -> None:
        self.last = now
        self.gap: int | None = None
        self.key = key
        self.ends: list[bytes] = []
        self.began_at = began_at
        self.is_shared = is_shared
        self._is_new = True

    def use(self, now: int) -> int:
        self.last, self.gap = now, now - self.last
        self._is_new = True
        return self.gap

    def continues(self, found: bytes, *, repeats: bool) -> bool:
        """Whether a prompt that continues from the state `found` is the chat's next one. `repeats`: more of the prompt
        is cached than this state, so it repeats the answer."""
        if found != self.key and found not in self.ends:
            return False
        if repeats or found not in self.ends:
            self.began_at = 0
        elif found != self.key:
            self.began_at = len(self.ends) - self.ends.index(found)
        return True

    def leave(self, key: bytes, *, ends_prompt: bool) -> None:
        """Record that the chat has saved a state, at the end of its prompt or elsewhere."""
        self.key = key
        if ends_prompt:
            self.ends = [key] if self._is_new else [*self.ends, key]
            self._is_new = False

    @property
    def rewrites(self) -> bool:
        """Whether its prompts do not repeat earlier answers."""
        return self.began_at > 0

    def worth(self, key: bytes) -> int:
        """2: the next prompt is likely to continue from this state; 1: it might; 0: the state is superseded."""
        base = self.ends[-max(1, self.began_at)] if len(self.ends) >= max(1, self.began_at) else None
        if key == self.key:
            return 1 if self.rewrites and base not in (None, key) else 2
        return 0 if key != base else 2 if self.rewrites else 1


class StateHistories:
    """Histories of all saved states, and of some that were evicted. It does not know in which slots they are."""

    def __init__(self, num_states: int) -> None:
        """`num_states` is the maximum number of saved states at a time."""
        self.kept: dict[bytes, History] = {}  # on the device
        self.demoted: dict[bytes, History] = {}  # on the host
        self._now = 0
        self._gone: dict[bytes, History] = {}
        self._max_gone = REMEMBERED * num_states
        self._typical_gap = 0.0
        self._usual = 0
        """`began_at` of the latest prompt that continued a chat; new chats are expected to do the same."""

    def begin(self, found: bytes | None, longer: Iterable[bytes], *, repeats: bool = False) -> History:
        """Record a new prompt that continues from the state `found`. `longer` are the keys of longer prefixes of it,
        the longest first; with `repeats` KV of a longer prefix is cached. Returns the history for the states that the
        sequence will save."""
        self._now += 1
        history = self._returned(longer)
        known = self._known(found) if history is None else None
        if known is not None and known.is_shared:
            self._used(known)
        elif known is not None and found is not None and known.continues(found, repeats=repeats):
            history, self._usual = known, known.began_at
        elif known is not None and found is not None:  # a second chat begins there
            (self.kept if found in self.kept else self.demoted)[found] = History(self._now, found, is_shared=True)
        if history is None:
            return History(self._now, began_at=self._usual)
        self._used(history)
        return history

    def again(self, found: bytes | None) -> History:
        """Like begin(), for a prompt that was recorded before, such as that of a preempted sequence."""
        known = self._known(found)
        return History(self._now) if known is None or known.is_shared else known

    def _known(self, key: bytes | None) -> History | None:
        return None if key is None else self.kept.get(key) or self.demoted.get(key)

    def _returned(self, longer: Iterable[bytes]) -> History | None:
        """History of a chat that returns after its latest state was evicted."""
        if not self._gone:
            return None
        for key in longer:
            history = self._gone.get(key)
            if history is not None and history.worth(key) == 2 and not history.is_shared:
                return history
        return None

    def _used(self, history: History) -> None:
        gap = history.use(self._now)
        self._typical_gap += (gap - self._typical_gap) * (SMOOTHING if self._typical_gap else 1)

    def add(self, key: bytes, history: History, *, ends_prompt: bool = False) -> None:
        """Record a newly published state, left by a sequence with this history."""
        before = self._gone.pop(key, history)
        if before is history:
            history.leave(key, ends_prompt=ends_prompt)
        else:  # another chat had left it
            history = History(before.last, key, is_shared=True)
            self._used(history)
        self.kept[key] = history

    def remove(self, states: dict[bytes, History], key: bytes, *, is_remembered: bool = False) -> None:
        """Remove a state from `states`, which is `kept` or `demoted`; `is_remembered` keeps its history for a while."""
        history = states.pop(key)
        if is_remembered:
            self._gone.pop(key, None)
            self._gone[key] = history
            if len(self._gone) > self._max_gone:
                del self._gone[next(iter(self._gone))]

    def clear(self) -> None:
        """Forget all states and histories."""
        for states in (self.kept, self.demoted, self._gone):
            states.clear()

    def worst(
        self, states: dict[bytes, History], may_go: Callable[[bytes], bool], *, only_superseded: bool = False
    ) -> bytes | None:
        """Key of the state of `states` (`kept` or `demoted`) to evict, among those that `may_go`; None if there is
        none. With `only_superseded` and many states, None also if none of the examined ones is superseded."""
        items = states.items()
        if len(states) <= 2 * LOOKED_AT:
            return self._worst_of(items, may_go, only_superseded=only_superseded)
        ends = chain(islice(items, LOOKED_AT), islice(reversed(items), LOOKED_AT))
        worst = self._worst_of(ends, may_go, only_superseded=only_superseded)
        if worst is None and not only_superseded:  # all examined states may be in use
            worst = self._worst_of(items, may_go, only_superseded=False)
        return worst

    def _worst_of(
        self, items: Iterable[tuple[bytes, History]], may_go: Callable[[bytes], bool], *, only_superseded: bool
    ) -> bytes | None:
        spare, worst, longest = None, None, -1.0
        for key, history in items:
            worth = history.worth(key)
            if worth < 2:
                if (worth == 0 or spare is None) and may_go(key):
                    if worth == 0:
                        return key
                    spare = key
            elif not only_superseded and spare is None:
                wait = self.expected_wait(history)
                if wait > longest and may_go(key):
                    worst, longest = key, wait
        return worst if spare is None else spare

    def is_better(self, history: History, worst: bytes) -> bool:
        """Whether a state that the next prompt of `history` is likely to use is worth more than `worst` of
        `demoted`."""
        other = self.demoted[worst]
        return other.worth(worst) < 2 or self.expected_wait(history) < self.expected_wait(other)

    def expected_wait(self, history: History) -> float:
        gap = self._typical_gap if history.gap is None else history.gap
        return abs(history.last + gap - self._now)
