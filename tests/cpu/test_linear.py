"""Linear layers, packed or not, whole or cut over ranks; and the rounding of RMSNorm."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints import load_and_see, make_checkpoint
from tests.rows import random
from tests.thread_group import ThreadGroup
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.shard import HeadSplit, Shard, Split
from vllm_lite.kernels import cpu
from vllm_lite.layers.norm import RMSNorm
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights import onednn
from vllm_lite.layers.weights.embedding import Embedding, LMHead
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.matmul import DenseMatmul, Int8Matmul, NativeMatmul, OneDnnMatmul, SideBySide, make_matmul
from vllm_lite.layers.weights.onednn import pack, packed_linear
from vllm_lite.layers.weights.weight_form import DenseForm, LinearShape
from vllm_lite.models.llama import Llama
from vllm_lite.parallel.communicator import SingleRank

CPU = torch.device("cpu")
SIZES = (24, 8, 8)


def make_linear(dtype, bias, quantization=None):
    outputs = tuple(Split.whole(size) for size in SIZES)
    return Linear(LinearShape(Split.whole(48), outputs, dtype, CPU), bias=bias, form=DenseForm(quantization))


def names(linear):
    return [f"w{index}" for index in range(len(linear.shape.outputs))]


def give(group, weight):
    """Give a weight as a loader does: its memory is used for something else afterwards."""
    group.take(mine := weight.clone())
    if group.stacks[0].lent:
        mine.zero_()


def only(monkeypatch, kind):
    """Make layers take this kind of matrix product."""
    if kind is NativeMatmul:
        if not cpu.available():
            pytest.skip("no native library")
        return
    monkeypatch.setattr(cpu, "available", lambda: False)
    if kind is DenseMatmul:
        monkeypatch.setattr(onednn, "pack", lambda _: None)


@pytest.mark.parametrize("kind", [NativeMatmul, OneDnnMatmul, DenseMatmul, Int8Matmul])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_linear(monkeypatch, num_rows, dtype, bias, kind):
    if kind is OneDnnMatmul and dtype == torch.float32:
        assert pack(torch.zeros(40, 48)) is not None
    only(monkeypatch, kind)
    linear = make_linear(dtype, bias, "int8" if kind is Int8Matmul else None)
    x, weight = random(num_rows, 48, dtype=dtype), random(40, 48, dtype=dtype)
    expected = x.double() @ weight.double().t()
    if bias:
        expected += random(40, dtype=dtype).double()
    linear.group(*names(linear)).take(weight, *([random(40, dtype=dtype)] if bias else []))
    assert isinstance(linear.matmul, kind) or (kind is OneDnnMatmul and pack(weight) is None)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    if kind is Int8Matmul:
        tolerance = 0.35
    for out_dtype in (dtype, torch.float32):
        out = torch.full((num_rows, 40), torch.nan, dtype=out_dtype)
        linear.forward(x, out)
        assert torch.allclose(out.double(), expected, rtol=0, atol=tolerance)


def test_this_torch_can_pack():
    """If this fails, torch changed operators that it does not document (layers/weights/onednn.py): all is slower."""
    weight, x, bias = random(40, 48), random(3, 48), random(40)
    packed = pack(weight)
    assert packed is not None
    assert torch.allclose(packed_linear(x, packed, bias), x @ weight.t() + bias, atol=1e-5)


@pytest.mark.parametrize("kind", [NativeMatmul, OneDnnMatmul])
def test_a_packed_row_does_not_depend_on_the_rows_beside_it(monkeypatch, kind):
    only(monkeypatch, kind)
    linear = make_linear(torch.bfloat16, bias=False)
    linear.group(*names(linear)).take(random(40, 48, dtype=torch.bfloat16))
    x, out = random(64, 48, dtype=torch.bfloat16), torch.empty(64, 40, dtype=torch.bfloat16)
    linear.forward(x, out)
    for num_rows in (1, 2, 3, 8, 33):
        few = torch.empty(num_rows, 40, dtype=torch.bfloat16)
        linear.forward(x[:num_rows], few)
        assert torch.equal(few, out[:num_rows])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", [NativeMatmul, OneDnnMatmul, DenseMatmul])
@pytest.mark.parametrize("tied", [True, False])
def test_lm_head(monkeypatch, tied, kind, quantization):
    """Logits are float32, whatever the model is; the embedding is exact, also where it has given its weight away."""
    only(monkeypatch, kind)
    embedding = Embedding(Split.whole(40), 48, SingleRank(CPU), dtype=torch.bfloat16, device=CPU)
    head = LMHead(embedding, tied=tied, quantization=quantization)
    table, hidden = random(40, 48, dtype=torch.bfloat16), random(3, 48, dtype=torch.bfloat16)
    weight = table if tied else table * 2
    expected = hidden.double() @ weight.double().t()
    give(head.group("head"), weight)
    if not tied:
        give(embedding.group("table"), table)
    logits = torch.empty(3, 40)
    head.forward(hidden, logits)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), expected, rtol=0, atol=0.15 if quantization is None else 1)
    shares = tied and kind is NativeMatmul and quantization is None
    assert (embedding.packed is not None) == shares
    out = torch.empty(3, 48, dtype=torch.bfloat16)
    embedding.forward(torch.tensor([7, 39, 0], dtype=torch.int32), out)
    assert torch.equal(out, table[[7, 39, 0]])
    for wrong in (-1, 40):
        with pytest.raises(IndexError):
            embedding.forward(torch.tensor([1, wrong, 2]), out)


class Codes:
    """A stored weight whose product has no rows that could be looked up."""

    stacks = ()

    def __init__(self, table):
        self.table = table

    def matmul(self, _, bias):
        return SideBySide(((make_matmul(self.table, bias), len(self.table)),))

    def dense(self, _):
        return self.table


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_is_made_where_nothing_can_be_looked_up_in_codes(tied):
    embedding = Embedding(Split.whole(40), 128, SingleRank(CPU), dtype=torch.bfloat16, device=CPU)
    table, out = random(40, 128, dtype=torch.bfloat16), torch.empty(40, 128, dtype=torch.bfloat16)
    if tied:
        LMHead(embedding, tied=True).load_quantized(Codes(table), ())
    else:
        embedding.load_quantized(Codes(table), ())
    embedding.forward(torch.arange(40), out)
    assert torch.equal(out, table)


def test_splits():
    assert [Split.even(12, Shard(rank, 3)) for rank in range(3)] == [Split(12, 0, 4), Split(12, 4, 4), Split(12, 8, 4)]
    with pytest.raises(ValueError, match="13 cannot be split over 3 ranks"):
        Split.even(13, Shard(0, 3))
    assert [Split.near_even(8, shard) for shard in Shard(0, 3).all_ranks] == [
        Split(8, 0, 3),
        Split(8, 3, 3),
        Split(8, 6, 2),
    ]
    assert Split.even(4, Shard(1, 2)).times(8) == Split(32, 16, 16)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "world", "query_sizes", "kv_starts"),
    [
        (8, 4, 2, [4, 4], [0, 2]),
        (8, 2, 4, [2, 2, 2, 2], [0, 0, 1, 1]),
        (5, 1, 2, [3, 2], [0, 0]),
        (5, 1, 4, [2, 1, 1, 1], [0, 0, 0, 0]),
        (14, 2, 4, [4, 3, 4, 3], [0, 0, 1, 1]),
    ],
)
def test_heads_of_the_ranks(num_heads, num_kv_heads, world, query_sizes, kv_starts):
    """Query heads are shared out in their order, and each rank has the KV head that its query heads attend to."""
    ranks = [HeadSplit.of(num_heads, num_kv_heads, shard) for shard in Shard(0, world).all_ranks]
    assert [rank.query.size for rank in ranks] == query_sizes
    assert [rank.query.start for rank in ranks] == [sum(query_sizes[:rank]) for rank in range(world)]
    assert [rank.kv.start for rank in ranks] == kv_starts
    group = num_heads // num_kv_heads
    for query, kv in ranks:
        seen = {head // group for head in range(query.start, query.end)}
        assert seen == set(range(kv.start, kv.end))
        assert query.size % kv.size == 0


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "world"), [(8, 4, 3), (5, 1, 6), (14, 2, 16), (12, 4, 6)])
def test_heads_that_ranks_cannot_share(num_heads, num_kv_heads, world):
    with pytest.raises(ValueError, match=f"{num_heads} heads with {num_kv_heads} KV heads .* {world} ranks"):
        HeadSplit.of(num_heads, num_kv_heads, Shard(0, world))


@given(st.integers(1, 2000), st.integers(1, 65), st.sampled_from([1, 7, 64]))
def test_near_even_shares_are_a_partition(total, world, unit):
    parts = [Split.near_even(total, shard, unit) for shard in Shard(0, world).all_ranks]
    assert [part.start for part in parts] == [sum(part.size for part in parts[:rank]) for rank in range(world)]
    assert sum(part.size for part in parts) == total
    assert all(part.start % unit == 0 or part.size == 0 for part in parts)
    num_units = [-(-part.size // unit) for part in parts]
    assert max(num_units) - min(num_units) <= 1
    assert num_units == sorted(num_units, reverse=True)


@given(st.integers(1, 70), st.integers(0, 200_000))
def test_every_rank_has_some_of_the_vocabulary(world, more):
    parts = [Split.vocabulary(world + more, shard) for shard in Shard(0, world).all_ranks]
    assert all(part.size for part in parts)
    assert sum(part.size for part in parts) == world + more
    if world + more >= 64 * world:
        assert all(part.start % 64 == 0 for part in parts)


def test_ranks_load_the_parts_of_the_whole(tmp_path):
    """The seam for tensor parallelism: put together along their split dimension, the ranks' weights are the model's."""
    path = make_checkpoint(tmp_path / "model", attention_bias=True)
    spec = load_spec(path)

    def loaded(communicator):
        model = Llama(Parts(spec, torch.float32, CPU, communicator), 16, 4)
        return load_and_see(model, path)

    whole, *ranks = (loaded(communicator) for communicator in (SingleRank(CPU), *ThreadGroup(2).communicators))
    num_split = 0
    for name, tensor in whole.items():
        parts = [rank[name] for rank in ranks]
        axes = [axis for axis in range(tensor.dim()) if parts[0].shape[axis] != tensor.shape[axis]]
        num_split += len(axes)
        assert torch.equal(torch.cat(parts, dim=axes[0]) if axes else parts[0], tensor), name
    # Seven matrices and the biases of Q, K and V in each layer, the embedding and the LM head.
    assert num_split == spec.num_layers * (7 + 3) + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rounds_like_transformers(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(96, 1e-5).to(dtype)
    ours = RMSNorm(96, 1e-5, dtype=dtype, device=CPU)
    weight, x, residual = 1 + random(96) / 4, random(64, 96, dtype=dtype), random(64, 96, dtype=dtype) * 3
    theirs.weight.data.copy_(weight)
    ours.load(weight.to(dtype))
    with torch.inference_mode():
        expected, expected_sum = theirs(x), theirs(residual + x)
    out = torch.empty_like(x)
    ours.forward(x, out)
    exactly_equal = (out == expected).float().mean()
    assert exactly_equal > (0.99 if dtype == torch.bfloat16 else 0.5)
    assert torch.allclose(out, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    total = residual + x
    ours.add_forward(residual, x, out=x)
    assert torch.equal(residual, total)
    assert torch.allclose(x, expected_sum, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
