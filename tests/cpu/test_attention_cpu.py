"""The native attention kernels against attention in float64, for every instruction set that this machine has."""

import dataclasses
import mmap

import pytest
import torch
from msgspec.structs import replace

from tests.attention_steps import changed, step_batch
from tests.cpu.test_attention_reference import CHUNKED, DECODE, Batch
from tests.isas import OF_THIS_MACHINE, PRODUCTS, on_each
from vllm_lite.attention.backend import Heads
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.select import select_backend
from vllm_lite.checkpoint.families.bloom import alibi_slopes
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.attention import THREAD_BYTES
from vllm_lite.kernels.cpu.library import num_threads, set_num_threads

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
RAGGED = [(1, t) for t in (1, 15, 16, 17, 100, 513)]
MIXED = [(1, 513), (5, 17), (1, 0), (40, 40), (3, 200), (150, 230), (2, 3), (1, 1100)]
"""Decodes, a draft to be verified, chunks with and without prefix, of one tile of rows and of several; one is empty."""


@pytest.fixture
def threads():
    used = num_threads()
    yield set_num_threads
    set_num_threads(used)


def exact(batch):
    """Compute the expected output of `batch` in float64: [num_tokens, num_heads, head_size]."""
    spec = batch.spec
    outs = []
    rows = batch.query.double().split([query_len for query_len, _ in batch.lengths])
    for query, key, value in zip(rows, batch.keys, batch.values, strict=True):
        query_len, seq_len = len(query), len(key)
        if seq_len == 0:
            outs.append(torch.zeros_like(query))
            continue
        group = spec.num_heads // spec.num_kv_heads
        k, v = (x.double().nan_to_num().repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, k) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
        distance = torch.arange(seq_len) - torch.arange(seq_len - query_len, seq_len)[:, None]
        if spec.alibi_slopes is not None:
            scores += torch.tensor(spec.alibi_slopes).double()[:, None, None] * distance
        unseen = (distance > 0) | (distance <= -(spec.window or seq_len))
        scores = scores.masked_fill(unseen, -torch.inf)
        sinks = torch.full((spec.num_heads,), -torch.inf) if batch.sinks is None else batch.sinks
        with_sinks = torch.cat((scores, sinks.double()[:, None, None].expand(-1, query_len, 1)), -1)
        weights = with_sinks.softmax(-1)[..., :-1]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


def assert_exact(lengths, isas=PRODUCTS, tolerance=None, sharpness=1, **options):
    """Check attention on each instruction set against the exact result. By default there are two query heads per KV
    head, and in bfloat16 also four, which AMX supports."""
    if "group" not in options and options.get("dtype") == torch.bfloat16:
        assert_exact(lengths, isas, tolerance, sharpness, group=4, num_kv_heads=1, **options)
    batch = Batch(lengths, backend=CpuBackend, **options)
    batch.query *= sharpness
    expected, pool = exact(batch), batch.pool.clone()
    tolerance = tolerance or TOLERANCE[batch.shape.dtype]
    for isa in on_each(isas):
        batch.pool.copy_(pool)  # so that each writes the new tokens
        batch.backend = CpuBackend(batch.shape)
        difference = (batch.run().double() - expected).abs().max()
        assert difference <= tolerance, (isa, lengths, options)


def isas_for(dtype):
    """Tiles are of bfloat16: AMX does all else as AVX512-BF16 does."""
    return PRODUCTS if dtype == torch.bfloat16 else OF_THIS_MACHINE


@pytest.mark.parametrize("head_size", [8, 16, 24, 64, 80, 96, 112, 120, 128, 192, 256, 264, 512])
def test_head_sizes(head_size):
    for dtype in FLOATS:
        assert_exact([*RAGGED, (5, 40), (40, 70)], isas_for(dtype), head_size=head_size, dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64, 128])
def test_block_sizes(block_size):
    for dtype in FLOATS:
        assert_exact(MIXED, isas_for(dtype), block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 24, 100])
def test_heads_that_share_a_kv_head(group):
    for dtype in FLOATS:
        lengths = [(1, 1), (1, 17), (1, 513), (3, 40), (9, 70)]
        assert_exact(lengths, isas_for(dtype), group=group, head_size=16, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_dtype", [*FLOATS, *FLOAT8])
def test_types_of_the_cache(dtype, kv_dtype):
    scales = {"k_scale": 0.03, "v_scale": 0.11} if kv_dtype in FLOAT8 else {}
    for head_size in (24, 512):
        assert_exact([*RAGGED, (40, 70)], dtype=dtype, kv_dtype=kv_dtype, head_size=head_size, **scales)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100, 600])
def test_windows(window):
    """All before a sequence's window is NaN, and its table names blocks that do not exist."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_exact(MIXED, isas_for(dtype), windows=(window,), dtype=dtype)


@pytest.mark.parametrize("slopes", [None, (0.5, 0.25, 0.01, 1.0)])
@pytest.mark.parametrize("soft_cap", [0.0, 0.2, 30.0])
def test_soft_cap_and_alibi(soft_cap, slopes):
    for dtype in (torch.float32, torch.bfloat16):
        assert_exact(MIXED, isas_for(dtype), soft_cap=soft_cap, alibi_slopes=slopes, dtype=dtype, windows=(300,))


@pytest.mark.parametrize("options", [{}, {"windows": (300,), "soft_cap": 2.0}, {"kv_dtype": FLOAT8[0], "v_scale": 0.1}])
def test_sinks(options):
    for dtype in (torch.float32, torch.bfloat16):
        assert_exact(MIXED, isas_for(dtype), sinks=True, dtype=dtype, **options)


FAMILIES = {
    "gpt2": (64, 1, 3),
    "qwen2": (64, 7, 2),
    "qwen2-14b": (128, 5, 1),
    "llama": (128, 4, 1),
    "opt": (80, 1, 5),
    "phi3": (96, 1, 3),
    "phi3-small": (96, 3, 2),
    "command": (128, 8, 1),
    "glm4": (128, 16, 1),
    "gemma": (256, 2, 1),
    "gemma-1b": (256, 4, 1),
    "gemma-4": (512, 8, 2),
    "falcon": (64, 71, 1),
}
"""Head size, query heads that share a KV head, KV heads: shapes that checkpoints have."""


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_of_families(family):
    """With Gemma's soft cap, and with ALiBi for heads that are not a power of two."""
    head_size, group, num_kv_heads = FAMILIES[family]
    shape = {"head_size": head_size, "group": group, "num_kv_heads": num_kv_heads}
    slopes = alibi_slopes(group * num_kv_heads)
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({"soft_cap": 50.0, "windows": (33,)}, {"alibi_slopes": slopes}, {"sinks": True}):
            assert_exact([(1, 1), (1, 70), (3, 40), (50, 60)], isas_for(dtype), dtype=dtype, **shape, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_is_the_same_alone_and_in_any_batch_on_any_number_of_threads(each_product_isa, threads, dtype):
    lengths = [(1, 700), (1, 20), (4, 1300), (1, 513), (60, 60), (1, 1100)]
    options = {"dtype": dtype, "group": 4, "head_size": 64, "backend": CpuBackend}
    threads(1)
    batch = Batch(lengths, **options)
    out = batch.run()
    for count in (2, 4):
        threads(count)
        assert torch.equal(Batch(lengths, **options).run(), out)
    first = 0
    for i, (query_len, _) in enumerate(lengths):
        alone = one_of(batch, i, first, query_len)
        assert torch.equal(alone, out[first : first + query_len])
        first += query_len


def one_of(batch, i, first, query_len):
    """Attend with sequence i of `batch` alone, whose KV is already written."""
    seq_len = batch.lengths[i][1]
    table = torch.tensor([batch.blocks[i]], dtype=torch.int32)
    step = step_batch([(query_len, seq_len)], [table], [torch.full((query_len,), -1)])
    batch.backend.prepare(step)
    query = batch.query[first : first + query_len]
    out = torch.empty(query.shape, dtype=query.dtype)
    batch.backend.attend(query, batch.kv, step, 0, out)
    return out


def test_long_sequences_are_accurate():
    """Thousands of keys in 16 splits, in float32: as close to float64 as one rounding each allows."""
    assert_exact([(1, 9001), (20, 5000)], OF_THIS_MACHINE, dtype=torch.float32, head_size=64)


def test_large_scores_do_not_overflow():
    for dtype in (torch.float32, torch.bfloat16):
        assert_exact(RAGGED, isas_for(dtype), tolerance=2e-2, sharpness=2.0**40, dtype=dtype, head_size=64)


def test_sums_are_brought_to_new_largest_scores():
    """Scores differ by dozens, so that many rows find a far larger score after their first 64 keys."""
    for dtype in (torch.float32, torch.bfloat16):
        lengths = [(1, 513), (40, 200), (2, 1100)]
        assert_exact(lengths, isas_for(dtype), tolerance=2e-2, sharpness=16, dtype=dtype, head_size=64)


def test_blocks_beyond_2_to_the_31_elements(each_product_isa):
    """A pool of 6 GiB that is hardly touched: the numbers of elements and bytes before a block exceed 32 bits."""
    block, num_blocks = 2 * 2 * 16 * 8, (3 << 30) // (2 * 2 * 16 * 8)
    no_reserve = 0x4000  # Linux's MAP_NORESERVE, which older Pythons do not name
    memory = mmap.mmap(-1, num_blocks * block * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    pool = torch.frombuffer(memory, dtype=torch.bfloat16).view(num_blocks, 2, 2, 16, 8)
    batch = Batch([(1, 17), (3, 30)], backend=CpuBackend, dtype=torch.bfloat16)
    moved = {b: num_blocks - 1 - b for blocks in batch.blocks for b in blocks}
    for here, there in moved.items():
        pool[there] = batch.kv[here]
    batch.blocks = [[moved[b] for b in blocks] for blocks in batch.blocks]
    batch.slots = [moved[slot // 16] * 16 + slot % 16 for slot in batch.slots]
    batch.kv = pool
    assert min(batch.slots) // 16 * block > 2**31
    assert torch.allclose(batch.run().double(), exact(batch), rtol=0, atol=2e-2)


def test_a_wrong_key_would_show():
    """The tests above can fail: one old key changed changes the result by more than their tolerances."""
    batch = Batch(RAGGED, backend=CpuBackend)
    batch.kv[batch.blocks[4][2], 0, 1, 3] += 1
    assert (batch.run().double() - exact(batch)).abs().max() > 1e-3


def test_plans_grow_with_the_batch():
    """More sequences than the first buffer has room for, then few again."""
    for count in (3, 400, 3):
        assert_exact([(1, 1 + i % 5) for i in range(count)])


def test_two_windows_in_one_model():
    """Each group has its own plan; their scratch memory is shared."""
    full, windowed = (Batch(CHUNKED + DECODE, backend=CpuBackend, windows=(w,)) for w in (None, 9))
    step = full.step()
    step.block_tables += windowed.step().block_tables
    step.slot_mapping += (step.slot_mapping[0],)
    full.backend = CpuBackend(changed(full.shape, windows=(None, 9)))
    full.backend.prepare(step)
    for group, batch in enumerate((full, windowed)):
        out = torch.empty_like(batch.query)
        full.backend.write_kv(Heads(batch.query, batch.key, batch.value), batch.kv, step, group)
        full.backend.attend(batch.query, batch.kv, step, group, out)
        assert torch.allclose(out.double(), exact(batch), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 12}, "head size 12 is not a multiple of 8"),
        ({"head_size": 584}, "head size 584 is not a multiple of 8 up to 576"),
        ({"dtype": torch.float64}, "no kernels for torch.float64"),
        ({"kv_dtype": torch.int16}, "with a cache in torch.int16"),
        ({"num_heads": 5}, "5 heads cannot share 2 KV heads"),
        ({"alibi_slopes": (1.0,)}, "1 ALiBi slopes for 4 heads"),
        ({"device": torch.device("cuda")}, "runs on a CPU, not on cuda"),
    ],
)
def test_unsupported_shapes_are_refused(change, reason):
    shape = changed(Batch([(1, 1)]).shape, **change)
    with pytest.raises(ConfigError, match=reason):
        select_backend(shape, "cpu")


def test_the_workspace_covers_the_scratch_of_splits():
    batch = Batch([(1, 5000), (8, 5000), (1, 9000)], backend=CpuBackend, group=4)
    batch.step()
    taken = sum(part.nbytes for part in batch.backend.kernels[0].scratch)
    assert 0 < taken <= batch.backend.workspace_bytes(max_num_tokens=10, max_num_seqs=3, max_seq_len=9000)
    short = CpuBackend(batch.shape).workspace_bytes(1000, 100, 512)
    assert short == num_threads() * THREAD_BYTES, "nothing is split"


def test_groups_of_other_heads_have_scratch_memory_of_their_own():
    """The scratch memory of a step's kernels is announced, and kept by its plan, for groups of both kinds."""
    batch = Batch([(1, 5000), (8, 5000), (1, 9000)], backend=CpuBackend, group=4)
    narrow = batch.shape.groups[0]
    wide = replace(narrow, num_heads=6, num_kv_heads=3, head_size=512)
    backend = CpuBackend(dataclasses.replace(batch.shape, groups=(narrow, wide, replace(narrow, window=4000))))
    assert backend.kernels[0] is backend.kernels[2] is not backend.kernels[1]
    step = batch.step()
    step.block_tables, step.slot_mapping = step.block_tables * 3, step.slot_mapping * 3
    backend.prepare(step)
    taken = [part for kernel in backend.kernels[:2] for part in kernel.scratch]
    assert all(len(part) and any(kept is part for kept in step.plan.scratch) for part in taken)
    announced = backend.workspace_bytes(max_num_tokens=10, max_num_seqs=3, max_seq_len=9000)
    results = sum(kernel.scratch[0].nbytes for kernel in backend.kernels[:2])
    assert 2 * results <= announced - num_threads() * THREAD_BYTES, "twice: what grows is there beside what it replaces"
    with pytest.raises(ValueError, match=r"kv has \[2, 2, 16, 8\] .* made for \[2, 3, 16, 512\]"):
        backend.attend(batch.query, batch.kv, step, 1, torch.empty_like(batch.query))


def test_a_cache_with_strided_rows_is_refused():
    batch = Batch([(1, 3)], backend=CpuBackend)
    wrong = torch.zeros(4, 2, 2, 8, 16).transpose(3, 4)
    assert wrong.shape[1:] == batch.kv.shape[1:]
    with pytest.raises(ValueError, match="the last one dense"):
        batch.backend.attend(batch.query, wrong, batch.step(), 0, torch.empty_like(batch.query))
