"""Logprobs of prompt tokens: which positions of a step have a next token that is known and wants to be scored.

They are scored as the prompt is computed, whatever the chunks. A sequence that loses its blocks and computes its prompt
again goes on where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.errors import ProtocolError
from vllm_lite.models.registry import Model
from vllm_lite.protocol.api import PromptLogprobs
from vllm_lite.protocol.step import Handle
from vllm_lite.worker.sampling.logprobs import report

Int64s = NDArray[np.int64]

LOGITS_AT_ONCE = 1 << 22
"""Entries of logits that are made at a time: 16 MiB."""


class Piece(NamedTuple):
    """What one sequence scores in a step: the `num_tokens` prompt tokens from number `start` on."""

    handle: Handle
    start: int
    num_tokens: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """What one step scores."""

    pieces: list[Piece]
    places: Int64s  # [num_scored], where in the step's tokens those stand that come before
    targets: Int64s  # [num_scored], the tokens that are scored


class PromptScores:
    """How far the sequences are whose prompts are scored."""

    def __init__(self) -> None:
        self._open: dict[Handle, tuple[int, int, int]] = {}  # first token not scored, number of tokens, num_top

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, handle: Handle, num_prompt: int, num_top: int) -> None:
        if num_prompt > 1:
            self._open[handle] = 1, num_prompt, num_top

    def end(self, handle: Handle) -> None:
        """Of the sequence; it may have ended before, or never have been scored."""
        self._open.pop(handle, None)

    def of_step(
        self,
        handles: Sequence[Handle],
        rows: Int64s,  # [num_seqs]
        ranges: tuple[Int64s, Int64s],  # of the positions computed: [num_seqs] each
        query_start_loc: NDArray[np.int32],  # [num_seqs + 1]
        token_ids: NDArray[np.int32],  # [max_rows, max_tokens]
    ) -> Scoring | None:
        """Raises ProtocolError if positions were left out."""
        pieces, places, targets = [], [], []
        for index, handle in enumerate(handles):
            if handle not in self._open:
                continue
            (first, num_prompt, num_top), begin, end = self._open[handle], int(ranges[0][index]), int(ranges[1][index])
            if begin >= first:
                raise ProtocolError(f"handle {handle} skips prompt tokens {first} to {begin}, which are to be scored")
            last = min(end, num_prompt - 1)
            if last >= first:
                pieces.append(Piece(handle, first, last + 1 - first, num_top))
                places.append(np.arange(first - 1, last) - begin + query_start_loc[index])
                targets.append(token_ids[rows[index], first : last + 1])
        if not pieces:
            return None
        return Scoring(pieces, np.concatenate(places).astype(np.int64), np.concatenate(targets).astype(np.int64))

    def commit(self, scoring: Scoring) -> None:
        """The step has run."""
        for handle, start, count, num_top in scoring.pieces:
            _, num_prompt, _ = self._open.pop(handle)
            if start + count < num_prompt:
                self._open[handle] = start + count, num_prompt, num_top


def score(
    model: Model,
    hidden: torch.Tensor,  # [num_scored, hidden_size]
    scoring: Scoring,
) -> list[tuple[Handle, PromptLogprobs]]:
    """Logits are made of some rows at a time: of a whole prompt they would take more memory than the model."""
    vocab_size = model.spec.vocab_size
    targets = torch.from_numpy(scoring.targets).to(hidden.device)
    num_top = np.repeat([piece.num_top for piece in scoring.pieces], [piece.num_tokens for piece in scoring.pieces])
    at_once = max(1, LOGITS_AT_ONCE // vocab_size)
    entries = []
    for first in range(0, len(targets), at_once):
        rows = slice(first, first + at_once)
        entries += report(model.logits(hidden[rows]).log_softmax(1), targets[rows], num_top[rows])
    ends = np.cumsum([piece.num_tokens for piece in scoring.pieces]).tolist()
    return [
        (piece.handle, PromptLogprobs(piece.start, entries[end - piece.num_tokens : end]))
        for piece, end in zip(scoring.pieces, ends, strict=True)
    ]
