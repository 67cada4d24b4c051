"""Cases of a layer's experts, as named functions of a launcher and a device, without pytest."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, relu, silu

from tests.kernels.cases import Case
from tests.kernels.fused_cases import assert_rounded, draw, with_gaps
from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe.experts import FOR_MANY, StackedExperts, Stacks, TileProducts
from vllm_lite.kernels.cuda.moe.sorted_experts import MAX_PAIRS, Sorted
from vllm_lite.kernels.cuda.moe.torch_products import TorchProducts
from vllm_lite.kernels.routing import Chosen

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Maximum error relative to the largest output: values between the products may be rounded up instead of down."""
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


class Sizes(NamedTuple):
    """Sizes of a layer; a rank holds some of its experts."""

    num_experts: int = 5
    top: int = 3
    hidden: int = 80
    inner: int = 40
    first: int = 0
    held: int = 5


def weights(sizes: Sizes, dtype: torch.dtype, device: torch.device, *, biases: bool = False) -> Stacks:
    """Different weights for each of the rank's experts."""
    whole = Stacks(
        draw((sizes.num_experts, 2 * sizes.inner, sizes.hidden), dtype, device, sizes.hidden**-0.5),
        draw((sizes.num_experts, sizes.hidden, sizes.inner), dtype, device, sizes.inner**-0.5),
    )
    if biases:
        shapes = (sizes.num_experts, 2 * sizes.inner), (sizes.num_experts, sizes.hidden)
        whole = Stacks(whole.gate_up, whole.down, *(draw(shape, dtype, device) for shape in shapes))
    held = slice(sizes.first, sizes.first + sizes.held)
    own = [part if part is None else part[held].contiguous() for part in whole[2:]]
    return Stacks(whole.gate_up[held].contiguous(), whole.down[held].contiguous(), *own)


def pick(num_tokens: int, sizes: Sizes, device: torch.device) -> Chosen:
    """Different experts for each token, in any order."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, sizes.num_experts, generator=generator)
    chosen = scores.argsort(1)[:, : sizes.top].int().contiguous()
    return Chosen(chosen.to(device), draw((num_tokens, sizes.top), torch.float32, device).abs())


def expected(x: torch.Tensor, chosen: Chosen, stacks: Stacks, first: int, activation: Activation) -> torch.Tensor:
    """The right output in float64, with the roundings between the products."""
    gate_up, down = (part.double().cpu() for part in stacks[:2])
    on_both, on_down = (
        of_none if bias is None else bias.double().cpu()
        for bias, of_none in zip(stacks[2:], (torch.zeros(gate_up.shape[:2]), torch.zeros(down.shape[:2])), strict=True)
    )
    experts, factors = chosen.experts.cpu() - first, chosen.weights.double().cpu()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double().cpu()):
        for expert, factor in zip(experts[token].tolist(), factors[token], strict=True):
            if 0 <= expert < len(down):
                first_product = (gate_up[expert] @ row + on_both[expert]).to(x.dtype).double()
                gate, up = first_product.chunk(2)
                if activation == "relu2":
                    active = relu(first_product).square()
                elif activation == "swiglu_oai":
                    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                    active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                else:
                    active = ACTIVATIONS[activation](gate).to(x.dtype).double() * up
                out[token] += factor * (down[expert] @ active.to(x.dtype).double() + on_down[expert])
    return out


def check(launcher: Launcher, x: torch.Tensor, chosen: Chosen, stacks: Stacks, first: int = 0) -> torch.Tensor:
    """Run the kernels on x with SiLU, and check the result."""
    out = torch.full_like(x, torch.nan)
    StackedExperts(launcher, stacks, first, "silu").forward(x, chosen, out)
    compare(out, expected(x, chosen, stacks, first, "silu"))
    return out


def compare(out: torch.Tensor, truth: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype] * float(truth.abs().max())
    torch.testing.assert_close(out.double().cpu(), truth, rtol=0, atol=tolerance)


def computes(sizes: Sizes, dtype: torch.dtype, *counts: int) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        stacks = weights(sizes, dtype, device)
        for num_tokens in counts:
            x = draw((num_tokens, sizes.hidden), dtype, device)
            check(launcher, x, pick(num_tokens, sizes, device), stacks, sizes.first)

    return run


def activation(kind: Activation) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        sizes, dtype = Sizes(), torch.bfloat16
        stacks, chosen = weights(sizes, dtype, device), pick(3, sizes, device)
        if kind == "relu2":
            stacks = stacks._replace(gate_up=stacks.gate_up[:, sizes.inner :].contiguous())
        x = draw((3, sizes.hidden), dtype, device, 2.0)
        out = torch.empty_like(x)
        StackedExperts(launcher, stacks, 0, kind).forward(x, chosen, out)
        compare(out, expected(x, chosen, stacks, 0, kind))

    return run


def biases(dtype: torch.dtype, *counts: int) -> Case:
    """gpt-oss's experts in small and in large tiles; some elements exceed the limits of its activation."""

    def run(launcher: Launcher, device: torch.device) -> None:
        sizes = Sizes(num_experts=4, top=2, hidden=40, inner=24, first=1, held=3)
        stacks = weights(sizes, dtype, device, biases=True)
        for num_tokens in counts:
            x, chosen = draw((num_tokens, sizes.hidden), dtype, device, 4.0), pick(num_tokens, sizes, device)
            for own in (stacks, stacks._replace(down_bias=None)):  # which one rank adds
                out = torch.empty_like(x)
                StackedExperts(launcher, own, sizes.first, "swiglu_oai").forward(x, chosen, out)
                compare(out, expected(x, chosen, own, sizes.first, "swiglu_oai"))

    return run


def roundings(dtype: torch.dtype) -> Case:
    """Gate and up are rounded, then the activation, then its product with up. The down projection is the identity."""

    def run(launcher: Launcher, device: torch.device) -> None:
        one = torch.eye(64, dtype=dtype, device=device)
        third = one / 3
        x = draw((9, 64), dtype, device, 2.0)
        out, first = torch.empty_like(x), torch.zeros(9, 1, dtype=torch.int32, device=device)
        experts = StackedExperts(launcher, Stacks(torch.cat((third, third))[None], one[None]), 0, "silu")
        experts.forward(x, Chosen(first, torch.ones(9, 1, device=device)), out)
        both = (x.double() * third[0, 0].double()).to(dtype).double()
        assert_rounded(out, silu(both).to(dtype).double() * both)

    return run


def in_the_order_of_experts(launcher: Launcher, device: torch.device) -> None:
    """The results of two of three experts cancel out. The third one's result remains only if results are added in the
    order of experts."""
    gate_up, down = (part[:1].expand(3, -1, -1).contiguous() for part in weights(Sizes(), F32, device)[:2])
    x = draw((1, Sizes().hidden), F32, device)
    alone, together = torch.empty_like(x), torch.empty_like(x)
    experts = StackedExperts(launcher, Stacks(gate_up, down), 0, "silu")
    for ids, factors, out in (([0], [1.0], alone), ([0, 2, 1], [2.0**27, 1.0, -(2.0**27)], together)):
        chosen = torch.tensor([ids], dtype=torch.int32, device=device), torch.tensor([factors], device=device)
        experts.forward(x, Chosen(*chosen), out)
    assert torch.equal(alone, together)


def one_expert_for_all(dtype: torch.dtype, num_tokens: int) -> Case:
    """All tokens choose the same expert, so it has more rows than the tiles that are computed at once."""

    def run(launcher: Launcher, device: torch.device) -> None:
        sizes = Sizes(top=1)
        stacks, x = weights(sizes, dtype, device), draw((num_tokens, sizes.hidden), dtype, device)
        for expert in (0, 4):
            chosen = Chosen(
                torch.full((num_tokens, 1), expert, dtype=torch.int32, device=device),
                draw((num_tokens, 1), torch.float32, device),
            )
            check(launcher, x, chosen, stacks)

    return run


def others_add_nothing(launcher: Launcher, device: torch.device) -> None:
    """A token whose experts are all on other ranks gets zeros, whatever the memory of its pairs contains."""
    for first, held in ((0, 2), (2, 3), (4, 1)):
        sizes = Sizes(top=2, first=first, held=held)
        stacks, chosen = weights(sizes, torch.bfloat16, device), pick(9, sizes, device)
        out = check(launcher, draw((9, sizes.hidden), torch.bfloat16, device), chosen, stacks, first)
        outside = ((chosen.experts < first) | (chosen.experts >= first + held)).all(1)
        assert not out[outside].any()
    nowhere = Chosen(torch.tensor([[-1, 7], [0, 5]], dtype=torch.int32, device=device), chosen.weights[:2])
    out = check(launcher, draw((2, sizes.hidden), torch.bfloat16, device), nowhere, stacks, 4)
    assert not out.any()


def a_row_by_itself(launcher: Launcher, device: torch.device) -> None:
    """A row's bits do not depend on the other rows: neither on their number, which decides the tiles, nor on their
    experts."""
    sizes, dtype = Sizes(), torch.bfloat16
    experts = StackedExperts(launcher, weights(sizes, dtype, device), 0, "silu")
    x, chosen = draw((60, sizes.hidden), dtype, device), pick(60, sizes, device)
    together = torch.empty_like(x)
    experts.forward(x, chosen, together)
    for own in (slice(0, 1), slice(31, 34), slice(59, 60)):
        alone = torch.empty_like(x[own])
        experts.forward(x[own], Chosen(chosen.experts[own], chosen.weights[own]), alone)
        assert torch.equal(alone, together[own])


def in_place_and_strided(launcher: Launcher, device: torch.device) -> None:
    sizes, dtype = Sizes(), torch.float16
    stacks, chosen = weights(sizes, dtype, device), pick(6, sizes, device)
    x = draw((6, sizes.hidden), dtype, device)
    out = check(launcher, x, chosen, stacks)
    for gap in (8, 3):  # one is a multiple of 16 bytes, one is not
        rows = with_gaps(x, gap)
        StackedExperts(launcher, stacks, 0, "silu").forward(rows, chosen, rows)
        assert torch.equal(rows, out)


def by_torch(launcher: Launcher, device: torch.device) -> None:
    """Large steps use torch's grouped product, which rounds once more. Smaller steps use the kernels and have their
    bits."""
    sizes = Sizes(3, 2, 64, 16, first=1, held=2)
    stacks, num_tokens = weights(sizes, BF16, device), FOR_MANY
    both = StackedExperts(launcher, stacks, 1, "silu", TorchProducts(launcher))
    x, chosen = draw((num_tokens, sizes.hidden), BF16, device), pick(num_tokens, sizes, device)
    ours, theirs, biased_out = check(launcher, x, chosen, stacks, 1), *x.new_full((2, *x.shape), torch.nan)
    both.forward(x, chosen, theirs)
    compare(theirs, expected(x, chosen, stacks, 1, "silu"))
    assert not torch.equal(ours, theirs)
    biased = weights(sizes, BF16, device, biases=True)
    StackedExperts(launcher, biased, 1, "swiglu_oai", TorchProducts(launcher)).forward(x, chosen, biased_out)
    compare(biased_out, expected(x, chosen, biased, 1, "swiglu_oai"))
    few = slice(0, num_tokens - 1)
    both.forward(x[few], Chosen(chosen.experts[few], chosen.weights[few]), theirs[few])
    assert torch.equal(ours[few], theirs[few])


def more_pairs_than_at_once(launcher: Launcher, device: torch.device) -> None:
    """More pairs than are computed at once are computed in parts, with the same bits for each row."""
    sizes = Sizes(1, 1, 8, 8, held=1)
    num_tokens, stacks = 2 * MAX_PAIRS + 3, weights(sizes, BF16, device)
    x, chosen = draw((num_tokens, sizes.hidden), BF16, device), pick(num_tokens, sizes, device)
    out, ends = torch.full_like(x, torch.nan), [0, MAX_PAIRS - 1, MAX_PAIRS, -1]
    seen: list[int] = []

    class Counting(TileProducts):
        def forward(self, x: torch.Tensor, in_order: Sorted, stacks: Stacks, activation: Activation) -> torch.Tensor:
            seen.append(len(in_order.pairs))
            return super().forward(x, in_order, stacks, activation)

    StackedExperts(launcher, stacks, 0, "silu", Counting(launcher)).forward(x, chosen, out)
    assert max(seen) <= MAX_PAIRS, seen
    assert min(seen) > MAX_PAIRS / 2, f"a part is hardly worth reading all weights for: {seen}"
    few = Chosen(*(part[ends] for part in chosen))
    compare(out[ends], expected(x[ends], few, stacks, 0, "silu"))
    assert not out.isnan().any()


def no_tokens(launcher: Launcher, device: torch.device) -> None:
    sizes = Sizes()
    x = torch.empty(0, sizes.hidden, device=device)
    StackedExperts(launcher, weights(sizes, x.dtype, device), 0, "silu").forward(x, pick(0, sizes, device), x)


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES: list[tuple[str, Case]] = [
    ("bfloat16", computes(Sizes(), BF16, 1, 2, 33)),
    ("half", computes(Sizes(), F16, 1, 33)),
    ("float", computes(Sizes(), F32, 1, 5)),
    ("tiles_of_64_rows", computes(Sizes(), BF16, 70)),
    ("tiles_of_64_rows_float", computes(Sizes(num_experts=2, top=2, hidden=24, inner=20, held=2), F32, 70)),
    ("odd_sizes", computes(Sizes(hidden=75, inner=21), BF16, 3, 60)),
    ("odd_sizes_float", computes(Sizes(hidden=37, inner=9), F32, 3)),
    ("many_experts", computes(Sizes(40, 8, 64, 16, held=40), BF16, 12)),
    ("deeper_than_a_ring", computes(Sizes(2, 1, 712, 16, held=2), BF16, 3)),
    ("one_expert", computes(Sizes(1, 1, held=1), BF16, 3)),
    ("one_expert_for_all", one_expert_for_all(BF16, 40)),
    ("one_expert_for_all_in_large_tiles", one_expert_for_all(F16, 300)),
    *((kind, activation(kind)) for kind in ("gelu", "gelu_tanh", "relu", "relu2")),
    ("biases", biases(BF16, 3, 70)),
    ("biases_float", biases(F32, 3)),
    ("roundings_bfloat16", roundings(BF16)),
    ("roundings_half", roundings(F16)),
    ("in_the_order_of_experts", in_the_order_of_experts),
    ("others_add_nothing", others_add_nothing),
    ("a_row_by_itself", a_row_by_itself),
    ("in_place_and_strided", in_place_and_strided),
    ("by_torch", by_torch),
    ("more_pairs_than_at_once", more_pairs_than_at_once),
    ("no_tokens", no_tokens),
]
