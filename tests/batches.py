"""Persistent batches with the parts that need no model."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from vllm_lite.worker.batch.block_tables import BlockTables
from vllm_lite.worker.batch.input_batch import InputBatch
from vllm_lite.worker.batch.part import StepPart
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.model_runner import ModelRunner
from vllm_lite.worker.sampling.masks import MaskSourceOf
from vllm_lite.worker.step_parts.drafts import Drafts
from vllm_lite.worker.step_parts.rules import Rules

PartT = TypeVar("PartT", bound=StepPart)


def part_of(holder: InputBatch | ModelRunner, kind: type[PartT]) -> PartT:
    """The holder's part of this kind."""
    return next(part for part in holder.parts if isinstance(part, kind))


def make_batch(
    *,
    max_num_seqs: int,
    max_model_len: int,
    vocab_size: int,
    block_size: int,
    num_blocks: int,
    windows: Sequence[int | None],
    mask_source_of: MaskSourceOf | None = None,
) -> InputBatch:
    """A batch whose sequences may have rules and drafts."""
    alone: Any = SimpleNamespace(shard=SimpleNamespace(rank=0, world=1), shares_memory=False)
    rules = Rules(alone, mask_source_of)
    tables = BlockTables(max_num_seqs, max_model_len, block_size, num_blocks, windows)
    return InputBatch(Rows(max_num_seqs, max_model_len, vocab_size, tables), [Drafts(None, rules), rules])
