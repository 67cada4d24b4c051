"""Choice of the saved state that makes room for another: the oldest that a longer one of the same chat has superseded;
if there is none, the one of a chat's last two that its next prompt will hardly begin with; and else the one whose next
use is expected to be furthest away.

A chat's next prompt begins with the latest state where it repeats the answer, and with one of the last prompt where it
does not, as where reasoning is dropped from answers or a client shortens them. What it did the last time it is expected
to do again.

The least recently used would be the worst choice where chats follow one another in a circle: with one chat more than
there is room for, each would lose its state just before its next prompt. A state is used about once, by the chat's next
prompt, which leaves a longer one; so a history is that of a chat, and its next prompt is expected as long after the
last one as that was after the one before. One that is overdue is expected to take as long again as it is late. The
history of a state that had to go is remembered for a while: a chat that comes back without its state shows that it was
worth keeping.

A state with which a second chat begins, such as that behind a system prompt, has a history of its own.
"""

from collections.abc import Callable, Iterable
from itertools import chain, islice

REMEMBERED = 16
"""So many histories of states that had to go are remembered, for each state that can be kept."""
LOOKED_AT = 256
"""So many of the oldest states and of the newest are looked at for one that makes room: among chats whose prompts come
equally often, those whose next use is furthest away are at either end."""
SMOOTHING = 1 / 16
"""The weight of the latest gap in the typical one."""


class History:
    """When states of one chat were used, counted in prompts that came in.

    last       the last time
    gap        how long that was behind the time before; None: it was the first
    key        the latest state of the chat
    ends       those at the end of its last prompt, the longest last
    began_at   which of these its prompt began with, counted from the end; 0: with one of the answer behind it
    is_shared  it is that of one state, with which several chats begin
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
        """Whether a prompt that begins with this state is the chat's next one. `repeats`: more of it is known than that
        state, so it repeats the answer."""
        if found != self.key and found not in self.ends:
            return False
        if repeats or found not in self.ends:
            self.began_at = 0
        elif found != self.key:
            self.began_at = len(self.ends) - self.ends.index(found)
        return True

    def leave(self, key: bytes, *, ends_prompt: bool) -> None:
        """The chat has left a state, at the end of its prompt or elsewhere."""
        self.key = key
        if ends_prompt:
            self.ends = [key] if self._is_new else [*self.ends, key]
            self._is_new = False

    @property
    def rewrites(self) -> bool:
        """Whether its prompts do not repeat the answers before."""
        return self.began_at > 0

    def worth(self, key: bytes) -> int:
        """2: its next prompt is likely to begin with this state; 1: or else with this one; 0: it is superseded."""
        base = self.ends[-max(1, self.began_at)] if len(self.ends) >= max(1, self.began_at) else None
        if key == self.key:
            return 1 if self.rewrites and base not in (None, key) else 2
        return 0 if key != base else 2 if self.rewrites else 1


class StateHistories:
    """Knows the histories of the states that can be found, and of some that had to go; not where they are."""

    def __init__(self, num_states: int) -> None:
        """For at most so many states at a time."""
        self.kept: dict[bytes, History] = {}  # on the device
        self.demoted: dict[bytes, History] = {}  # on the host
        self._now = 0
        self._gone: dict[bytes, History] = {}
        self._max_gone = REMEMBERED * num_states
        self._typical_gap = 0.0
        self._usual = 0
        """What a chat that is new is expected to do: the `began_at` of the latest."""

    def begin(self, found: bytes | None, longer: Iterable[bytes], *, repeats: bool = False) -> History:
        """A prompt comes in that begins with the state `found`; `longer` are the keys behind more of it, the longest
        first, of which some is known if it `repeats`. Returns the history with which the states go on that it
        leaves."""
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
        """As `begin`, for a prompt that came in before."""
        known = self._known(found)
        return History(self._now) if known is None or known.is_shared else known

    def _known(self, key: bytes | None) -> History | None:
        return None if key is None else self.kept.get(key) or self.demoted.get(key)

    def _returned(self, longer: Iterable[bytes]) -> History | None:
        """The history of a chat that comes back after its latest state had to go."""
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
        """A state can be found from now on, which a sequence with this history has left, maybe where its prompt
        ends."""
        before = self._gone.pop(key, history)
        if before is history:
            history.leave(key, ends_prompt=ends_prompt)
        else:  # another chat had left it
            history = History(before.last, key, is_shared=True)
            self._used(history)
        self.kept[key] = history

    def remove(self, states: dict[bytes, History], key: bytes, *, is_remembered: bool = False) -> None:
        """A state of `kept` or of `demoted` is not there any more."""
        history = states.pop(key)
        if is_remembered:
            self._gone.pop(key, None)
            self._gone[key] = history
            if len(self._gone) > self._max_gone:
                del self._gone[next(iter(self._gone))]

    def clear(self) -> None:
        """No state can be found any more, nor is any history remembered."""
        for states in (self.kept, self.demoted, self._gone):
            states.clear()

    def worst(
        self, states: dict[bytes, History], may_go: Callable[[bytes], bool], *, only_superseded: bool = False
    ) -> bytes | None:
        """The one of `kept` or of `demoted` that has to make room, of those that may go; None if there is none. Where
        there are many, with `only_superseded` also if none is found among those that are looked at."""
        items = states.items()
        if len(states) <= 2 * LOOKED_AT:
            return self._worst_of(items, may_go, only_superseded=only_superseded)
        ends = chain(islice(items, LOOKED_AT), islice(reversed(items), LOOKED_AT))
        worst = self._worst_of(ends, may_go, only_superseded=only_superseded)
        if worst is None and not only_superseded:  # those may all be in use
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
        """Whether the state that a chat is likely to begin with is worth more than the `worst` of `demoted`."""
        other = self.demoted[worst]
        return other.worth(worst) < 2 or self.expected_wait(history) < self.expected_wait(other)

    def expected_wait(self, history: History) -> float:
        gap = self._typical_gap if history.gap is None else history.gap
        return abs(history.last + gap - self._now)
