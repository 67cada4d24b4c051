"""InputBatch, one kind of entry at a time: exact arrays, and refusals by name."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.batches import make_batch, part_of
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import (
    Continue,
    Draft,
    Entry,
    Finish,
    Fork,
    NewRequest,
    Preempt,
    ReplaceBlock,
    Resume,
    SetToken,
)
from vllm_lite.worker.batch.input_batch import InputBatch
from vllm_lite.worker.batch.step_inputs import Int32s, StepInputs
from vllm_lite.worker.sampling.drafter import NO_DRAFT, DraftBatch, Drafter, num_proved
from vllm_lite.worker.step_parts.drafts import Drafts, drafts_of

MAX_SEQS, MAX_LEN, VOCAB, BLOCK, NUM_BLOCKS = 4, 24, 50, 4, 64
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


def new_batch(windows: Sequence[int | None] = (None,), **overrides: int) -> InputBatch:
    sizes: dict[str, Any] = {
        "max_num_seqs": MAX_SEQS,
        "max_model_len": MAX_LEN,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "num_blocks": NUM_BLOCKS,
    }
    return make_batch(windows=windows, **(sizes | overrides))


def new_request(handle: int, tokens: list[int], *, sampling: Sampling = GREEDY, **fields: Any) -> NewRequest:
    values: dict[str, Any] = {
        "num_computed": 0,
        "num_cached": 0,
        "num_tokens": len(tokens),
        "block_ids": [[1, 2, 3, 4, 5, 6]],
    } | fields
    return NewRequest(handle, pack_tokens(tokens), len(tokens), sampling, **values)


def run(batch: InputBatch, *entries: Entry, sampled: int = 9) -> StepInputs:
    """Run one step in which every sequence without uncomputed tokens samples `sampled`."""
    batch.apply(entries)
    inputs = batch.build()
    batch.commit(inputs, np.full(len(inputs.sampling), sampled))
    batch.check_integrity()
    return inputs


def ids(*tokens: int) -> Int32s:
    return np.array(tokens, np.int32)


def test_whole_prompt_then_decode() -> None:
    batch = new_batch()
    inputs = run(batch, new_request(7, [11, 12, 13, 14, 15], block_ids=[[3, 5]]))
    assert inputs.input_ids.tolist() == [11, 12, 13, 14, 15]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4]
    assert inputs.slot_mapping[0].tolist() == [12, 13, 14, 15, 20]
    assert inputs.block_tables[0].tolist() == [[3, 5]]
    assert (inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()) == ([0, 5], [5])
    assert inputs.sample_tokens.tolist() == [4]

    inputs = run(batch, Continue(7, 1, []))
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([9], [5])
    assert inputs.slot_mapping[0].tolist() == [21]
    assert batch.tokens_of(7).tolist() == [11, 12, 13, 14, 15, 9, 9]


def test_a_chunk_samples_only_when_it_reaches_the_end() -> None:
    batch = new_batch()
    first = run(batch, new_request(1, [11, 12, 13, 14, 15], num_tokens=3), new_request(2, [21], block_ids=[[7]]))
    assert first.input_ids.tolist() == [11, 12, 13, 21]
    assert first.sampling.tolist() == [1]
    assert first.sample_tokens.tolist() == [3]
    second = run(batch, Continue(2, 1, []), Continue(1, 2, []))
    assert second.handles == [2, 1], "the order is that of the entries, not of the rows"
    assert second.input_ids.tolist() == [9, 14, 15]
    assert second.sampling.tolist() == [0, 1]


def test_a_whole_prompt_hit_computes_the_last_token_and_writes_nothing() -> None:
    inputs = run(new_batch(), new_request(1, [11, 12, 13, 14], num_computed=3, num_cached=4, num_tokens=1))
    assert inputs.slot_mapping[0].tolist() == [-1]
    assert (inputs.positions.tolist(), inputs.seq_lens.tolist(), inputs.sampling.tolist()) == ([3], [4], [0])


def test_every_group_has_its_own_table() -> None:
    batch = new_batch((None, None))
    inputs = run(batch, new_request(1, [11, 12, 13, 14, 15], block_ids=[[3, 5], [8, 2]]))
    assert [slots.tolist() for slots in inputs.slot_mapping] == [[12, 13, 14, 15, 20], [32, 33, 34, 35, 8]]
    run(batch, Continue(1, 1, []))
    run(batch, Continue(1, 1, []))
    inputs = run(batch, Continue(1, 1, []))
    inputs = run(batch, Continue(1, 1, [[6], [9]]))
    assert [table.tolist() for table in inputs.block_tables] == [[[3, 5, 6]], [[8, 2, 9]]]


def test_a_finished_row_is_filled_by_the_last() -> None:
    batch = new_batch()
    run(batch, *(new_request(i, [10 + i, 20 + i], block_ids=[[i]]) for i in (1, 2, 3)))
    inputs = run(batch, Finish(1), Continue(3, 1, []), Continue(2, 1, []))
    assert inputs.rows.tolist() == [0, 1]
    assert inputs.block_tables[0].tolist() == [[3], [2]]
    assert batch.tokens_of(3).tolist() == [13, 23, 9, 9]


def test_preempted_sequences_keep_their_tokens_and_parameters() -> None:
    batch = new_batch()
    hot = Sampling(0.7, 5, 0.9, 0.1, 2**63 + 5, sample=3, logprobs=2)
    run(batch, new_request(1, [11, 12], sampling=hot), new_request(2, [21]))
    run(batch, Preempt(1), Continue(2, 1, []))
    assert len(batch.rows) == 1
    inputs = run(batch, Resume(1, 0, 0, 3, [[8]]))
    assert inputs.input_ids.tolist() == [11, 12, 9]
    assert inputs.block_tables[0].tolist() == [[8]], "the old blocks are forgotten"
    params = batch.sample_inputs(inputs).params[0]
    assert params.tolist() == pytest.approx((0.7, 5, 0.9, 0.1, 2**63 + 5, 3, 2, False, 0))


def test_a_fork_is_the_first_part_of_its_parent() -> None:
    batch = new_batch((None, None))
    run(batch, new_request(1, [11, 12, 13, 14, 15], num_tokens=5, block_ids=[[3, 5, 7], [4, 6, 8]]))
    warm = Sampling(0.7, 5, 0.9, 0.1, 8, sample=4)
    inputs = run(batch, Continue(1, 1, []), Fork(1, 2, warm, 5, 4, 5), Fork(1, 3, GREEDY, 4, 3, 0), Continue(2, 1, []))
    assert inputs.input_ids.tolist() == [9, 15]
    assert inputs.slot_mapping[1].tolist() == [25, -1], "the child's last token is cached"
    assert inputs.block_tables[1].tolist() == [[4, 6, 8], [4, 6, 0]], "the blocks of its own tokens"
    assert batch.tokens_of(2).tolist() == [11, 12, 13, 14, 15, 9]
    inputs = run(batch, ReplaceBlock(2, 1, 1, 20), Continue(2, 1, []), Continue(3, 1, []))
    assert [slots.tolist() for slots in inputs.slot_mapping] == [[21, 15], [81, 19]]
    assert inputs.input_ids.tolist() == [9, 14]
    assert batch.rows.params["sample"].tolist() == [0, 4, 0, 0]
    run(batch, ReplaceBlock(1, 0, 0, 21), Continue(1, 1, []))
    assert batch.tables.ids[0][:2, 0].tolist() == [21, 3], "each has a table of its own"


def test_set_token_replaces_the_last_of_a_resident_and_of_a_preempted_sequence() -> None:
    batch = new_batch()
    run(batch, new_request(1, [11, 12]), new_request(2, [21]))
    run(batch, SetToken(1, 33), Preempt(2), SetToken(2, 44), Continue(1, 1, []))
    inputs = run(batch, Resume(2, 0, 0, 2, [[8]]))
    assert inputs.input_ids.tolist() == [21, 44]
    assert batch.tokens_of(1).tolist() == [11, 12, 33, 9]


def test_drafts_are_computed_behind_the_last_token_and_kept_while_right() -> None:
    batch = new_batch()
    ruled = Sampling(0.0, 0, 1.0, 0.0, 0, min_tokens_until=4, stop_ids=(5,))
    run(batch, new_request(1, [11, 12]), new_request(2, [21], sampling=ruled, block_ids=[[7, 8]]))
    batch.apply([Draft(1, 3, []), Draft(2, 2, [])])

    class Fixed(Drafter):
        def before(self, drafting: DraftBatch) -> list[Int32s]:
            assert (drafting.handles, drafting.max_drafts) == ([1, 2], [3, 2])
            assert [tokens.tolist() for tokens in drafting.tokens] == [[11, 12, 9], [21, 9]]
            return [ids(31, 32, 33), ids(41, 42)]

    part_of(batch, Drafts).drafter = Fixed()
    inputs = batch.build()
    part_of(batch, Drafts).drafter = None
    assert inputs.input_ids.tolist() == [9, 31, 32, 33, 9, 41, 42]
    assert inputs.positions.tolist() == [2, 3, 4, 5, 1, 2, 3]
    assert (inputs.seq_lens.tolist(), inputs.num_samples.tolist()) == ([6, 4], [4, 3])
    assert inputs.sample_tokens.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert drafts_of(inputs).tolist() == [31, 32, 33, NO_DRAFT, 41, 42, NO_DRAFT]
    samples = batch.sample_inputs(inputs)
    assert samples.positions.tolist() == [3, 4, 5, 6, 2, 3, 4]
    assert samples.edits is not None
    assert samples.edits.banned is not None
    assert [array.tolist() for array in samples.edits.banned] == [[4, 5], [5, 5]], "of the second, up to length 4"
    sampled = np.array([31, 32, 0, 1, 40, 42, 43])
    batch.commit(inputs, sampled, num_proved(sampled, drafts_of(inputs), inputs.sample_starts))
    batch.check_integrity()
    assert batch.tokens_of(1).tolist() == [11, 12, 9, 31, 32, 0]
    assert batch.tokens_of(2).tolist() == [21, 9, 40]
    inputs = run(batch, Continue(1, 1, []), Continue(2, 1, []))
    assert inputs.positions.tolist() == [5, 2], "wrong drafts are computed over"
    assert inputs.input_ids.tolist() == [0, 40]


def test_without_a_draft_a_draft_is_one_token() -> None:
    batch = new_batch()
    run(batch, new_request(1, [11]))
    inputs = run(batch, Draft(1, 3, []))
    assert (inputs.input_ids.tolist(), inputs.num_samples.tolist()) == ([9], [1])
    assert batch.tokens_of(1).tolist() == [11, 9, 9]
    assert run(batch, Continue(1, 1, [])).num_samples.tolist() == [1]


def test_blocks_left_behind_by_a_window_may_come_again() -> None:
    """The engine frees them without a word, so what is in the table before the window means nothing."""
    batch = new_batch((6,))
    run(batch, new_request(1, [11] * 9, block_ids=[[3, 5, 7]]))
    for _ in range(3):
        run(batch, Continue(1, 1, []))
    inputs = run(batch, Continue(1, 1, [[3]]))
    assert inputs.block_tables[0].tolist() == [[3, 5, 7, 3]]
    batch.tables.windows = (None,)
    with pytest.raises(RuntimeError, match="repeat"):
        batch.check_integrity()


def test_stop_ids_are_banned_until_the_minimal_length() -> None:
    batch = new_batch()
    ruled = Sampling(0.0, 0, 1.0, 0.0, 0, min_tokens_until=4, stop_ids=(5, 6, VOCAB + 1))
    banned = []
    for entry in (new_request(1, [11, 12], sampling=ruled), Preempt(1), Resume(1, 0, 0, 3, [[4]]), Continue(1, 1, [])):
        inputs = run(batch, entry, *([new_request(2, [7], block_ids=[[9]])] if isinstance(entry, NewRequest) else []))
        if len(inputs.sampling):
            edits = batch.sample_inputs(inputs).edits
            batch_banned = edits and edits.banned
            banned.append(batch_banned and tuple(array.tolist() for array in batch_banned))
    # Asked for after the commit, a sequence is one token longer: lengths 3, 4 and 5 here.
    assert banned == [([0, 0], [5, 6]), None, None]


def test_a_step_with_nothing_to_compute() -> None:
    batch = new_batch()
    run(batch, new_request(1, [11]))
    inputs = run(batch, Finish(1))
    assert (inputs.num_tokens, inputs.handles, inputs.query_start_loc.tolist()) == (0, [], [0])
    assert len(batch.rows) == 0


def test_a_full_context_still_has_room_for_the_token_sampled_behind_it() -> None:
    batch = new_batch()
    run(batch, new_request(1, list(range(MAX_LEN))))
    assert len(batch.tokens_of(1)) == MAX_LEN + 1


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Continue(5, 1, [])], "Continue of handle 5, which is unknown"),
        ([Finish(5)], "Finish of handle 5, which is unknown"),
        ([Preempt(5)], "Preempt of handle 5, which is unknown"),
        ([Resume(1, 0, 0, 1, [])], "Resume of handle 1, which is not preempted"),
        ([Preempt(1), Continue(1, 1, [])], "Continue of handle 1, which is preempted"),
        ([Fork(5, 6, GREEDY, 1, 0, 0)], "Fork of handle 5, which is unknown"),
        ([Fork(1, 1, GREEDY, 1, 0, 0)], "handle 1 is in use already"),
        ([Fork(1, 2, GREEDY, 4, 3, 0)], "Fork of handle 1 at 3 of 4 tokens, it has 3"),
        ([Fork(1, 2, GREEDY, 2, 2, 0)], "Fork of handle 1 at 2 of 2 tokens"),
        ([Draft(5, 1, [])], "Draft of handle 5, which is unknown"),
        ([Draft(1, 0, [])], "Draft of 0 tokens behind the 3 of handle 1"),
        ([Draft(1, 22, [])], "Draft of 22 tokens behind the 3 of handle 1"),
        ([Draft(1, 1, []), Continue(1, 1, [])], "handle 1 is scheduled twice"),
        ([ReplaceBlock(5, 0, 0, 9)], "ReplaceBlock of handle 5, which is unknown"),
        ([ReplaceBlock(1, 1, 0, 9)], "ReplaceBlock of entry 0 of group 1"),
        ([ReplaceBlock(1, 0, 6, 9)], r"ReplaceBlock of entry 6 of group 0 of handle 1, whose tables hold \[6\]"),
        ([ReplaceBlock(1, 0, 0, NUM_BLOCKS)], r"handle 1 got blocks \[64\]"),
        ([SetToken(5, 1)], "SetToken of handle 5, which is unknown"),
        ([SetToken(1, VOCAB)], "SetToken 50 of handle 1, the vocabulary 50"),
        ([new_request(1, [3])], "handle 1 is in use already"),
        ([Continue(1, 1, []), Continue(1, 1, [])], "handle 1 is scheduled twice"),
        ([Continue(1, 1, []), Finish(1)], "handle 1 is scheduled and removed"),
        ([Continue(1, 2, [])], "handle 1 cannot compute 2 tokens up to 4: it has 3 tokens"),
        ([Continue(1, 0, [])], "handle 1 cannot compute 0 tokens"),
        ([new_request(2, [3] * 5, block_ids=[[7]])], "handle 2 cannot compute 5 tokens up to 5: .* blocks for 4"),
        ([new_request(2, [3], block_ids=[[0]])], "handle 2 would write to the null block"),
        ([new_request(2, [3], block_ids=[[NUM_BLOCKS]])], r"handle 2 got blocks \[64\], the pool is \[0, 64\)"),
        ([new_request(2, [3], block_ids=[[-1]])], "handle 2 got blocks"),
        ([new_request(2, [3], block_ids=[[1], [2]])], "handle 2 got blocks for 2 KV groups of 1"),
        ([new_request(2, [3], block_ids=[[1] * 7])], "handle 2 got 7 blocks, at most 6"),
        ([new_request(2, [])], "handle 2 has 0 tokens, expected 1 to 24"),
        ([new_request(2, [3] * 25)], "handle 2 has 25 tokens, expected 1 to 24"),
        ([new_request(2, [VOCAB])], "handle 2 has token 50, the vocabulary 50"),
        ([new_request(2, [2**32 - 1])], "handle 2 has token 4294967295"),
        ([new_request(i, [3]) for i in range(2, 6)], "no row for handle 5: all 4"),
    ],
)
def test_entries_that_do_not_fit_are_refused_by_name(entries: list[Entry], message: str) -> None:
    batch = new_batch()
    run(batch, new_request(1, [11, 12]))
    with pytest.raises(ProtocolError, match=message):
        run(batch, *entries)


def test_a_draft_of_a_sequence_that_lacks_more_is_refused() -> None:
    batch = new_batch()
    run(batch, new_request(1, [11, 12, 13], num_tokens=1))
    with pytest.raises(ProtocolError, match="Draft of handle 1, which lacks more than its last token"):
        run(batch, Draft(1, 1, []))


def test_check_integrity_sees_a_wrong_map_a_wrong_count_and_a_shared_block() -> None:
    def damage_map(batch: InputBatch) -> None:
        batch.rows.resident.reverse()

    def damage_count(batch: InputBatch) -> None:
        batch.rows.num_computed[0] = 9

    def damage_table(batch: InputBatch) -> None:
        batch.tables.ids[0][0, 1] = batch.tables.ids[0][0, 0]

    for damage in (damage_map, damage_count, damage_table):
        batch = new_batch()
        run(batch, new_request(1, [11, 12]), new_request(2, [21]))
        damage(batch)
        with pytest.raises(RuntimeError):
            batch.check_integrity()
