"""Blocks of a common prefix are read once for all sequences, which have the same bits as alone."""

import random

import pytest
import torch

from tests.attention_steps import changed, step_batch
from tests.cpu.conftest import using_isa
from tests.cpu.test_attention_reference import Batch
from tests.isas import EMULATED, OF_THIS_MACHINE, on_each
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library
from vllm_lite.kernels.cpu.attention import ITEM_INTS, PLAN_INTS

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

BLOCK = 16
DECODES = [(1, n) for n in (1100, 1040, 1700, 1650, 1625, 513, 900, 700, 1090, 20)]
MIXED = [(19, 1100), (1, 1060), (5, 1700), (12, 1650), (300, 1625), (1, 600), (2, 900), (3, 700), (40, 1090), (1, 700)]
MIXED += [(0, 0), (3, 0)]
LEVELS = [(1, 0, 1024), (2, 0, 1024), (3, 2, 1600), (4, 2, 1616), (8, 0, 512), (7, 6, 528), (9, 6, 16)]
"""(sequence, another one, tokens that they begin with alike)."""
QUESTIONS = [(19 - i % 3, 1060 + i % 3) for i in range(9)]


@pytest.fixture(params=[1, 2])
def threads(request):
    """With one thread there are enough items where all sections of a question are one, with two there are not."""
    used = library.num_threads()
    library.set_num_threads(request.param)
    yield
    library.set_num_threads(used)


def attend(batch, lengths, table, shares):
    """Returns the step's output, the number of tokens that share items, and the number of items that resume a shared
    section."""
    backend = CpuBackend(changed(batch.shape, shares_prefixes=shares))
    step = step_batch(lengths, [table], [torch.full((len(batch.query),), -1)])
    backend.prepare(step)
    out = torch.full(batch.query.shape, 7.0, dtype=batch.query.dtype)
    for _ in range(2):  # counters are zeros again
        backend.attend(batch.query, batch.kv, step, 0, out, batch.sinks)
    num_items, num_tokens, *_ = plan = step.plan.of_kernels[0]
    items = plan[PLAN_INTS:][: num_items * ITEM_INTS].reshape(-1, ITEM_INTS)
    return out, num_tokens, items[:, -1].sum()


def assert_same(lengths, alike, *, isas=OF_THIS_MACHINE, num_shared=None, num_resumed=None, **options):
    batch = Batch(lengths, backend=CpuBackend, block_size=BLOCK, **options)
    batch.run()
    table = torch.zeros(len(lengths), max(map(len, batch.blocks)), dtype=torch.int32)
    for row, blocks in zip(table, batch.blocks, strict=True):
        row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    for one, other, num_tokens in alike:
        table[one, : num_tokens // BLOCK] = table[other, : num_tokens // BLOCK]
    for isa in on_each(isas):
        want, none, _ = attend(batch, lengths, table, False)
        got, shared, resumed = attend(batch, lengths, table, True)
        assert not none
        assert num_shared is None or shared == num_shared, (isa, shared)
        assert num_resumed is None or resumed == num_resumed, (isa, resumed)
        assert torch.equal(got, want), (isa, lengths, alike, options)


def all_like_the_first(lengths, num_tokens):
    return [(i, 0, num_tokens) for i in range(1, len(lengths))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_sequences_that_part_in_several_places(threads, dtype, group):
    assert_same(DECODES, LEVELS, dtype=dtype, group=group, head_size=32, num_kv_heads=1, num_shared=8)
    assert_same(MIXED, LEVELS, dtype=dtype, group=group, head_size=32)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize(
    "lengths", [[(1, n) for n in (1300, 1290, 1400, 1282)], QUESTIONS], ids=["decodes", "questions"]
)
def test_a_section_that_all_begin_alike_is_resumed(threads, lengths, kv_dtype):
    """From the last step of the softmax on that is not common to all."""
    lengths = [(query_len, seq_len + 222) if query_len > 1 else (1, seq_len) for query_len, seq_len in lengths]
    alike = [*all_like_the_first(lengths, 1264), (2, 1, 1280)]
    for dtype in (torch.float32, torch.bfloat16):
        options = {"dtype": dtype, "kv_dtype": kv_dtype, "head_size": 40}
        assert_same(lengths, alike, group=2, num_resumed=len(lengths), **options)


def test_by_tiles_in_plain_code():
    for isa in using_isa(EMULATED):
        assert_same(DECODES, LEVELS, isas=[isa], dtype=torch.bfloat16, num_kv_heads=1, group=2, head_size=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_caches_of_a_byte(dtype, kv_dtype):
    for lengths in (DECODES, MIXED):
        assert_same(lengths, LEVELS, dtype=dtype, kv_dtype=kv_dtype, group=2, head_size=64)


@pytest.mark.parametrize(
    "options",
    [
        {"group": 2},
        {"group": 8, "num_kv_heads": 1, "kv_dtype": torch.int8},
        {"group": 16, "num_kv_heads": 1, "head_size": 128},
        {"group": 5, "soft_cap": 2.0, "sinks": True},
        {"group": 4, "num_kv_heads": 1, "alibi_slopes": (0.5, 0.25, 0.01, 1.0)},
    ],
    ids=["two heads", "int8", "many rows", "sinks", "alibi"],
)
def test_questions_about_one_text(options):
    """Their sections are one item; with 16 heads there are more rows than one has."""
    num_tokens = sum(query_len for query_len, _ in QUESTIONS)
    many = options["group"] * 19 > 252
    for dtype in (torch.float32, torch.bfloat16):
        shared = 0 if many else num_tokens
        alike = all_like_the_first(QUESTIONS, 1040)
        assert_same(QUESTIONS, alike, dtype=dtype, num_shared=shared, **{"head_size": 16, **options})


def test_a_window_shares_nothing():
    assert_same(DECODES, LEVELS, windows=(2000,), head_size=16, num_shared=0)


def test_sections_of_other_sizes_are_not_the_same():
    """From position 7,680 on the size of sections grows every 960 positions."""
    lengths = [(1, 7600), (1, 7700), (2, 7710), (1, 8650), (3, 7660), (30, 7700)]
    alike = all_like_the_first(lengths, 7552)
    assert_same(lengths, alike, dtype=torch.bfloat16, num_kv_heads=1, group=2, head_size=16, num_shared=7)


def test_a_plan_has_room_for_whatever_is_alike():
    draw = random.Random(5)
    for _ in range(40):
        lengths = []
        for _ in range(draw.randrange(2, 9)):
            query_len = draw.choice((1, 1, 2, 7, 33))
            lengths.append((query_len, draw.randrange(query_len, 2700)))
        alike = []
        for one in range(1, len(lengths)):
            other = draw.randrange(one)
            before = min(length - query_len for query_len, length in (lengths[one], lengths[other]))
            alike.append((one, other, draw.randrange(before + 1)))
        group = draw.choice((1, 2, 7))
        assert_same(lengths, alike, isas=[cpu.isa()], dtype=torch.bfloat16, group=group, head_size=8)
