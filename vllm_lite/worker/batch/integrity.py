"""What may be wrong with one row of the persistent batch. For tests, and for when the worker is idle."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_lite.worker.memory.cache_engine import NULL_BLOCK

if TYPE_CHECKING:
    from vllm_lite.worker.batch.input_batch import InputBatch


def row_problems(batch: "InputBatch", row: int) -> Iterator[str]:
    num_tokens, num_computed = int(batch.num_tokens[row]), int(batch.num_computed[row])
    if not 0 <= num_computed <= num_tokens <= batch.max_model_len + 1:
        yield f"{num_computed} of {num_tokens} tokens computed, context {batch.max_model_len}"
    tokens = batch.token_ids[row, :num_tokens]
    if num_tokens and not 0 <= tokens.min() <= tokens.max() < batch.vocab_size:
        yield f"tokens outside the vocabulary: {tokens}"
    for group, table in enumerate(batch.block_tables):
        window, blocks = batch.windows[group], table[row, : batch.table_lens[row, group]]
        if len(blocks) * batch.block_size < num_computed:
            yield f"{len(blocks)} blocks of group {group} for {num_computed} computed tokens"
        # The engine takes blocks that a window has left behind without a word, and may give them out again.
        first = 0 if window is None else max(0, num_computed - window + 1) // batch.block_size
        blocks = blocks[first:]
        real = blocks[blocks != NULL_BLOCK]
        if len(set(real.tolist())) != len(real) or not ((real > 0) & (real < batch.num_blocks)).all():
            yield f"blocks of group {group} repeat or lie outside the pool: {blocks}"
