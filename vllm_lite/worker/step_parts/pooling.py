"""Pooling: computes embeddings, classes and scores from the hidden states of prompts, in any chunks.

When a preempted sequence is computed again, pooling continues with the first token that has not been pooled yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_lite.checkpoint.layer_specs.pooling import Kind
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ProtocolError
from vllm_lite.layers.pooler import Pooler
from vllm_lite.protocol.pooling import POOLING_TASKS, TOKEN_TASKS, PoolerInfo, Pooling
from vllm_lite.protocol.step import NOT_FINITE, Entry, Fork, Handle, NewRequest
from vllm_lite.worker.batch.part import StepPart
from vllm_lite.worker.batch.rows import SequenceState
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs

Pooled = list[tuple[Handle, bytes]]
Failed = list[tuple[Handle, str]]


@dataclass(slots=True)
class PromptPooling:
    """Progress of pooling one prompt."""

    asked: Pooling
    num_prompt: int
    num_pooled: int = 0
    """Tokens below this index are done."""
    state: torch.Tensor | None = None  # float32 [hidden_size]: the sum so far, or the first token's state
    rows: list[torch.Tensor] = field(
        default_factory=list
    )  # float32 [tokens of a chunk, hidden_size], if all are wanted

    @property
    def wants_rows(self) -> bool:
        """Whether each token gets a result of its own."""
        return self.asked.task in TOKEN_TASKS


class PooledPiece(NamedTuple):
    """Tokens [first, end) of one sequence whose hidden states are pooled in this step. `is_last`: they complete the
    prompt."""

    handle: Handle
    prompt: PromptPooling
    first: int
    end: int
    is_last: bool


class StepPooling(NamedTuple):
    """All tokens that one step pools."""

    pieces: list[PooledPiece]
    read: int
    """Number of the StepInputs.read() of all pieces' tokens."""
    places: list[int]
    """Indices, among the sequences that sample, of those whose prompts the step completes."""


class PooledPrompts(StepPart):
    """Pools the prompts of a step, those of preempted sequences included. It has no columns."""

    def __init__(self, pooler: Pooler | None, rank: int) -> None:
        """`pooler` is the model's. Only rank 0 computes results."""
        self._pooler = pooler
        self._kind: Kind = "last" if pooler is None else pooler.spec.kind
        self._answers = rank == 0
        self._prompts: dict[Handle, PromptPooling] = {}
        self._step: StepPooling | None = None
        self._found: tuple[Pooled, Failed] = [], []

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        if isinstance(entry, NewRequest) and entry.pooling is not None:
            if self._pooler is None:
                raise ProtocolError(f"handle {entry.handle} is to be pooled, and the model has no pooler")
            self._prompts[sequence.handle] = PromptPooling(entry.pooling, sequence.num_prompt)

    def close(self, sequence: SequenceState) -> None:
        self._prompts.pop(sequence.handle, None)

    # ---- a step

    def build(self, inputs: StepInputs) -> None:
        """Find the tokens that the step pools; their sequences do not sample. Raises ProtocolError if it skips some."""
        if not self._prompts:
            return
        prompts = [
            (index, self._prompts[handle]) for index, handle in enumerate(inputs.handles) if handle in self._prompts
        ]
        if not prompts:
            return
        pieces, positions, types, starts = [], [], None, inputs.starts
        for index, prompt in prompts:
            start, end = int(starts[index]), int(inputs.seq_lens[index])
            row = int(inputs.query_start_loc[index])
            piece = self._piece(inputs.handles[index], prompt, start, end)
            pieces.append(piece)
            if piece.end > piece.first:
                positions.append(np.arange(piece.first, piece.end) - start + row)
            if second_at := prompt.asked.second_at:
                types = np.zeros(inputs.num_tokens, np.int64) if types is None else types
                types[row : row + end - start] = np.arange(start, end) >= second_at
        is_pooled = np.isin(inputs.sampling, [index for index, _ in prompts])
        inputs.sampling, inputs.num_samples = inputs.sampling[~is_pooled], inputs.num_samples[~is_pooled]
        inputs.token_types = types
        inputs.draws = bool(inputs.reads) or len(inputs.sampling) > 0
        read = inputs.read(np.concatenate(positions).astype(np.int64) if positions else np.zeros(0, np.int64))
        self._step = StepPooling(pieces, read, is_pooled.nonzero()[0].tolist())

    def _piece(self, handle: Handle, prompt: PromptPooling, start: int, end: int) -> PooledPiece:
        """The pooled part of the tokens [start, end) of a prompt."""
        is_last = end == prompt.num_prompt
        if prompt.wants_rows or self._kind == "mean":
            if start > prompt.num_pooled:
                raise ProtocolError(f"handle {handle} skips tokens {prompt.num_pooled} to {start}, which are pooled")
            return PooledPiece(handle, prompt, max(start, prompt.num_pooled), end, is_last)
        if self._kind == "last":
            return PooledPiece(handle, prompt, end - 1 if is_last else end, end, is_last)
        if start > 0 and not prompt.num_pooled:
            raise ProtocolError(f"handle {handle} begins at token {start}, and its first token is pooled")
        return PooledPiece(handle, prompt, max(start, prompt.num_pooled), min(end, 1), is_last)

    def after_hidden(self, inputs: StepInputs, hidden: torch.Tensor | None) -> None:
        step = self._step
        if step is not None and self._answers and hidden is not None and self._pooler is not None:
            self._found = pool(self._pooler, hidden[inputs.read_rows(step.read)], step.pieces)

    def commit(self, inputs: StepInputs, tokens: Int64s, num_kept: Int64s | None) -> None:  # noqa: ARG002
        """Record the tokens that the step has pooled."""
        if self._step is not None:
            for piece in self._step.pieces:
                piece.prompt.num_pooled = max(piece.prompt.num_pooled, piece.end)

    def answer(self, inputs: StepInputs, fields: dict[str, Any]) -> None:
        """Add the results, and a count of 0 tokens at the place of each pooled sequence."""
        step, (pooled, failed) = self._step, self._found
        if step is None:
            return
        self._step, self._found = None, ([], [])
        places = set(step.places)
        sampled = iter(fields["counts"] or [1] * len(inputs.sampling))
        counts = [0 if place in places else next(sampled) for place in range(len(inputs.sampling) + len(places))]
        fields["counts"] = counts if 0 in counts else None
        fields["pooled"] = pooled or None
        fields["failed"] = [*(fields["failed"] or ()), *failed] or None

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:
        return not self._prompts and not any(isinstance(each, NewRequest) and each.pooling for each in entries)


def pool(
    pooler: Pooler,
    hidden: torch.Tensor,  # [num_pooled, hidden_size]
    pieces: Sequence[PooledPiece],
) -> tuple[Pooled, Failed]:
    """Pool the hidden states of a step. Returns the results of the prompts that it completes, and those prompts whose
    results are not finite."""
    kind = pooler.spec.kind
    counts = [max(0, piece.end - piece.first) for piece in pieces]
    states = _sums(hidden, counts) if kind == "mean" else None
    wide, first = hidden.float() if states is None else hidden, 0
    done: list[PooledPiece] = []
    for index, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
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
            prompt.state = prompt.state.clone()  # the step's memory is reused
    return _results(pooler, done)


def _sums(hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:  # float32 [len(counts), hidden_size]
    """Sum the rows of each piece. A single matrix product would be faster only for very short pieces."""
    sums = torch.zeros(len(counts), hidden.shape[1], device=hidden.device)
    for row, part in zip(sums, hidden.split(list(counts)), strict=True):
        torch.sum(part, 0, dtype=torch.float32, out=row)
    return sums


def _results(pooler: Pooler, done: Sequence[PooledPiece]) -> tuple[Pooled, Failed]:
    """Results of complete prompts; those with equal pooling parameters are computed together."""
    pooled, failed = dict[Handle, bytes](), Failed()
    alike: dict[tuple[str, int, bool], list[PooledPiece]] = {}
    for piece in done:
        asked = piece.prompt.asked
        alike.setdefault((asked.task, asked.dimensions, asked.use_activation), []).append(piece)
    for (task, dimensions, active), pieces in alike.items():
        lengths = [1] * len(pieces)
        if task in TOKEN_TASKS:
            parts = [torch.cat(piece.prompt.rows) for piece in pieces]
            lengths = [len(part) for part in parts]
            states = torch.cat(parts)
        else:
            states = torch.stack([_state(pooler, piece.prompt) for piece in pieces])
        if task in ("classify", "token_classify", "score"):
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


def pooler_info(spec: ModelSpec) -> PoolerInfo:
    """Facts about the model's pooler for clients."""
    own = spec.pooling
    if own is None:
        return PoolerInfo()
    return PoolerInfo(
        tasks=tuple(task for task in POOLING_TASKS if task in own.tasks),
        generates=own.generates,
        size=own.size(spec.hidden_size),
        labels=own.labels,
        matryoshka=own.matryoshka,
        makes_pairs=own.makes_pairs,
        reads_last=own.kind == "last",
        normalizes=own.normalize,
        longest_text=own.longest_text,
        tag_biases=own.tag_biases,
    )
