"""Chain: runs a model over its own drafts, one token of each sequence per pass.

The input of the first pass is the tokens that the drafting model has not computed yet: only the last one of the
sequence, if it reads the KV of the verifying model, or all tokens after the end of its own KV. Each pass draws one
token for each sequence, which is the input of the next pass.

A draft is drawn with the noise of its position and the sequence's own temperature, filters and rules, as the verifying
model draws there, but from the drafting model's logits. So sampled drafts are right nearly as often as greedy ones (the
chance is (1 - d) / (1 + d) or more, where d is the total variation distance of the two distributions).

Recurrent layers process drafts in scratch slots: the first pass reads the state of the sequence, without changing it,
and each later pass reads the state of the previous one.

If every sequence lacks only its last token and has no rules, recorded passes are used: recorded_chain.py.

K and V of drafts are written to the slots of the sequence's next tokens. The step that verifies the drafts computes the
same positions again, so it overwrites them before anything else reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_lite.protocol.step import Handle
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs, StepStates
from vllm_lite.worker.drafting.frequent import FrequentWords
from vllm_lite.worker.drafting.recorded_chain import DraftRows, RecordedChain
from vllm_lite.worker.forward import Forward
from vllm_lite.worker.sampling.drafter import DraftBatch
from vllm_lite.worker.sampling.sampler import NO_LOGPROBS, SampleInputs, TokenSampler, is_plain
from vllm_lite.worker.step_parts.rules import Rules


@dataclass(frozen=True, slots=True)
class Pass:
    """The tokens that one pass computes for each sequence: at least one, from the position in `starts` on."""

    handles: list[Handle]
    rows: Int64s  # [n]
    starts: Int64s  # [n], the position of the first token of each
    tokens: list[Int32s]  # of each: [num_tokens], from its start on


class Chain:
    """Drafts with a model: `forward` computes the logits of a pass, `sampler` draws from them.

    `groups`: the KV groups of the batch's block tables that the model uses, in its own order; None: all. `scratch`:
    slots for states of its recurrent layers, one for each sequence that may draft; empty without such layers.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: TokenSampler,
        rows: Rows,
        rules: Rules,
        groups: Sequence[int] | None = None,
        scratch: range = range(0),
    ) -> None:
        self.forward = forward
        self._sampler = sampler
        self._rows = rows
        self._rules = rules
        self._groups = groups
        self._scratch = scratch
        self.by_places = False
        """Whether the drafting model's positions are indexes of tokens, even if the verifying model counts differently
        after images."""
        self.stays = False
        """Whether all drafts are made at the position of the last token, over the tokens before it, and have no K and
        V, because the drafting model reads those of the verifying model."""
        self.words: FrequentWords | None = None
        """Decides whether drafts are made of frequent words only; None: they may be any tokens."""
        self._recorded = RecordedChain.of(forward, sampler, rows, groups, scratch)

    def draft(self, batch: DraftBatch, starts: Int64s | None = None) -> list[Int32s]:  # of each: [at most max_drafts]
        """Draft `max_drafts` tokens of each sequence, or fewer if no token can be drawn.

        starts: [num_seqs], the first position of each that the drafting model has not computed; None: the first
        position that the step computes, because it reads the KV of the verifying model.
        """
        rows = np.array([self._rows.row_of(handle, "a draft") for handle in batch.handles], np.int64)
        lengths = np.array([len(tokens) for tokens in batch.tokens], np.int64)
        counts = np.array(batch.max_drafts, np.int64)
        if starts is None:
            starts = self._rows.num_computed[rows]
        params = self._params(rows)
        if self.words is not None:
            self.words.follow(batch.tokens)
        if self._recorded is not None and not params["rules"].any() and (starts + 1 == lengths).all():
            last = np.array([tokens[-1] for tokens in batch.tokens], np.int64)
            nearer = np.zeros_like(rows) if self.by_places else self._rows.nearer[rows]
            asked = DraftRows(rows, lengths, counts, params, last, nearer, batch.states)
            found = self._recorded.draft(asked, stays=self.stays)
            if found is not None:
                return found
        drafts = np.zeros((len(rows), int(counts.max())), np.int32)
        tokens = [all_of[start:] for all_of, start in zip(batch.tokens, starts.tolist(), strict=True)]
        active = np.arange(len(rows))
        states = np.array(batch.states, np.int32) if self._scratch else None
        for index in range(drafts.shape[1]):
            inputs = self.inputs(Pass([batch.handles[i] for i in active], rows[active], starts[active], tokens))
            if states is not None:
                inputs.states = self._states(inputs, states[active], active)
                states = self._scratch.start + np.arange(len(rows), dtype=np.int32)
            samples = SampleInputs(params[active], lengths[active] + index)
            known = [(batch.tokens[i], drafts[i, :index]) for i in active]
            samples.edits = self._rules.edits_of_drafts(samples, rows[active], known)
            samples.plain = samples.edits is None and is_plain(samples.params)
            sampled = self._sampler.sample(self.forward.logits(inputs), samples)
            drafts[active, index] = sampled.tokens
            counts[active[list(sampled.failed)]] = index
            active = np.flatnonzero(counts > index + 1)
            starts = lengths - 1 if self.stays else lengths + index
            tokens = [drafts[i, index : index + 1] for i in active]
            if not len(active):
                break
        return [drafts[i, :count] for i, count in enumerate(counts.tolist())]

    def rehearse(self, step: StepInputs) -> None:
        """Run one pass on a step that neither reads nor writes KV, and draw the best tokens."""
        params = np.zeros(len(step.rows), self._rows.params.dtype)
        params["logprobs"] = NO_LOGPROBS
        if self._groups is not None:
            slots, tables = step.slot_mapping, step.block_tables
            step = replace(
                step,
                slot_mapping=tuple(slots[group] for group in self._groups),
                block_tables=tuple(tables[group] for group in self._groups),
                states=None,
            )
        self._sampler.sample(self.forward.logits(step), SampleInputs(params, step.positions, plain=True))

    def _states(self, inputs: StepInputs, sources: Int32s, active: Int64s) -> StepStates:  # [num_seqs] each
        """Segments that read states from `sources` and write them to the scratch slots of the sequences, by batch
        index."""
        firsts = np.arange(len(active) + 1, dtype=np.int32)
        return StepStates(firsts, inputs.query_start_loc, sources, (active + self._scratch.start).astype(np.int32))

    def _params(self, rows: Int64s) -> np.ndarray[tuple[int], np.dtype[np.void]]:  # ROW_PARAMS [n]
        """The sequences' own parameters, without logprobs, which drafts do not need."""
        params = self._rows.params[rows]
        params["logprobs"], params["is_named"] = NO_LOGPROBS, False
        return params

    def inputs(self, part: Pass, *, draws: bool = True) -> StepInputs:
        """Make the inputs of a pass; unless it `draws`, it only writes K and V."""
        counts = np.array([len(tokens) for tokens in part.tokens], np.int64)
        starts_of = np.zeros(len(counts) + 1, np.int32)
        counts.cumsum(out=starts_of[1:])
        token_rows, positions = part.rows, part.starts
        if starts_of[-1] > len(counts):
            token_rows = part.rows.repeat(counts)
            positions = np.arange(starts_of[-1]) + (part.starts - starts_of[:-1]).repeat(counts)
        tables = self._rows.tables
        written, groups = np.full(len(positions), not self.stays), self._groups
        if groups is None:  # the KV is the verifying model's, which may have computed it already
            groups, written = range(len(tables.ids)), positions >= self._rows.num_cached[token_rows]
        all_tables = tables.of(part.rows)
        return StepInputs(
            handles=part.handles,
            rows=part.rows,
            num_scheduled=counts,
            input_ids=np.concatenate(part.tokens).astype(np.int64),
            positions=positions if self.by_places else positions - self._rows.nearer[token_rows],
            slot_mapping=tables.slots(token_rows, positions, written, self._rows.handle_of, groups),
            block_tables=tuple(all_tables[group] for group in groups),
            query_start_loc=starts_of,
            seq_lens=(part.starts + (0 if self.stays else counts)).astype(np.int32),
            sampling=np.arange(len(counts) if draws else 0),
            num_samples=np.ones(len(counts) if draws else 0, np.int64),
        )
