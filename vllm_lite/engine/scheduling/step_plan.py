"""StepPlan: the step being scheduled, from an empty budget to the entries that the workers get."""

from collections.abc import Callable
from itertools import zip_longest

from vllm_lite.engine.scheduling.branching import Branching
from vllm_lite.engine.scheduling.policy import GuardedPolicy, View
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.step import Entry

OnDecision = Callable[[str, Sequence | None, dict[str, int | str]], None]
"""Receives every decision of the scheduler: its code, the sequence it is about, and the numbers behind it."""


class StepPlan:
    """Contents of a step so far, and the rest of its budget.

    budget         tokens that are left of it
    room           the part of them that is not reserved for the first running prompt
    shortest       tokens that the shortest other running prompt lacks, if there is one: a waiting prompt that lacks as
                   many or more is not admitted with a part of them
    entries        what the workers get, in the order of the decisions
    sampling       sequences that get a token from the step, in the order of its entries
    prompts        running sequences that lack more than one token
    forked         samples of the prompts that the step completes; each gets its first token from it, too, if it can
    draftable      sequences that got one token, with the places of their entries, and may draft more
    drafted        sequences that draft, with the most drafts of each
    is_cut         the waiting sequence looked at last was not admitted because it would be cut
    is_arriving    what it lacked was on its way
    num_looked_up  tokens of waiting sequences that were looked up in the prefix cache
    """

    def __init__(
        self,
        budget: int,
        view: View,
        rates: Rates,
        policy: GuardedPolicy,
        branching: Branching,
        on_decision: OnDecision | None,
    ) -> None:
        """`view` is what the policy knows of the step."""
        self.budget = self.room = budget
        self.view = view
        self.rates = rates
        self.shortest: int | None = None
        self.is_cut = self.is_arriving = False
        self.entries: list[Entry] = []
        self.sampling: list[Sequence] = []
        self.prompts: list[Sequence] = []
        self.forked: list[Sequence] = []
        self.draftable: list[tuple[int, Sequence]] = []
        self.drafted: list[tuple[Sequence, int]] = []
        self.num_looked_up = self.num_preempted = 0
        self._policy = policy
        self._branching = branching
        self.on_decision = on_decision

    def take(self, num_tokens: int) -> None:
        """Spend `num_tokens` of the budget."""
        self.budget -= num_tokens
        self.room = max(0, self.room - num_tokens)

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the step compute `num_tokens` more of a running sequence, whose entry it has. With the last known one it
        samples the next, and the other samples of a prompt that is complete fork."""
        self.take(num_tokens)
        sequence.num_computed += num_tokens
        left = sequence.num_tokens - sequence.num_computed
        if left:
            self.decide("chunked", sequence, tokens=num_tokens, left=left)
        else:
            sequence.num_pending = 1
            self.sampling.append(sequence)
            if sequence.request.unforked:
                self.forked += self._branching.fork_samples(sequence, self.entries, num_tokens)
        self._policy.charge(sequence, num_tokens)

    def decide(self, code: str, sequence: Sequence, **numbers: int | str) -> None:
        """Report a decision about `sequence`, if there is a listener."""
        if self.on_decision is not None:
            self.on_decision(code, sequence, numbers)


def joined(first: list[list[int]], then: list[list[int]]) -> list[list[int]]:
    """The blocks of both, by group."""
    return [[*had, *more] for had, more in zip_longest(first, then, fillvalue=())]
