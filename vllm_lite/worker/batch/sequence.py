"""The state of one sequence in the worker, from its NewRequest or Fork to its Finish. It has no other owner.

What every step reads of all sequences at once (tokens, lengths, block tables, parameters) stands in InputBatch's arrays
while the sequence has a row. A preempted sequence has no row and no blocks; all that its Resume needs is here.
"""

from dataclasses import dataclass

from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import AdapterNumber, Handle
from vllm_lite.worker.batch.step_inputs import Int32s
from vllm_lite.worker.pooling import PromptPooling
from vllm_lite.worker.sampling.logit_rules import SequenceRules
from vllm_lite.worker.sampling.logprobs import PromptScoring

NO_ROW = -1


@dataclass(slots=True)
class SequenceState:
    """Holds what a sequence was started with, and what stays with it through rows and preemptions."""

    handle: Handle
    sampling: Sampling
    num_prompt: int
    rules: SequenceRules | None
    """What changes its logits; a mask among the rules follows the tokens that it generates."""
    adapter: AdapterNumber = 0
    prompt_scoring: PromptScoring | None = None
    pooling: PromptPooling | None = None
    """How far its prompt is pooled; None: it is sampled."""
    row: int = NO_ROW
    preempted_tokens: Int32s | None = None  # [num_tokens], while it is preempted
