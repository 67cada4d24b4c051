"""Rules: sequences' penalties, bans, biases and grammars, as a part of the step beside the sampler.

A grammar may still be compiling. Its sequence then gets no token, and other sequences of the step are not affected. The
part checks for it as late as possible, after the forward pass was launched. If the token could not be computed again
(recurrent states), the whole step waits for the grammar instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.parallel.communicator import Communicator
from vllm_lite.protocol.step import Entry, Fork, Handle, NewRequest
from vllm_lite.worker.batch.part import StepPart, StepResult
from vllm_lite.worker.batch.rows import Rows, SequenceState
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s, StepInputs
from vllm_lite.worker.sampling import readiness
from vllm_lite.worker.sampling.logit_rules import LogitEdits, RuleBook, SequenceRules, read_rules
from vllm_lite.worker.sampling.masks import MaskSourceOf, SequenceMask, allow_all
from vllm_lite.worker.sampling.sampler import ALL_BANNED, SampleInputs
from vllm_lite.worker.sampling.step_masks import masks_of_drafts


class Rules(StepPart):
    """Column: the field `rules` of `Rows.params`, the sequence's entry in the RuleBook."""

    def __init__(
        self,
        communicator: Communicator,
        mask_source_of: MaskSourceOf | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`mask_source_of` makes the mask source of a new sequence that follows a grammar. `progress` is called while a
        step waits for one."""
        self._progress = progress
        self.mask_source_of = mask_source_of
        self._communicator = communicator
        self._of: dict[Handle, SequenceRules] = {}  # of sequences with rules, preempted ones included
        self._unsettled: dict[Handle, SequenceMask] = {}  # of those whose grammar is being compiled
        self._due: dict[Handle, SequenceMask] = {}
        """Masks of `_unsettled` whose sequences sample in this step."""

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        self.book = RuleBook(rows.max_num_seqs, rows.vocab_size, rows.max_model_len + 1)
        self.book.fills_masks = self._communicator.shard.rank == 0 or not self._communicator.shares_memory

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:  # noqa: ARG002
        rules = read_rules(sequence.sampling, sequence.num_prompt, self.rows.vocab_size, self.mask_source_of)
        if rules is None:
            return
        self._of[sequence.handle] = rules
        if rules.mask is not None and rules.mask.coming is not None:
            self._unsettled[sequence.handle] = rules.mask

    def close(self, sequence: SequenceState) -> None:
        self._of.pop(sequence.handle, None)
        self._unsettled.pop(sequence.handle, None)

    def add(self, row: int, sequence: SequenceState, tokens: NDArray[Any]) -> None:
        self.rows.params["rules"][row] = self.book.add(self._of.get(sequence.handle), tokens)

    def remove(self, row: int, last: int) -> None:  # noqa: ARG002 - the batch moves the parameters
        self.book.remove(int(self.rows.params["rules"][row]))

    def mask_of(self, handle: Handle) -> SequenceMask | None:
        """Mask of a sequence; None if it follows no grammar."""
        rules = self._of.get(handle)
        return None if rules is None else rules.mask

    def is_ruled(self, handle: Handle) -> bool:
        return handle in self._of

    def penalises(self, handle: Handle) -> bool:
        """Whether the sequence has penalties, so that its tokens change later logits."""
        rules = self._of.get(handle)
        return rules is not None and rules.weights is not None

    def edits_of_drafts(
        self,
        samples: SampleInputs,
        rows: Int64s,  # [num_samples], each a sequence of its own
        known: Sequence[tuple[Int32s, Int32s]],
    ) -> LogitEdits | None:
        """Edits of the logits from which a draft model samples; None: no edits. `known`: (tokens of the sequence with
        forced ones appended, drafts so far), per sample."""
        entries = samples.params["rules"]
        if not entries.any():
            return None
        split = []  # to the mask, forced tokens that are not the sequence's yet are drafts
        for row, (tokens, drafts) in zip(rows.tolist(), known, strict=True):
            num_tokens = int(self.rows.num_tokens[row])
            new = np.concatenate((tokens[num_tokens:], drafts))
            self.rows.token_ids[row, num_tokens : num_tokens + len(new)] = new
            split.append((tokens[:num_tokens], new))
        vocab_size = self.rows.vocab_size
        return self.book.edits(
            entries, samples.positions, rows, self.rows.token_ids, lambda some: masks_of_drafts(some, split, vocab_size)
        )

    # ---- a step

    def prepare(self, inputs: StepInputs) -> None:
        if not self._unsettled:
            return
        caught_up = (inputs.handles[index] for index in inputs.sampling.tolist())
        self._due = {handle: self._unsettled[handle] for handle in caught_up if handle in self._unsettled}
        if not inputs.is_repeatable:
            self._settle_all()
        inputs.draws_late = bool(self._due)

    def before_sample(self, samples: SampleInputs, rows: Int64s) -> None:
        samples.edits = self.book.edits(samples.params["rules"], samples.positions, rows, self.rows.token_ids)

    def after_hidden(self, inputs: StepInputs, hidden: torch.Tensor | None) -> None:  # noqa: ARG002
        """Check which grammars are compiled. If no other sequence gets a token in this step, wait for them."""
        if self._due:
            self._settle(patient=len(self._due) == len(inputs.handles))

    def _settle_all(self) -> None:
        """Let the whole step wait for the grammars of all sequences that sample in it."""
        rounds = 0
        while self._due and rounds < readiness.MAX_ROUNDS:
            self._settle(patient=True)
            self._progress()
            rounds += 1
        for handle, mask in self._due.items():
            mask.settle(readiness.TOO_LATE)
            del self._unsettled[handle]
        self._due = {}

    def _settle(self, *, patient: bool) -> None:
        due = self._due
        settled = readiness.settle(due.values(), self._communicator, patient=patient)
        self._due = {}
        for (handle, mask), is_settled in zip(due.items(), settled, strict=True):
            if is_settled:
                del self._unsettled[handle]
            else:
                self._due[handle] = mask

    def after_sample(self, inputs: StepInputs, result: StepResult) -> None:
        """Keep no token of sequences whose grammar is still compiling. If a sequence has no token left to sample, and a
        grammar ruled out the last one, set the grammar's explanation."""
        if result.sampled.failed:
            self._explain(inputs, result.sampled.failed)
        if waiting := self._due:
            self._due = {}
            waits = [inputs.handles[index] in waiting for index in inputs.sampling.tolist()]
            result.num_kept = np.where(waits, 0, result.num_kept)

    def _explain(self, inputs: StepInputs, failed: dict[int, str]) -> None:
        sequences = np.repeat(inputs.sampling, inputs.num_samples)
        for sample, why in failed.items():
            mask = self.mask_of(inputs.handles[sequences[sample]])
            if why == ALL_BANNED and mask is not None:
                failed[sample] = mask.explain()

    def commit(self, inputs: StepInputs, tokens: Int64s, num_kept: Int64s | None) -> None:
        """Count the new token of each sequence with penalties; such sequences have no proposed tokens."""
        if not self.book.counts_tokens:
            return
        at, starts = inputs.sampling, inputs.sample_starts
        if num_kept is not None:
            at, starts = at[num_kept > 0], starts[num_kept > 0]
        self.book.count(self.rows.params["rules"][inputs.rows[at]], tokens[starts])

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:
        ruled = (isinstance(entry, NewRequest) and entry.sampling.is_ruled for entry in entries)
        return not self.book.entries and not any(ruled)

    def load_kernels(self, device: torch.device) -> None:
        allow_all(torch.zeros(1, self.rows.vocab_size, device=device))

    def check_integrity(self) -> None:
        entries = self.rows.params["rules"][: len(self.rows)].tolist()
        if sorted(filter(None, entries)) != sorted(self.book.entries):
            raise RuntimeError(f"rules in use: {self.book.entries}, {entries}")
        if not self._unsettled.keys() <= self._of.keys() <= self.rows.sequences.keys():
            raise RuntimeError(f"rules of {list(self._of)}, grammars awaited of {list(self._unsettled)}")
