"""Logprobs of prompt tokens (prompt_logprobs), computed while the prompt is, in any chunks.

When a preempted sequence computes its prompt again, scoring continues with the first token that has no logprob yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_lite.errors import ProtocolError
from vllm_lite.models.registry import Model
from vllm_lite.protocol.api import PromptLogprobs, TokenLogprobs
from vllm_lite.protocol.step import Entry, Fork, Handle, NewRequest
from vllm_lite.worker.batch.part import StepPart
from vllm_lite.worker.batch.rows import SequenceState
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs
from vllm_lite.worker.sampling.logprobs import find, report
from vllm_lite.worker.sampling.row_share import RowShare

LOGITS_AT_ONCE = 1 << 22
"""Maximum float32 logits computed at a time: 16 MiB."""


@dataclass(slots=True)
class PromptScoring:
    """Progress of scoring one sequence's prompt. The first token of a prompt never has a logprob."""

    num_prompt: int
    num_top: int
    num_scored: int = 1
    """Prompt tokens below this index are done."""


class PromptPiece(NamedTuple):
    """Prompt tokens [scoring.num_scored, end) of one sequence, which get their logprobs in this step."""

    handle: Handle
    scoring: PromptScoring
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.scoring.num_scored


class StepScoring(NamedTuple):
    """All prompt tokens that get their logprobs in one step."""

    pieces: list[PromptPiece]
    targets: Int64s  # [num_scored], the tokens themselves
    read: int = 0
    """Number of the StepInputs.read() of the tokens before them."""


class PromptScorer(StepPart):
    """Scores the prompts of sequences with prompt_logprobs, preempted ones included. It has no columns."""

    def __init__(self, model: Model, progress: Callable[[], None] = lambda: None) -> None:
        self._model = model
        self._progress = progress
        self._has_head = model.communicator.shard.stage.is_last
        self._scorings: dict[Handle, PromptScoring] = {}
        self._step: StepScoring | None = None
        self._found: list[tuple[Handle, PromptLogprobs]] | None = None

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        num_top = sequence.sampling.prompt_logprobs
        if num_top is not None and isinstance(entry, NewRequest):
            self._scorings[sequence.handle] = PromptScoring(sequence.num_prompt, num_top)

    def close(self, sequence: SequenceState) -> None:
        self._scorings.pop(sequence.handle, None)

    # ---- a step

    def build(self, inputs: StepInputs) -> None:
        """Find the prompt tokens whose predecessors this step computes. Raises ProtocolError if it skips some."""
        if not self._scorings:
            return
        pieces, positions, targets, starts = [], [], [], inputs.starts
        for index, handle in enumerate(inputs.handles):
            scoring = self._scorings.get(handle)
            if scoring is None or scoring.num_scored >= scoring.num_prompt:
                continue
            first, start, end = scoring.num_scored, int(starts[index]), int(inputs.seq_lens[index])
            if start >= first:
                raise ProtocolError(f"handle {handle} skips prompt tokens {first} to {start}, which are to be scored")
            last = min(end, scoring.num_prompt - 1)
            if last >= first:
                pieces.append(PromptPiece(handle, scoring, last + 1))
                positions.append(np.arange(first - 1, last) - start + inputs.query_start_loc[index])
                targets.append(self.rows.token_ids[inputs.rows[index], first : last + 1])
        if pieces:
            read = inputs.read(np.concatenate(positions).astype(np.int64))
            self._step = StepScoring(pieces, np.concatenate(targets).astype(np.int64), read)

    def after_hidden(self, inputs: StepInputs, hidden: torch.Tensor | None) -> None:
        step = self._step
        if step is not None and hidden is not None and self._has_head:
            self._found = score(self._model, hidden, inputs.read_rows(step.read), step, self._progress)

    def commit(self, inputs: StepInputs, tokens: Int64s, num_kept: Int64s | None) -> None:  # noqa: ARG002
        """Record the prompt tokens that the step has scored."""
        if self._step is not None:
            for piece in self._step.pieces:
                piece.scoring.num_scored = piece.end
            self._step = None

    def answer(self, inputs: StepInputs, fields: dict[str, Any]) -> None:  # noqa: ARG002
        fields["prompts"], self._found = self._found, None

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:
        asked = (isinstance(entry, NewRequest) and entry.sampling.prompt_logprobs is not None for entry in entries)
        return not self._scorings and not any(asked)


def score(
    model: Model,
    hidden: torch.Tensor,  # [n, hidden_size]
    scored: slice,
    scoring: StepScoring,
    progress: Callable[[], None] = lambda: None,
) -> list[tuple[Handle, PromptLogprobs]]:
    """Score the prompt tokens from the rows `scored` of `hidden`, some rows at a time: a whole prompt's logits would
    take more memory than the model. `progress` is called after each product, which for a large vocabulary takes as long
    as a layer.

    All ranks compute logits, and each scores a share of the rows. Only rank 0 returns results.
    """
    vocab_size, communicator = model.spec.vocab_size, model.communicator
    is_first = communicator.shard.rank == 0
    targets = torch.from_numpy(scoring.targets).to(hidden.device)
    counts = [piece.num_tokens for piece in scoring.pieces]
    num_top = np.repeat([piece.scoring.num_top for piece in scoring.pieces], counts)
    most_top = min(int(num_top.max()), vocab_size)
    at_once = max(1, LOGITS_AT_ONCE // vocab_size)
    entries: list[TokenLogprobs] = []
    for first in range(0, len(targets), at_once):
        rows = slice(first, first + at_once)
        which = range(scored.start, scored.stop)[rows]
        own = slice(which.start, which.stop)
        logits = model.logits(hidden[own], which=own)
        model.gather_logits(logits)
        share = RowShare.of(len(logits), communicator.shard)
        found = find(logits[share.own].log_softmax(1), targets[rows][share.own], most_top)
        # After the exchange no rank reads these logits any more, so their memory can be reused.
        found = share.exchange(communicator, found)
        if is_first:
            entries += report(found, num_top[rows])
        progress()
    if not is_first:
        return []
    ends = np.cumsum(counts).tolist()
    return [
        (piece.handle, PromptLogprobs(piece.scoring.num_scored, entries[end - piece.num_tokens : end]))
        for piece, end in zip(scoring.pieces, ends, strict=True)
    ]
