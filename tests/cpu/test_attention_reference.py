"""The backends that a CPU has against attention written out row by row in float64."""

import math

import pytest
import torch

from tests.attention_steps import attention_shape, changed, step_batch
from vllm_lite.attention.backend import Heads
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.int8_rows import dequantized, quantized
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.select import BACKENDS, select_backend
from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu

NUM_KV_HEADS = 2
HEAD_SIZE = 8
NUM_LAYERS = 3
NO_BLOCK = 10**6
LAYER = 1
"""The cache handed over is this layer's strided view of a pool, as in the engine."""


needs_library = pytest.mark.skipif(not cpu.available(), reason="needs the native library")


@pytest.fixture(params=[ReferenceBackend, pytest.param(CpuBackend, marks=needs_library)])
def backend(request):
    return request.param


def attention_by_hand(query, keys, values, window=None, soft_cap=0.0, slopes=None, sinks=None):
    """query: [query_len, num_heads, head], keys and values: [seq_len, num_kv_heads, head]; row by row in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    query_len, num_heads, head_size = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    out = torch.zeros_like(query)
    for row in range(query_len):
        visible = seq_len - query_len + row + 1
        seen = slice(max(0, visible - (window or visible)), visible)
        if seen.start >= seen.stop:  # nothing, or a padding sequence
            continue
        distances = torch.arange(seen.start, seen.stop) - (visible - 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = keys[seen, kv_head] @ query[row, head] / math.sqrt(head_size)
            if soft_cap:
                scores = soft_cap * (scores / soft_cap).tanh()
            if slopes is not None:
                scores = scores + slopes[head] * distances
            top = scores.max()
            weights = (scores - top).exp()
            total = weights.sum() + (0 if sinks is None else (sinks[head].double() - top).exp())
            out[row, head] = weights / total @ values[seen, kv_head]
    return out


def make_sinks(num_heads):
    """Sinks take next to nothing of a softmax or nearly all of it, and neighbours differ."""
    return torch.tensor([(-3.0, 2.5, 0.0, 6.0, -20.0)[head % 5] + head / num_heads for head in range(num_heads)])


class Batch:
    """Sequences of (query_len, seq_len) with random Q, K and V, in a pool whose other slots contain `filler`."""

    def __init__(
        self,
        lengths,
        *,
        backend=ReferenceBackend,
        block_size=16,
        group=2,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        filler=math.nan,
        dtype=torch.float32,
        ids_seed=0,
        windows=(None,),
        **shape,
    ):
        data = torch.Generator().manual_seed(1)
        self.lengths = lengths
        self.block_size = block_size
        self.num_kv_heads, self.num_heads = num_kv_heads, num_kv_heads * group
        sizes = (self.num_heads, num_kv_heads, head_size)
        self.shape = attention_shape(sizes, block_size, dtype, windows, **shape)
        self.spec = self.shape.groups[0]
        self.backend = backend(self.shape)
        self.sinks = make_sinks(self.num_heads) if self.spec.sinks else None
        num_tokens = sum(query_len for query_len, _ in lengths)
        heads = (self.num_heads, num_kv_heads, num_kv_heads)
        fused = torch.randn(num_tokens, sum(heads), head_size, generator=data).to(dtype)
        self.query, self.key, self.value = fused.split(heads, dim=1)  # strided, as the fused projection leaves them
        self.keys = [torch.randn(t, num_kv_heads, head_size, generator=data).to(dtype) for _, t in lengths]
        self.values = [torch.randn(t, num_kv_heads, head_size, generator=data).to(dtype) for _, t in lengths]
        counts = [-(-t // block_size) for _, t in lengths]
        ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(ids_seed)) + 1
        self.blocks = [list(map(int, part)) for part in ids.split(counts)]
        pool = torch.full((sum(counts) + 1, NUM_LAYERS, 2, num_kv_heads, block_size, head_size), filler)
        self.pool = pool.to(self.shape.cache_dtype)
        if self.shape.cache_dtype == torch.int8:  # with a scale after each row
            self.pool = torch.full((*pool.shape[:-1], head_size + 4), 0x7F, dtype=torch.int8)
        self.kv = self.pool[:, LAYER]
        self.fill()

    def _slots(self, i, first=0):
        """Return the block of each position of sequence i from `first` on, and the offset in it."""
        positions = torch.arange(first, self.lengths[i][1])
        return torch.tensor(self.blocks[i], dtype=torch.long)[positions // self.block_size], positions % self.block_size

    def first_seen(self, i):
        """The first position that a row of sequence i sees; positions before it may be anything in the cache."""
        query_len, seq_len = self.lengths[i]
        return max(0, seq_len - query_len + 1 - (self.spec.window or seq_len))

    def fill(self):
        """Old tokens go to the cache by hand; the new ones are left for write_kv."""
        self.slots = []
        row = 0
        for i, (query_len, seq_len) in enumerate(self.lengths):
            if seq_len == 0:  # a padding sequence has rows and no tokens
                self.slots += [PAD_SLOT] * query_len
            else:
                blocks, offsets = self._slots(i, seq_len - query_len)
                self.slots += (blocks * self.block_size + offsets).tolist()
                self.keys[i][seq_len - query_len :] = self.key[row : row + query_len]
                self.values[i][seq_len - query_len :] = self.value[row : row + query_len]
                for which, x in enumerate((self.keys[i], self.values[i])):
                    self._fill_part(i, which, x)
            row += query_len

    def _fill_part(self, i, which, x):
        """Write K (0) or V (1) of sequence i, x: [seq_len, num_kv_heads, head_size], and set x to the values read from
        the cache."""
        first, (query_len, seq_len) = self.first_seen(i), self.lengths[i]
        x[:first] = math.nan  # and `filler` in the cache
        stored = self.stored(x[first:], which)
        x[first:] = self.loaded(stored, which)
        cache = self.kv[:, which].transpose(1, 2)  # [num_blocks, block_size, num_kv_heads, head_size]
        if cache.dtype.itemsize == 1:  # of eight bits, not all types can be indexed
            cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
        blocks, offsets = (part[: seq_len - query_len - first] for part in self._slots(i, first))
        cache[blocks, offsets] = stored[: seq_len - query_len - first]

    def stored(self, x, which):
        """K (0) or V (1) as the cache is to hold it."""
        dtype = self.shape.cache_dtype
        if dtype == torch.int8:
            return quantized(x)
        if dtype.itemsize > 1:
            return x.to(dtype)
        limit = torch.finfo(dtype).max
        return (x.float() / (self.shape.k_scale, self.shape.v_scale)[which]).clamp(-limit, limit).to(dtype)

    def loaded(self, x, which):
        if x.dtype == torch.int8:
            return dequantized(x)
        return x if x.dtype.itemsize > 1 else x.float() * (self.shape.k_scale, self.shape.v_scale)[which]

    def step(self, extra_rows=0):
        longest = max(map(len, self.blocks)) + 1  # each row has at least one entry after its blocks
        table = [blocks + [0] * (longest - len(blocks)) for blocks in self.blocks]
        for i, row in enumerate(table):  # blocks that left the window are not even looked up
            unseen = self.first_seen(i) // self.block_size
            row[:unseen] = [NO_BLOCK] * unseen
        slots = torch.tensor(self.slots + [PAD_SLOT] * extra_rows)
        batch = step_batch(self.lengths, [torch.tensor(table, dtype=torch.int32)], [slots])
        self.backend.prepare(batch)
        return batch

    def run(self):
        step = self.step()
        self.backend.write_kv(Heads(self.query, self.key, self.value), self.kv, step, 0)
        out = torch.full(self.query.shape, 7.0, dtype=self.query.dtype)
        self.backend.attend(self.query, self.kv, step, 0, out, self.sinks)
        return out

    def expected(self):
        rows = self.query.split([query_len for query_len, _ in self.lengths])
        scores = (self.spec.window, self.spec.soft_cap, self.spec.alibi_slopes, self.sinks)
        parts = [attention_by_hand(*qkv, *scores) for qkv in zip(rows, self.keys, self.values, strict=True)]
        return torch.cat(parts)


DECODE = [(1, t) for t in (1, 2, 15, 16, 17, 33)]
PREFILL = [(t, t) for t in (1, 15, 16, 17)]
CHUNKED = [(5, 17), (1, 16), (16, 33), (2, 3), (15, 31)]


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("block_size", [1, 4, 8, 16])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, CHUNKED], ids=["decode", "prefill", "mixed"])
def test_matches_attention_by_hand(backend, lengths, block_size, group):
    batch = Batch(lengths, block_size=block_size, group=group, backend=backend)
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [1, 7, 8, 33])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, CHUNKED], ids=["decode", "prefill", "mixed"])
def test_windows_match_attention_by_hand(backend, lengths, block_size, window):
    """Every cached position before the window is NaN; windows are not multiples of blocks; chunks are longer or not."""
    batch = Batch(lengths, block_size=block_size, windows=(window,), backend=backend)
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=2e-6)


def test_a_window_one_too_wide_would_show(backend):
    batch = Batch([(1, 17), (5, 33)], windows=(6,), filler=0.0, backend=backend)
    expected = batch.expected()
    batch.backend = backend(changed(batch.shape, windows=(7,)))
    assert not torch.allclose(batch.run().double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(backend, dtype, tolerance):
    batch = Batch(CHUNKED + DECODE, dtype=dtype, group=4, backend=backend)
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "scores",
    [
        {"soft_cap": 0.5},
        {"alibi_slopes": (0.5, 0.25, 0.125, 2.0)},
        {"soft_cap": 3.0, "alibi_slopes": (1.0, 0, 0, 0.1)},
        {"sinks": True},
        {"soft_cap": 0.5, "alibi_slopes": (0.5, 0.25, 0.125, 2.0), "sinks": True},
    ],
    ids=["soft-cap", "alibi", "both", "sinks", "all"],
)
def test_scores_that_are_more_than_products(backend, scores, window):
    batch = Batch(CHUNKED + DECODE, backend=backend, windows=(window,), **scores)
    plain = Batch(CHUNKED + DECODE, backend=backend, windows=(window,)).run()
    out = batch.run()
    assert torch.allclose(out.double(), batch.expected(), rtol=0, atol=2e-6)
    assert not torch.allclose(out, plain, rtol=0, atol=1e-3)


@pytest.mark.parametrize("sink", [-1e30, -200.0, 200.0, 1e30])
def test_a_sink_far_from_the_scores_takes_nothing_or_all(backend, sink):
    plain = Batch(CHUNKED + DECODE, backend=backend, dtype=torch.bfloat16).run()
    batch = Batch(CHUNKED + DECODE, backend=backend, dtype=torch.bfloat16, sinks=True)
    batch.sinks = torch.full((batch.num_heads,), sink)
    out = batch.run()
    assert torch.allclose(out, plain, rtol=0, atol=1e-2) if sink < 0 else (out == 0).all()


@pytest.mark.parametrize(
    "sinks", [torch.zeros(3), torch.zeros(4, 1), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.bfloat16)]
)
def test_sinks_that_are_no_number_a_head_are_refused(backend, sinks):
    batch = Batch([(1, 3)], backend=backend, sinks=True)
    batch.sinks = sinks
    with pytest.raises(ValueError, match=r"sinks must be float32 \[4\], contiguous, got torch"):
        batch.run()


@pytest.mark.parametrize(("has", "given"), [(True, "no sinks"), (False, "sinks")])
def test_sinks_are_given_exactly_where_the_model_has_some(backend, has, given):
    batch = Batch([(1, 3)], backend=backend, sinks=has)
    batch.sinks = None if has else torch.zeros(4)
    with pytest.raises(ValueError, match=f"was given {given} for layers whose spec says sinks={has}"):
        batch.run()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 8e-6), (torch.bfloat16, 6e-2)])
def test_float8_caches(backend, kv_dtype, dtype, tolerance):
    """K is stored times 4 and V times 64, where the largest of them no longer fit into e4m3."""
    scales = {"k_scale": 0.25, "v_scale": 2.0**-6}
    batch = Batch(CHUNKED + DECODE, backend=backend, dtype=dtype, kv_dtype=kv_dtype, **scales)
    batch.value *= 4
    batch.fill()
    assert torch.allclose(batch.run().double(), batch.expected(), rtol=0, atol=tolerance)
    for row, slot in enumerate(batch.slots):
        block, offset = divmod(slot, batch.block_size)
        assert torch.equal(batch.kv[block, 0, :, offset].float(), batch.stored(batch.key[row], 0).float())
        assert torch.equal(batch.kv[block, 1, :, offset].float(), batch.stored(batch.value[row], 1).float())


def test_block_ids_do_not_change_a_bit(backend):
    runs = [Batch(CHUNKED + DECODE, ids_seed=seed, backend=backend) for seed in range(3)]
    assert runs[0].blocks != runs[1].blocks
    first, *others = [batch.run() for batch in runs]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("filler", [0.0, 1e30, math.inf])
def test_contents_of_unused_slots_change_no_bit(backend, filler):
    assert torch.equal(
        Batch(CHUNKED + DECODE, filler=filler, backend=backend).run(),
        Batch(CHUNKED + DECODE, filler=math.nan, backend=backend).run(),
    )


def test_writing_touches_its_own_slots_and_no_other(backend):
    batch = Batch([(5, 17), (1, 16), (3, 3)], filler=0.0, backend=backend)
    before = batch.pool.clone()
    batch.backend.write_kv(Heads(batch.query, batch.key, batch.value), batch.kv, batch.step(), 0)
    for row, slot in enumerate(batch.slots):
        block, offset = divmod(slot, batch.block_size)
        before[block, LAYER, 0, :, offset] = batch.key[row]
        before[block, LAYER, 1, :, offset] = batch.value[row]
    assert torch.equal(batch.pool, before)


def test_tokens_without_a_slot_are_not_written_but_attend(backend):
    """A hit of the whole prompt: the last token is recomputed while its KV is already in the cache."""
    batch = Batch([(3, 9), (1, 5)], backend=backend)
    expected = batch.run()
    written = batch.pool.clone()
    batch.slots = [PAD_SLOT] * len(batch.slots)
    assert torch.equal(batch.run(), expected)
    assert torch.equal(batch.pool.nan_to_num(), written.nan_to_num())


def test_padding_rows_and_empty_sequences_give_zeros(backend):
    batch = Batch([(1, 0), (2, 7), (4, 0), (1, 3), (1, 0)], backend=backend)
    expected = batch.expected()
    empty = [0, 3, 4, 5, 6, 8]
    out = batch.run()
    assert torch.equal(out[empty], torch.zeros(len(empty), *out.shape[1:]))
    expected[empty] = 0
    assert torch.allclose(out.double(), expected, rtol=0, atol=2e-6)


def test_rows_after_the_last_sequence_give_zeros(backend):
    batch = Batch([(2, 7), (1, 3)], backend=backend)
    step = batch.step(extra_rows=2)
    query = torch.cat((batch.query, torch.full((2, *batch.query.shape[1:]), math.nan)))
    key, value = torch.full((2, 5, NUM_KV_HEADS, HEAD_SIZE), math.nan)
    key[:3], value[:3] = batch.key, batch.value
    batch.backend.write_kv(Heads(query, key, value), batch.kv, step, 0)
    out = torch.full(query.shape, 7.0)
    batch.backend.attend(query, batch.kv, step, 0, out)
    assert torch.allclose(out[:3].double(), batch.expected(), rtol=0, atol=2e-6)
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))


def test_groups_have_their_own_tables_and_slots(backend):
    first, second = Batch(CHUNKED, ids_seed=1, backend=backend), Batch(CHUNKED, ids_seed=2, backend=backend)
    step, other = first.step(), second.step()
    step.block_tables += other.block_tables
    step.slot_mapping += other.slot_mapping
    first.backend = backend(changed(first.shape, windows=(5, None)))
    first.backend.prepare(step)
    out = torch.empty_like(first.query)
    first.backend.write_kv(Heads(second.query, second.key, second.value), second.kv, step, 1)
    first.backend.attend(second.query, second.kv, step, 1, out)
    assert torch.equal(out, Batch(CHUNKED, backend=backend).run())


def test_select(caplog):
    shape = Batch([(1, 1)]).shape
    assert isinstance(select_backend(shape), CpuBackend if cpu.available() else ReferenceBackend)
    assert isinstance(select_backend(shape, "reference"), ReferenceBackend)
    with pytest.raises(ConfigError, match=f"'flash' is unknown; use auto, {', '.join(BACKENDS)}"):
        select_backend(shape, "flash")
    assert not caplog.records or not cpu.available()
    wide = changed(shape, head_size=584)
    assert isinstance(select_backend(wide), ReferenceBackend)
    assert "by the slower backend reference: cpu: head size 584 is not a multiple of 8 up to 576" in caplog.text
    odd = attention_shape((5, 2, 8), 16, torch.float32)
    with pytest.raises(ConfigError, match="5 heads cannot share 2 KV heads"):
        select_backend(odd)
