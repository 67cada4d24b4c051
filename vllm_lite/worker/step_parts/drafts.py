"""Speculation as a step part: drafts are proposed to the rows, and accepted if the model samples the same tokens.

worker/sampling/drafter.py explains why the output is the same as without drafts, and has the drafters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import to_device
from vllm_lite.checkpoint.gemma4_assistant import is_assistant
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.step import Draft, Entry, Fork, Handle, NewRequest, SureDrafts
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.batch.part import Handler, StepPart, StepResult
from vllm_lite.worker.batch.rows import Rows, SequenceState
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs
from vllm_lite.worker.drafting.assistant import AssistantDrafter
from vllm_lite.worker.drafting.draft_model import ModelDrafter
from vllm_lite.worker.drafting.eagle import EagleDrafter
from vllm_lite.worker.drafting.mtp import MTPDrafter
from vllm_lite.worker.drafting.self_drafter import SelfDrafter
from vllm_lite.worker.sampling.drafter import (
    NO_DRAFT,
    NO_PRICE,
    ComputedStep,
    DraftBatch,
    Drafter,
    DrawnStep,
    GrammarDrafter,
    NgramDrafter,
    num_proved,
    on_host,
)
from vllm_lite.worker.sampling.suffix import SuffixDrafter
from vllm_lite.worker.step_parts.rules import Rules
from vllm_lite.worker.step_parts.states import RowStates


class Drafts(StepPart):
    """Lets a drafter propose tokens for the sequences that the engine allows drafts. It has no columns: drafts follow
    the tokens of a row."""

    def __init__(self, drafter: Drafter | None, rules: Rules, states: RowStates | None = None) -> None:
        self.drafter = drafter
        self._rules = rules
        self._states = states
        self._max_drafts: dict[Handle, int] = {}  # of the sequences that take drafts in this step
        self._price = NO_PRICE
        self._on_device: dict[Handle, torch.Tensor] = {}
        """Drafts of this step that are only on the device: int64 [num_drafts]. The rows have token 0 instead."""
        self._forced: Mapping[Handle, int] = {}  # number of each sequence's drafts that its grammar forced
        self._hidden: torch.Tensor | None = None
        self._groups: dict[Handle, bytes] = {}  # of the sequences whose answers may be drafted for others
        self._answers: dict[Handle, Int32s] = {}  # of the sequences with a group that have lost their row

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        if self.drafter is not None:
            self.drafter.attach(rows, self._rules)

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        if self.drafter is not None:
            self.drafter.opened(sequence.handle, entry.parent if isinstance(entry, Fork) else None)
        group = entry.draft_group if isinstance(entry, NewRequest) else self._groups.get(entry.parent, b"")
        if group:
            self._groups[sequence.handle] = group

    def add(self, row: int, sequence: SequenceState, tokens: NDArray[Any]) -> None:  # noqa: ARG002
        self._answers.pop(sequence.handle, None)

    def remove(self, row: int, last: int) -> None:  # noqa: ARG002
        if not self._groups:
            return
        handle, sequence = self.rows.handle_of(row), self.rows.resident[row]
        if handle in self._groups:
            self._answers[handle] = self.rows.tokens_of(handle)[sequence.num_prompt :].copy()

    def close(self, sequence: SequenceState) -> None:
        """Pass the answer to the drafter."""
        group, answer = self._groups.pop(sequence.handle, b""), self._answers.pop(sequence.handle, None)
        if self.drafter is not None and answer is not None:
            self.drafter.ended(group, answer)

    def handlers(self) -> Mapping[type, Handler]:
        return {Draft: self._draft, SureDrafts: self._set_price}

    def _draft(self, entry: Draft) -> None:
        """Schedule the sequence's last token, as Continue does, and let it take drafts."""
        rows = self.rows
        row = rows.row_of(entry.handle, "Draft")
        num_tokens = int(rows.num_tokens[row])
        if rows.num_computed[row] + 1 != num_tokens:
            raise ProtocolError(f"Draft of handle {entry.handle}, which lacks more than its last token")
        if not 0 < entry.max_drafts <= rows.max_model_len - num_tokens:
            raise ProtocolError(f"Draft of {entry.max_drafts} tokens behind the {num_tokens} of handle {entry.handle}")
        rows.tables.append(row, entry.handle, entry.new_block_ids)
        rows.schedule(entry.handle, 1)
        if not self._rules.penalises(entry.handle):  # penalties are against tokens that would be drafted
            self._max_drafts[entry.handle] = entry.max_drafts

    def _set_price(self, entry: SureDrafts) -> None:
        self._price = entry

    def moves(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        if self.drafter is not None:
            self.drafter.moves(block_ops)

    def propose(self) -> None:
        """Call the drafter once for all sequences of the step, and propose its drafts to the rows."""
        asked, self._max_drafts, self._forced = self._max_drafts, {}, {}
        price, self._price = self._price, NO_PRICE
        if self.drafter is not None:
            self.drafter.begin_step()
        if self.drafter is None or not asked:
            return
        handles = list(asked)
        tokens = [self.rows.tokens_of(handle) for handle in handles]
        masks = [self._rules.mask_of(handle) for handle in handles]
        groups = [self._groups.get(handle, b"") for handle in handles]
        states = None
        if self._states is not None:
            states = [int(self._states.sources[self.rows.row_of(handle, "a draft")]) for handle in handles]
        batch = DraftBatch(handles, tokens, list(asked.values()), masks, groups, states, price)
        drafts = self.drafter.before(batch)
        self._forced = self.drafter.forced
        for handle, drafted in zip(handles, drafts, strict=True):
            if isinstance(drafted, torch.Tensor) and len(drafted) and not self._rules.is_ruled(handle):
                self._on_device[handle] = drafted
                self.rows.propose(handle, np.zeros(len(drafted), np.int32))
            else:  # rules read the drafts before each sample
                self.rows.propose(handle, on_host(drafted))

    def build(self, inputs: StepInputs) -> None:
        if self.drafter is not None:
            inputs.shows_all = self.drafter.reads_all
            inputs.shows_hidden = self.drafter.reads_hidden or inputs.shows_all
        if self._forced:
            inputs.forced = [self._forced.get(inputs.handles[index], 0) for index in inputs.sampling.tolist()]
        if not self._on_device:
            return
        drafts = [self._on_device[handle] for handle in inputs.handles if handle in self._on_device]
        device = drafts[0].device
        inputs.device_ids = to_device(inputs.input_ids, device).index_copy(
            0, to_device(self._places(inputs), device), torch.cat(drafts)
        )

    def _places(self, inputs: StepInputs) -> Int64s:  # [num_drafts]
        """Indices among the step's tokens of the drafts that are on the device."""
        ends = zip(inputs.handles, inputs.query_start_loc[1:].tolist(), strict=True)
        ranges = [np.arange(end - len(self._on_device[each]), end) for each, end in ends if each in self._on_device]
        return np.concatenate(ranges).astype(np.int64)

    def after_hidden(self, inputs: StepInputs, hidden: torch.Tensor | None) -> None:
        if inputs.shows_all and hidden is not None:  # recurrent layers will use the model's memory again
            self._hidden = hidden.clone() if inputs.wanted is None else None
        elif inputs.shows_hidden:
            self._hidden = hidden

    def after_sample(self, inputs: StepInputs, result: StepResult) -> None:
        """Keep the samples whose preceding drafts were all accepted."""
        if not inputs.has_proposals:
            return
        if self._on_device and inputs.device_ids is not None:  # they come to the host together with the tokens
            places = self._places(inputs)
            inputs.input_ids[places] = inputs.device_ids.numpy(force=True)[places]
            self._on_device = {}
        drafts, num_before = drafts_of(inputs), inputs.sample_offsets
        # A failed draft position is rejected; the next step samples it again, undrafted.
        for sample in result.sampled.failed:
            if num_before[sample]:
                drafts[sample - 1] = NO_DRAFT
        result.num_kept = num_proved(result.sampled.tokens, drafts, inputs.sample_starts)

    def commit(self, inputs: StepInputs, tokens: Int64s, num_kept: Int64s | None) -> None:
        """Pass the step's results to the drafter."""
        hidden, self._hidden = self._hidden, None
        if inputs.shows_all and self.drafter is not None:
            own = inputs.num_scheduled.copy()
            own[inputs.sampling] -= inputs.num_samples - (inputs.num_samples if num_kept is None else num_kept)
            self.drafter.computed(ComputedStep(inputs, hidden, own))
            return
        if self.drafter is None or not self.drafter.follows or (self.drafter.reads_hidden and hidden is None):
            return
        kept = inputs.num_samples if num_kept is None else num_kept
        (at,) = kept.nonzero()
        samples = inputs.sample_starts[at] + kept[at] - 1
        rows = inputs.rows[inputs.sampling[at]]
        self.drafter.after(
            DrawnStep(
                [self.rows.handle_of(row) for row in rows.tolist()],
                self.rows.num_tokens[rows] + kept[at],
                tokens[samples],
                None if hidden is None else hidden[to_device(samples, hidden.device)],
            )
        )

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:  # noqa: ARG002
        return self.drafter is None or not (self.drafter.reads_hidden or self.drafter.reads_all)

    def answer(self, inputs: StepInputs, fields: dict[str, Any]) -> None:
        if inputs.has_proposals:
            fields["drafted"] = drafted = (inputs.num_samples - 1).tolist()
            if inputs.forced is not None:
                fields["forced"] = [min(pair) for pair in zip(inputs.forced, drafted, strict=True)]


def drafts_of(inputs: StepInputs) -> Int64s:  # [num_samples]
    """The draft at the position of each sample; NO_DRAFT for the last sample of each sequence."""
    drafts = inputs.input_ids.take(inputs.sample_tokens + 1, mode="clip")
    drafts[inputs.sample_starts + inputs.num_samples - 1] = NO_DRAFT
    return drafts


def _of_checkpoint(speculation: Speculation) -> Drafter:
    """Make the drafter of a checkpoint that drafts: an independent model, or an assistant."""
    assists = speculation.model is not None and is_assistant(speculation.model)
    return AssistantDrafter(speculation) if assists else ModelDrafter(speculation)


OF_METHOD: Mapping[str, Callable[[Speculation], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "draft_model": _of_checkpoint,
    "eagle3": EagleDrafter,
    "self": lambda speculation: SelfDrafter(),  # noqa: ARG005
}
"""Method -> drafter, except mtp, whose drafter is in the model's own checkpoint."""


def drafter_of(config: ResolvedConfig) -> Drafter:
    """Make the configured drafter, which also drafts the tokens that grammars force."""
    speculation = config.speculative_config
    other: Drafter | None = None
    if speculation is not None:
        other = MTPDrafter(config) if speculation.method == "mtp" else OF_METHOD[speculation.method](speculation)
    return GrammarDrafter(other, forces=config.jump_forward)
