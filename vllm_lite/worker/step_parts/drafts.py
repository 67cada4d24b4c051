"""Speculation as a part of the step: drafts are proposed to the rows, and those that the model samples too are kept.

worker/sampling/drafter.py says why the tokens are the same as without, and what drafts.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.step import Draft, Handle
from vllm_lite.worker.batch.part import Handler, StepPart, StepResult
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs
from vllm_lite.worker.sampling.drafter import NO_DRAFT, DraftBatch, Drafter, num_kept
from vllm_lite.worker.step_parts.rules import Rules


class Drafts(StepPart):
    """Has a drafter propose for the sequences that the engine allows drafts. It has no columns: drafts stand behind the
    tokens of a row."""

    def __init__(self, drafter: Drafter | None, rules: Rules) -> None:
        self.drafter = drafter
        self._rules = rules
        self._max_drafts: dict[Handle, int] = {}  # of the sequences that take drafts in this step

    def handlers(self) -> Mapping[type, Handler]:
        return {Draft: self._draft}

    def _draft(self, entry: Draft) -> None:
        """Like Continue, unless something is drafted."""
        rows = self.rows
        row = rows.row_of(entry.handle, "Draft")
        num_tokens = int(rows.num_tokens[row])
        if rows.num_computed[row] + 1 != num_tokens:
            raise ProtocolError(f"Draft of handle {entry.handle}, which lacks more than its last token")
        if not 0 < entry.max_drafts <= rows.max_model_len - num_tokens:
            raise ProtocolError(f"Draft of {entry.max_drafts} tokens behind the {num_tokens} of handle {entry.handle}")
        rows.tables.append(row, entry.handle, entry.new_block_ids)
        rows.schedule(entry.handle, 1)
        if not self._rules.penalises(entry.handle):  # penalties are against what would be drafted
            self._max_drafts[entry.handle] = entry.max_drafts

    def propose(self) -> None:
        """Ask the drafter, once for all sequences of the step."""
        asked, self._max_drafts = self._max_drafts, {}
        if self.drafter is None or not asked:
            return
        handles = list(asked)
        tokens = [self.rows.tokens_of(handle) for handle in handles]
        masks = [self._rules.mask_of(handle) for handle in handles]
        drafts = self.drafter.propose(DraftBatch(handles, tokens, list(asked.values()), masks))
        for handle, drafted in zip(handles, drafts, strict=True):
            self.rows.propose(handle, drafted)

    def after_sample(self, inputs: StepInputs, result: StepResult) -> None:
        """Keep the samples that are proved by the drafts before them, which are right."""
        if not inputs.has_proposals:
            return
        drafts, num_before = drafts_of(inputs), inputs.sample_offsets
        # A failed draft position is rejected; the next step samples it again, undrafted.
        for sample in result.sampled.failed:
            if num_before[sample]:
                drafts[sample - 1] = NO_DRAFT
        result.num_kept = num_kept(result.sampled.tokens, drafts, inputs.sample_starts)

    def answer(self, inputs: StepInputs, fields: dict[str, Any]) -> None:
        if inputs.has_proposals:
            drafted = inputs.num_samples - 1
            fields["drafted"] = int(np.count_nonzero(drafted)), int(drafted.sum())


def drafts_of(inputs: StepInputs) -> Int64s:  # [num_samples]
    """The token that was drafted where each sample is; NO_DRAFT at the last sample of each sequence."""
    drafts = np.append(inputs.input_ids, NO_DRAFT)[inputs.sample_tokens + 1]
    drafts[inputs.sample_starts + inputs.num_samples - 1] = NO_DRAFT
    return drafts
