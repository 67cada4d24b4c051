"""StepInputs: the inputs of one step: arrays for the forward pass, and the tokens that sample."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import PAD_SLOT, TokenVectors, WholeImage
from vllm_lite.protocol.step import Handle
from vllm_lite.worker.sampling.sampler import SampleInputs

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class StepStates(NamedTuple):
    """State slots that the step's sequences read and write, laid out like kernels.delta_rule.Segments."""

    firsts: Int32s  # [num_seqs + 1]
    rows: Int32s  # [num_segments + 1]
    sources: Int32s  # [num_segments]
    targets: Int32s  # [num_segments]

    @property
    def last_targets(self) -> Int32s:  # [num_seqs]
        """Slot of each sequence's state after the step."""
        return self.targets[self.firsts[1:] - 1]


@dataclass(slots=True)
class StepInputs:
    """Inputs of one step: sequences in the order of their entries, the tokens of each next to each other.

    The batch creates it, then each StepPart completes it. After that it does not change.
    """

    handles: list[Handle]
    rows: Int64s  # [num_seqs], rows of the batch
    num_scheduled: Int64s  # [num_seqs], tokens of each sequence in this step
    input_ids: Int64s  # [num_tokens]
    positions: Int64s  # [num_tokens], the place of each token in its sequence, unless `counts_otherwise`
    slot_mapping: tuple[Int64s, ...]  # per KV group: [num_tokens]
    block_tables: tuple[Int32s, ...]  # per KV group: [num_seqs, max_blocks of these]
    query_start_loc: Int32s  # [num_seqs + 1]
    seq_lens: Int32s  # [num_seqs], proposed tokens included
    sampling: Int64s  # [num_sampling], indices of the sequences whose last token is computed, and that sample
    num_samples: Int64s  # [num_sampling], one after the last token of each, and one after every proposed token
    has_proposals: bool = False
    """Whether any sequence has proposed tokens, and so more than one sample."""
    is_steady: bool = False
    """Whether the arrays are buffers of SteadyDecode, which the next steady step overwrites."""
    samples: SampleInputs | None = None
    """The sampler's inputs, if a steady step reuses them."""
    device_ids: torch.Tensor | None = None
    """int64 [num_tokens] on the device, used instead of `input_ids` if the host does not know some of them."""

    # ---- set by StepParts
    reads: list[Int64s] = field(default_factory=list)
    """Indices of tokens whose hidden states parts have requested by read()."""
    shows_hidden: bool = False
    """Whether a part needs the hidden states from which tokens are sampled."""
    shows_all: bool = False
    """Whether a part needs the hidden states of all tokens, unless others have requested some by read()."""
    draws: bool = True
    """False: no sequence of the step samples, and the model may have no LM head."""
    draws_late: bool = False
    """Whether the sampler's inputs can only be built after the forward pass was launched."""
    is_repeatable: bool = True
    """Whether the last token of a sequence can be computed again, if the step gives it no token."""
    counts_otherwise: bool = False
    """Whether a part has set `positions` as its model counts them, other than the places by which KV is stored. After
    the prompt they grow by one per token."""
    vectors: TokenVectors | None = None
    """Vectors of placeholder tokens, on the device; None: there are none."""
    images: tuple[WholeImage, ...] = ()
    """Images whose tokens attend to each other in both directions."""
    forced: list[int] | None = None  # [num_sampling]
    """Number of proposed tokens of each sequence that its grammar forces; None: no grammar forces any."""
    states: StepStates | None = None
    """State slots; None: the model has no recurrent layers."""
    token_types: Int64s | None = None  # [num_tokens]
    """1 for tokens in the second text of a pair; None: all are 0."""
    adapters: Int64s | None = None  # [num_seqs]
    """Number of each sequence's adapter, 0 for none; None: the model takes no adapters."""

    # ---- kept by the properties of these names, which are read once the parts have completed a step with proposals
    _sample_starts: Int64s | None = field(default=None, init=False)
    _sample_offsets: Int64s | None = field(default=None, init=False)
    _sample_tokens: Int64s | None = field(default=None, init=False)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def is_eager(self) -> bool:
        """Whether parts need hidden states, which few graphs keep, if any."""
        return bool(self.reads) or self.shows_hidden

    @property
    def starts(self) -> Int64s:  # [num_seqs]
        """First place that the step computes of each sequence."""
        return self.seq_lens - self.num_scheduled

    @property
    def sample_starts(self) -> Int64s:  # [num_sampling]
        """Index of each sequence's first sample."""
        if not self.has_proposals:
            return np.arange(len(self.sampling))
        if self._sample_starts is None:
            self._sample_starts = self.num_samples.cumsum() - self.num_samples
        return self._sample_starts

    @property
    def sample_offsets(self) -> Int64s:  # [num_samples]
        """Number of proposed tokens of its sequence before each sample."""
        if not self.has_proposals:
            return np.zeros(len(self.sampling), np.int64)
        if self._sample_offsets is None:
            starts = self.sample_starts.repeat(self.num_samples)
            self._sample_offsets = np.arange(len(starts)) - starts
        return self._sample_offsets

    @property
    def sample_tokens(self) -> Int64s:  # [num_samples]
        """Index of each sample's token among the step's tokens."""
        if self._sample_tokens is not None:
            return self._sample_tokens
        ends = self.query_start_loc[1:][self.sampling].astype(np.int64)
        tokens: Int64s = (ends - self.num_samples).repeat(self.num_samples) + self.sample_offsets
        if self.has_proposals:
            self._sample_tokens = tokens
        return tokens

    @property
    def tentative(self) -> Int64s | None:  # [num_tentative]
        """Indices of the tokens of sequences with proposed tokens, if the model has recurrent states: no state includes
        them before they are accepted."""
        if not self.has_proposals or self.states is None:
            return None
        trying = self.sampling[self.num_samples > 1]
        return np.flatnonzero(np.isin(np.arange(len(self.rows)), trying).repeat(self.num_scheduled))

    @property
    def wanted(self) -> Int64s | None:  # [num_wanted]
        """Indices of the tokens whose hidden states are needed: for samples, then those of each read(). None: all
        tokens, in order."""
        if self.shows_all and not self.reads:
            return None
        if not self.reads:
            return self.sample_tokens if self.num_samples.sum() < self.num_tokens else None
        if not self.draws and sum(map(len, self.reads)) == self.num_tokens:
            return None
        wanted: Int64s = np.concatenate([self.sample_tokens, *self.reads])
        return wanted

    @property
    def sampled_rows(self) -> Int64s | slice:
        """Rows of the wanted hidden states from which tokens are sampled."""
        num_samples = int(self.num_samples.sum())
        return self.sample_tokens if self.wanted is None and num_samples < self.num_tokens else slice(num_samples)

    def read(self, positions: Int64s) -> int:
        """Request the hidden states of the tokens with these indices. Returns a number for read_rows()."""
        self.reads.append(positions)
        return len(self.reads) - 1

    def read_rows(self, read: int) -> slice:
        """Rows of the wanted hidden states that belong to this read()."""
        start = int(self.num_samples.sum()) + sum(map(len, self.reads[:read]))
        return slice(start, start + len(self.reads[read]))


def padding_step(num_tokens: int, num_seqs: int, num_groups: int, block_size: int, *, num_sampling: int) -> StepInputs:
    """Build a step of `num_tokens` tokens, spread over new sequences that write nothing and read the null block.

    The first `num_sampling` of them sample. Used to warm up and to profile memory: it touches no sequence's KV.
    """
    query_start_loc = np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32)
    query_lens = np.diff(query_start_loc)
    nowhere = np.zeros(num_seqs, np.int32)
    width = -(-int(query_lens.max()) // block_size)
    return StepInputs(
        handles=[],
        rows=np.arange(num_seqs),
        num_scheduled=query_lens.astype(np.int64),
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.zeros(num_tokens, np.int64),
        slot_mapping=(np.full(num_tokens, PAD_SLOT, np.int64),) * num_groups,
        block_tables=(np.zeros((num_seqs, width), np.int32),) * num_groups,  # reads the null block, which is zero
        query_start_loc=query_start_loc,
        seq_lens=query_lens,
        sampling=np.arange(num_sampling),
        num_samples=np.ones(num_sampling, np.int64),
        states=StepStates(np.arange(num_seqs + 1, dtype=np.int32), query_start_loc, nowhere, nowhere),
    )
