"""Features of the steps in a message: the numbers on which the workers' time for the message depends.

The same code reads recorded and simulated steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_lite.protocol.step import (
    AdapterNumber,
    Continue,
    Draft,
    Finish,
    Fork,
    Handle,
    NewRequest,
    Resume,
    SchedulerOutput,
)

BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1 << 30)
"""Bounds of the number of tokens of a step. The time of a token differs between them, because kernels compute several
rows at a time, and a few rows cost nothing while the weights are read."""
NAMES = (
    "message",
    "idle",
    "step",
    *(f"token_to_{bound}" for bound in BOUNDS[1:-1]),
    "token_beyond",
    "decode_kilotokens",
    "chunk_megapairs",
    "sampled",
    "request",
    "block_op",
    "lookup",
    "verify",
    "draft",
    "adapted",
    "adapter",
)
"""Names of the features of a message: the message itself; whether the workers were idle before it; its steps; the
tokens of each step, by BOUNDS; the tokens that decodes and drafts attend to, in thousands; pairs of a token of a chunk
and a token that it attends to, in millions; sampled tokens; requests that are new to the workers; moved blocks;
sequences that may draft; steps with drafts, and the maximum drafts of a sequence in each; tokens with an adapter, and
the adapters of each step."""
PLACE = {name: place for place, name in enumerate(NAMES)}
TOKENS = slice(PLACE["token_to_1"], PLACE["token_beyond"] + 1)
"""Features whose sum is the number of tokens."""
_FIRST_TOKEN, _DECODES, _PAIRS = PLACE["token_to_1"], PLACE["decode_kilotokens"], PLACE["chunk_megapairs"]

Features = list[float]
Drafts = Mapping[Handle, tuple[int, int]]
"""Sequences that could draft in a step -> the numbers of drafted and of accepted tokens."""


class StepDone(NamedTuple):
    """A step, the number of sequences that got tokens in it, and its drafts."""

    output: SchedulerOutput
    num_sampled: int
    drafts: Drafts


class StepReader:
    """Counts the computed tokens of each sequence."""

    def __init__(self) -> None:
        self._computed: dict[Handle, int] = {}
        self._adapters: dict[Handle, AdapterNumber] = {}
        """Sequence -> its adapter, for sequences with an adapter."""
        self._in_step: set[AdapterNumber] = set()

    def message(self, steps: Sequence[StepDone], *, was_idle: bool) -> Features:
        """The features of steps that are sent in one message."""
        found = [0.0] * len(NAMES)
        found[PLACE["message"]] = 1.0
        found[PLACE["idle"]] = float(was_idle)
        for step in steps:
            self._add(found, *step)
        return found

    def _add(self, found: Features, output: SchedulerOutput, num_sampled: int, drafts: Drafts) -> None:
        total = most_drafts = 0
        self._in_step.clear()
        for entry in output.entries:
            if isinstance(entry, Continue):
                total += self._compute(found, entry.handle, entry.num_tokens)
            elif isinstance(entry, NewRequest | Resume):
                found[PLACE["request"]] += isinstance(entry, NewRequest)
                self._computed[entry.handle] = entry.num_computed
                if isinstance(entry, NewRequest) and entry.adapter:
                    self._adapters[entry.handle] = entry.adapter
                total += self._compute(found, entry.handle, entry.num_tokens)
            elif isinstance(entry, Draft):
                made, right = drafts.get(entry.handle, (0, 0))
                if made:
                    found[_DECODES] += self._computed.get(entry.handle, 0) / 1e3
                total += self._compute(found, entry.handle, 1 + made)
                self._computed[entry.handle] -= made - right
                num_sampled += made
                most_drafts = max(most_drafts, made)
                found[PLACE["lookup"]] += 1
            elif isinstance(entry, Fork):
                self._computed[entry.child] = entry.num_computed
                if entry.parent in self._adapters:
                    self._adapters[entry.child] = self._adapters[entry.parent]
            elif isinstance(entry, Finish):
                self._computed.pop(entry.handle, None)
                self._adapters.pop(entry.handle, None)
        found[PLACE["step"]] += 1
        found[PLACE["sampled"]] += num_sampled
        found[PLACE["block_op"]] += len(output.block_ops)
        found[PLACE["verify"]] += most_drafts > 0
        found[PLACE["draft"]] += most_drafts
        found[PLACE["adapter"]] += len(self._in_step)
        for place, (low, high) in enumerate(pairwise(BOUNDS), _FIRST_TOKEN):
            if total <= low:
                break
            found[place] += min(total, high) - low

    def _compute(self, found: Features, handle: Handle, count: int) -> int:
        start = self._computed.get(handle, 0)
        self._computed[handle] = start + count
        if count == 1:
            found[_DECODES] += (start + 1) / 1e3
        else:
            found[_PAIRS] += count * (start + (count + 1) / 2) / 1e6
        if self._adapters and (adapter := self._adapters.get(handle)):
            self._in_step.add(adapter)
            found[PLACE["adapted"]] += count
        return count


def told(features: Features, times: Iterable[float]) -> float:
    """The expected seconds: the sum of features times the time of one of each."""
    return sum(map(float.__mul__, features, times))
