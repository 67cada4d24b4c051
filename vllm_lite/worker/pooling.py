"""Pooling: from the hidden states of prompts to what their requests asked for, whatever the chunks.

A sequence that is preempted and computed again goes on with the first token that has not been pooled yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.checkpoint.pooling import Kind
from vllm_lite.errors import ProtocolError
from vllm_lite.layers.pooler import Pooler
from vllm_lite.protocol.pooling import Pooling
from vllm_lite.protocol.step import NOT_FINITE, Handle

Int64s = NDArray[np.int64]
Pooled = list[tuple[Handle, bytes]]
Failed = list[tuple[Handle, str]]


@dataclass(slots=True)
class PromptPooling:
    """Remembers how far one prompt is pooled."""

    asked: Pooling
    num_prompt: int
    num_pooled: int = 0
    """Tokens below this index need not be looked at any more."""
    state: torch.Tensor | None = None  # float32 [hidden_size]: the sum so far, or the first token's state
    rows: list[torch.Tensor] = field(
        default_factory=list
    )  # float32 [tokens of a chunk, hidden_size], if all are wanted

    @property
    def wants_rows(self) -> bool:
        """Whether each token gets a vector of its own."""
        return self.asked.task == "token_embed"


class PooledPiece(NamedTuple):
    """Names the tokens [first, end) of one sequence, whose hidden states are looked at in this step. `is_last`: with
    them the prompt is complete."""

    handle: Handle
    prompt: PromptPooling
    first: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepPooling:
    """Names all tokens whose hidden states are pooled in one step, and the places that the sequences whose prompts it
    completes have among those that are caught up."""

    pieces: list[PooledPiece]
    positions: Int64s  # [num_pooled], index among the step's tokens
    places: list[int]
    token_types: Int64s | None = None  # [num_tokens], 1 in the second text of a pair; None: all are 0

    def commit(self) -> None:
        """Remember what the step has pooled."""
        for piece in self.pieces:
            piece.prompt.num_pooled = max(piece.prompt.num_pooled, piece.end)


class Computed(NamedTuple):
    """What a step computes of each of its sequences."""

    starts: Int64s  # [num_seqs], the first position
    ends: Int64s  # [num_seqs], the position behind the last
    query_start_loc: NDArray[np.int32]  # [num_seqs + 1]


class PooledSequence(Protocol):
    """A sequence of the persistent batch."""

    @property
    def handle(self) -> Handle: ...

    @property
    def pooling(self) -> PromptPooling | None: ...


class PooledPrompts:
    """Counts the sequences of a batch that are pooled, also preempted ones, and finds what a step pools of them."""

    def __init__(self) -> None:
        self.kind: Kind = "last"
        self._count = 0

    def add(self, asked: Pooling | None, num_prompt: int) -> PromptPooling | None:
        """A sequence comes, which is pooled if something is `asked` of it."""
        if asked is None:
            return None
        self._count += 1
        return PromptPooling(asked, num_prompt)

    def leave(self, prompt: PromptPooling | None) -> None:
        self._count -= prompt is not None

    def step(
        self,
        sequences: Sequence[PooledSequence],  # of the step
        computed: Computed,
        caught_up: Int64s,  # which of them are
    ) -> tuple[StepPooling | None, Int64s]:
        """Find what a step pools, None if nothing, and which of its sequences are sampled. Raises ProtocolError if
        positions were left out."""
        if not self._count:
            return None, caught_up
        found = [(index, each.handle, each.pooling) for index, each in enumerate(sequences) if each.pooling is not None]
        if not found:
            return None, caught_up
        pieces, positions, types = [], [], None
        for index, handle, prompt in found:
            start, end = int(computed.starts[index]), int(computed.ends[index])
            row = int(computed.query_start_loc[index])
            piece = self._piece(handle, prompt, start, end)
            pieces.append(piece)
            if piece.end > piece.first:
                positions.append(np.arange(piece.first, piece.end) - start + row)
            if second_at := prompt.asked.second_at:
                types = np.zeros(computed.query_start_loc[-1], np.int64) if types is None else types
                types[row : row + end - start] = np.arange(start, end) >= second_at
        joined = np.concatenate(positions).astype(np.int64) if positions else np.zeros(0, np.int64)
        is_pooled = np.isin(caught_up, [index for index, _, _ in found])
        return StepPooling(pieces, joined, is_pooled.nonzero()[0].tolist(), types), caught_up[~is_pooled]

    def _piece(self, handle: Handle, prompt: PromptPooling, start: int, end: int) -> PooledPiece:
        """Which of the tokens [start, end) of a prompt are looked at."""
        is_last = end == prompt.num_prompt
        if prompt.wants_rows or self.kind == "mean":
            if start > prompt.num_pooled:
                raise ProtocolError(f"handle {handle} skips tokens {prompt.num_pooled} to {start}, which are pooled")
            return PooledPiece(handle, prompt, max(start, prompt.num_pooled), end, is_last)
        if self.kind == "last":
            return PooledPiece(handle, prompt, end - 1 if is_last else end, end, is_last)
        if start > 0 and not prompt.num_pooled:
            raise ProtocolError(f"handle {handle} begins at token {start}, and its first token is pooled")
        return PooledPiece(handle, prompt, max(start, prompt.num_pooled), min(end, 1), is_last)


def pool(
    pooler: Pooler,
    hidden: torch.Tensor,  # [num_pooled, hidden_size]
    step: StepPooling,
) -> tuple[Pooled, Failed]:
    """What the prompts that this step completes asked for, and those of them for whom that is not finite."""
    kind = pooler.spec.kind
    counts = [max(0, piece.end - piece.first) for piece in step.pieces]
    states = _sums(hidden, counts) if kind == "mean" else None
    wide, first = hidden.float() if states is None else hidden, 0
    done: list[PooledPiece] = []
    for index, (piece, count) in enumerate(zip(step.pieces, counts, strict=True)):
        prompt, own = piece.prompt, wide[first : first + count]
        first += count
        if prompt.wants_rows:
            prompt.rows.append(own.float().clone())
        elif states is not None:
            prompt.state = states[index] if prompt.state is None else prompt.state + states[index]
        elif count:
            prompt.state = own[0]
        if piece.is_last:
            done.append(piece)
        elif prompt.state is not None:
            prompt.state = prompt.state.clone()  # the step's own memory is used again
    return _results(pooler, done)


def _sums(hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:  # float32 [len(counts), hidden_size]
    """The sum of each piece's rows. One matrix product would be quicker only for very short pieces."""
    sums = torch.zeros(len(counts), hidden.shape[1], device=hidden.device)
    for row, part in zip(sums, hidden.split(list(counts)), strict=True):
        torch.sum(part, 0, dtype=torch.float32, out=row)
    return sums


def _results(pooler: Pooler, done: Sequence[PooledPiece]) -> tuple[Pooled, Failed]:
    """Those that asked for the same are computed together."""
    pooled, failed = dict[Handle, bytes](), Failed()
    alike: dict[tuple[str, int, bool], list[PooledPiece]] = {}
    for piece in done:
        asked = piece.prompt.asked
        alike.setdefault((asked.task, asked.dimensions, asked.use_activation), []).append(piece)
    for (task, dimensions, active), pieces in alike.items():
        lengths = [1] * len(pieces)
        if task == "token_embed":
            parts = [torch.cat(piece.prompt.rows) for piece in pieces]
            lengths = [len(part) for part in parts]
            states = torch.cat(parts)
        else:
            states = torch.stack([_state(pooler, piece.prompt) for piece in pieces])
        if task in ("classify", "score"):
            found = pooler.numbers(states, use_activation=active)
        else:
            found = pooler.vectors(states, dimensions, use_activation=active)
        ends = np.cumsum(lengths).tolist()
        numbers = np.ascontiguousarray(found.numpy(force=True), "<f4")
        for piece, end, length in zip(pieces, ends, lengths, strict=True):
            own = numbers[end - length : end]
            if np.isfinite(own).all():
                pooled[piece.handle] = own.tobytes()
            else:
                failed.append((piece.handle, NOT_FINITE))
    return [(piece.handle, pooled[piece.handle]) for piece in done if piece.handle in pooled], failed


def _state(pooler: Pooler, prompt: PromptPooling) -> torch.Tensor:  # float32 [hidden_size]
    if prompt.state is None:
        raise ProtocolError("a prompt is complete, and nothing of it was pooled")
    return prompt.state / prompt.num_prompt if pooler.spec.kind == "mean" else prompt.state
