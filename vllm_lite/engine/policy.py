"""Who is served next, who gives way, how much a step may compute: policies, and the guard that checks them.

A policy is a class with any of these three methods (what it lacks is first come, first served). It may read the
sequences it is given and must not change them:

    order(self, waiting, view) -> the same sequences, in the order in which to admit them
    victim(self, candidates, view) -> the running sequence to preempt; the last candidate came last
    budget(self, view) -> tokens of the next step, 1 to view.max_num_batched_tokens
    charged(self, sequence, num_tokens) -> None, told of every token that a step computes

`--policy package.module:Class` loads one by name. What it returns is checked after each call; at the first fault the
scheduler goes on with first come, first served and says so.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heapreplace
from importlib import import_module
from typing import Any, NamedTuple

from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import ConfigError


class View(NamedTuple):
    """What a policy may know besides the sequences."""

    now_s: float
    num_running: int
    num_waiting: int
    num_free_blocks: int
    max_num_batched_tokens: int


class Fcfs:
    """First come, first served; who came last gives way."""


class Priority:
    """Lower `priority` first, then first come; the highest number that came last gives way."""

    @staticmethod
    def _key(sequence: Sequence) -> tuple[int, int, int]:
        return (sequence.request.params.priority, sequence.request.arrival, sequence.index)

    def order(self, waiting: Seq[Sequence], view: View) -> Seq[Sequence]:  # noqa: ARG002
        return sorted(waiting, key=self._key)

    def victim(self, candidates: Seq[Sequence], view: View) -> Sequence:  # noqa: ARG002
        return max(candidates, key=self._key)


class Deadline:
    """The earliest deadline first; who has most time, or no deadline, gives way."""

    @staticmethod
    def _key(sequence: Sequence) -> tuple[float, int, int]:
        deadline_s = sequence.request.deadline_s
        return (float("inf") if deadline_s is None else deadline_s, sequence.request.arrival, sequence.index)

    def order(self, waiting: Seq[Sequence], view: View) -> Seq[Sequence]:  # noqa: ARG002
        return sorted(waiting, key=self._key)

    def victim(self, candidates: Seq[Sequence], view: View) -> Sequence:  # noqa: ARG002
        return max(candidates, key=self._key)


class Fair:
    """Deficit round robin between tenants (`user`): what a tenant's sequences compute is taken from its deficit, every
    round gives all tenants the same again, and whoever has most is served. Nobody's share grows by asking more.

    A tenant counts as long as it was seen in the last two steps, waiting or running; who wants nothing saves nothing up
    and forgets debts.
    """

    def __init__(self) -> None:
        self.deficits: dict[str | None, float] = defaultdict(float)
        self._seen: dict[str | None, int] = {}
        self._view: View | None = None
        self._step = 0

    def order(self, waiting: Seq[Sequence], view: View) -> Seq[Sequence]:
        if view is not self._view:  # one view a step: running and waiting sequences are ordered with the same one
            self._view, self._step = view, self._step + 1
        queues: dict[str | None, deque[Sequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.request.params.user, deque()).append(sequence)
        self._seen |= dict.fromkeys(queues, self._step)
        self._seen = {tenant: step for tenant, step in self._seen.items() if step >= self._step - 2}
        most = max((self.deficits[tenant] for tenant in self._seen), default=0.0)
        # As many rounds as it takes until somebody owes nothing.
        self.deficits = defaultdict(float, {tenant: self.deficits[tenant] - most for tenant in self._seen})
        left = [(-self.deficits[tenant], place, tenant) for place, tenant in enumerate(queues)]
        heapify(left)
        ordered = []
        while left:
            owes, place, tenant = left[0]
            ordered.append(queues[tenant].popleft())
            if queues[tenant]:
                heapreplace(left, (owes + ordered[-1].num_tokens, place, tenant))
            else:
                heappop(left)
        return ordered

    def charged(self, sequence: Sequence, num_tokens: int) -> None:
        tenant = sequence.request.params.user
        self.deficits[tenant] -= num_tokens
        self._seen[tenant] = self._step


BUILT_IN: dict[str, type] = {"fcfs": Fcfs, "priority": Priority, "deadline": Deadline, "fair": Fair}


def load(name: str) -> Any:
    """A policy by its built-in name or as "package.module:Class". Raises ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"scheduling_policy must be one of {sorted(BUILT_IN)} or module:Class, got {name!r}")
    try:
        return getattr(import_module(module), attribute)()
    except Exception as error:
        raise ConfigError(f"policy {name!r} cannot be loaded: {error!r}") from error


class GuardedPolicy:
    """A policy whose answers are checked. `on_fault(what)` is called once, when it is replaced by fcfs."""

    def __init__(self, policy: Any, on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        self._use(policy)

    def _use(self, policy: Any) -> None:
        self.order_by = getattr(policy, "order", None)
        self.choose_victim = getattr(policy, "victim", None)
        self.choose_budget = getattr(policy, "budget", None)
        self.charged = getattr(policy, "charged", None)

    def order(self, waiting: Seq[Sequence], view: View) -> Seq[Sequence]:
        ordered = self._ask(self.order_by, list(waiting), view)
        if ordered is not None and _is_permutation(ordered, waiting):
            return list(ordered)
        if self.order_by is not None:
            self._fault("order() must return the sequences it was given, each once")
        return waiting

    def victim(self, candidates: Seq[Sequence], view: View) -> Sequence:
        victim = self._ask(self.choose_victim, list(candidates), view)
        if any(victim is candidate for candidate in candidates):
            return victim  # type: ignore[no-any-return]
        if self.choose_victim is not None:
            self._fault(f"victim() must return one of the candidates, got {victim!r}")
        return candidates[-1]

    def budget(self, view: View) -> int:
        budget = self._ask(self.choose_budget, view)
        if isinstance(budget, int) and 1 <= budget <= view.max_num_batched_tokens:
            return budget
        if self.choose_budget is not None:
            self._fault(f"budget() must return 1 to {view.max_num_batched_tokens}, got {budget!r}")
        return view.max_num_batched_tokens

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        self._ask(self.charged, sequence, num_tokens)

    def _ask(self, method: Callable[..., Any] | None, *arguments: object) -> Any:
        if method is None:
            return None
        try:
            return method(*arguments)
        except Exception as error:
            self._fault(f"{getattr(method, '__name__', 'it')}() raised {error!r}")
            return None

    def _fault(self, what: str) -> None:
        if self.order_by or self.choose_victim or self.choose_budget or self.charged:
            self._use(Fcfs())
            self._on_fault(what)


def _is_permutation(ordered: Any, waiting: Seq[Sequence]) -> bool:
    try:
        return sorted(map(id, ordered)) == sorted(map(id, waiting))
    except TypeError:
        return False
