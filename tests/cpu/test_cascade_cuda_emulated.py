"""Shared prefixes in the CUDA backend on the emulator: each sequence has the bits that it has alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention_steps import attention_shape, changed
from tests.cpu.test_attention_cuda_emulated import Step, backend_for, make_step
from tests.kernels import emulator
from vllm_lite.kernels.cuda.attention import shared_prefix
from vllm_lite.kernels.cuda.attention.shared_prefix import Worth

pytestmark = pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")

BF16 = torch.bfloat16
SHAPE = changed(attention_shape((4, 2, 32), 16, BF16), shares_prefixes=True)
COMMON = 1024


@pytest.fixture(autouse=True)
def _few_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "WORTH", Worth(saved_blocks=1))


def sharing(step: Step, common: int = COMMON) -> Step:
    """The sequences of `step` beyond that many tokens begin with them, in the first one's blocks."""
    lens = step.batch.host
    assert lens is not None
    for table in step.batch.block_tables:
        for i in np.flatnonzero(lens.seq_lens > common):
            table[i, : common // 16] = table[0, : common // 16]
    tables = [table.numpy() for table in step.batch.block_tables]
    return replace(step, batch=replace(step.batch, host=replace(lens, block_tables=tables)))


def alone(step: Step, group: int = 0) -> torch.Tensor:
    return step.run(backend_for(replace(step.shape, shares_prefixes=False)), group)[0]


LENGTHS = [(1, n) for n in (1100, 1040, 1300, 1025, 20, 1090, 1111, 1060, 1400, 1200)]


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        (LENGTHS, {}),
        (LENGTHS, {"windows": (None, 40, None)}),
        ([*LENGTHS[:7], (5, 1200), (30, 1300), (3, 0)], {"sinks": True}),
    ],
    ids=["decodes", "groups", "drafts and prompts"],
)
def test_a_step_has_the_bits_of_its_rows(lengths: list[tuple[int, int]], changes: dict[str, Any]) -> None:
    shape = changed(SHAPE, **changes)
    step = sharing(make_step(shape, lengths))
    backend = backend_for(shape)
    batch = replace(step.batch)
    backend.prepare(batch)
    for group, spec in enumerate(shape.groups):
        shares = batch.plan.decodes[group].cascade is not None
        assert shares == (spec.window is None)
        if spec.window is None:
            assert torch.equal(step.run(backend, group)[0], alone(step, group))


def test_a_graph_runs_steps_with_and_without_shared_prefixes() -> None:
    """Steps with and without shared prefixes in turn; steps of few sequences have no second launch."""
    step = sharing(make_step(SHAPE, LENGTHS))
    lens = step.batch.host
    assert lens is not None
    batch = replace(step.batch, host=None, max_seq_len=5000)
    backend = backend_for(SHAPE)
    backend.prepare(batch)
    backend.write_kv(step.heads, step.kv, batch, 0)
    want = alone(step)
    places = [part.data_ptr() for part in (batch.plan.memory, *batch.plan.decodes[0].cascade)]
    unlike = [np.arange(lens.block_tables[0].size, dtype=np.int32).reshape(lens.block_tables[0].shape)]
    for tables, shared in ((lens.block_tables, 8), ((), 0), (lens.block_tables, 8), (unlike, 0)):
        backend.refresh(batch, lens.seq_lens, tables)
        assert batch.plan.decodes[0].splits[0, 1] == shared, "9 rows, 8 of which a block takes, and 4 splits"
        out = torch.full(step.heads.query.shape, 7.0, dtype=BF16)
        backend.attend(step.heads.query, step.kv, batch, 0, out)
        assert torch.equal(out, want)
    assert places == [part.data_ptr() for part in (batch.plan.memory, *batch.plan.decodes[0].cascade)]


def test_which_graphs_have_the_launch() -> None:
    def has(lengths: list[tuple[int, int]], max_seq_len: int, **changes: Any) -> bool:
        shape = changed(SHAPE, **changes)
        batch = replace(make_step(shape, lengths).batch, host=None, max_seq_len=max_seq_len)
        backend_for(shape).prepare(batch)
        return batch.plan.decodes[0].cascade is not None

    many = [(1, 20)] * 8
    assert has(many, 1025)
    assert not has(many, 1024)
    assert not has(many[:7], 5000)
    assert not has(many, 5000, shares_prefixes=False)
    assert not has(many, 5000, windows=(4000,))
    assert not has(many, 5000, alibi_slopes=(0.5, 0.25, 0.1, 0.9))
    assert not has(many, 5000, num_heads=18)
