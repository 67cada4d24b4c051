"""Handles: the small integers by which workers know sequences, and the prompt scores that workers report by handle.

A prompt is scored (prompt_logprobs) while it is computed, so it reads nothing from the prefix cache until it has been
computed once (`Sequence.unscored`). After a preemption the same workers continue scoring where they were; new workers
score the whole prompt again. Either way clients get each score once.
"""

from vllm_lite.engine.request import Produced
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import PromptLogprobs
from vllm_lite.protocol.step import Continue, Handle, ModelOutput


class Handles:
    """Allocates handles. The one freed last is reused first, so that handles stay small."""

    def __init__(self) -> None:
        self._free: list[Handle] = []
        self._num = 0
        self._scored: dict[Handle, tuple[Sequence, int]] = {}

    def introduce(self, sequence: Sequence, step: int) -> None:
        """Give `sequence` a handle. Workers learn it in step number `step` or later."""
        if self._free:
            sequence.handle = self._free.pop()
        else:
            sequence.handle = self._num
            self._num += 1
        sequence.decode_entry = Continue(sequence.handle, 1, [])
        if sequence.unscored:
            self._scored[sequence.handle] = sequence, step

    def give_back(self, sequence: Sequence) -> None:
        self._free.append(sequence.handle)
        self._scored.pop(sequence.handle, None)

    def scores(self, result: ModelOutput) -> list[Produced]:
        """Outputs with the prompt scores of a step's result, for requests that have not ended. Scores of a handle that
        another sequence has got since the step was sent are dropped."""
        produced = []
        for handle, scores in result.prompts or ():
            sequence, since = self._scored.get(handle, (None, 0))
            if sequence is not None and result.step >= since:
                request = sequence.request
                new = _unknown(scores, request.num_scored)
                request.num_scored = max(request.num_scored, scores.start + len(scores.entries))
                if new.entries:
                    produced.append(Produced(request, sequence.index, sequence.num_output, [], prompt=new))
        return produced


def _unknown(scores: PromptLogprobs, num_known: int) -> PromptLogprobs:
    """The part of `scores` after the first `num_known` prompt tokens, whose scores have been sent before."""
    known = num_known - scores.start
    return scores if known <= 0 else PromptLogprobs(scores.start + known, scores.entries[known:])
