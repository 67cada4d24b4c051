"""A layer's experts on a CPU as one native operation, in every form of their weights.

A step reads the experts that its tokens chose, so with few tokens the speed of memory is the limit, with which the
kernels are compared. Choices change from call to call, and there are so many layers that no cache holds the experts of
the next call.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch

from micro.kernels_timing import Row, best_times, clock_for, name_of, read_bandwidth_gb_s
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.kernels.gguf_blocks import BlockRows
from vllm_lite.kernels.grouped import E2M1, GroupedWeight
from vllm_lite.kernels.routing import Chosen
from vllm_lite.layers.moe.expert_matmul import ExpertMatmul, ExpertSizes
from vllm_lite.layers.moe.experts import make_expert_matmul
from vllm_lite.layers.quantized.mxfp4 import BLOCK
from vllm_lite.layers.weights.matmul import Matmul, NativeMatmul, make_matmul

LEAST_BYTES = 600 << 20
"""Minimum bytes of all experts together: more than a large cache holds."""
NUM_TOKENS = (1, 8, 32)
Form = Quantization | Literal["mxfp4", "q4_k"] | None
"""Ways to store weights. gpt-oss has experts in MXFP4, GGUF files in Q4_K; dense weights are never converted to these
two."""
FORMS: tuple[Form, ...] = (None, "int8", "fp8", "int4", "int4_g32", "mxfp4", "q4_k")
Q4_K_INPUTS, Q4_K_BYTES = 256, 144  # inputs and bytes of a block
MIN_TIME_S = 0.3  # for each form and number of tokens


class Shape(NamedTuple):
    """Sizes of a layer of experts, by default those of Qwen3-30B-A3B."""

    hidden: int = 2048
    inner: int = 768
    num_experts: int = 128
    top: int = 8


QWEN3_30B = Shape()


class ExpertsCase(NamedTuple):
    """The experts of several layers, as if they were one layer's."""

    experts: ExpertMatmul
    expert_bytes: int
    num_layers: int


def measure(
    num_threads: int,
    dtype: torch.dtype = torch.bfloat16,
    forms: Sequence[Form] = FORMS,
    shape: Shape = QWEN3_30B,
) -> Iterator[Row]:
    """Measure each form. `gb_s` is the speed at which the weights of the chosen experts are read, `limit` the speed at
    which the same number of threads reads memory."""
    limit = read_bandwidth_gb_s(num_threads, LEAST_BYTES)
    both, down = torch.randn(2 * shape.inner, shape.hidden).to(dtype), torch.randn(shape.hidden, shape.inner).to(dtype)
    for form in forms:
        case = _case(both, down, form, shape)
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, shape.hidden).to(dtype)
            out, choices = torch.empty_like(x), _choices(num_tokens, shape, case.num_layers)
            calls = [partial(_pass, case, x, choices, out)]
            (seconds,) = best_times(clock_for(num_threads), calls, MIN_TIME_S)
            num_bytes = sum(len(chosen.experts.unique()) for chosen in choices) * case.expert_bytes
            speed = num_bytes / seconds / 1e9
            yield {
                "kernel": f"experts {form or name_of(dtype)}, rows {name_of(dtype)}, threads: {num_threads}",
                "shape": f"{num_tokens} x {shape.hidden} x {shape.inner}, {shape.top} of {shape.num_experts}",
                "us": seconds / len(choices) * 1e6,
                "gb_s": speed,
                "limit": limit,
                "share": speed / limit,
            }


def _case(both: torch.Tensor, down: torch.Tensor, form: Form, shape: Shape) -> ExpertsCase:
    """Experts with equal weights, each in separate memory."""
    first = _matmul(both, form), _matmul(down, form)
    expert_bytes = sum(part.packed.num_bytes for part in first if isinstance(part, NativeMatmul))
    num_layers = max(1, -(-LEAST_BYTES // (expert_bytes * shape.num_experts)))
    count = num_layers * shape.num_experts
    gate_up, downs = (
        [part, *(_matmul(weight, form) for _ in range(count - 1))]
        for part, weight in zip(first, (both, down), strict=True)
    )
    sizes = ExpertSizes(Split.whole(count), shape.inner, "silu")
    return ExpertsCase(make_expert_matmul(gate_up, downs, sizes), expert_bytes, num_layers)


def _matmul(weight: torch.Tensor, form: Form) -> Matmul:
    rows, inputs = weight.shape
    if form == "q4_k":
        blocks = torch.zeros(rows, inputs // Q4_K_INPUTS * Q4_K_BYTES, dtype=torch.uint8)
        return NativeMatmul(PackedWeight(BlockRows("Q4_K", blocks)))
    if form != "mxfp4":
        return make_matmul(weight.clone(), None, form)
    codes = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8)
    scales = torch.full((rows, inputs // BLOCK), inputs**-0.5)
    return NativeMatmul(PackedWeight(GroupedWeight(codes, E2M1, scales.log2().round().exp2(), BLOCK)))


def _choices(num_tokens: int, shape: Shape, num_layers: int) -> list[Chosen]:
    """Choices of experts for several steps, layer by layer. Each token chooses all experts of a layer once before any
    of them again."""
    weights, steps = torch.full((num_tokens, shape.top), 1 / shape.top), shape.num_experts // shape.top
    order = torch.stack([torch.randperm(shape.num_experts) for _ in range(num_tokens)]).int()
    return [
        Chosen((order.roll(-step * shape.top, 1)[:, : shape.top] + layer * shape.num_experts).contiguous(), weights)
        for step in range(steps)
        for layer in range(num_layers)
    ]


def _pass(case: ExpertsCase, x: torch.Tensor, choices: list[Chosen], out: torch.Tensor) -> None:
    for chosen in choices:
        case.experts.forward(x, chosen, out)
