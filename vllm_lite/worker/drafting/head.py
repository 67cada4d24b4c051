"""HeadDrafter: a head of one layer predicts the tokens behind the next one from hidden states of the model.

The head's KV of a token is made of that token and of the hidden state of the one before it. It is written behind each
step, for the tokens that the step has computed, into the slots of these tokens: so what a block holds depends on the
tokens up to its end alone, as its hash says, and is shared, copied and swapped with the model's. A step computes no
more of a prompt than K and V there.

Drafts begin with the last token, whose hidden state before it is kept of the step before. The head's own output stands
for the hidden state of the draft behind which the next is drawn. Where no hidden state is known, in front of the first
token and behind a prefix hit, zeros stand for it: that costs a draft at most.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_lite.attention.step_batch import to_device
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.protocol.step import Handle
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import Int32s, StepInputs
from vllm_lite.worker.drafting.chain import Chain
from vllm_lite.worker.drafting.layered import LayeredDrafter
from vllm_lite.worker.sampling.drafter import NO_TOKENS, ComputedStep, DraftBatch
from vllm_lite.worker.step_parts.rules import Rules


class HeadDrafter(LayeredDrafter):
    """Drafts with a head, one pass for each draft. A subclass makes it; it reads hidden states from its `given`."""

    reads_all = True
    _model: Any
    _chain: Chain  # by `attach`
    _rows: Rows

    def __init__(self, spec: ModelSpec, kv_layers: tuple[LayerSpec, ...]) -> None:
        self.spec, self.kv_layers = spec, kv_layers
        self._before: dict[Handle, tuple[int, torch.Tensor]] = {}
        """The position of each sequence's last computed token, and its hidden state: [hidden_size]."""
        self._given: dict[Handle, int] = {}
        """Rows of `_hidden` that the next pass of the chain computes with."""
        self._hidden = torch.empty(0)

    def attach(self, rows: Rows, rules: Rules) -> None:
        self._rows = rows
        self._chain = Chain(self, self.sampler(), rows, rules, self._groups)

    def rehearse(self, step: StepInputs) -> None:
        handles = list(range(len(step.rows)))
        self._given = {handle: handle for handle in handles}
        self._hidden = torch.zeros_like(self._model.given[: len(handles)])
        self._chain.rehearse(replace(step, handles=handles))

    def opened(self, handle: Handle, parent: Handle | None) -> None:
        """A fork has the hidden state of its parent, if it has as many tokens."""
        self._before.pop(handle, None)
        if parent in self._before:
            self._before[handle] = self._before[parent]

    # ---- the head's KV

    def computed(self, step: ComputedStep) -> None:
        """Write the head's K and V of the step's tokens."""
        inputs, hidden = step.inputs, step.hidden
        starts, firsts = inputs.starts.tolist(), inputs.query_start_loc[:-1].tolist()
        given = self._model.given[: inputs.num_tokens]
        if hidden is None:
            given.zero_()
        else:
            given[1:] = hidden[:-1]
        for handle, start, first in zip(inputs.handles, starts, firsts, strict=True):
            position, before = self._before.get(handle, (-1, None))
            given[first] = before if before is not None and position == start - 1 else 0
        self._eager.hidden(self._own(inputs))
        for handle, start, first, count in zip(inputs.handles, starts, firsts, step.num_kept.tolist(), strict=True):
            if hidden is None:
                self._before.pop(handle, None)
            elif count:
                self._before[handle] = start + count - 1, hidden[first + count - 1]

    def _own(self, inputs: StepInputs) -> StepInputs:
        """The inputs of a pass over the same tokens that draws nothing."""
        none = np.zeros(0, np.int64)
        return replace(
            inputs,
            slot_mapping=tuple(inputs.slot_mapping[group] for group in self._groups),
            block_tables=tuple(inputs.block_tables[group] for group in self._groups),
            sampling=none,
            num_samples=none,
            has_proposals=False,
            samples=None,
            reads=[],
            shows_all=False,
            states=None,
            token_types=None,
        )

    # ---- drafts

    def before(self, batch: DraftBatch) -> Sequence[Int32s]:
        """As Drafter.before. Behind forced tokens, whose hidden states are not known, nothing is drafted."""
        drafts = [NO_TOKENS] * len(batch.handles)
        chosen, given = list[int](), list[torch.Tensor]()
        for index, (handle, tokens) in enumerate(zip(batch.handles, batch.tokens, strict=True)):
            position, before = self._before.get(handle, (-1, None))
            row = self._rows.row_of(handle, "a draft")
            if before is not None and position == len(tokens) - 2 == self._rows.num_tokens[row] - 2:
                chosen.append(index)
                given.append(before)
        if not chosen:
            return drafts
        self._hidden = torch.stack(given)
        some = batch.some(chosen)
        self._given = {handle: row for row, handle in enumerate(some.handles)}
        starts = np.array([len(tokens) - 1 for tokens in some.tokens], np.int64)
        for index, drafted in zip(chosen, self._chain.draft(some, starts), strict=True):
            drafts[index] = drafted
        return drafts

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of one token of each sequence, as Forward.logits."""
        rows = np.array([self._given[handle] for handle in inputs.handles], np.int64)
        self._model.given[: len(rows)] = self._hidden[to_device(rows, self._hidden.device)]
        self._hidden = self._eager.hidden(inputs).clone()
        self._given = {handle: row for row, handle in enumerate(inputs.handles)}
        return self._eager.head(self._hidden)
