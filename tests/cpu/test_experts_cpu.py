"""Experts and routing of csrc/cpu against the plain loop and plain torch; a row's results do not depend on other
rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.routing_rules import routing_rules
from tests.rows import random
from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.experts import PackedExperts
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.kernels.grouped import UINT4, UINT8, GroupedWeight
from vllm_lite.kernels.routing import Chosen, Routing, choose
from vllm_lite.layers.moe.expert_matmul import ExpertSizes, LoopedExperts, NativeExperts
from vllm_lite.layers.moe.experts import make_expert_matmul
from vllm_lite.layers.weights.matmul import Matmul, NativeMatmul, make_grouped_matmul, make_matmul

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

HIDDEN, INNER = 96, 20
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Maximum error relative to the largest output: one unit in the last place, as sums may be rounded up instead of
down."""


def make(
    num_experts: int, dtype: torch.dtype = torch.float32, quantization: Quantization | None = None, inner: int = INNER
) -> tuple[list[Matmul], list[Matmul]]:
    """gate_up and down of each expert; no two are alike."""
    both = random(num_experts, 2 * inner, HIDDEN, dtype=dtype).mul_(HIDDEN**-0.5)
    down = random(num_experts, HIDDEN, inner, dtype=dtype).mul_(inner**-0.5)
    return [make_matmul(w, None, quantization) for w in both], [make_matmul(w, None, quantization) for w in down]


def pick(num_tokens: int, num_experts: int, top: int) -> Chosen:
    """Different experts for each token, in any order."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    return Chosen(scores.argsort(1)[:, :top].int().contiguous(), random(num_tokens, top).abs())


def compare(
    weights: tuple[list[Matmul], list[Matmul]], held: Split, x: torch.Tensor, chosen: Chosen, inner: int = INNER
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the native operation and the loop to x."""
    sizes = ExpertSizes(held, inner, "silu")
    native = make_expert_matmul(*weights, sizes)
    assert isinstance(native, NativeExperts)
    ours, theirs = torch.full_like(x, torch.nan), torch.empty_like(x)
    native.forward(x, chosen, ours)
    LoopedExperts(*weights, sizes).forward(x, chosen, theirs)
    return ours, theirs


@pytest.mark.usefixtures("each_product_isa", "two_threads")
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4_g32"])
def test_experts_match_the_loop(dtype: torch.dtype, quantization: Quantization | None) -> None:
    weights = make(5, dtype, quantization)
    for num_tokens in (1, 2, 33):
        ours, theirs = compare(weights, Split.whole(5), random(num_tokens, HIDDEN, dtype=dtype), pick(num_tokens, 5, 3))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * float(theirs.abs().max()))


@pytest.mark.usefixtures("each_product_isa", "two_threads")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_more_pairs_than_a_window_has(dtype: torch.dtype, quantization: Quantization | None) -> None:
    """Two threads compute 512 pairs at once; there are up to 5600, and 120 to 700 of an expert. Wide experts have tasks
    that copy their rows, where there are tiles."""
    for num_tokens, count, inner in ((300, 20, INNER), (700, 20, INNER), (700, 2, 500)):
        weights, x = make(count, dtype, quantization, inner), random(num_tokens, HIDDEN, dtype=dtype)
        ours, theirs = compare(weights, Split.whole(count), x, pick(num_tokens, count, min(8, count)), inner)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * float(theirs.abs().max()))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_without_a_gate(dtype: torch.dtype, quantization: Quantization | None) -> None:
    gate_up = [make_matmul(w, None, quantization) for w in random(5, INNER, HIDDEN, dtype=dtype).mul_(HIDDEN**-0.5)]
    weights, sizes = (
        (gate_up, make(5, dtype, quantization)[1]),
        ExpertSizes(Split.whole(5), INNER, "relu2", gated=False),
    )
    native, x, chosen = make_expert_matmul(*weights, sizes), random(33, HIDDEN, dtype=dtype), pick(33, 5, 3)
    assert isinstance(native, NativeExperts)
    ours, theirs = torch.full_like(x, torch.nan), torch.empty_like(x)
    native.forward(x, chosen, ours)
    LoopedExperts(*weights, sizes).forward(x, chosen, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * float(theirs.abs().max()))


@pytest.mark.parametrize("experts", [[0, 0, 0], [4, 2, 4]])
def test_all_tokens_to_one_expert(experts: list[int]) -> None:
    chosen = Chosen(torch.tensor(experts).int()[:, None], random(3, 1))
    ours, theirs = compare(make(5), Split.whole(5), random(3, HIDDEN), chosen)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("held", [Split(7, 0, 4), Split(7, 4, 3), Split(7, 6, 1)])
def test_experts_of_other_ranks_add_nothing(held: Split) -> None:
    gate_up, down = make(7)
    own = gate_up[held.start : held.end], down[held.start : held.end]
    x, chosen = random(9, HIDDEN), pick(9, 7, 2)
    ours, theirs = compare(own, held, x, chosen)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    outside = ((chosen.experts < held.start) | (chosen.experts >= held.end)).all(1)
    assert outside.any()
    assert not ours[outside].any()


@pytest.mark.usefixtures("each_product_isa")
@pytest.mark.parametrize("quantization", [None, "int8", "int4_g32"])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, quantization: Quantization | None) -> None:
    """Neither on threads, nor on the number of rows of its experts, nor on the ends of windows."""
    sizes = ExpertSizes(Split.whole(20), INNER, "silu")
    native = make_expert_matmul(*make(20, dtype, quantization), sizes)
    x, chosen = random(300, HIDDEN, dtype=dtype), pick(300, 20, 8)
    together = torch.empty_like(x)
    cpu.set_num_threads(2)
    native.forward(x, chosen, together)
    cpu.set_num_threads(1)
    for row in (0, 17, 299):
        own = slice(row, row + 1)
        alone = torch.empty_like(x[own])
        native.forward(x[own], Chosen(chosen.experts[own], chosen.weights[own]), alone)
        assert torch.equal(alone, together[own])


def test_the_output_may_be_the_input() -> None:
    weights, x, chosen = make(5), random(6, HIDDEN), pick(6, 5, 3)
    expected, _ = compare(weights, Split.whole(5), x, chosen)
    rows = torch.full((6, HIDDEN + 5), 7.0)  # with a gap after each
    rows[:, :HIDDEN] = x
    make_expert_matmul(*weights, ExpertSizes(Split.whole(5), INNER, "silu")).forward(
        rows[:, :HIDDEN], chosen, rows[:, :HIDDEN]
    )
    assert torch.equal(rows[:, :HIDDEN], expected)
    assert (rows[:, HIDDEN:] == 7).all()


def packed(weights: tuple[list[Matmul], list[Matmul]], first: int = 0) -> PackedExperts:
    gate_up: Any
    down: Any
    gate_up, down = weights
    return PackedExperts([each.packed for each in gate_up], [each.packed for each in down], first, "silu")


def test_a_recorded_call_reads_its_choices_when_it_runs() -> None:
    weights, x, chosen = make(5), random(4, HIDDEN), pick(4, 5, 2)
    out, experts, program = torch.zeros(4, HIDDEN), packed(weights), Program()
    program.record(lambda: experts.forward(x, chosen, out))
    for shift in (0, 1):
        chosen.experts.copy_((pick(4, 5, 2).experts + shift) % 5)
        program.replay()
        assert torch.equal(out, compare(weights, Split.whole(5), x, chosen)[0])


@pytest.mark.parametrize(
    ("x", "chosen", "message"),
    [
        (torch.zeros(2, HIDDEN + 1), pick(2, 5, 2), "with 96 elements"),
        (torch.zeros(3, HIDDEN), pick(2, 5, 2), "2 choices"),
        (torch.zeros(2, HIDDEN, dtype=torch.float64), pick(2, 5, 2), "float64"),
        (torch.zeros(2, HIDDEN), Chosen(*(part.t().contiguous().t() for part in pick(2, 5, 2))), "contiguous"),
    ],
)
def test_other_tensors_are_refused(x: torch.Tensor, chosen: Chosen, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed(make(5)).forward(x, chosen, torch.empty_like(x))


def grouped(weights: list[Matmul], values: torch.Tensor) -> list[Matmul]:
    """Codes with zero points and columns in an order of their own, of the shapes of these."""
    made, cpu_device = [], torch.device("cpu")
    for number, each in enumerate(weights):
        assert isinstance(each, NativeMatmul)
        shape = each.packed.num_outputs, each.packed.num_inputs
        generator = torch.Generator().manual_seed(number)
        codes = torch.randint(len(values), shape, generator=generator, dtype=torch.uint8)
        scales = (torch.rand(shape[0], -(-shape[1] // 32), generator=generator) + 1) / 64
        order = torch.randperm(shape[1], generator=generator)
        weight = GroupedWeight(codes, values, scales, 32, (7 + number) * scales, order)
        made.append(make_grouped_matmul(weight, None, torch.float32, cpu_device))
    return made


@pytest.mark.parametrize("values", [UINT4, UINT8])
@pytest.mark.usefixtures("each_product_isa", "two_threads")
def test_experts_with_zero_points_and_columns_in_any_order(values: torch.Tensor) -> None:
    gate_up, down = make(5)
    for num_tokens in (1, 40):
        x, chosen = random(num_tokens, HIDDEN), pick(num_tokens, 5, 3)
        ours, theirs = compare((grouped(gate_up, values), grouped(down, values)), Split.whole(5), x, chosen)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_experts_of_several_kinds_are_computed_one_by_one() -> None:
    """Rows can be prepared once only for experts of one kind."""
    gate_up, down = make(4)
    for other in (make(4, quantization="int8"), make(4, quantization="int4"), (grouped(gate_up, UINT4), down)):
        mixed = [*gate_up[:2], *other[0][2:]]
        assert isinstance(make_expert_matmul(mixed, down, ExpertSizes(Split.whole(4), INNER, "silu")), LoopedExperts)
        with pytest.raises(ValueError, match="weights of one kind"):
            packed((mixed, down))


def test_experts_must_have_one_shape() -> None:
    gate_up, down = make(2)
    with pytest.raises(ValueError, match="one shape"):
        packed((gate_up, [down[0], make_matmul(random(HIDDEN, INNER + 1))]))
    with pytest.raises(ValueError, match="is not a gated MLP"):
        packed((down, gate_up))


# ---- routing


def routed(logits: torch.Tensor, routing: Routing) -> tuple[Chosen, Chosen]:
    """Route by the kernel and by plain torch."""
    shape = len(logits), routing.spec.experts_per_token
    ours, theirs = (Chosen(torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape)) for _ in range(2))
    CpuOps().route(logits, routing, ours)
    choose(logits, routing, theirs)
    return ours, theirs


@settings(max_examples=examples(150))
@given(
    routing_rules(7, may_have_factors=True), st.integers(0, 2**31), st.integers(1, 9), st.sampled_from([0.0, 0.5, 4.0])
)
def test_routing_agrees_with_plain_torch(spec: RoutingSpec, seed: int, num_tokens: int, scale: float) -> None:
    """With scale 0 all scores are equal: the first of them are chosen."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(num_tokens, spec.num_experts, generator=generator)
    bias = torch.randn(spec.num_experts, generator=generator).round() if spec.choice_bias else None
    factors = torch.rand(spec.num_experts, generator=generator) + 0.5 if spec.expert_factors else None
    ours, theirs = routed(logits, Routing(spec, bias, factors))
    assert torch.equal(ours.experts, theirs.experts)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_every_choice_is_an_expert(value: float) -> None:
    logits = random(3, 12)
    logits[0], logits[1, ::2], logits[2, 3] = value, value, value
    for groups in (1, 3):
        spec = RoutingSpec(12, 4, scoring="sigmoid", num_groups=groups, groups_per_token=(groups + 1) // 2)
        ours, _ = routed(logits, Routing(spec, None))
        assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in ours.experts.tolist())


def test_a_router_follows_a_new_bias() -> None:
    ops, logits, spec = CpuOps(), torch.zeros(1, 4), RoutingSpec(4, 1, choice_bias=True)
    chosen = Chosen(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1))
    for expert in (2, 3):
        ops.route(logits, Routing(spec, torch.eye(4)[expert]), chosen)
        assert chosen.experts.item() == expert


@pytest.mark.usefixtures("each_product_isa")
def test_gated_sums(dtype: torch.dtype) -> None:
    for size in (1, 19, 96):
        x, added = random(3, size, dtype=dtype), random(3, size + 1, dtype=dtype)[:, :size]
        gates = torch.tensor([[-200.0], [0.3], [90.0]])
        expected = (x.double() + gates.double().sigmoid() * added.double()).to(dtype)
        CpuOps().add_gated(x, added, gates)
        torch.testing.assert_close(x, expected, rtol=TOLERANCE[dtype], atol=1e-6)
