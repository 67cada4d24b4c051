"""Cases of a layer's experts whose weights stay packed, as named functions of a launcher and a device.

No pytest in here.
"""

from typing import NamedTuple

import torch

from tests.kernels.cases import Case
from tests.kernels.experts_cases import Sizes, compare, expected, pick
from tests.kernels.fused_cases import draw, with_gaps
from tests.kernels.packed_linear_cases import BF16, CHANNEL, F16, F32, weight
from tests.kernels.packed_linear_cases import Sizes as Matrix
from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe import packed_experts
from vllm_lite.kernels.cuda.moe.experts import FOR_MANY, Stacks
from vllm_lite.kernels.cuda.moe.packed_experts import GpuPackedExperts, PackedStacks
from vllm_lite.kernels.cuda.moe.packed_stack import PackedStack, tiles_in_turn
from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight
from vllm_lite.kernels.grouped import E2M1, E4M3, INT4, INT8, UINT4, GroupedWeight, dequantize
from vllm_lite.kernels.routing import Chosen

SIZES = Sizes(num_experts=5, top=3, hidden=104, inner=80, held=5)
"""Sizes that need padding: 104 inputs are not whole chunks, and 160 and 104 outputs are not multiples of 64."""


class Layer(NamedTuple):
    """The packed weights of a layer's experts, and the same weights dequantized."""

    stacks: PackedStacks
    dense: Stacks

    def experts(self, launcher: Launcher, activation: Activation = "silu", first: int = 0) -> GpuPackedExperts:
        return GpuPackedExperts(launcher, self.stacks, first, activation, self.dense.down.dtype)


def stack(stored: list[GroupedWeight], device: torch.device, *, in_turn: bool = False) -> PackedStack:
    weights = [GpuPackedWeight.of(each, device) for each in stored]
    codes = [tiles_in_turn(each.codes, 0, each.shape[0], 1) if in_turn else each.codes for each in weights]
    return PackedStack.of(torch.stack(codes), weights, in_turn=in_turn)


def layer(
    device: torch.device,
    dtype: torch.dtype,
    values: torch.Tensor,
    group_size: int,
    less: str = "nothing",
    sizes: Sizes = SIZES,
    *,
    gated: bool = True,
    biases: bool = False,
    scale: torch.dtype = F16,
) -> Layer:
    """No two experts are alike."""

    def matrices(outputs: int, inputs: int) -> list[GroupedWeight]:
        found = []
        for index in range(sizes.held):
            stored = weight(values, group_size, less, Matrix(outputs, inputs), scale)
            by = 2.0 ** (-3 - index % 2)  # exact in any type of scales
            minima = None if stored.minima is None else (stored.minima * by).roll(index, 0)
            codes, scales = stored.codes.roll(index, 0), (stored.scales * by).roll(index, 0)
            found.append(stored._replace(codes=codes, scales=scales, minima=minima))
        return found

    both, down = matrices((1 + gated) * sizes.inner, sizes.hidden), matrices(sizes.hidden, sizes.inner)
    shapes = ((sizes.held, 2 * sizes.inner), (sizes.held, sizes.hidden)) if biases else ()
    added = [draw(shape, dtype, device) for shape in shapes]
    packed = PackedStacks(stack(both, device, in_turn=gated), stack(down, device), *added)
    dense = (torch.stack([dequantize(each) for each in part]) for part in (both, down))
    return Layer(packed, Stacks(*(each.to(device, dtype) for each in dense), *added))


def exact(layer: Layer, x: torch.Tensor, chosen: Chosen, first: int, activation: Activation) -> torch.Tensor:
    return expected(x, chosen, layer.dense, first, activation)


def computes(
    values: torch.Tensor,
    group_size: int,
    less: str = "nothing",
    dtype: torch.dtype = BF16,
    counts: tuple[int, ...] = (1, 7),
    scale: torch.dtype = F16,
) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        own = layer(device, dtype, values, group_size, less, scale=scale)
        for num_tokens in counts:
            x, chosen = draw((num_tokens, SIZES.hidden), dtype, device, 0.3), pick(num_tokens, SIZES, device)
            out = torch.full_like(x, torch.nan)
            own.experts(launcher).forward(x, chosen, out)
            compare(out, exact(own, x, chosen, 0, "silu"))

    return run


def activation(kind: Activation) -> Case:
    """With biases where there is a gate; outputs beyond the limits of gpt-oss's, for any number of rows."""

    def run(launcher: Launcher, device: torch.device) -> None:
        gated = kind != "relu2"
        own = layer(device, BF16, E2M1, 32, gated=gated, biases=gated)
        for num_tokens in (2, 9, 20, 60, FOR_MANY * 2):
            x, chosen = draw((num_tokens, SIZES.hidden), BF16, device), pick(num_tokens, SIZES, device)
            out = torch.full_like(x, torch.nan)
            own.experts(launcher, kind).forward(x, chosen, out)
            compare(out, exact(own, x, chosen, 0, kind))

    return run


def every_code(dtype: torch.dtype) -> Case:
    """Each code of float4, with the smallest scale and others, to the last bit, in the order of the outputs."""

    def run(launcher: Launcher, device: torch.device) -> None:
        codes = (torch.arange(96 * 64).view(96, 64) * 37 % 16).to(torch.uint8)
        scales = torch.exp2(torch.arange(96 * 2).view(96, 2) % 12 - 8.0)
        stored = GroupedWeight(codes, E2M1, scales, 32)
        other = stored._replace(codes=codes.flip(0))
        down = stack([stored._replace(codes=codes[:64, :48], scales=scales[:64])] * 2, device)
        packed = stack([stored, other], device, in_turn=True)
        made = GpuPackedExperts(launcher, PackedStacks(packed, down), 0, "silu", dtype)
        for given in (packed, stack([stored, other], device)):
            wide = made.widen(given, torch.full((3, 96, 64), torch.nan, dtype=dtype, device=device))
            assert torch.equal(wide[0].float().cpu(), dequantize(stored))
            assert torch.equal(wide[1].float().cpu(), dequantize(other))
            assert len(wide) == 2

    return run


def some_experts(launcher: Launcher, device: torch.device) -> None:
    """A rank holds some of many experts, and few of these have rows. Results of other ranks' experts are not added."""
    sizes = Sizes(num_experts=90, top=2, hidden=64, inner=32, first=10, held=70)
    own = layer(device, BF16, INT4, 32, sizes=sizes)
    for num_tokens in (1, 3, 40):
        x, chosen = draw((num_tokens, 64), BF16, device, 0.3), pick(num_tokens, sizes, device)
        out = torch.full_like(x, torch.nan)
        own.experts(launcher, first=10).forward(x, chosen, out)
        compare(out, exact(own, x, chosen, 10, "silu"))
    last = torch.tensor([[79, 9], [80, 0]], dtype=torch.int32, device=device)
    out = torch.full_like(x[:2], torch.nan)
    own.experts(launcher, first=10).forward(x[:2], Chosen(last, chosen.weights[:2]), out)
    compare(out, exact(own, x[:2], Chosen(last, chosen.weights[:2]), 10, "silu"))
    assert not out[1].any()


def a_row_by_itself(launcher: Launcher, device: torch.device) -> None:
    """Its bits depend neither on the other rows nor on their number, which decides tiles and grids."""
    own = layer(device, BF16, E2M1, 32)
    experts, x, chosen = own.experts(launcher), draw((60, SIZES.hidden), BF16, device), pick(60, SIZES, device)
    together = torch.empty_like(x)
    experts.forward(x, chosen, together)
    for part in (slice(0, 1), slice(30, 36), slice(59, 60), slice(20, 45)):
        alone = torch.empty_like(x[part])
        experts.forward(x[part], Chosen(chosen.experts[part], chosen.weights[part]), alone)
        assert torch.equal(alone, together[part]), part


def one_expert_for_all(launcher: Launcher, device: torch.device) -> None:
    """More rows than tiles that are computed at once have; no token chooses the other experts."""
    own = layer(device, F16, E2M1, 32)
    x = draw((40, SIZES.hidden), F16, device, 0.3)
    for expert in (0, 4):
        ids = torch.full((40, 1), expert, dtype=torch.int32, device=device)
        chosen, out = Chosen(ids, draw((40, 1), F32, device)), torch.full_like(x, torch.nan)
        own.experts(launcher).forward(x, chosen, out)
        compare(out, exact(own, x, chosen, 0, "silu"))


def many_rows(launcher: Launcher, device: torch.device) -> None:
    """Some experts after others become numbers, in bounded memory: with any bound the same bits."""
    before, widened = packed_experts.SCRATCH_BYTES, list[int]()
    for values, group_size, less in ((E2M1, 32, "nothing"), (UINT4, 32, "zeros"), (E4M3, CHANNEL, "nothing")):
        own, num_tokens = layer(device, BF16, values, group_size, less, biases=True), FOR_MANY * 2
        x, chosen = draw((num_tokens, SIZES.hidden), BF16, device, 0.3), pick(num_tokens, SIZES, device)

        class Counting(GpuPackedExperts):
            def widen(self, weights: PackedStack, into: torch.Tensor) -> torch.Tensor:
                widened.append(len(into))
                return super().widen(weights, into)

        outs = [torch.full_like(x, torch.nan) for _ in range(3)]
        each = 2 * SIZES.hidden * 3 * SIZES.inner
        try:
            for out, packed_experts.SCRATCH_BYTES in zip(outs, (before, 2 * each, 1), strict=True):
                Counting(launcher, own.stacks, 0, "silu", BF16).forward(x, chosen, out)
        finally:
            packed_experts.SCRATCH_BYTES = before
        assert widened == [5] * 2 + [2] * 6 + [1] * 10
        widened.clear()
        compare(outs[0], exact(own, x, chosen, 0, "silu"))
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


def in_place_and_strided(launcher: Launcher, device: torch.device) -> None:
    own, chosen = layer(device, F16, INT8, 32), pick(6, SIZES, device)
    x, experts = draw((6, SIZES.hidden), F16, device, 0.3), own.experts(launcher)
    out = torch.empty_like(x)
    experts.forward(x, chosen, out)
    for gap in (8, 3):
        rows = with_gaps(x, gap)
        experts.forward(rows, chosen, rows)
        assert torch.equal(rows, out)


def zeros_of_some(launcher: Launcher, device: torch.device) -> None:
    """Some experts have no zero points, or minima where others have zero points, or scales of another type."""
    sizes = Sizes(num_experts=3, top=3, hidden=64, inner=32, held=3)

    def made(kind: str, shape: Matrix) -> GroupedWeight:
        values, scale = INT4 if kind == "nothing" else UINT4, F32 if kind == "minima" else F16
        stored = weight(values, 32, kind, shape, scale)
        return stored._replace(scales=stored.scales / 8, minima=None if stored.minima is None else stored.minima / 8)

    for kinds in (("nothing", "zeros", "nothing"), ("zeros", "minima", "nothing"), ("minima", "minima", "zeros")):
        both, down = ([made(kind, shape) for kind in kinds] for shape in (Matrix(64, 64), Matrix(64, 32)))
        stacks = PackedStacks(stack(both, device, in_turn=True), stack(down, device))
        assert stacks.down.less == ("MINIMA" if "minima" in kinds else "ZEROS")
        dense = (torch.stack([dequantize(each) for each in part]).to(device) for part in (both, down))
        x, chosen = draw((5, 64), BF16, device, 0.3), pick(5, sizes, device)
        out = torch.full_like(x, torch.nan)
        GpuPackedExperts(launcher, stacks, 0, "silu", BF16).forward(x, chosen, out)
        compare(out, expected(x, chosen, Stacks(*dense), 0, "silu"))


def no_tokens(launcher: Launcher, device: torch.device) -> None:
    x = torch.empty(0, SIZES.hidden, dtype=BF16, device=device)
    layer(device, BF16, E2M1, 32).experts(launcher).forward(x, pick(0, SIZES, device), x)


CASES: list[tuple[str, Case]] = [
    ("float4", computes(E2M1, 32, counts=(1, 2, 7, 13, 33))),
    ("float4_half", computes(E2M1, 32, dtype=F16)),
    ("int4_groups_of_128", computes(INT4, 128)),
    ("int4_groups_of_64", computes(INT4, 64, dtype=F16, scale=BF16)),
    ("int4_zeros", computes(UINT4, 32, "zeros")),
    ("int4_minima", computes(UINT4, 32, "minima", scale=F32)),
    ("int8_one_scale", computes(INT8, CHANNEL, scale=F32)),
    ("float8_groups", computes(E4M3, 64, scale=BF16, counts=(1, 33))),
    ("float8_one_scale", computes(E4M3, CHANNEL, scale=F32, dtype=F16)),
    *((kind, activation(kind)) for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai")),
    ("every_code", every_code(BF16)),
    ("every_code_half", every_code(F16)),
    ("some_experts", some_experts),
    ("a_row_by_itself", a_row_by_itself),
    ("one_expert_for_all", one_expert_for_all),
    ("many_rows", many_rows),
    ("in_place_and_strided", in_place_and_strided),
    ("zeros_of_some", zeros_of_some),
    ("no_tokens", no_tokens),
]
