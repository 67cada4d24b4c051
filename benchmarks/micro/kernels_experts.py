"""A layer's experts on a CPU as one native operation, in every form of their weights.

A step reads the experts that its tokens chose, so few tokens run at the speed of memory, and that is the limit that
they are held against. Choices change from call to call, so that no cache holds what the next one reads.
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch

from micro.kernels_timing import Row, best_times, clock_for, name_of, read_bandwidth_gb_s
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.kernels.grouped import E2M1, GroupedWeight
from vllm_lite.kernels.routing import Chosen
from vllm_lite.layers.moe.expert_matmul import ExpertMatmul, ExpertSizes
from vllm_lite.layers.moe.experts import make_expert_matmul
from vllm_lite.layers.quantized.mxfp4 import BLOCK
from vllm_lite.layers.weights.matmul import Matmul, NativeMatmul, make_matmul

NUM_EXPERTS, TOP = 32, 8
HIDDEN, INNER = 2048, 768
"""As of Qwen3-30B-A3B, which has 128 experts."""
NUM_TOKENS = (1, 8, 32)
Form = Quantization | Literal["mxfp4"] | None
MXFP4: Literal["mxfp4"] = "mxfp4"
"""As gpt-oss has its experts; no dense weight becomes it."""
FORMS: tuple[Form, ...] = (None, "int8", "fp8", "int4", "int4_g32", MXFP4)
MIN_TIME_S = 0.3  # for each form and number of tokens


class ExpertsCase(NamedTuple):
    experts: ExpertMatmul
    expert_bytes: int


def measure(num_threads: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """`gb_s` is of the weights of the experts that were chosen, `limit` the speed at which as many threads read."""
    limit = read_bandwidth_gb_s(num_threads)
    both, down = torch.randn(2 * INNER, HIDDEN).to(dtype), torch.randn(HIDDEN, INNER).to(dtype)
    for form in FORMS:
        case = _case(both, down, form)
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, HIDDEN).to(dtype)
            out, choices = torch.empty_like(x), _choices(num_tokens)
            calls = [partial(_pass, case, x, choices, out)]
            (seconds,) = best_times(clock_for(num_threads), calls, MIN_TIME_S)
            num_bytes = sum(len(chosen.experts.unique()) for chosen in choices) * case.expert_bytes
            speed = num_bytes / seconds / 1e9
            yield {
                "kernel": f"experts {form or name_of(dtype)}, rows {name_of(dtype)}, threads: {num_threads}",
                "shape": f"{num_tokens} x {HIDDEN} x {INNER}, {TOP} of {NUM_EXPERTS}",
                "us": seconds / len(choices) * 1e6,
                "gb_s": speed,
                "limit": limit,
                "share": speed / limit,
            }


def _case(both: torch.Tensor, down: torch.Tensor, form: Form) -> ExpertsCase:
    """Experts that are alike, each in memory of its own."""
    gate_up, downs = ([_matmul(weight, form) for _ in range(NUM_EXPERTS)] for weight in (both, down))
    first = (gate_up[0], downs[0])
    expert_bytes = sum(part.packed.num_bytes for part in first if isinstance(part, NativeMatmul))
    sizes = ExpertSizes(Split.whole(NUM_EXPERTS), INNER, "silu")
    return ExpertsCase(make_expert_matmul(gate_up, downs, sizes), expert_bytes)


def _matmul(weight: torch.Tensor, form: Form) -> Matmul:
    if form != "mxfp4":
        return make_matmul(weight.clone(), None, form)
    rows, inputs = weight.shape
    codes = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8)
    scales = torch.full((rows, inputs // BLOCK), inputs**-0.5)
    return NativeMatmul(PackedWeight(GroupedWeight(codes, E2M1, scales.log2().round().exp2(), BLOCK)))


def _choices(num_tokens: int) -> list[Chosen]:
    """Choices for several steps, each with the experts that the one before has left out first."""
    weights, steps = torch.full((num_tokens, TOP), 1 / TOP), NUM_EXPERTS // TOP
    order = torch.stack([torch.randperm(NUM_EXPERTS) for _ in range(num_tokens)]).int()
    return [Chosen(order.roll(-step * TOP, 1)[:, :TOP].contiguous(), weights) for step in range(steps)]


def _pass(case: ExpertsCase, x: torch.Tensor, choices: list[Chosen], out: torch.Tensor) -> None:
    for chosen in choices:
        case.experts.forward(x, chosen, out)
