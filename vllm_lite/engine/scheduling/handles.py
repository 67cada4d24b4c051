"""Handles: the small integers under which workers know sequences, and the prompt scores that workers report by handle.

A prompt is scored (prompt_logprobs) as it is computed, so until it has been computed once, nothing of it may be taken
from the cache (`Sequence.unscored`). One that is preempted before that is computed again, and scored from where the
workers were. Workers that take over from others know nothing of that, and score it all again: each score is sent once.
"""

from vllm_lite.engine.request import Produced
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import PromptLogprobs
from vllm_lite.protocol.step import Continue, Handle, ModelOutput


class Handles:
    """Gives handles to sequences: the one given back last first, so that they stay small."""

    def __init__(self) -> None:
        self._free: list[Handle] = []
        self._num = 0
        self._scored: dict[Handle, tuple[Sequence, int]] = {}

    def introduce(self, sequence: Sequence, step: int) -> None:
        """Give `sequence` a handle. Workers see it in `step` or later."""
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
        """The prompt scores in a step's result, for the requests that have not ended. A handle may belong to another
        sequence than when the step was sent."""
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
    """The part of `scores` that lies behind the first `num_known` tokens of the prompt: each is sent once."""
    known = num_known - scores.start
    return scores if known <= 0 else PromptLogprobs(scores.start + known, scores.entries[known:])
