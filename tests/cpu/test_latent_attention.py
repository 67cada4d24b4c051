"""Attention whose V is a part of K: kernels compared with float64, the products around it, and recorded steps."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.attention_steps import changed, step_batch
from tests.families.latent import SIZES, VARIANTS
from tests.kernels import emulator
from tests.kernels.emulator import EmulatorLauncher
from tests.plays import graphs_of, run_both
from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.cuda import CudaBackend, kernels_reason
from vllm_lite.attention.paged import split_layout_reason
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.checkpoint.quantization.memory import tensor_bytes
from vllm_lite.checkpoint.quantization.spec import BlockScaled
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.headers import Tensor
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.errors import ModelError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.cpu.weights.file_packer import group_size
from vllm_lite.kernels.cpu.weights.head_linear import HeadLinear
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.kernels.grouped import dequantize, quantize, quantize4
from vllm_lite.kernels.ops import Rotation, TorchOps
from vllm_lite.layers.attention.head_matmul import BatchedHeads, LoopedHeads, form_of_heads, make_head_matmul
from vllm_lite.layers.weights import matmul as matmul_module
from vllm_lite.layers.weights import onednn
from vllm_lite.layers.weights.matmul import DenseMatmul, Int8Matmul, make_matmul
from vllm_lite.layers.weights.weight_form import DenseForm, LinearShape
from vllm_lite.models.registry import Sizes, build

needs_emulator = pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")
needs_library = pytest.mark.skipif(not cpu.available(), reason="needs the native library")
DEEPSEEK, SMALL, UNEVEN = (16, 576, 512), (3, 32, 24), (20, 40, 8)
"""Heads, elements of K, elements of V."""
MIXED = [(1, 513), (5, 17), (40, 40), (3, 200), (70, 130), (1, 600)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FP8 = torch.float8_e4m3fn
BLOCK_SIZE = 16


class Step:
    """Sequences of (query_len, seq_len) whose older tokens were written by earlier steps; other slots have NaN."""

    def __init__(self, backend, heads, lengths=MIXED, dtype=torch.float32, kv_dtype=None, k_scale=1.0):
        num_heads, size, value_size = heads
        spec = AttentionSpec(num_heads, 1, size, scale=size**-0.5, value_size=value_size)
        self.shape = AttentionShape((spec,), BLOCK_SIZE, dtype, torch.device("cpu"), kv_dtype, k_scale)
        self.lengths, self.spec, self.backend = lengths, spec, backend(self.shape)
        data = torch.Generator().manual_seed(5)
        self.keys = [torch.randn(seq_len, size, generator=data).to(dtype) for _, seq_len in lengths]
        num_tokens = sum(query_len for query_len, _ in lengths)
        self.query = torch.randn(num_tokens, num_heads, size, generator=data).to(dtype)
        counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
        ids = torch.randperm(sum(counts), generator=data) + 1
        self.tables = [part.tolist() for part in ids.split(counts)]
        pool = torch.full((sum(counts) + 1, 2, 1, 1, BLOCK_SIZE, size), torch.nan).to(self.shape.cache_dtype)
        self.pool, self.kv = pool, pool[:, 1]

    def slots(self, i, first, end):
        return [self.tables[i][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(first, end)]

    def write(self, work):
        """Write positions [first, end) of sequence i, for each of `work`, and return the step."""
        slots = [slot for i, first, end in work for slot in self.slots(i, first, end)]
        longest = max(map(len, self.tables))
        table = [self.tables[i] + [0] * (longest - len(self.tables[i])) for i, _, _ in work]
        step = step_batch(
            [(end - first, end) for _, first, end in work],
            [torch.tensor(table, dtype=torch.int32)],
            [torch.tensor(slots, dtype=torch.int64)],
        )
        self.backend.prepare(step)
        key = torch.cat([self.keys[i][first:end] for i, first, end in work])[:, None]
        heads = Heads(torch.empty(len(key), *self.query.shape[1:], dtype=key.dtype), key, key[..., :1])
        self.backend.write_kv(heads, self.kv, step, 0)
        return step

    def run(self):
        before = [(i, 0, seq_len - query_len) for i, (query_len, seq_len) in enumerate(self.lengths)]
        for one in before:
            if one[2]:
                self.write([one])
        step = self.write([(i, end - query_len, end) for i, (query_len, end) in enumerate(self.lengths)])
        out = self.query.new_full((step.num_tokens, self.spec.num_heads, self.spec.value_size or 0), torch.nan)
        self.backend.attend(self.query, self.kv, step, 0, out)
        return out

    def exact(self):
        outs, row, k_scale = [], 0, self.shape.k_scale
        for (query_len, seq_len), key in zip(self.lengths, self.keys, strict=True):
            kept = key.to(self.shape.dtype if self.shape.cache_dtype == FP8 else self.shape.cache_dtype)
            if self.shape.cache_dtype == FP8:
                kept = (key.float() / k_scale).clamp(-448, 448).to(FP8).float() * k_scale
            kept = kept.double()
            query = self.query[row : row + query_len].double()
            row += query_len
            scores = torch.einsum("qhd,kd->hqk", query, kept) * self.spec.scale
            unseen = torch.ones(query_len, seq_len, dtype=torch.bool).triu(seq_len - query_len + 1)
            weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,kd->qhd", weights, kept[:, : self.spec.value_size]))
        return torch.cat(outs)


def assert_exact(step):
    out = step.run()
    assert float((out - step.exact()).abs().max()) <= TOLERANCE[step.shape.dtype]


@pytest.mark.parametrize("heads", [DEEPSEEK, SMALL, UNEVEN], ids=str)
def test_plainly(heads):
    assert_exact(Step(ReferenceBackend, heads))
    assert_exact(Step(ReferenceBackend, heads, MIXED, torch.bfloat16, FP8, 0.02))


@needs_library
@pytest.mark.parametrize("heads", [DEEPSEEK, SMALL, UNEVEN], ids=str)
def test_natively(each_product_isa, heads):
    for dtype in TOLERANCE:
        assert_exact(Step(CpuBackend, heads, MIXED, dtype))
    assert_exact(Step(CpuBackend, heads, MIXED, torch.float32, torch.bfloat16))
    assert_exact(Step(CpuBackend, heads, MIXED, torch.bfloat16, FP8, 0.02))


def on_emulator(shape):
    return CudaBackend(shape, EmulatorLauncher())


@needs_emulator
@pytest.mark.parametrize(
    ("heads", "dtype", "lengths"),
    [
        (SMALL, torch.bfloat16, MIXED),
        (SMALL, torch.float16, [(9, 9)]),
        (UNEVEN, torch.float16, [(1, 9), (3, 40)]),
        ((5, 192, 128), torch.bfloat16, [(1, 520), (5, 17), (40, 40)]),
    ],
    ids=str,
)
def test_as_a_gpu_does(heads, dtype, lengths):
    assert_exact(Step(on_emulator, heads, lengths, dtype))


@needs_emulator
def test_layers_of_a_step_share_the_first_ones_launches():
    step = Step(on_emulator, SMALL, [(1, 20), (9, 30)], torch.bfloat16)
    first = step.run()
    batch = step.write([(0, 19, 20), (1, 21, 30)])
    other, out = torch.full_like(step.kv, torch.nan), torch.empty_like(first)
    other[:] = step.kv * 2
    key = torch.cat([step.keys[0][19:], step.keys[1][21:]])[:, None] * 2
    heads = Heads(torch.empty(len(key), *step.query.shape[1:], dtype=key.dtype), key, key[..., :1])
    before = len(batch.plan.launches)
    step.backend.attend(step.query, step.kv, batch, 0, torch.empty_like(out))
    step.backend.attend(step.query, other, batch, 0, out)
    step.backend.write_kv(heads, other, batch, 0)
    assert len(batch.plan.launches) > before
    assert torch.equal(other.nan_to_num(7), (step.kv * 2).nan_to_num(7))
    assert not torch.equal(out, first)
    assert torch.isfinite(out).all()


@needs_emulator
def test_a_graph_serves_any_lengths():
    step = Step(on_emulator, SMALL, [(1, 513), (1, 17), (1, 40)], torch.bfloat16)
    want, tables = step.run(), [*step.tables, [0]]
    longest = max(map(len, tables))
    table = torch.tensor([own + [0] * (longest - len(own)) for own in tables], dtype=torch.int32)
    batch = step_batch([(1, 600)] * 4, [table], [torch.full((4,), -1)])
    batch = replace(batch, host=None)
    step.backend.prepare(batch)
    for lens in ([513, 17, 40], [17], [513, 17, 40]):
        step.backend.refresh(batch, np.array(lens))
    query = torch.cat((step.query, step.query[:1]))
    out = torch.full((4, *want.shape[1:]), torch.nan, dtype=want.dtype)
    step.backend.attend(query, step.kv, batch, 0, out)
    assert torch.equal(out[:3], want)
    assert not out[3].any()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_however_it_is_computed(each_isa, dtype):
    length = 700
    step = Step(CpuBackend, DEEPSEEK, [(length, length)], dtype)
    whole = step.run()
    for pieces in ([(0, 1)], [(699, 700)], [(600, 603), (511, 513)], [(5, 300), (300, 700)]):
        table = torch.tensor(step.tables * len(pieces), dtype=torch.int32)
        count = sum(end - first for first, end in pieces)
        batch = step_batch([(end - first, end) for first, end in pieces], [table], [torch.full((count,), -1)])
        step.backend.prepare(batch)
        out = torch.empty(count, 16, 512, dtype=dtype)
        step.backend.attend(torch.cat([step.query[a:b] for a, b in pieces]), step.kv, batch, 0, out)
        assert torch.equal(out, torch.cat([whole[a:b] for a, b in pieces])), pieces


@pytest.mark.parametrize("backend", [ReferenceBackend, pytest.param(CpuBackend, marks=needs_library)])
def test_only_the_given_slots_are_written(backend):
    step = Step(backend, SMALL, [(37, 37)])
    step.write([(0, 0, 37)])
    kept = step.kv[:, 0, 0].flatten(0, 1)  # [slot, size]
    slots = step.slots(0, 0, 37)
    assert torch.equal(kept[slots], step.keys[0])
    others = torch.ones(len(kept), dtype=torch.bool)
    others[slots] = False
    assert kept[others].isnan().all()
    assert step.pool[:, 0].isnan().all()


def test_other_backends_refuse_it_by_name():
    shape = Step(ReferenceBackend, SMALL).shape
    assert "latent attention" in str(split_layout_reason(shape))
    assert "not torch.float32" in str(kernels_reason(shape))
    half = replace(shape, dtype=torch.bfloat16)
    assert kernels_reason(half) is None
    for changes in ({"windows": (9,)}, {"sinks": True}, {"soft_cap": 1.0}, {"alibi_slopes": (0.1,) * 3}):
        assert "neither a window" in str(kernels_reason(changed(half, **changes))), changes
    assert "sparse" in str(kernels_reason(changed(half, index_size=16)))
    assert "float8" in str(kernels_reason(replace(half, kv_dtype=FP8)))
    assert "not a multiple of 8" in str(CpuBackend.supports(changed(shape, value_size=20)))


@needs_library
def test_long_sequences_are_split_within_the_scratch_that_is_said():
    step = Step(CpuBackend, DEEPSEEK, [(1, 9000), (1, 8000)])
    step.run()
    kernel = step.backend.kernels[0]
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([9000, 8000], dtype=torch.int32)
    assert kernel.plan(starts, lengths, 2, 9000, None)[0] == 29, "sections of 640 and 576 keys"
    taken = sum(part.nbytes for part in kernel.scratch)
    assert taken <= step.backend.workspace_bytes(max_num_tokens=2, max_num_seqs=2, max_seq_len=9000)


# ---- products by head


def by_head(num_heads=3, num_rows=7, outputs=24, inputs=20, dtype=torch.float32):
    """Weights, and rows in wider ones."""
    data = torch.Generator().manual_seed(2)
    weights = [torch.randn(outputs, inputs, generator=data).to(dtype) for _ in range(num_heads)]
    x = torch.randn(num_rows, num_heads, inputs + 8, generator=data).to(dtype)[..., :inputs]
    return weights, x, torch.full((num_rows, num_heads, outputs + 8), 9.0, dtype=dtype)


@needs_library
@pytest.mark.parametrize("num_rows", [1, 7, 97, 200])
@pytest.mark.parametrize("sizes", [(24, 20), (512, 128), (128, 512), (300, 33)], ids=str)
def test_heads_at_once_are_heads_one_by_one(each_isa, sizes, num_rows):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights, x, room = by_head(5, num_rows, sizes[0], sizes[1], dtype)
        matmuls = [make_matmul(weight) for weight in weights]
        heads, expected = make_head_matmul(matmuls), torch.empty(num_rows, 5, sizes[0], dtype=dtype)
        assert isinstance(heads, HeadLinear)
        LoopedHeads(matmuls).forward(x, expected)
        heads.forward(x, room[..., : sizes[0]])
        assert torch.equal(room[..., : sizes[0]], expected)
        assert (room[..., sizes[0] :] == 9).all()


@needs_library
def test_heads_of_int8(each_isa):
    weights, x, room = by_head(dtype=torch.bfloat16)
    HeadLinear([PackedWeight(weight, form="int8") for weight in weights]).forward(x, room[..., :24])
    rounded = [dequantize(quantize(weight, "int8", group_size=group_size("int8"))) for weight in weights]
    expected = torch.stack([x[:, head].float() @ weight.t() for head, weight in enumerate(rounded)], 1)
    assert float((room[..., :24] - expected).abs().max()) < 4e-3 * float(expected.abs().max())


@needs_library
@pytest.mark.parametrize("group_size", [32, 128])
def test_heads_of_int4(each_isa, group_size):
    weights, x, room = by_head(dtype=torch.bfloat16)
    quantized = [quantize4(weight, group_size) for weight in weights]
    HeadLinear([PackedWeight(weight) for weight in quantized]).forward(x, room[..., :24])
    rounded = [dequantize(weight) for weight in quantized]
    expected = torch.stack([x[:, head].float() @ weight.t() for head, weight in enumerate(rounded)], 1)
    assert float((room[..., :24] - expected).abs().max()) < 4e-3 * float(expected.abs().max())


@pytest.mark.parametrize("num_rows", [1, 7, 200])
@pytest.mark.parametrize("sizes", [(24, 20), (512, 128), (128, 512)], ids=str)
def test_dense_heads_are_one_product(sizes, num_rows):
    """With strided rows on both sides, as layers have them."""
    for dtype, tolerance in TOLERANCE.items():
        weights, x, room = by_head(5, num_rows, sizes[0], sizes[1], dtype)
        expected = torch.einsum("nhi,hoi->nho", x.double(), torch.stack(weights).double())
        weights = [weight.t().contiguous().t() for weight in weights]  # as the transposed ones of a checkpoint may lie
        matmuls = [DenseMatmul(weight, None) for weight in weights]
        heads = make_head_matmul(matmuls)
        assert isinstance(heads, BatchedHeads)
        heads.forward(x, room[..., : sizes[0]])
        assert torch.allclose(room[..., : sizes[0]].double(), expected, rtol=tolerance, atol=1e-4)
        assert (room[..., sizes[0] :] == 9).all()
        parts = [matmul.weight.data_ptr() for matmul in matmuls]
        assert parts == [part.data_ptr() for part in heads.weight], "weights are there once"


def test_any_other_weights_are_multiplied_one_by_one():
    weights, x, room = by_head()
    bias = torch.arange(24.0)
    heads = make_head_matmul([DenseMatmul(weight, bias) for weight in weights])
    assert isinstance(heads, LoopedHeads)
    heads.forward(x, room[..., :24])
    assert torch.allclose(room[..., :24], torch.einsum("nhi,hoi->nho", x, torch.stack(weights)) + bias, atol=1e-5)
    mixed = [DenseMatmul(weights[0], None), DenseMatmul(weights[1][:8], None)]
    assert isinstance(make_head_matmul(mixed), LoopedHeads)
    assert isinstance(make_head_matmul([*mixed[:1], Int8Matmul(weights[1], None)]), LoopedHeads)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gpu_has_quantized_heads_dense(transposed, monkeypatch):
    monkeypatch.setattr(matmul_module, "copies", lambda *_: False)  # no native kernels
    monkeypatch.setattr(onednn, "pack", lambda _: None)
    assert form_of_heads(DenseForm("int8"), torch.device("cpu")) == DenseForm("int8")
    form = form_of_heads(DenseForm("int8"), torch.device("cuda"))
    shape = LinearShape(Split.whole(20), (Split.whole(24),), torch.float32, torch.device("cpu"), transposed)
    matmul = form.stored(["a"], shape).matmul([weight := torch.randn(24, 20)], None)
    assert isinstance(matmul, DenseMatmul)
    assert torch.equal(matmul.weight, weight)


@needs_library
def test_wrong_heads_are_refused():
    weights, x, room = by_head()
    heads = HeadLinear([PackedWeight(weight) for weight in weights])
    with pytest.raises(ValueError, match=r"3 heads of 24 x 20 weights take no torch.float32 \[7, 2, 20\]"):
        heads.forward(x[:, :2], room[..., :24])
    with pytest.raises(ValueError, match="must be dense"):
        heads.forward(x, torch.empty(7, 24, 3).transpose(1, 2))
    with pytest.raises(ValueError, match="one shape and type"):
        HeadLinear([PackedWeight(weights[0]), PackedWeight(weights[0][:8])])


@pytest.mark.parametrize("ops", [TorchOps, pytest.param(CpuOps, marks=needs_library)])
def test_a_part_of_each_head_is_turned_into_its_place(ops):
    angles = torch.arange(7.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    rotation = Rotation(angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1))
    heads, room = torch.randn(7, 3, 28)[..., 20:], torch.zeros(7, 3, 32)
    before, turned = heads.clone(), heads.clone()
    ops().rotate_into(heads, rotation, room[..., 24:])
    TorchOps().rotate(turned, rotation)
    assert torch.equal(heads, before)
    assert torch.allclose(room[..., 24:], turned, atol=1e-6)
    assert not room[..., :24].any()


# ---- whole models


@needs_library
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_replayed_steps_have_the_bits_of_eager_ones(settings, tmp_path: Path):
    settings_of_model = dict(VARIANTS[0].settings) | {"first_k_dense_replace": SIZES["num_hidden_layers"]}
    model = replace(VARIANTS[0], settings=settings_of_model).make(tmp_path / "dense")
    eager, graphed = run_both(model, seed=3, num_steps=40, on=None, **settings)
    assert graphs_of(graphed).num_replays > 10
    assert eager.got == graphed.got


def test_the_cache_keeps_one_vector_a_token(tmp_path: Path):
    spec = load_spec(VARIANTS[0].make(tmp_path / "model"))
    assert [group.kv_shape(16) for group in spec.kv_groups] == [(3, 1, 1, 16, 32)]
    assert spec.kv_block_bytes(16, 2) == 3 * 32 * 16 * 2
    assert spec.kv_block_bytes(16, 2, tp=3) == spec.kv_block_bytes(16, 2), "each rank has all of it"


def test_a_gpu_is_planned_with_dense_heads(tmp_path: Path):
    """A GPU keeps these heads dense, whatever else is quantized."""
    spec = load_spec(VARIANTS[0].make(tmp_path / "model"))
    names = [f"model.layers.0.self_attn.{layer}.weight" for layer in ("kv_b_proj", "k_b_proj.1", "v_b_proj.1")]
    heads = Checkpoint(spec, dict.fromkeys(names, Tensor("BF16", (64, 128))))
    other = Checkpoint(spec, {"model.layers.0.self_attn.o_proj.weight": Tensor("BF16", (64, 128))})
    assert weights_bytes(heads, 2, "int8", device="cuda") == (dense := weights_bytes(heads, 2))
    assert weights_bytes(heads, 2, "int8") < dense
    assert weights_bytes(other, 2, "int8", device="cuda") < 2 * 64 * 128
    codes, form = Tensor("F8_E4M3", (256, 128)), BlockScaled(numbers="float8", block=(128, 128), scale="scale")
    assert tensor_bytes("a.o_proj.weight", codes, form, 2, "cuda") == 256 * 128
    assert tensor_bytes("a.kv_b_proj.weight", codes, form, 2, "cuda") == 2 * 256 * 128
    assert tensor_bytes("a.kv_b_proj.weight", codes, form, 2, "cpu") == 256 * 128


def test_layers_behind_the_last_are_ignored(tmp_path: Path):
    model = build(load_spec(VARIANTS[2].make(tmp_path / "model")), "float32", "cpu", Sizes(8, 8))
    assert model.ignores("model.layers.3.eh_proj.weight")
    assert not model.ignores("model.layers.2.eh_proj.weight")


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"attention_bias": True}, "attention_bias: must be false"),
        ({"norm_topk_prob": True}, "norm_topk_prob: must be false"),
        ({"topk_method": "group_limited_greedy", "n_group": 2}, "5 experts cannot be in 2 groups"),
        ({"num_experts_per_tok": 6}, "cannot go to 6 experts of 5"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' is not supported"),
    ],
)
def test_unsupported_settings_are_refused(config, error, tmp_path: Path):
    path = VARIANTS[0].make(tmp_path / "model")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | config))
    with pytest.raises(ModelError, match=error):
        load_spec(path)
