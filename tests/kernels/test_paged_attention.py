"""paged_attention_v1 and v2 through the emulator, and the errors of their Python side."""

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels import kv_layouts
from tests.kernels import paged_attention_cases as cases
from vllm_lite.checkpoint.layer_specs.block_sparse import BlockSparse
from vllm_lite.kernels.cuda.attention import paged_attention as pa
from vllm_lite.kernels.cuda.attention.attention_inputs import Scoring

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("max_seq_len", "num_rows", "v1"),
    [
        (0, 1, True),
        (512, 1, True),
        (513, 1, False),
        (513, 512, False),
        (513, 513, True),
        (8192, 513, True),
        (8193, 9999, False),
    ],
)
def test_rule(max_seq_len: int, num_rows: int, v1: bool) -> None:
    assert pa.prefers_v1(max_seq_len, num_rows) is v1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_layouts_hold_the_same_values(dtype: torch.dtype) -> None:
    engine = torch.arange(3 * 2 * 2 * 8 * 32).remainder(251).reshape(3, 2, 2, 8, 32).to(dtype)
    keys, values = kv_layouts.to_split(engine)
    x = 16 // engine.element_size()
    block, head, slot, d = 2, 1, 5, 29
    assert keys[block, head, d // x, slot, d % x] == engine[block, 0, head, slot, d]
    assert values[block, head, d, slot] == engine[block, 1, head, slot, d]
    flash = kv_layouts.to_flash(engine)
    assert flash[1, block, slot, head, d] == engine[block, 1, head, slot, d]
    assert torch.equal(kv_layouts.from_split(keys, values), engine)
    assert torch.equal(kv_layouts.from_flash(flash), engine)


def test_reference_is_torch_attention() -> None:
    """The truth of the cases, held against an implementation that is not ours."""
    problem = cases.Problem((37,), num_heads=6, num_kv_heads=2, dtype=torch.float32)
    drawn = cases.draw(problem)
    keys, values = kv_layouts.gather(drawn.engine, drawn.tables[0], 37)
    ours = cases.reference(problem, drawn)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        drawn.q.double().transpose(0, 1)[None], keys[None], values[None], enable_gqa=True
    )
    assert (ours - theirs[0].transpose(0, 1)).abs().max() < 1e-12


def inputs(problem: cases.Problem) -> tuple[torch.Tensor, torch.Tensor, pa.SplitCache, Scoring]:
    drawn = cases.draw(problem)
    return torch.empty_like(drawn.q), drawn.q, cases.split_cache(problem, drawn, CPU), drawn.scoring(problem, CPU)


class NoLauncher:
    multiprocessor_bytes = 0

    def kernel(self, source: str, name: str) -> None:  # noqa: ARG002
        raise AssertionError("nothing may be launched")


@pytest.mark.parametrize("version", cases.BOTH)
def test_no_sequences(version: cases.Version) -> None:
    out, q, cache, scoring = inputs(cases.Problem((5,)))
    empty = replace(cache, block_tables=cache.block_tables[:0], seq_lens=cache.seq_lens[:0], max_seq_len=0)
    version(NoLauncher(), out[:0], q[:0], empty, scoring)  # type: ignore[arg-type]


def refused(message: str, **changes: object) -> None:
    out, q, cache, scoring = inputs(cases.Problem((5, 20)))
    parts = {"out": out, "q": q}
    for name, value in changes.items():
        if name in parts:
            assert isinstance(value, torch.Tensor)
            parts[name] = value
        elif hasattr(cache, name):
            cache = replace(cache, **{name: value})  # type: ignore[arg-type]
        else:
            scoring = replace(scoring, **{name: value})  # type: ignore[arg-type]
    for version in cases.BOTH:
        with pytest.raises(ValueError, match=message):
            version(NoLauncher(), parts["out"], parts["q"], cache, scoring)  # type: ignore[arg-type]


def test_refusals() -> None:
    bf16 = torch.bfloat16
    q = torch.zeros(2, 4, 64, dtype=bf16)
    refused("Unsupported head size: 72", q=torch.zeros(2, 4, 72, dtype=bf16))
    refused("out must be like q", out=torch.zeros(2, 4, 64))
    refused("out must be contiguous", out=torch.zeros(2, 64, 4, dtype=bf16).transpose(1, 2))
    refused("heads of a row of q", q=torch.zeros(2, 64, 4, dtype=bf16).transpose(1, 2), out=q)
    refused("does not go with q", q=q.half(), out=q.half())
    refused("only a cache may be fp8", q=q.to(torch.float8_e5m2), out=q.to(torch.float8_e5m2))
    refused("float64", q=q.double(), out=q.double())
    refused("3 query heads cannot share 2", q=q[:, :3].contiguous(), out=q[:, :3].contiguous())
    refused("Unsupported block size: 24", values=torch.zeros(9, 2, 64, 24, dtype=bf16))
    refused("values must be", values=torch.zeros(9, 2, 32, 16, dtype=bf16))
    refused("keys must be", keys=torch.zeros(9, 2, 8, 8, 8, dtype=bf16))
    refused("block_tables must be", block_tables=torch.zeros(2, 4, dtype=torch.int64))
    refused("seq_lens must be", seq_lens=torch.zeros(3, dtype=torch.int32))
    refused("max_seq_len 999", max_seq_len=999)
    refused("window", window=-1)
    refused("soft cap", soft_cap=-math.inf)
    refused("alibi_slopes", alibi_slopes=torch.zeros(4, dtype=torch.float64))
    refused("not a multiple of the block size", block_sparse=BlockSparse(1, 2, 24))
    refused("vert_stride at least 1", block_sparse=BlockSparse(1, 0, 16))


def test_head_size_that_fp8_cannot_split() -> None:
    problem = cases.Problem((5,), head_size=120)
    out, q, cache, scoring = inputs(problem)
    keys, values = (torch.zeros(9, 2, *rest, dtype=torch.float8_e5m2) for rest in ((7, 16, 16), (120, 16)))
    with pytest.raises(ValueError, match="head size 120 is not a multiple of x = 16"):
        pa.paged_attention_v1(NoLauncher(), out, q, replace(cache, keys=keys, values=values), scoring)  # type: ignore[arg-type]


def test_v1_has_a_limit_of_shared_memory() -> None:
    out, q, cache, scoring = inputs(cases.Problem((5,)))
    wide = replace(cache, block_tables=torch.zeros(1, 4096, dtype=torch.int32), max_seq_len=65536)
    with pytest.raises(ValueError, match="use paged_attention_v2"):
        pa.paged_attention_v1(NoLauncher(), out, q, wide, scoring)  # type: ignore[arg-type]
