"""Shapes and batches for tests of attention alone, without a model, so token ids and positions do not matter."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.step_batch import HostLens, StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec

OF_A_GROUP = set(AttentionSpec.__struct_fields__)


def attention_shape(
    heads: tuple[int, int, int],  # num_heads, num_kv_heads, head_size
    block_size: int,
    dtype: torch.dtype,
    windows: Sequence[int | None] = (None,),
    **options: Any,
) -> AttentionShape:
    """A shape on the CPU, one group for each window; `options` are fields of AttentionShape and AttentionSpec."""
    spec = AttentionSpec(*heads, scale=heads[-1] ** -0.5)
    groups = tuple(msgspec.structs.replace(spec, window=window) for window in windows)
    return changed(AttentionShape(groups, block_size, dtype, torch.device("cpu")), **options)


def changed(shape: AttentionShape, **changes: Any) -> AttentionShape:
    """`shape` with other fields of its own or of all its groups; `windows` has one window for each group."""
    if "windows" in changes:
        windows = changes.pop("windows")
        groups = tuple(msgspec.structs.replace(shape.groups[0], window=window) for window in windows)
        shape = replace(shape, groups=groups)
    for_groups = {key: value for key, value in changes.items() if key in OF_A_GROUP}
    if "head_size" in for_groups:
        for_groups.setdefault("scale", for_groups["head_size"] ** -0.5)
    groups = tuple(msgspec.structs.replace(spec, **for_groups) for spec in shape.groups)
    return replace(shape, groups=groups, **{key: value for key, value in changes.items() if key not in for_groups})


def step_batch(
    lengths: Sequence[tuple[int, int]],  # query_len, seq_len
    block_tables: Sequence[torch.Tensor],  # per group
    slot_mapping: Sequence[torch.Tensor],  # per group; their length is the step's number of tokens, if there is any
    token_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> StepBatch:
    lens = HostLens(*np.array(lengths, np.int32).reshape(-1, 2).T)
    num_tokens = len(slot_mapping[0]) if slot_mapping else int(lens.query_lens.sum())
    starts = np.concatenate(([0], np.cumsum(lens.query_lens)))
    return StepBatch(
        num_tokens=num_tokens,
        num_seqs=len(lengths),
        max_query_len=int(lens.query_lens.max(initial=0)),
        max_seq_len=int(lens.seq_lens.max(initial=0)),
        token_ids=torch.zeros(num_tokens, dtype=torch.int64) if token_ids is None else token_ids,
        positions=torch.zeros(num_tokens, dtype=torch.int64) if positions is None else positions,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lens.seq_lens.tolist(), dtype=torch.int32),
        block_tables=tuple(block_tables),
        slot_mapping=tuple(slot_mapping),
        host=lens,
    )
