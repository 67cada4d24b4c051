"""What must be true of the rows of an InputBatch, whatever steps it has seen."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_lite.worker.batch.sequence import SequenceState
from vllm_lite.worker.batch.step_inputs import Int32s
from vllm_lite.worker.memory.cache_engine import NULL_BLOCK

if TYPE_CHECKING:
    from vllm_lite.worker.batch.input_batch import InputBatch


def row_problems(batch: "InputBatch", row: int, sequence: SequenceState) -> Iterator[str]:
    """What contradicts itself in a row of the batch, which `sequence` has."""
    if sequence.row != row or sequence.preempted_tokens is not None:
        yield f"the sequence is elsewhere: {sequence}"
    num_tokens, num_computed = int(batch.num_tokens[row]), int(batch.num_computed[row])
    if not 0 <= num_computed <= num_tokens <= batch.max_model_len + 1:
        yield f"{num_computed} of {num_tokens} tokens computed, context {batch.max_model_len}"
    tokens = batch.token_ids[row, :num_tokens]
    if num_tokens and not 0 <= tokens.min() <= tokens.max() < batch.vocab_size:
        yield f"tokens outside the vocabulary: {tokens}"
    for group, table in enumerate(batch.block_tables):
        window, blocks = batch.windows[group], table[row, : batch.table_lens[row, group]]
        # The engine frees blocks that a window has left behind without a message, and may allocate them again.
        first = 0 if window is None else max(0, num_computed - window + 1) // batch.block_size
        if len(blocks) * batch.block_size < num_computed or not is_table(blocks[first:], batch.num_blocks):
            yield f"blocks of group {group} lack some of {num_computed} tokens, repeat or are no blocks: {blocks}"


def is_table(ids: Int32s, num_blocks: int) -> bool:
    """Whether a sequence may hold these blocks: each is one of the pool's, and none but the null block twice."""
    real = ids[ids != NULL_BLOCK]
    return len(set(real.tolist())) == len(real) and bool(((real > 0) & (real < num_blocks)).all())
