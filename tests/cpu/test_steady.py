"""Steps like the previous one are prepared by native calls, and equal steps that are prepared in full."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tests.cpu.test_input_batch import MAX_LEN, new_batch, new_request
from vllm_lite.errors import ProtocolError
from vllm_lite.kernels import cpu
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Continue, Entry, Finish, SetToken
from vllm_lite.worker.batch.input_batch import InputBatch
from vllm_lite.worker.batch.steady import SteadyDecode

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

RANDOM = Sampling(0.7, 5, 0.9, 0.0, 3)
RULED = Sampling(0.0, 0, 1.0, 0.0, 0, min_tokens_until=9, stop_ids=(5,))
REPORTED = Sampling(0.0, 0, 1.0, 0.0, 0, logprobs=1)


def both(num_groups: int = 1) -> tuple[InputBatch, InputBatch]:
    """A batch, and one that makes every step in full."""
    batch, plain = new_batch((None,) * num_groups), new_batch((None,) * num_groups)
    plain._steady = SteadyDecode(None)
    return batch, plain


def step(batches: tuple[InputBatch, InputBatch], entries: Sequence[Entry], token: int) -> bool:
    """Run a step on both and compare all of it. Whether the first was spared to make it in full."""
    answers: list[list[Any]] = []
    prepared = []
    for batch in batches:
        batch.apply(entries)
        inputs = batch.build()
        prepared.append(inputs.is_steady)
        sampling = batch.sample_inputs(inputs)
        parts = [getattr(inputs, field.name) for field in fields(inputs) if field.name not in ("is_steady", "samples")]
        parts += [sampling.params, sampling.positions, sampling.edits and sampling.edits.banned]
        answers.append([part.copy() if isinstance(part, np.ndarray) else part for part in parts])
        batch.commit(inputs, np.arange(token, token + len(inputs.sampling)))
        batch.check_integrity()
    for got, expected in zip(*answers, strict=True):
        np.testing.assert_equal(got, expected)
    first, second = batches
    np.testing.assert_equal(first.rows.token_ids, second.rows.token_ids)
    np.testing.assert_equal(
        [first.rows.num_tokens, first.rows.num_computed], [second.rows.num_tokens, second.rows.num_computed]
    )
    assert not prepared[1]
    return prepared[0]


def decode(*handles: int, blocks: dict[int, list[list[int]]] | None = None) -> list[Entry]:
    return [Continue(handle, 1, (blocks or {}).get(handle, [])) for handle in handles]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("second", [RANDOM, RULED, REPORTED])
def test_decodes_have_the_inputs_of_steps_made_in_full(num_groups: int, second: Sampling) -> None:
    batches = both(num_groups)
    # Rows in another order than the step's, blocks that are added later, and a first token whose KV is cached.
    blocks = [[7 + 10 * group] for group in range(num_groups)]
    step(batches, [new_request(4, [11, 12], block_ids=[[1]] * num_groups)], 20)
    known: dict[str, Any] = {"num_computed": 3, "num_cached": 4, "num_tokens": 1, "block_ids": blocks}
    step(batches, [new_request(2, [21, 22, 23, 24], sampling=second, **known)], 30)
    assert not step(batches, decode(2, 4, blocks={2: [[8]] * num_groups}), 5), "nothing like it was seen yet"
    for index in range(2, 5):
        new = {4: [[30 + group] for group in range(num_groups)]} if index == 3 else {}
        assert step(batches, decode(2, 4, blocks=new), index)
    assert not step(batches, decode(4, 2, blocks={2: [[9]] * num_groups}), 6), "another order"
    assert step(batches, decode(4, 2), 7)


def test_whatever_else_happens_is_made_in_full() -> None:
    batches = both()
    step(batches, [new_request(0, [11], block_ids=[[1, 2, 3]]), new_request(1, [12], block_ids=[[4, 5, 6]])], 20)
    step(batches, decode(0, 1), 1)
    assert step(batches, decode(0, 1), 2)
    assert not step(batches, [SetToken(0, 33), *decode(0, 1)], 3)
    assert step(batches, decode(0, 1), 4)
    assert not step(batches, decode(1), 5)
    assert step(batches, decode(1), 6)
    # The same handle as another sequence, which happens to begin with one token.
    assert not step(batches, [Finish(1), new_request(1, [40], block_ids=[[7, 8]], sampling=RANDOM)], 7)
    assert step(batches, decode(1), 8)
    assert not step(batches, [new_request(2, list(range(5)), num_tokens=3, block_ids=[[9, 10]]), *decode(1)], 9)
    assert not step(batches, [*decode(1), Continue(2, 2, [])], 10)


def test_a_sequence_that_leaves_may_move_anothers_row() -> None:
    """The one that decodes is the same, and its row is another."""
    batches = both()
    step(batches, [new_request(0, [11], block_ids=[[1, 2]]), new_request(1, [12], block_ids=[[3, 4]])], 20)
    step(batches, decode(1), 21)
    assert step(batches, decode(1), 22)
    assert not step(batches, [Finish(0), *decode(1)], 23)
    assert step(batches, decode(1), 24)


def test_invalid_entries_are_refused_after_steady_steps() -> None:
    batch = new_batch()
    batch.apply([new_request(3, [1, 2], block_ids=[[1]])])
    for _ in range(3):
        inputs = batch.build()
        batch.sample_inputs(inputs)
        batch.commit(inputs, np.array([9]))
        batch.apply(decode(3))
    with pytest.raises(ProtocolError, match=r"handle 3 cannot compute 1 tokens up to 5.* blocks for 4"):
        batch.build()


def test_the_longest_table_may_grow_to_the_whole_context() -> None:
    batches = both()
    step(batches, [new_request(0, [11], block_ids=[[1, 2, 3, 4, 5, 6]])], 3)
    assert [step(batches, decode(0), 4) for _ in range(MAX_LEN - 1)] == [True] * (MAX_LEN - 1)
