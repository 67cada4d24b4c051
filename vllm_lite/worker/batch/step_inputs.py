"""The inputs of one step, made by the persistent batch: arrays for the forward pass, and which tokens sample."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.protocol.step import Handle
from vllm_lite.worker.pooling import StepPooling
from vllm_lite.worker.sampling.drafter import NO_DRAFT
from vllm_lite.worker.sampling.logprobs import StepScoring
from vllm_lite.worker.sampling.sampler import SampleInputs

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class StepStates(NamedTuple):
    """Where the states of the step's sequences come from and go to, as kernels.delta_rule.Segments."""

    firsts: Int32s  # [num_seqs + 1]
    rows: Int32s  # [num_segments + 1]
    sources: Int32s  # [num_segments]
    targets: Int32s  # [num_segments]

    @property
    def last_targets(self) -> Int32s:  # [num_seqs]
        """Where each sequence's state is behind the step."""
        return self.targets[self.firsts[1:] - 1]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Holds one step's inputs: sequences in the order of their entries, tokens of one sequence side by side."""

    handles: list[Handle]
    rows: Int64s  # [num_seqs], rows of the batch
    num_scheduled: Int64s  # [num_seqs], tokens of each in this step
    input_ids: Int64s  # [num_tokens]
    positions: Int64s  # [num_tokens]
    slot_mapping: tuple[Int64s, ...]  # per KV group: [num_tokens]
    block_tables: tuple[Int32s, ...]  # per KV group: [num_seqs, max_blocks of these]
    query_start_loc: Int32s  # [num_seqs + 1]
    seq_lens: Int32s  # [num_seqs], drafts included
    sampling: Int64s  # [num_sampling], which of the step's sequences are caught up and sample
    num_samples: Int64s  # [num_sampling], one behind the last token of each, and one behind every draft
    adapters: Int64s  # [num_seqs], the number of each one's adapter; 0: none
    drafted: bool = False
    """Whether some sequence has drafts, so more than one sample."""
    scoring: StepScoring | None = None
    """The prompt tokens that get their logprobs."""
    pooling: StepPooling | None = None
    """The prompt tokens that are pooled."""
    is_steady: bool = False
    """Whether the arrays are buffers of SteadyDecode, which the next steady step overwrites."""
    states: StepStates | None = None
    """None: the model has no recurrent layers."""
    samples: SampleInputs | None = None
    """The sampler's inputs, if they were known beforehand."""
    device_ids: torch.Tensor | None = None
    """int64 [num_tokens] on the device: what counts in place of `input_ids`, some of which the host does not know."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def sample_starts(self) -> Int64s:  # [num_sampling]
        """Index of each sequence's first sample."""
        if not self.drafted:
            return np.arange(len(self.sampling))
        return np.cumsum(self.num_samples) - self.num_samples

    @property
    def num_drafts_before(self) -> Int64s:  # [num_samples]
        """How many drafts of its sequence stand before each sample."""
        if not self.drafted:
            return np.zeros(len(self.sampling), np.int64)
        return np.arange(self.num_samples.sum()) - np.repeat(self.sample_starts, self.num_samples)

    @property
    def sample_tokens(self) -> Int64s:  # [num_samples]
        """Index of each sample's token among the step's tokens."""
        ends = self.query_start_loc[1:][self.sampling].astype(np.int64)
        return np.repeat(ends - self.num_samples, self.num_samples) + self.num_drafts_before

    @property
    def tentative(self) -> Int64s | None:  # [num_tentative]
        """Indices of the tokens of sequences with drafts, if the model has states: none takes them up in this step."""
        if not self.drafted or self.states is None:
            return None
        drafting = self.sampling[self.num_samples > 1]
        return np.flatnonzero(np.isin(np.arange(len(self.rows)), drafting).repeat(self.num_scheduled))

    @property
    def wanted(self) -> Int64s | None:  # [num_samples + num_scored + num_pooled]
        """Indices of the tokens whose hidden states are wanted: for samples, then for prompt logprobs, then for
        pooling. None if these are all, in order."""
        if self.pools_all:
            return None
        if self.scoring is not None or self.pooling is not None:
            more: list[Int64s] = [part.positions for part in (self.scoring, self.pooling) if part is not None]
            wanted: Int64s = np.concatenate([self.sample_tokens, *more])
            return wanted
        return self.sample_tokens if self.num_samples.sum() < self.num_tokens else None

    @property
    def token_types(self) -> Int64s | None:  # [num_tokens]
        """1 for tokens in the second text of a pair; None if all are 0."""
        return None if self.pooling is None else self.pooling.token_types

    @property
    def only_pools(self) -> bool:
        """Whether the step is for poolers alone: there is nothing to sample or to score."""
        return self.pooling is not None and self.scoring is None and not len(self.sampling)

    @property
    def pools_all(self) -> bool:
        """Whether it only pools, and every token of it."""
        return self.only_pools and self.pooling is not None and len(self.pooling.positions) == self.num_tokens

    @property
    def drafts(self) -> Int64s:  # [num_samples]
        """The token that was drafted where each sample is; NO_DRAFT at the last sample of each sequence."""
        drafts = np.append(self.input_ids, NO_DRAFT)[self.sample_tokens + 1]
        drafts[self.sample_starts + self.num_samples - 1] = NO_DRAFT
        return drafts


def padding_step(num_tokens: int, num_seqs: int, num_groups: int, block_size: int, *, num_sampling: int) -> StepInputs:
    """Make a step of `num_tokens` tokens, spread over new sequences that write nothing and read the null block.

    The first `num_sampling` of them want a token. For warming up and for profiling memory: a step of this size that
    touches no sequence's KV.
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
        adapters=np.zeros(num_seqs, np.int64),
        states=StepStates(np.arange(num_seqs + 1, dtype=np.int32), query_start_loc, nowhere, nowhere),
    )
