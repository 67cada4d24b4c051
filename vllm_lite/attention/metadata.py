"""What every attention backend is told about one step. Built once per step, shared by all layers."""

from dataclasses import dataclass
from typing import Any

import torch

PAD_SLOT = -1
"""Slot of a token whose K and V are not written: padding, and a recomputed token whose KV is already in the cache."""


@dataclass(slots=True)
class AttentionMetadata:
    """The shape of a step's batch and where its KV lives; one entry per KV group where a tuple is said.

    Rows of all sequences stand one after another: sequence i owns rows `query_start_loc[i] : query_start_loc[i + 1]`.
    Its query rows are the last ones of its `seq_lens[i]` tokens, so row j of q may see the first seq_len - q + j + 1.
    Padding: rows after the last sequence's, and sequences with seq_len 0; their output is zero.
    """

    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs], tokens in the cache after this step's writes
    block_tables: tuple[torch.Tensor, ...]  # per group: int32 [num_seqs, max_blocks], entries past the length unused
    slot_mapping: tuple[torch.Tensor, ...]  # per group: int64 [num_tokens], block id * block size + offset, or PAD_SLOT
    plan: Any = None
    """What the backend's `prepare` worked out for this step; opaque to everyone else."""
