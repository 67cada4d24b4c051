"""RecordedChain: the passes of a chain on a CPU, each of which is a recorded decode step.

A pass of a small model, or of a head, takes less time than building its inputs. So everything that is known before the
first draft (positions, slots, lengths, block tables, the records of draws) is built for all passes at once. Between two
passes, only the drawn tokens are copied. Sequences with more drafts come first, so that the sequences of each pass are
the first ones of the previous pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import sampler as native
from vllm_lite.kernels.sampling import Picked
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import Int32s, Int64s
from vllm_lite.worker.forward import Forward
from vllm_lite.worker.graphs import DecodeGraphs, OwnRows
from vllm_lite.worker.sampling.sampler import Sampler, TokenSampler, draw_records, is_plain


class Fed(ABC):
    """A forward pass that also reads the output of the previous pass for each sequence."""

    graphs: Forward
    """DecodeGraphs, if its passes are recorded."""

    @abstractmethod
    def feed(self, order: Int64s) -> None:  # [num_seqs]
        """Prepare the first pass, over these batch indexes in this order."""

    @abstractmethod
    def follow(self, hidden: torch.Tensor) -> None:  # [num_rows, hidden_size]
        """Take the hidden states that a pass computed, of the sequences of the next pass."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Drafting sequences, each of which lacks only its last token."""

    rows: Int64s  # [n], of the batch
    lengths: Int64s  # [n], tokens of each
    counts: Int64s  # [n], the most drafts of each, at least 1
    params: NDArray[np.void]  # ROW_PARAMS [n], without rules or logprobs
    last: Int64s  # [n], the last token of each
    nearer: Int64s  # [n], index of the last token of each minus its position, which images lower
    states: list[int] | None  # [n], the slot of the recurrent state of each

    def ordered(self, order: Int64s) -> "DraftRows":
        return DraftRows(
            self.rows[order],
            self.lengths[order],
            self.counts[order],
            self.params[order],
            self.last[order],
            self.nearer[order],
            None if self.states is None else [self.states[index] for index in order],
        )


class RecordedChain:
    """Drafts greedily or with noise, for sequences without rules."""

    def __init__(
        self, forward: Forward, graphs: DecodeGraphs, rows: Rows, groups: Sequence[int] | None, scratch: range
    ) -> None:
        self._graphs = graphs
        self._fed = forward if isinstance(forward, Fed) else None
        self._rows = rows
        self._groups = groups
        self._scratch = scratch
        self._best_of = native.BestOf()

    @classmethod
    def of(
        cls, forward: Forward, sampler: TokenSampler, rows: Rows, groups: Sequence[int] | None, scratch: range
    ) -> "RecordedChain | None":
        """Create one with the parameters of Chain. Returns None if passes are not recorded, or if ranks exchange drawn
        tokens."""
        graphs = forward.graphs if isinstance(forward, Fed) else forward
        if not isinstance(graphs, DecodeGraphs) or not graphs.capture.on_demand:
            return None
        if not (isinstance(sampler, Sampler) and sampler.device.type == "cpu" and cpu.available()):
            return None
        return cls(forward, graphs, rows, groups, scratch)

    def draft(self, asked: DraftRows, *, stays: bool = False) -> list[Int32s] | None:  # of each: [at most its count]
        """Draft `counts` tokens of each sequence, or fewer if no token can be drawn. Returns None and does nothing if
        passes of this number of sequences are not recorded. `stays`: see Chain."""
        order = np.argsort(-asked.counts, kind="stable")
        own = asked.ordered(order)
        alive = np.arange(own.counts[0])[:, None] < own.counts  # [num_passes, n]
        widths = alive.sum(1).tolist()
        passes = [self._graphs.own_rows(width) for width in widths]
        if None in passes:
            return None
        numbers, seq_lens = self._inputs(own, alive, stays=stays)
        draws = self._draws(own, len(widths))
        if self._fed is not None:
            self._fed.feed(order)
        drafts, best = np.zeros((len(order), len(widths)), np.int32), np.zeros((len(order), len(widths)), np.float32)
        for index, (step, width) in enumerate(zip(passes, widths, strict=True)):
            if step is None:
                raise RuntimeError("a pass that was recorded is not")
            step.numbers[:], step.seq_lens[:] = numbers[index, :, :width], seq_lens[index, :width]
            if own.states is not None:
                self._place_states(step, own.states, index)
            step.graph.replay()
            picked = self._pick(step, None if draws is None else draws[index, :width])
            drafts[:width, index], best[:width, index] = picked.tokens, picked.best
            if index + 1 < len(widths):
                numbers[index + 1, 0, :width] = picked.tokens
                if self._fed is not None:
                    self._fed.follow(step.hidden[: widths[index + 1]])
        self._graphs.num_replays += len(widths)
        self._graphs.eager.num_last = widths[-1]
        return _cut(drafts, best, own.counts, order)

    def _inputs(
        self, own: DraftRows, alive: NDArray[np.bool_], *, stays: bool
    ) -> tuple[Int64s, Int32s]:  # [num_passes, 2 + num_groups, n] as OwnRows.numbers, and [num_passes, n]
        """Build the inputs of all passes, without the tokens that are still to be drawn, and fill in the block
        tables."""
        tables, (num_passes, count) = self._rows.tables, alive.shape
        groups = range(len(tables.ids)) if self._groups is None else self._groups
        further = np.zeros(num_passes, np.int64) if stays else np.arange(num_passes)
        positions = np.where(alive, own.lengths - 1 + further[:, None], 0)
        written = alive & (not stays)
        if self._groups is None:  # the KV is the verifying model's, which may have computed it already
            written = alive & (positions >= self._rows.num_cached[own.rows])
        rows = np.broadcast_to(own.rows, alive.shape)
        slots = tables.slots(rows.ravel(), positions.ravel(), written.ravel(), self._rows.handle_of, groups)
        numbers = np.empty((num_passes, 2 + len(slots), count), np.int64)
        numbers[0, 0], numbers[:, 1] = own.last, positions - own.nearer
        for group, of_group in enumerate(slots, start=2):
            numbers[:, group] = of_group.reshape(alive.shape)
        of_rows = tables.of(own.rows)
        step = self._graphs.own_rows(count)
        for place, group in zip(step.tables if step else (), groups, strict=True):
            place[:count, : of_rows[group].shape[1]] = of_rows[group]
        return numbers, (positions + (not stays)).astype(np.int32)

    def _place_states(self, step: OwnRows, sources: list[int], index: int) -> None:
        """Set the state slots: the first pass reads the states of the sequences, each later pass those of the previous
        one."""
        count = step.states.shape[1]
        step.states[1] = np.arange(self._scratch.start, self._scratch.start + count)
        step.states[0] = step.states[1] if index else sources[:count]

    def _draws(self, own: DraftRows, num_passes: int) -> NDArray[np.void] | None:  # DRAW [num_passes, n]
        """The records of all draws; None if all sequences take their best token."""
        if is_plain(own.params):
            return None
        count = len(own.rows)
        positions = own.lengths + np.arange(num_passes)[:, None]
        records = draw_records(np.tile(own.params, num_passes), positions.ravel(), self._rows.vocab_size)
        return records.reshape(num_passes, count)

    def _pick(self, step: OwnRows, draws: NDArray[np.void] | None) -> Picked:
        if draws is not None:
            return native.pick(step.logits, draws)
        return self._best_of(step.logits)


def _cut(
    drafts: Int32s,  # [n, num_passes]
    best: NDArray[np.float32],  # [n, num_passes], the best logit of each draw
    counts: Int64s,  # [n]
    order: Int64s,  # [n], of each the place of its sequence
) -> list[Int32s]:
    """The drafts of each sequence, by batch index, up to the first that could not be drawn."""
    found: list[Int32s] = [drafts[0]] * len(order)
    bad = ~np.isfinite(best)
    if bad.any():
        counts = np.minimum(counts, np.where(bad.any(1), bad.argmax(1), drafts.shape[1]))
    for index, (place, count) in enumerate(zip(order.tolist(), counts.tolist(), strict=True)):
        found[place] = drafts[index, :count]
    return found
