"""A row of attention has the same bits however it is computed, because its position alone decides the order of its
sums."""

import pytest
import torch

from tests.attention_steps import step_batch
from tests.cpu.test_attention_reference import Batch
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

LENGTH = 1300
"""Three sections of keys, of 512 at least."""
PIECES = [
    [(0, 1)],
    [(700, 701), (1299, 1300)],
    [(63, 64), (64, 65), (511, 512), (512, 513), (1023, 1024), (1024, 1025)],
    [(1, 5), (509, 514), (1295, 1300)],  # drafts
    [(0, 17), (17, 50), (50, 51), (51, 300), (480, 640), (1000, 1300)],  # chunks
]


def attend(batch, pieces):
    """Attend with the rows of each range of positions, all in one step, of one sequence whose KV is already written."""
    table = torch.tensor([batch.blocks[0]] * len(pieces), dtype=torch.int32)
    lengths = [(end - begin, end) for begin, end in pieces]
    num_tokens = sum(query_len for query_len, _ in lengths)
    step = step_batch(lengths, [table], [torch.full((num_tokens,), -1)])
    batch.backend.prepare(step)
    query = torch.cat([batch.query[begin:end] for begin, end in pieces])
    out = torch.empty_like(query)
    batch.backend.attend(query, batch.kv, step, 0, out, batch.sinks)
    return out


def assert_same(batch, whole, pieces):
    expected = torch.cat([whole[begin:end] for begin, end in pieces])
    assert torch.equal(attend(batch, pieces), expected), pieces


def assert_one_order(**options):
    """The tokens of a prompt alone, in twos and threes, as drafts and in chunks, against all of it at once."""
    if "group" not in options and options.get("dtype") == torch.bfloat16:
        assert_one_order(group=4, **options)  # which AMX takes
    batch = Batch([(LENGTH, LENGTH)], backend=CpuBackend, num_kv_heads=1, **options)
    whole = batch.run()
    for pieces in PIECES:
        assert_same(batch, whole, pieces)
        for piece in pieces:
            assert_same(batch, whole, [piece])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_a_row_is_the_same_in_any_piece_of_its_prompt(each_isa, dtype, group):
    assert_one_order(dtype=dtype, group=group, head_size=64)


@pytest.mark.parametrize("head_size", [8, 24, 80, 128, 264])
def test_blocks_of_any_size_have_the_same_order(each_isa, head_size):
    for dtype in (torch.float32, torch.bfloat16):
        assert_one_order(dtype=dtype, head_size=head_size)


@pytest.mark.parametrize("window", [5, 64, 300, 600])
def test_with_a_window(each_isa, window):
    for dtype in (torch.float32, torch.bfloat16):
        assert_one_order(dtype=dtype, windows=(window,), head_size=32)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float16])
def test_with_a_cache_of_another_type(each_isa, kv_dtype):
    assert_one_order(dtype=torch.bfloat16, kv_dtype=kv_dtype, head_size=64)


def test_with_soft_cap_and_alibi(each_product_isa):
    for dtype in (torch.float32, torch.bfloat16):
        assert_one_order(dtype=dtype, soft_cap=20.0, alibi_slopes=(0.5, 0.25, 0.01, 1.0), group=4, head_size=32)


@pytest.mark.parametrize("options", [{"group": 4, "head_size": 64}, {"windows": (600,), "soft_cap": 2.0}])
def test_with_sinks(each_isa, options):
    """Sinks are added once per row: after the only section, after the last one, or where splits are merged."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_one_order(dtype=dtype, sinks=True, **options)


@pytest.mark.parametrize("window", [None, 9000])
def test_long_contexts_have_larger_sections(each_isa, window):
    """From position 7,680 on the size of sections grows every 960 positions, so rows of one piece have sections of
    different sizes."""
    length = 10_000
    batch = Batch([(500, length)], backend=CpuBackend, dtype=torch.bfloat16, head_size=16, windows=(window,), group=4)
    batch.run()
    batch.query = torch.randn(length, batch.num_heads, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    # With a window the cache has only the tokens that rows from 9,500 on see.
    for begin, end in [(9595, 9605), (9550, 9750), *([] if window else [(7600, 7800), (8630, 8650)])]:
        whole = attend(batch, [(begin, end)])
        alone = [(position, position + 1) for position in range(begin, end)]
        assert torch.equal(attend(batch, alone), whole)
        drafts = [(position, position + 4) for position in range(begin, end - 3, 4)]
        assert torch.equal(attend(batch, drafts), whole[: 4 * len(drafts)])
