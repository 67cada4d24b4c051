"""HeadDrafter: a head of one layer predicts tokens after the next one from hidden states of the model.

The head computes its KV of a token from that token and the hidden state of the previous one. It writes this KV after
each step, for the computed tokens, to the slots of these tokens. So the contents of a block depend only on the tokens
up to its end, as its hash requires, and are shared, copied and swapped with the model's KV. For a prompt, the head
computes only K and V in each step.

Drafts begin with the last token; the hidden state before it was kept from the previous step. For later drafts, the
head's own output replaces the hidden state of the previous draft. If a hidden state is unknown, before the first token
and after a prefix hit, it is replaced by zeros, which makes at most one draft wrong.
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
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs
from vllm_lite.worker.drafting.chain import Chain
from vllm_lite.worker.drafting.frequent import FrequentWords
from vllm_lite.worker.drafting.kv_writer import KVWriter
from vllm_lite.worker.drafting.layered import LayeredDrafter, recorded
from vllm_lite.worker.drafting.recorded_chain import Fed
from vllm_lite.worker.graphs import DecodeGraphs
from vllm_lite.worker.sampling.drafter import NO_TOKENS, ComputedStep, DraftBatch, KVViews
from vllm_lite.worker.step_parts.rules import Rules


class HeadDrafter(LayeredDrafter, Fed):
    """Drafts with a head, one pass for each draft. A subclass creates the head, which reads hidden states from its
    `given`."""

    reads_all = True
    _model: Any
    chain: Chain  # by `attach`
    _rows: Rows

    def __init__(self, spec: ModelSpec, kv_layers: tuple[LayerSpec, ...]) -> None:
        self.spec, self.kv_layers = spec, kv_layers
        self._before: dict[Handle, tuple[int, torch.Tensor]] = {}
        """Sequence -> position and hidden state, [hidden_size], of its last computed token."""
        self._given: dict[Handle, int] = {}
        """Sequence -> row of `_hidden` that the next pass of the chain uses."""
        self._hidden = torch.empty(0)

    def begin(self, own: KVViews, of_model: KVViews) -> None:
        super().begin(own, of_model)
        self.graphs = recorded(self._eager, self._place)
        self._writer = KVWriter(self._eager, self._place)

    def attach(self, rows: Rows, rules: Rules) -> None:
        self._rows = rows
        self.chain = Chain(self, self.sampler(), rows, rules, self._groups)
        self.chain.words = FrequentWords.of(self._model.lm_head, self.graphs)

    def rehearse(self, step: StepInputs) -> None:
        handles = list(range(len(step.rows)))
        self._given = {handle: handle for handle in handles}
        self._hidden = torch.zeros_like(self._model.given[: len(handles)])
        self.chain.rehearse(replace(step, handles=handles))

    def opened(self, handle: Handle, parent: Handle | None) -> None:
        """Give a fork the hidden state of its parent, if it has the same number of tokens."""
        self._before.pop(handle, None)
        if parent in self._before:
            self._before[handle] = self._before[parent]

    # ---- the head's KV

    def computed(self, step: ComputedStep) -> None:
        """Write the head's K and V of the step's tokens, and keep the hidden state of the last one of each sequence."""
        self.write_kv(step)
        inputs, hidden = step.inputs, step.hidden
        firsts = inputs.query_start_loc[:-1].tolist()
        parts = zip(inputs.handles, inputs.starts.tolist(), firsts, step.num_kept.tolist(), strict=True)
        for handle, start, first, count in parts:
            if hidden is None:
                self._before.pop(handle, None)
            elif count:
                self._before[handle] = start + count - 1, hidden[first + count - 1]

    def write_kv(self, step: ComputedStep) -> None:
        """Write K and V of all tokens of the step."""
        inputs, hidden = step.inputs, step.hidden
        given = self._model.given[: inputs.num_tokens]
        if hidden is None:
            given.zero_()
        else:
            given[1:] = hidden[:-1]
        firsts = inputs.query_start_loc[:-1].tolist()
        for handle, start, first in zip(inputs.handles, inputs.starts.tolist(), firsts, strict=True):
            position, before = self._before.get(handle, (-1, None))
            given[first] = before if before is not None and position == start - 1 else 0
        own = self._own(inputs)
        if not self._writer.write(own):
            self._eager.hidden(own)

    def stand_in(self, hidden: torch.Tensor) -> torch.Tensor:  # [num_rows, hidden_size]
        """Turn the outputs of a pass into replacements of the model's hidden states."""
        return hidden

    def _own(self, inputs: StepInputs) -> StepInputs:
        """Inputs of a pass over the same tokens that draws no tokens."""
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
        """See Drafter.before. No drafts follow forced tokens, whose hidden states are unknown."""
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
        for index, drafted in zip(chosen, self.chain.draft(some, starts), strict=True):
            drafts[index] = drafted
        return drafts

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of one token of each sequence, as Forward.logits."""
        self.feed(np.array([self._given[handle] for handle in inputs.handles], np.int64))
        shown = self.graphs.shown(inputs) if isinstance(self.graphs, DecodeGraphs) else None
        hidden = self._eager.hidden(inputs) if shown is None else shown[0]
        self._hidden = self.stand_in(hidden).clone()
        self._given = {handle: row for row, handle in enumerate(inputs.handles)}
        return self._eager.head(hidden) if shown is None else shown[1]

    def feed(self, order: Int64s) -> None:
        """See Fed.feed; passes the model's hidden states."""
        self._model.given[: len(order)] = self._hidden[to_device(order, self._hidden.device)]

    def follow(self, hidden: torch.Tensor) -> None:
        """See Fed.follow."""
        self._model.given[: len(hidden)] = self.stand_in(hidden)
