"""The reference backend against attention written out token by token in float64."""

import math
from dataclasses import replace

import pytest
import torch

from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.metadata import PAD_SLOT, AttentionMetadata
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.select import BACKENDS, select_backend
from vllm_lite.errors import ConfigError

NUM_KV_HEADS = 2
HEAD_SIZE = 8
NUM_LAYERS = 3
NO_BLOCK = 10**6
LAYER = 1
"""The cache handed over is this layer's strided view of a pool, as in the engine."""


def attention_by_hand(query, keys, values, window=None):
    """query: [query_len, num_heads, head], keys and values: [seq_len, num_kv_heads, head]; scalar loops in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    query_len, num_heads, head_size = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    out = torch.zeros_like(query)
    for row in range(query_len):
        visible = seq_len - query_len + row + 1
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            seen = range(max(0, visible - (window or visible)), visible)
            scores = [float(query[row, head] @ keys[t, kv_head]) / math.sqrt(head_size) for t in seen]
            weights = [math.exp(score - max(scores)) for score in scores]
            for t, weight in zip(seen, weights, strict=True):
                out[row, head] += weight / sum(weights) * values[t, kv_head]
    return out


class Batch:
    """Sequences of (query_len, seq_len) with random Q, K and V, in a pool whose other slots hold `filler`."""

    def __init__(
        self, lengths, *, block_size=16, group=2, filler=math.nan, dtype=torch.float32, ids_seed=0, windows=(None,)
    ):
        data = torch.Generator().manual_seed(1)
        self.lengths = lengths
        self.block_size = block_size
        cpu = torch.device("cpu")
        self.shape = AttentionShape(NUM_KV_HEADS * group, NUM_KV_HEADS, HEAD_SIZE, block_size, dtype, cpu, windows)
        self.backend = ReferenceBackend(self.shape)
        num_tokens = sum(query_len for query_len, _ in lengths)
        heads = (self.shape.num_heads, NUM_KV_HEADS, NUM_KV_HEADS)
        fused = torch.randn(num_tokens, sum(heads), HEAD_SIZE, generator=data).to(dtype)
        self.query, self.key, self.value = fused.split(heads, dim=1)  # strided, as the fused projection leaves them
        self.keys = [torch.randn(t, NUM_KV_HEADS, HEAD_SIZE, generator=data).to(dtype) for _, t in lengths]
        self.values = [torch.randn(t, NUM_KV_HEADS, HEAD_SIZE, generator=data).to(dtype) for _, t in lengths]
        counts = [-(-t // block_size) for _, t in lengths]
        ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(ids_seed)) + 1
        self.blocks = [list(map(int, part)) for part in ids.split(counts)]
        pool = torch.full((sum(counts) + 1, NUM_LAYERS, 2, NUM_KV_HEADS, block_size, HEAD_SIZE), filler, dtype=dtype)
        self.pool = pool
        self.kv = pool[:, LAYER]
        self.slots = []
        self._fill()

    def _slot(self, i, position):
        return self.blocks[i][position // self.block_size] * self.block_size + position % self.block_size

    def first_seen(self, i):
        """The first position that a row of sequence i sees; positions before it may be anything in the cache."""
        query_len, seq_len = self.lengths[i]
        return max(0, seq_len - query_len + 1 - (self.shape.windows[0] or seq_len))

    def _fill(self):
        """Old tokens go to the cache by hand; the new ones are left for write_kv."""
        row = 0
        for i, (query_len, seq_len) in enumerate(self.lengths):
            for position in range(seq_len):
                slot = self._slot(i, position)
                if position < self.first_seen(i):
                    self.keys[i][position] = self.values[i][position] = math.nan  # and `filler` in the cache
                elif position < seq_len - query_len:
                    block, offset = divmod(slot, self.block_size)
                    self.kv[block, 0, :, offset] = self.keys[i][position]
                    self.kv[block, 1, :, offset] = self.values[i][position]
                else:
                    self.keys[i][position] = self.key[row]
                    self.values[i][position] = self.value[row]
                    self.slots.append(slot)
                    row += 1
            if seq_len == 0:  # a padding sequence has rows and no tokens
                self.slots += [PAD_SLOT] * query_len
                row += query_len

    def metadata(self, extra_rows=0):
        starts = torch.tensor([0] + [query_len for query_len, _ in self.lengths]).cumsum(0)
        longest = max(map(len, self.blocks)) + 1  # at least one entry of each row lies past its blocks
        table = [blocks + [0] * (longest - len(blocks)) for blocks in self.blocks]
        for i, row in enumerate(table):  # what a window has left behind is not even looked up
            unseen = self.first_seen(i) // self.block_size
            row[:unseen] = [NO_BLOCK] * unseen
        metadata = AttentionMetadata(
            num_tokens=int(starts[-1]) + extra_rows,
            num_seqs=len(self.lengths),
            max_query_len=max(query_len for query_len, _ in self.lengths),
            max_seq_len=max(seq_len for _, seq_len in self.lengths),
            query_start_loc=starts.to(torch.int32),
            seq_lens=torch.tensor([seq_len for _, seq_len in self.lengths], dtype=torch.int32),
            block_tables=(torch.tensor(table, dtype=torch.int32),),
            slot_mapping=(torch.tensor(self.slots + [PAD_SLOT] * extra_rows),),
        )
        self.backend.prepare(metadata)
        return metadata

    def run(self):
        metadata = self.metadata()
        self.backend.write_kv(Heads(self.query, self.key, self.value), self.kv, metadata, 0)
        out = torch.full(self.query.shape, 7.0, dtype=self.query.dtype)
        self.backend.attend(self.query, self.kv, metadata, 0, out)
        return out

    def expected(self):
        rows = self.query.split([query_len for query_len, _ in self.lengths])
        window = self.shape.windows[0]
        parts = [attention_by_hand(*qkv, window) for qkv in zip(rows, self.keys, self.values, strict=True)]
        return torch.cat(parts)


DECODE = [(1, t) for t in (1, 2, 15, 16, 17, 33)]
PREFILL = [(t, t) for t in (1, 15, 16, 17)]
CHUNKED = [(5, 17), (1, 16), (16, 33), (2, 3), (15, 31)]


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("block_size", [1, 4, 8, 16])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, CHUNKED], ids=["decode", "prefill", "mixed"])
def test_matches_attention_by_hand(lengths, block_size, group):
    batch = Batch(lengths, block_size=block_size, group=group)
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [1, 7, 8, 33])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, CHUNKED], ids=["decode", "prefill", "mixed"])
def test_windows_match_attention_by_hand(lengths, block_size, window):
    """Every cached position before the window is NaN; windows are no multiples of blocks; chunks are longer or not."""
    batch = Batch(lengths, block_size=block_size, windows=(window,))
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=2e-6)


def test_a_window_one_too_wide_would_show():
    batch = Batch([(1, 17), (5, 33)], windows=(6,), filler=0.0)
    expected = batch.expected()
    batch.backend.shape = replace(batch.shape, windows=(7,))
    assert not torch.allclose(batch.run().double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype, tolerance):
    batch = Batch(CHUNKED + DECODE, dtype=dtype, group=4)
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=tolerance)


def test_where_the_blocks_lie_changes_no_bit():
    runs = [Batch(CHUNKED + DECODE, ids_seed=seed) for seed in range(3)]
    assert runs[0].blocks != runs[1].blocks
    first, *others = [batch.run() for batch in runs]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("filler", [0.0, 1e30, math.inf])
def test_what_unused_slots_hold_changes_no_bit(filler):
    assert torch.equal(Batch(CHUNKED + DECODE, filler=filler).run(), Batch(CHUNKED + DECODE, filler=math.nan).run())


def test_writing_touches_its_own_slots_and_no_other():
    batch = Batch([(5, 17), (1, 16), (3, 3)], filler=0.0)
    before = batch.pool.clone()
    batch.backend.write_kv(Heads(batch.query, batch.key, batch.value), batch.kv, batch.metadata(), 0)
    for row, slot in enumerate(batch.slots):
        block, offset = divmod(slot, batch.block_size)
        before[block, LAYER, 0, :, offset] = batch.key[row]
        before[block, LAYER, 1, :, offset] = batch.value[row]
    assert torch.equal(batch.pool, before)


def test_tokens_without_a_slot_are_not_written_but_attend():
    """A hit of the whole prompt: the last token is recomputed while its KV is already in the cache."""
    batch = Batch([(3, 9), (1, 5)])
    expected = batch.run()
    written = batch.pool.clone()
    batch.slots = [PAD_SLOT] * len(batch.slots)
    assert torch.equal(batch.run(), expected)
    assert torch.equal(batch.pool.nan_to_num(), written.nan_to_num())


def test_padding_rows_and_empty_sequences_give_zeros():
    batch = Batch([(1, 0), (2, 7), (4, 0), (1, 3), (1, 0)])
    expected = batch.expected()
    empty = [0, 3, 4, 5, 6, 8]
    out = batch.run()
    assert torch.equal(out[empty], torch.zeros(len(empty), *out.shape[1:]))
    expected[empty] = 0
    assert torch.allclose(out.double(), expected, rtol=0, atol=2e-6)


def test_rows_after_the_last_sequence_give_zeros():
    batch = Batch([(2, 7), (1, 3)])
    metadata = batch.metadata(extra_rows=2)
    query = torch.cat((batch.query, torch.full((2, *batch.query.shape[1:]), math.nan)))
    key, value = torch.full((2, 5, NUM_KV_HEADS, HEAD_SIZE), math.nan)
    key[:3], value[:3] = batch.key, batch.value
    batch.backend.write_kv(Heads(query, key, value), batch.kv, metadata, 0)
    out = torch.full(query.shape, 7.0)
    batch.backend.attend(query, batch.kv, metadata, 0, out)
    assert torch.allclose(out[:3].double(), batch.expected(), rtol=0, atol=2e-6)
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))


def test_groups_have_their_own_tables_and_slots():
    first, second = Batch(CHUNKED, ids_seed=1), Batch(CHUNKED, ids_seed=2)
    metadata, other = first.metadata(), second.metadata()
    metadata.block_tables += other.block_tables
    metadata.slot_mapping += other.slot_mapping
    first.backend.shape = replace(first.shape, windows=(5, None))
    first.backend.prepare(metadata)
    out = torch.empty_like(first.query)
    first.backend.write_kv(Heads(second.query, second.key, second.value), second.kv, metadata, 1)
    first.backend.attend(second.query, second.kv, metadata, 1, out)
    assert torch.equal(out, Batch(CHUNKED).run())


def test_select():
    shape = Batch([(1, 1)]).shape
    assert isinstance(select_backend(shape), ReferenceBackend)
    assert isinstance(select_backend(shape, "reference"), ReferenceBackend)
    with pytest.raises(ConfigError, match=f"'flash' is unknown; use auto, {', '.join(BACKENDS)}"):
        select_backend(shape, "flash")
    odd = AttentionShape(5, 2, 8, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="5 heads cannot share 2 KV heads"):
        select_backend(odd)
