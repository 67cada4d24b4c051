"""InputBatch against a naive model that keeps a Python list per sequence: random streams of entries, exact arrays."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.step import Continue, Entry, Finish, Fork, NewRequest, Preempt, Resume, Sampling
from vllm_lite.worker.input_batch import InputBatch, StepInputs

MAX_SEQS, MAX_LEN, VOCAB, BLOCK, NUM_BLOCKS = 4, 24, 50, 4, 64
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


def new_batch(num_groups: int = 1, **overrides: int) -> InputBatch:
    sizes = {
        "max_num_seqs": MAX_SEQS,
        "max_model_len": MAX_LEN,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "num_blocks": NUM_BLOCKS,
    }
    return InputBatch(num_groups=num_groups, **(sizes | overrides))


def new_request(handle: int, tokens: list[int], *, sampling: Sampling = GREEDY, **fields: Any) -> NewRequest:
    values: dict[str, Any] = {
        "num_computed": 0,
        "num_cached": 0,
        "num_tokens": len(tokens),
        "block_ids": [[1, 2, 3, 4, 5, 6]],
    } | fields
    return NewRequest(handle, pack_tokens(tokens), len(tokens), sampling, **values)


def run(batch: InputBatch, *entries: Entry, sampled: int = 9) -> StepInputs:
    """One step in which every sequence that is caught up samples the token `sampled`."""
    batch.apply(entries)
    inputs = batch.build()
    batch.commit(inputs, np.full(len(inputs.sampling), sampled))
    batch.check_integrity()
    return inputs


# ---- one thing at a time


def test_whole_prompt_then_decode() -> None:
    batch = new_batch()
    inputs = run(batch, new_request(7, [11, 12, 13, 14, 15], block_ids=[[3, 5]]))
    assert inputs.input_ids.tolist() == [11, 12, 13, 14, 15]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4]
    assert inputs.slot_mapping[0].tolist() == [12, 13, 14, 15, 20]
    assert inputs.block_tables[0].tolist() == [[3, 5]]
    assert (inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()) == ([0, 5], [5])
    assert inputs.last_tokens.tolist() == [4]

    inputs = run(batch, Continue(7, 1, []))
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([9], [5])
    assert inputs.slot_mapping[0].tolist() == [21]
    assert batch.tokens_of(7).tolist() == [11, 12, 13, 14, 15, 9, 9]


def test_a_chunk_samples_only_when_it_reaches_the_end() -> None:
    batch = new_batch()
    first = run(batch, new_request(1, [11, 12, 13, 14, 15], num_tokens=3), new_request(2, [21], block_ids=[[7]]))
    assert first.input_ids.tolist() == [11, 12, 13, 21]
    assert first.sampling.tolist() == [1]
    assert first.last_tokens.tolist() == [3]
    second = run(batch, Continue(2, 1, []), Continue(1, 2, []))
    assert second.handles == [2, 1], "the order is that of the entries, not of the rows"
    assert second.input_ids.tolist() == [9, 14, 15]
    assert second.sampling.tolist() == [0, 1]


def test_a_whole_prompt_hit_computes_the_last_token_and_writes_nothing() -> None:
    inputs = run(new_batch(), new_request(1, [11, 12, 13, 14], num_computed=3, num_cached=4, num_tokens=1))
    assert inputs.slot_mapping[0].tolist() == [-1]
    assert (inputs.positions.tolist(), inputs.seq_lens.tolist(), inputs.sampling.tolist()) == ([3], [4], [0])


def test_every_group_has_its_own_table() -> None:
    batch = new_batch(num_groups=2)
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
    hot = Sampling(0.7, 5, 0.9, 0.1, 2**63 + 5, child=3, logprobs=2)
    run(batch, new_request(1, [11, 12], sampling=hot), new_request(2, [21]))
    run(batch, Preempt(1), Continue(2, 1, []))
    assert (batch.num_rows, batch.num_parked) == (1, 1)
    inputs = run(batch, Resume(1, 0, 0, 3, [[8]]))
    assert inputs.input_ids.tolist() == [11, 12, 9]
    assert inputs.block_tables[0].tolist() == [[8]], "the old blocks are forgotten"
    params = batch.sample_inputs(inputs).params[0]
    assert params.tolist() == pytest.approx((0.7, 5, 0.9, 0.1, 2**63 + 5, 3, 2, 0))


def test_fork_copies_the_parent_under_its_own_index() -> None:
    batch = new_batch()
    run(batch, new_request(1, [11, 12, 13], num_tokens=2))
    inputs = run(
        batch, Fork(1, 2, 4, []), Fork(1, 3, 5, [[9]]), Continue(1, 1, []), Continue(2, 1, []), Continue(3, 1, [])
    )
    assert inputs.input_ids.tolist() == [13, 13, 13]
    assert inputs.slot_mapping[0].tolist() == [6, 6, 38]
    assert batch.sample_inputs(inputs).params["child"].tolist() == [0, 4, 5]


def test_stop_ids_are_banned_until_the_minimal_length() -> None:
    batch = new_batch()
    ruled = Sampling(0.0, 0, 1.0, 0.0, 0, min_tokens_until=4, stop_ids=(5, 6, VOCAB + 1))
    banned = []
    for entry in (new_request(1, [11, 12], sampling=ruled), Preempt(1), Resume(1, 0, 0, 3, [[4]]), Continue(1, 1, [])):
        inputs = run(batch, entry, *([new_request(2, [7], block_ids=[[9]])] if isinstance(entry, NewRequest) else []))
        if len(inputs.sampling):
            batch_banned = batch.sample_inputs(inputs).banned
            banned.append(batch_banned and tuple(array.tolist() for array in batch_banned))
    # Asked for after the commit, a sequence is one token longer: lengths 3, 4 and 5 here.
    assert banned == [([0, 0], [5, 6]), None, None]


def test_a_step_with_nothing_to_compute() -> None:
    batch = new_batch()
    run(batch, new_request(1, [11]))
    inputs = run(batch, Finish(1))
    assert (inputs.num_tokens, inputs.handles, inputs.query_start_loc.tolist()) == (0, [], [0])
    assert batch.num_rows == 0


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
        ([Fork(5, 6, 0, [])], "Fork of handle 5, which is unknown"),
        ([Fork(1, 1, 0, [])], "handle 1 is in use already"),
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
def test_what_does_not_fit_is_refused_by_name(entries: list[Entry], message: str) -> None:
    batch = new_batch()
    run(batch, new_request(1, [11, 12]))
    with pytest.raises(ProtocolError, match=message):
        run(batch, *entries)


def test_check_integrity_sees_a_wrong_map_a_wrong_count_and_a_shared_block() -> None:
    def damage_map(batch: InputBatch) -> None:
        batch._rows[1], batch._rows[2] = batch._rows[2], batch._rows[1]

    def damage_count(batch: InputBatch) -> None:
        batch.num_computed[0] = 9

    def damage_table(batch: InputBatch) -> None:
        batch.block_tables[0][0, 1] = batch.block_tables[0][0, 0]

    for damage in (damage_map, damage_count, damage_table):
        batch = new_batch()
        run(batch, new_request(1, [11, 12]), new_request(2, [21]))
        damage(batch)
        with pytest.raises(RuntimeError):
            batch.check_integrity()


# ---- anything at all, against the naive model


@dataclass
class Naive:
    """One sequence as plain lists."""

    tokens: list[int]
    sampling: Sampling
    blocks: list[list[int]] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    parked: bool = False

    def needs(self, end: int) -> int:
        return -(-end // BLOCK) - len(self.blocks[0])


@dataclass
class Stream:
    """Draws legal steps and plays them on the naive model."""

    data: st.DataObject
    num_groups: int
    sequences: dict[int, Naive] = field(default_factory=dict)
    next_handle: int = 0
    next_block: int = 1

    def draw(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def blocks(self, count: int) -> list[list[int]]:
        """Fresh ids, `count` for each group."""
        first = self.next_block
        self.next_block += count * self.num_groups
        return [list(range(first + group * count, first + (group + 1) * count)) for group in range(self.num_groups)]

    def sampling(self) -> Sampling:
        until = self.draw(0, 8)
        return Sampling(
            0.5 * self.draw(0, 2), self.draw(-1, 3), 0.5, 0.25, self.draw(0, 2**64 - 1), 0, None, until, (1, 2)
        )

    def step(self) -> tuple[list[Entry], list[tuple[int, int]]]:
        """A step's entries and its scheduled (handle, number of tokens)."""
        entries: list[Entry] = []
        scheduled: list[tuple[int, int]] = []
        for handle in list(self.sequences):
            self.leave_or_not(handle, entries)
        for handle, sequence in list(self.sequences.items()):
            if not sequence.parked and sequence.computed < len(sequence.tokens) and self.draw(0, 3):
                scheduled.append((handle, self.go_on(handle, sequence, entries)))
        for handle, sequence in list(self.sequences.items()):
            if sequence.parked and self.has_room() and self.draw(0, 1):
                scheduled.append((handle, self.resume(handle, sequence, entries)))
        while self.has_room() and self.draw(0, 1):
            scheduled.append(self.arrive(entries))
        return entries, scheduled

    def has_room(self) -> bool:
        return sum(not sequence.parked for sequence in self.sequences.values()) < MAX_SEQS

    def leave_or_not(self, handle: int, entries: list[Entry]) -> None:
        sequence = self.sequences[handle]
        fate = self.draw(0, 9)
        if fate == 0 or len(sequence.tokens) > MAX_LEN:
            entries.append(Finish(handle))
            del self.sequences[handle]
        elif fate == 1 and not sequence.parked:
            entries.append(Preempt(handle))
            sequence.parked, sequence.blocks = True, []
        elif fate == 2 and not sequence.parked and self.has_room():
            own = self.blocks(len(sequence.blocks[0])) if self.draw(0, 1) else []
            child = self.new_handle()
            entries.append(Fork(handle, child, 7, own))
            blocks = [list(ids) for ids in own or sequence.blocks]
            sampling = msgspec.structs.replace(sequence.sampling, child=7)
            self.sequences[child] = replace(sequence, tokens=list(sequence.tokens), blocks=blocks, sampling=sampling)

    def new_handle(self) -> int:
        self.next_handle += 1
        return self.next_handle

    def go_on(self, handle: int, sequence: Naive, entries: list[Entry]) -> int:
        count = self.draw(1, len(sequence.tokens) - sequence.computed)
        missing = sequence.needs(sequence.computed + count)
        new_ids = self.blocks(missing) if missing > 0 else []
        for ids, more in zip(sequence.blocks, new_ids, strict=False):
            ids.extend(more)
        entries.append(Continue(handle, count, new_ids))
        return count

    def place(self, sequence: Naive) -> int:
        """Draw where a sequence starts: some tokens found in the cache, perhaps all of them."""
        length = len(sequence.tokens)
        sequence.cached = self.draw(0, length // BLOCK) * BLOCK
        sequence.computed = min(sequence.cached, length - 1)
        count = self.draw(1, length - sequence.computed)
        sequence.blocks = self.blocks(-(-(sequence.computed + count) // BLOCK))
        sequence.parked = False
        return count

    def resume(self, handle: int, sequence: Naive, entries: list[Entry]) -> int:
        count = self.place(sequence)
        entries.append(Resume(handle, sequence.computed, sequence.cached, count, [list(b) for b in sequence.blocks]))
        return count

    def arrive(self, entries: list[Entry]) -> tuple[int, int]:
        handle = self.new_handle()
        length = self.draw(1, 12)
        sequence = Naive([self.draw(0, VOCAB - 1) for _ in range(length)], self.sampling())
        self.sequences[handle] = sequence
        count = self.place(sequence)
        blocks = [list(ids) for ids in sequence.blocks]
        entries.append(
            NewRequest(
                handle,
                pack_tokens(sequence.tokens),
                length,
                sequence.sampling,
                sequence.computed,
                sequence.cached,
                count,
                blocks,
            )
        )
        return handle, count


def expect(stream: Stream, scheduled: list[tuple[int, int]], inputs: StepInputs, batch: InputBatch) -> None:
    """Compare a step's arrays with what the naive model says, token by token."""
    ids: list[int] = []
    positions: list[int] = []
    starts, caught_up = [0], []
    slots: list[list[int]] = [[] for _ in range(stream.num_groups)]
    for i, (handle, count) in enumerate(scheduled):
        sequence = stream.sequences[handle]
        for position in range(sequence.computed, sequence.computed + count):
            ids.append(sequence.tokens[position])
            positions.append(position)
            for group, blocks in enumerate(sequence.blocks):
                slot = blocks[position // BLOCK] * BLOCK + position % BLOCK
                slots[group].append(slot if position >= sequence.cached else -1)
        starts.append(len(ids))
        if sequence.computed + count == len(sequence.tokens):
            caught_up.append(i)
    sequences = [stream.sequences[handle] for handle, _ in scheduled]
    assert inputs.handles == [handle for handle, _ in scheduled]
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert [array.tolist() for array in inputs.slot_mapping] == slots
    assert inputs.query_start_loc.tolist() == starts
    assert inputs.seq_lens.tolist() == [s.computed + count for s, (_, count) in zip(sequences, scheduled, strict=True)]
    for group, table in enumerate(inputs.block_tables):
        assert [row[: len(s.blocks[group])].tolist() for row, s in zip(table, sequences, strict=True)] == [
            s.blocks[group] for s in sequences
        ]
    assert inputs.sampling.tolist() == caught_up
    samples = batch.sample_inputs(inputs)
    sampling = [sequences[i].sampling for i in caught_up]
    assert samples.params["seed"].tolist() == [s.seed for s in sampling]
    assert samples.params["child"].tolist() == [s.child for s in sampling]
    assert samples.params["top_k"].tolist() == [max(s.top_k, 0) for s in sampling]
    assert samples.positions.tolist() == [len(sequences[i].tokens) for i in caught_up]
    banned = [
        (sample, stop)
        for sample, i in enumerate(caught_up)
        if len(sequences[i].tokens) < sequences[i].sampling.min_tokens_until
        for stop in sequences[i].sampling.stop_ids
    ]
    got = [] if samples.banned is None else list(zip(*(array.tolist() for array in samples.banned), strict=True))
    assert got == banned


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_groups=st.integers(1, 2))
def test_any_stream_of_entries_gives_the_arrays_of_the_naive_model(data: st.DataObject, num_groups: int) -> None:
    stream, batch = Stream(data, num_groups), new_batch(num_groups, num_blocks=10_000)
    for _ in range(data.draw(st.integers(1, 10))):
        entries, scheduled = stream.step()
        batch.apply(entries)
        inputs = batch.build()
        expect(stream, scheduled, inputs, batch)
        sampled = [stream.draw(0, VOCAB - 1) for _ in inputs.sampling]
        for i, token in zip(inputs.sampling, sampled, strict=True):
            stream.sequences[inputs.handles[i]].tokens.append(token)
        for handle, count in scheduled:
            stream.sequences[handle].computed += count
        batch.commit(inputs, np.array(sampled, np.int64))
        batch.check_integrity()
        for handle, sequence in stream.sequences.items():
            assert batch.tokens_of(handle).tolist() == sequence.tokens
        assert batch.num_rows + batch.num_parked == len(stream.sequences)
