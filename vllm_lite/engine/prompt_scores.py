"""Whose prompts are being scored, and the way of the scores from the workers' answers to the requests.

A prompt is scored as it is computed, so until it has been computed once, nothing of it may be taken from the cache
(`Sequence.unscored`). One that is preempted before is computed, and scored, again from where the workers are.
"""

from vllm_lite.engine.plan import Produced
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.step import Handle, ModelOutput


class PromptScores:
    """The sequences that workers have been told to score, until they end."""

    def __init__(self) -> None:
        self._open: dict[Handle, tuple[Sequence, int]] = {}

    def begin(self, sequence: Sequence, step: int) -> None:
        """Workers hear of it in `step` or later."""
        if sequence.unscored:
            self._open[sequence.handle] = sequence, step

    def end(self, sequence: Sequence) -> None:
        if self._open and self._open.get(sequence.handle, (None,))[0] is sequence:
            del self._open[sequence.handle]

    def take(self, output: ModelOutput) -> list[Produced]:
        """What a step found, for the requests that are still there. A handle may have come to another sequence since
        the step was sent."""
        produced = []
        for handle, scores in output.prompts or ():
            sequence, since = self._open.get(handle, (None, 0))
            if sequence is not None and output.step >= since:
                start = sequence.num_output
                produced.append(Produced(sequence.request, sequence.index, start, [], prompt=scores))
        return produced
