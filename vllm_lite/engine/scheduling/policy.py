"""Scheduling policies choose which sequence is served next, which is preempted, and the token budget of a step.

A policy is a class with any of the methods below; first come, first served replaces those that it lacks. It must not
change the sequences that it gets:

    key(self, sequence) -> a tuple of numbers that never changes for a sequence. The lowest key is served first and
        preempted last; equal ones are served in order of arrival. Cheap: O(log n) to enter or leave the queue
    order(self, sequences, view) -> the same sequences, in the order in which to serve them. Called in every step for
        the running sequences, and for all waiting ones: O(n)
    victim(self, candidates, view) -> the running sequence to preempt; by default the last in the order
    budget(self, view) -> token budget of the next step, 1 to view.max_num_batched_tokens
    charged(self, sequence, num_tokens) -> None; called with the number of tokens that a step computes of a sequence

`--scheduling-policy package.module:Class` loads one by name. GuardedPolicy checks every return value; at the first
fault it switches to first come, first served and the engine logs an error.
"""

from collections import abc
from collections.abc import Callable, Iterable
from importlib import import_module
from math import isnan
from typing import Any, NamedTuple

from vllm_lite.engine.scheduling.waiting_queue import FairQueue, Key, SortedQueue, WaitingQueue
from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import ConfigError


class View(NamedTuple):
    """State of the engine that a policy sees besides the sequences."""

    now_s: float
    num_running: int
    num_waiting: int
    num_free_blocks: int
    max_num_batched_tokens: int


def arrival_key(sequence: Sequence) -> Key:
    return (sequence.request.arrival, sequence.index)


class Fcfs:
    """First come, first served; the sequence that arrived last is preempted first."""


class Priority:
    """Lowest `priority` number first, then order of arrival; preempts the last in this order."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.request.params.priority,)


class Deadline:
    """Earliest deadline first; preempts the sequence with the latest deadline, or without one."""

    def key(self, sequence: Sequence) -> Key:
        deadline_s = sequence.request.deadline_s
        return (float("inf") if deadline_s is None else deadline_s,)


class Fair:
    """Equal shares of tokens for tenants (`user`): the tenant that was served least comes first, so more requests do
    not give it a larger share. FairQueue defines which tenants count, and from when."""

    def __init__(self) -> None:
        self.queue = FairQueue(arrival_key)

    def order(self, sequences: abc.Sequence[Sequence], view: View) -> abc.Sequence[Sequence]:  # noqa: ARG002
        return sorted(sequences, key=lambda each: (self.queue.served(each.request.params.user), *arrival_key(each)))

    def charged(self, sequence: Sequence, num_tokens: int) -> None:
        self.queue.charge(sequence, num_tokens)


BUILT_IN: dict[str, type] = {"fcfs": Fcfs, "priority": Priority, "deadline": Deadline, "fair": Fair}


def load(name: str) -> Any:
    """A policy by its built-in name or as "package.module:Class". Raises ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(BUILT_IN)} or module:Class, got {name!r}")
    try:
        return getattr(import_module(module), attribute)()
    except Exception as error:
        raise ConfigError(f"policy {name!r} cannot be loaded: {error!r}") from error


class GuardedPolicy:
    """Checks a policy's return values, and owns the waiting queue that it sorts. At the first fault fcfs replaces the
    policy, and `on_fault(what)` is called, once."""

    def __init__(self, policy: Any, on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        self.queue: WaitingQueue = SortedQueue(arrival_key)
        self._use(policy)

    def _use(self, policy: Any) -> None:
        self._key = getattr(policy, "key", None)
        self._order = getattr(policy, "order", None)
        self.choose_victim = getattr(policy, "victim", None)
        self.choose_budget = getattr(policy, "budget", None)
        self.charged = getattr(policy, "charged", None)
        waiting = list(self.queue)
        self.queue = policy.queue if isinstance(policy, Fair) else SortedQueue(self._checked_key)
        for sequence in waiting:
            self.queue.add(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue."""
        queue = self.queue
        queue.add(sequence)
        if self.queue is not queue:  # key() failed for this sequence, and fcfs has made a new queue without it
            self.queue.add(sequence)

    def waiting(self, view: View) -> Iterable[Sequence]:
        """The waiting sequences in order of admission."""
        if self._order is None or isinstance(self.queue, FairQueue):
            return self.queue
        return self._ordered(list(self.queue), view)

    def sorted_running(self, running: list[Sequence], view: View) -> list[Sequence]:
        """The running sequences in the order in which to serve them."""
        if self._order is not None:
            return self._ordered(running, view)
        if self._key is not None:
            running.sort(key=self._checked_key)
        return running

    def may_pass(self, sequence: Sequence, blocked: Sequence) -> bool:
        """Whether `sequence` may be admitted before `blocked`, which does not fit yet: only if their keys differ in
        nothing but the arrival."""
        return self._key is None or self._checked_key(sequence)[:-2] == self._checked_key(blocked)[:-2]

    def _checked_key(self, sequence: Sequence) -> Key:
        if self._key is not None:
            key = self._ask(self._key, sequence)
            if isinstance(key, tuple) and all(isinstance(part, int | float) and not isnan(part) for part in key):
                return key + arrival_key(sequence)
            self._fault(f"key() must return a tuple of numbers, got {key!r}")
        return arrival_key(sequence)

    def _ordered(self, sequences: list[Sequence], view: View) -> list[Sequence]:
        ordered = self._ask(self._order, list(sequences), view)
        if ordered is not None and _is_permutation(ordered, sequences):
            return list(ordered)
        self._fault("order() must return the sequences it was given, each once")
        return sequences

    def victim(self, candidates: abc.Sequence[Sequence], view: View) -> Sequence:
        victim = self._ask(self.choose_victim, list(candidates), view)
        if any(victim is candidate for candidate in candidates):
            return victim  # type: ignore[no-any-return]
        self._fault(f"victim() must return one of the candidates, got {victim!r}")
        return candidates[-1]

    def budget(self, view: View) -> int:
        budget = self._ask(self.choose_budget, view)
        if isinstance(budget, int) and 1 <= budget <= view.max_num_batched_tokens:
            return budget
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
        """Replace the policy and report why, unless _ask() has done so already."""
        if self._key or self._order or self.choose_victim or self.choose_budget or self.charged:
            self._use(Fcfs())
            self._on_fault(what)


def _is_permutation(ordered: Any, waiting: abc.Sequence[Sequence]) -> bool:
    try:
        return sorted(map(id, ordered)) == sorted(map(id, waiting))
    except TypeError:
        return False
