"""Logprobs of tokens, as they are reported: of sampled ones, and of a prompt's own tokens.

A prompt's tokens get their logprobs while the prompt is computed, whatever the chunks. A sequence that is preempted and
computes its prompt again goes on with the first token that has none yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.errors import ProtocolError
from vllm_lite.models.registry import Model
from vllm_lite.protocol.api import PromptLogprobs, TokenLogprobs
from vllm_lite.protocol.step import Handle
from vllm_lite.worker.sampling.row_share import RowShare

Int64s = NDArray[np.int64]

LOGITS_AT_ONCE = 1 << 22
"""Entries of logits that are made at a time: 16 MiB."""


def record_of(num_top: int) -> np.dtype[np.void]:
    """The dtype of what is found of one token: its logprob and rank, and the likeliest tokens with their logprobs."""
    top = (num_top,)
    return np.dtype([("logprob", np.float32), ("rank", np.int32), ("ids", np.int32, top), ("values", np.float32, top)])


def find(
    logprobs: torch.Tensor,  # float32 [num_wanted, vocab], log-softmax of the raw logits
    tokens: torch.Tensor,  # int64 [num_wanted]
    num_top: int,  # at most vocab
) -> NDArray[np.void]:  # record_of(num_top) [num_wanted]
    """Find each token's logprob and rank, and the `num_top` most likely tokens at its position, likeliest first."""
    found = np.empty(len(tokens), record_of(num_top))
    chosen = logprobs.gather(1, tokens[:, None])
    values, ids = logprobs.topk(num_top, dim=1)
    found["logprob"] = chosen.squeeze(1).numpy(force=True)
    found["rank"] = (logprobs > chosen).sum(1).numpy(force=True) + 1
    found["ids"], found["values"] = ids.numpy(force=True), values.numpy(force=True)
    return found


def report(
    found: NDArray[np.void],  # record_of(...) [num_wanted]
    num_top: NDArray[Any],  # int [num_wanted]
) -> list[TokenLogprobs]:
    """Report each token's logprob and rank, and of the likeliest tokens as many as are wanted of it."""
    top = [
        tuple(zip(ids[:count], values[:count], strict=True))
        for ids, values, count in zip(found["ids"].tolist(), found["values"].tolist(), num_top.tolist(), strict=True)
    ]
    return [TokenLogprobs(*row) for row in zip(found["logprob"].tolist(), found["rank"].tolist(), top, strict=True)]


# ---- prompts


@dataclass(slots=True)
class PromptScoring:
    """Remembers how far one sequence's prompt has its logprobs. The first token of a prompt never has one."""

    num_prompt: int
    num_top: int
    num_scored: int = 1
    """The prompt's tokens below this index need no logprobs any more."""


class PromptPiece(NamedTuple):
    """Names the prompt tokens [scoring.num_scored, end) of one sequence, which get their logprobs in this step."""

    handle: Handle
    scoring: PromptScoring
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.scoring.num_scored


@dataclass(frozen=True, slots=True)
class StepScoring:
    """Names all prompt tokens that get their logprobs in one step."""

    pieces: list[PromptPiece]
    positions: Int64s  # [num_scored], index among the step's tokens of the token before each
    targets: Int64s  # [num_scored], the tokens themselves

    def commit(self) -> None:
        """Remember what the step has scored."""
        for piece in self.pieces:
            piece.scoring.num_scored = piece.end


def score_step(
    scorings: Sequence[tuple[int, Handle, PromptScoring]],  # index among the step's sequences, handle, scoring
    rows: Int64s,  # [num_seqs]
    ranges: tuple[Int64s, Int64s],  # the positions that each computes: start and end, [num_seqs] each
    query_start_loc: NDArray[np.int32],  # [num_seqs + 1]
    token_ids: NDArray[np.int32],  # [max_rows, max_tokens]
) -> StepScoring | None:
    """Find the prompt tokens whose predecessors are computed in this step. None if there are none.

    Raises ProtocolError if positions were left out.
    """
    pieces, positions, targets = [], [], []
    for index, handle, scoring in scorings:
        if scoring.num_scored >= scoring.num_prompt:
            continue
        first, start, end = scoring.num_scored, int(ranges[0][index]), int(ranges[1][index])
        if start >= first:
            raise ProtocolError(f"handle {handle} skips prompt tokens {first} to {start}, which are to be scored")
        last = min(end, scoring.num_prompt - 1)
        if last >= first:
            pieces.append(PromptPiece(handle, scoring, last + 1))
            positions.append(np.arange(first - 1, last) - start + query_start_loc[index])
            targets.append(token_ids[rows[index], first : last + 1])
    if not pieces:
        return None
    return StepScoring(pieces, np.concatenate(positions).astype(np.int64), np.concatenate(targets).astype(np.int64))


def score(
    model: Model,
    hidden: torch.Tensor,  # [num_scored, hidden_size]
    scoring: StepScoring,
    progress: Callable[[], None] = lambda: None,
) -> list[tuple[Handle, PromptLogprobs]]:
    """Score the prompt tokens, some rows at a time: a whole prompt's logits would take more memory than the model.
    `progress` is called after each product, which for a large vocabulary takes as long as a layer.

    All ranks make logits and each looks at a share of the rows. Rank 0 reports, the others return nothing.
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
        logits = model.logits(hidden[rows])
        model.gather_logits(logits)
        share = RowShare.of(len(logits), communicator.shard)
        found = find(logits[share.own].log_softmax(1), targets[rows][share.own], most_top)
        # Behind the exchange no rank reads these logits any more, and all may write the next ones into their memory.
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
