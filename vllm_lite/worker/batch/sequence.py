"""One sequence as the worker knows it, from NewRequest or Fork to Finish. The only owner of its state.

What every step reads of all sequences at once (tokens, lengths, block tables, parameters) stands in InputBatch's arrays
while the sequence has a row. A preempted sequence has no row and no blocks; all that its Resume needs is here.
"""

from dataclasses import dataclass

from vllm_lite.protocol.step import Handle, Sampling
from vllm_lite.worker.batch.step_inputs import Int32s
from vllm_lite.worker.sampling.logit_rules import SequenceRules
from vllm_lite.worker.sampling.logprobs import PromptScoring

NO_ROW = -1


@dataclass(slots=True)
class SequenceState:
    """A sequence's handle, what it was started with, and what follows it from row to row."""

    handle: Handle
    sampling: Sampling
    num_prompt: int
    rules: SequenceRules | None
    """What changes its logits, and what its rules remember of the tokens it generated."""
    prompt_scoring: PromptScoring | None = None
    row: int = NO_ROW
    preempted_tokens: Int32s | None = None  # [num_tokens], while it is preempted
