"""Attention of encoders and towers by native kernels, against softmax in float64, for every instruction set."""

import numpy as np
import pytest
import torch

from tests.isas import PRODUCTS, on_each
from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.encoder import EncoderBackend
from vllm_lite.attention.step_batch import HostLens, StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TEXTS = [1, 17, 64, 100, 3, 700]
"""Tokens of texts side by side: of one tile of keys and of many, with rows for one item and for several."""
CPU, NOTHING = torch.device("cpu"), torch.empty(0, dtype=torch.int64)


def texts_of(lengths: list[int]) -> StepBatch:
    lens = np.array(lengths, np.int32)
    starts = np.concatenate([[0], lens.cumsum()]).astype(np.int32)
    return StepBatch(
        num_tokens=sum(lengths),
        num_seqs=len(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        token_ids=NOTHING,
        positions=NOTHING,
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_tables=(),
        slot_mapping=(),
        host=HostLens(lens, lens),
    )


def attended(spec: AttentionSpec, qkv: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """qkv: [num_tokens, 3, num_heads, head_size]."""
    backend, batch = EncoderBackend(AttentionShape((spec,), 1, qkv.dtype, CPU, is_encoder=True)), texts_of(lengths)
    assert backend.kernels
    backend.prepare(batch)
    query, key, value = qkv.unbind(1)
    heads = Heads(query, key, value)
    out = torch.full_like(heads.query, torch.nan, memory_format=torch.contiguous_format)
    backend.write_kv(heads, torch.empty(0), batch, 0)
    backend.attend(heads.query, torch.empty(0), batch, 0, out)
    return out


def exact(spec: AttentionSpec, qkv: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    outs = []
    for text in qkv.double().split(lengths):
        query, key, value = text.unbind(1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
        places = torch.arange(len(text))
        unseen = (places[:, None] - places).abs() >= (spec.window or len(text))
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), value))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("head_size", "window"), [(8, None), (64, None), (72, None), (72, 50), (80, None), (128, 9)])
def test_every_text_alone(head_size: int, window: int | None, dtype: torch.dtype) -> None:
    spec = AttentionSpec(3, 3, head_size, head_size**-0.5, window=window)
    qkv = torch.randn(sum(TEXTS), 3, 3, head_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = exact(spec, qkv, TEXTS)
    for isa in on_each(PRODUCTS):
        difference = (attended(spec, qkv, TEXTS).double() - expected).abs().max()
        assert difference <= TOLERANCE[dtype], (isa, head_size, window, dtype)


def test_bits_do_not_depend_on_other_texts() -> None:
    spec = AttentionSpec(2, 2, 72, 72**-0.5)
    qkv = torch.randn(sum(TEXTS), 3, 2, 72, generator=torch.Generator().manual_seed(1)).bfloat16()
    for isa in on_each(PRODUCTS):
        together = attended(spec, qkv, TEXTS).split(TEXTS)
        for text, own, length in zip(qkv.split(TEXTS), together, TEXTS, strict=True):
            assert torch.equal(attended(spec, text, [length]), own), (isa, length)
