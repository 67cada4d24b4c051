"""InputBatch against a naive model that keeps a Python list per sequence: random streams of entries, exact arrays."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.batches import make_batch, part_of
from tests.examples import examples
from tests.parity_mask import ParityMask
from tests.plain_rules import changed
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import Sampling, SamplingParams
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
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.sampling.drafter import DraftBatch, Drafter, Int32s, num_proved
from vllm_lite.worker.sampling.masks import NEVER
from vllm_lite.worker.sampling.sampler import SampleInputs
from vllm_lite.worker.step_parts.drafts import Drafts, drafts_of

MAX_SEQS, MAX_LEN, VOCAB, BLOCK = 4, 24, 50, 4
STOPS = (1, 2)


@dataclass
class Naive:
    """One sequence as plain lists."""

    tokens: list[int]
    params: SamplingParams
    num_prompt: int
    sampling: Sampling
    blocks: list[list[int]] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    parked: bool = False
    drafts: list[int] = field(default_factory=list)

    @property
    def penalised(self) -> bool:
        rules = self.params.logit_rules()
        return rules is not None and rules.penalises

    def masked(self, length: int) -> NDArray[np.bool_]:
        """Tokens that its mask, if it has one, rules out at `length`: odd tokens after an odd one."""
        if not has_mask(self.sampling):
            return np.zeros(VOCAB, np.bool_)
        output = (self.tokens + self.drafts)[self.num_prompt : length]
        confirmed = len(self.tokens) - self.num_prompt
        broken = [at for at, pair in enumerate(pairwise(output)) if pair[0] % 2 and pair[1] % 2]
        if broken:  # by a token of the sequence: it has failed; by a draft: the sample does not count
            return np.full(VOCAB, broken[0] + 1 < confirmed)
        return np.arange(VOCAB) % 2 == 1 if output and output[-1] % 2 else np.zeros(VOCAB, np.bool_)

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

    def params(self) -> SamplingParams:
        """Some rules, or none."""
        tokens = st.integers(0, 5) if self.draw(0, 1) else st.integers(0, VOCAB - 1)  # few, so that they come again
        words = st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3)
        values = st.sampled_from([-0.75, 0.5, 2.0])
        fields: dict[str, Any] = {
            "presence_penalty": values,
            "frequency_penalty": values,
            "repetition_penalty": st.sampled_from([0.5, 1.3]),
            "logit_bias": st.dictionaries(tokens, values, max_size=4),
            "allowed_token_ids": st.lists(tokens, min_size=1, max_size=6),
            "bad_words_token_ids": words,
            "min_tokens": st.integers(1, 6),
        }
        chosen = self.data.draw(st.sets(st.sampled_from(sorted(fields)), max_size=3))
        return SamplingParams(**{name: self.data.draw(fields[name]) for name in sorted(chosen)})

    def naive(self, tokens: list[int], num_prompt: int) -> Naive:
        params = self.params()
        sampling = Sampling(
            temperature=0.5 * self.draw(0, 2),
            top_k=self.draw(-1, 3),
            top_p=0.5,
            min_p=0.25,
            seed=self.draw(0, 2**64 - 1),
            min_tokens_until=num_prompt + params.min_tokens if params.min_tokens else 0,
            stop_ids=STOPS,
            rules=params.logit_rules(),
        )
        return Naive(tokens, params, num_prompt, sampling)

    def step(self) -> tuple[list[Entry], list[tuple[int, int]]]:
        """A step's entries and its scheduled (handle, number of tokens, drafts not counted)."""
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
            self.fork(handle, sequence, entries)
        elif fate == 3 and not sequence.parked:
            group, ((fresh,), *_) = self.draw(0, self.num_groups - 1), self.blocks(1)
            index = self.draw(0, len(sequence.blocks[group]) - 1)
            entries.append(ReplaceBlock(handle, group, index, fresh))
            sequence.blocks[group][index] = fresh
        elif fate == 4 and sequence.computed < len(sequence.tokens) and not sequence.penalised:  # beams never are
            sequence.tokens[-1] = self.draw(0, VOCAB - 1)
            entries.append(SetToken(handle, sequence.tokens[-1]))

    def fork(self, handle: int, sequence: Naive, entries: list[Entry]) -> None:
        num_tokens = self.draw(1, len(sequence.tokens))
        computed = self.draw(0, min(num_tokens - 1, sequence.computed))
        cached = self.draw(0, num_tokens)
        child = self.naive(sequence.tokens[:num_tokens], min(num_tokens, sequence.num_prompt))
        child.blocks = [part[: -(-num_tokens // BLOCK)] for part in sequence.blocks]
        child.computed, child.cached = computed, cached
        child_handle = self.new_handle()
        entries.append(Fork(handle, child_handle, child.sampling, num_tokens, computed, cached))
        self.sequences[child_handle] = child

    def new_handle(self) -> int:
        self.next_handle += 1
        return self.next_handle

    def go_on(self, handle: int, sequence: Naive, entries: list[Entry]) -> int:
        count = self.draw(1, len(sequence.tokens) - sequence.computed)
        max_drafts = min(4, MAX_LEN - len(sequence.tokens)) if len(sequence.tokens) == sequence.computed + 1 else 0
        max_drafts = self.draw(0, max(0, max_drafts))
        missing = sequence.needs(sequence.computed + count + max_drafts)
        new_ids = self.blocks(missing) if missing > 0 else []
        for ids, more in zip(sequence.blocks, new_ids, strict=False):
            ids.extend(more)
        entries.append(Draft(handle, max_drafts, new_ids) if max_drafts else Continue(handle, count, new_ids))
        if not sequence.penalised:  # the worker does not draft
            sequence.drafts = [self.draw(0, VOCAB - 1) for _ in range(self.draw(0, max_drafts))]
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
        sequence = self.naive([self.draw(0, VOCAB - 1) for _ in range(length)], self.draw(1, length))
        self.sequences[handle] = sequence
        count = self.place(sequence)
        blocks = [list(ids) for ids in sequence.blocks]
        entries.append(
            NewRequest(
                handle,
                pack_tokens(sequence.tokens),
                sequence.num_prompt,
                sequence.sampling,
                sequence.computed,
                sequence.cached,
                count,
                blocks,
            )
        )
        return handle, count


def expect(stream: Stream, scheduled: list[tuple[int, int]], inputs: StepInputs, batch: InputBatch) -> None:
    """Compare a step's arrays with the naive model's, token by token."""
    ids: list[int] = []
    positions: list[int] = []
    starts, caught_up = [0], []
    slots: list[list[int]] = [[] for _ in range(stream.num_groups)]
    samples: list[tuple[int, Naive, int]] = []  # place among the tokens, sequence, length before it
    for i, (handle, count) in enumerate(scheduled):
        sequence = stream.sequences[handle]
        tokens = sequence.tokens + sequence.drafts
        for position in range(sequence.computed, sequence.computed + count + len(sequence.drafts)):
            if position >= len(sequence.tokens) - 1:
                samples.append((len(ids), sequence, position + 1))
            ids.append(tokens[position])
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
    ends = [s.computed + count + len(s.drafts) for s, (_, count) in zip(sequences, scheduled, strict=True)]
    assert inputs.seq_lens.tolist() == ends
    for group, table in enumerate(inputs.block_tables):
        assert [row[: len(s.blocks[group])].tolist() for row, s in zip(table, sequences, strict=True)] == [
            s.blocks[group] for s in sequences
        ]
    assert inputs.sampling.tolist() == caught_up
    assert inputs.sample_tokens.tolist() == [at for at, _, _ in samples]
    expect_samples([(sequence, length) for _, sequence, length in samples], batch.sample_inputs(inputs))


def expect_samples(samples: list[tuple[Naive, int]], got: SampleInputs) -> None:
    """Compare the sampler's inputs. `samples`: sequence, and its length before the token."""
    assert got.params["seed"].tolist() == [sequence.sampling.seed for sequence, _ in samples]
    assert got.params["sample"].tolist() == [sequence.sampling.sample for sequence, _ in samples]
    assert got.params["top_k"].tolist() == [max(sequence.sampling.top_k, 0) for sequence, _ in samples]
    assert got.positions.tolist() == [length for _, length in samples]
    logits = torch.randn(len(samples), VOCAB, generator=torch.Generator().manual_seed(len(samples)))
    expected = logits.numpy().copy()
    for row, (sequence, length) in zip(expected, samples, strict=True):
        tokens = (sequence.tokens + sequence.drafts)[:length]
        prompt, output = tokens[: sequence.num_prompt], tokens[sequence.num_prompt :]
        row[:] = changed(row, sequence.params, prompt, output, STOPS)
        row[sequence.masked(length)] = NEVER
    if got.edits is not None:
        got.edits.apply(logits)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-6, atol=1e-6)


def sample(stream: Stream, sequence: Naive) -> list[int]:
    """Tokens for a sequence that is caught up, many of them as drafted; it grows by those that count."""
    sampled = [stream.draw(0, VOCAB - 1) for _ in range(len(sequence.drafts) + 1)]
    sampled = [stream.data.draw(st.sampled_from(pair)) for pair in zip(sampled, [*sequence.drafts, 0], strict=True)]
    for token, draft in zip(sampled, [*sequence.drafts, None], strict=True):
        sequence.tokens.append(token)
        if token != draft:
            break
        sequence.computed += 1
    sequence.drafts = []
    return sampled


def has_mask(sampling: Sampling) -> bool:
    return sampling.is_ruled and sampling.seed % 2 == 0


def new_batch(num_groups: int) -> InputBatch:
    return make_batch(
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        block_size=BLOCK,
        num_blocks=10_000,
        windows=[None] * num_groups,
        mask_source_of=lambda sampling: ParityMask(VOCAB) if has_mask(sampling) else None,
    )


class OfStream(Drafter):
    """A drafter that proposes the stream's random drafts."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def before(self, batch: DraftBatch) -> list[Int32s]:
        sequences = [self.stream.sequences[handle] for handle in batch.handles]
        assert not any(sequence.penalised for sequence in sequences)
        return [np.array(sequence.drafts, np.int32) for sequence in sequences]


@settings(max_examples=examples(200), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data(), num_groups=st.integers(1, 2))
def test_any_stream_of_entries_gives_the_arrays_of_the_naive_model(data: st.DataObject, num_groups: int) -> None:
    stream, batch = Stream(data, num_groups), new_batch(num_groups)
    part_of(batch, Drafts).drafter = OfStream(stream)
    for _ in range(data.draw(st.integers(1, 10))):
        entries, scheduled = stream.step()
        batch.apply(entries)
        inputs = batch.build()
        expect(stream, scheduled, inputs, batch)
        for handle, count in scheduled:
            stream.sequences[handle].computed += count
        sampled: list[int] = []
        for i in inputs.sampling:
            sampled += sample(stream, stream.sequences[inputs.handles[i]])
        tokens = np.array(sampled, np.int64)
        batch.commit(inputs, tokens, num_proved(tokens, drafts_of(inputs), inputs.sample_starts))
        batch.check_integrity()
        for handle, sequence in stream.sequences.items():
            assert batch.tokens_of(handle).tolist() == sequence.tokens
        assert len(batch.rows) == sum(not sequence.parked for sequence in stream.sequences.values())
