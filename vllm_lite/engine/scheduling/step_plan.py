"""StepPlan: the step being scheduled: the budget that is left, and the entries for the workers."""

from collections.abc import Callable
from itertools import zip_longest

from vllm_lite.engine.scheduling.branching import Branching
from vllm_lite.engine.scheduling.policy import GuardedPolicy, View
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.step import Entry

OnDecision = Callable[[str, Sequence | None, dict[str, int | str]], None]
"""Called with every decision of the scheduler: its code, its sequence, and the numbers behind it."""


class StepPlan:
    """Contents of a step so far, and the rest of its budget.

    budget         tokens that the step may still compute
    room           the part of `budget` that is not reserved for the first running prompt
    shortest       missing tokens of the shortest other running prompt, if there is one: a waiting prompt that lacks as
                   many or more is admitted only whole
    entries        entries for the workers, in the order of the decisions
    sampling       sequences that get a token from the step, in the order of its entries
    prompts        running sequences that lack more than one token
    forked         samples forked from prompts that the step completes; each gets its first token here, too, if it can
    draftable      (index of its entry, sequence) of sequences that decode one token and may draft more
    drafted        (sequence, maximum number of its drafts) of sequences that draft
    is_cut         the latest waiting sequence was not admitted because only a part of it would fit into the budget
    is_arriving    the latest waiting sequence lacks something that is in transfer
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
        """`view` is passed to the policy's methods."""
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
        """Account for `num_tokens` of a running sequence, whose entry is in the plan. If they include its last known
        token, the step samples the next one, and the other samples of a completed prompt fork."""
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
    """Concatenate two lists of block ids per KV group; either may be empty."""
    return [[*had, *more] for had, more in zip_longest(first, then, fillvalue=())]
