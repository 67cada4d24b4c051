"""Part of `gpu_check_bench`: a layer of experts by kernels of ours, by torch's grouped product, and by a loop."""

from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_check_parts import emit

from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe.experts import FOR_MANY, StackedExperts, Stacks
from vllm_lite.kernels.cuda.moe.torch_products import for_weights
from vllm_lite.kernels.routing import Chosen

LOOP = "experts, loop"


class Layer(NamedTuple):
    """The experts of Qwen3-30B-A3B's layers."""

    num_experts: int = 128
    top: int = 8
    hidden: int = 2048
    inner: int = 768

    def __str__(self) -> str:
        return f"{self.num_experts} experts top {self.top} of {self.hidden}/{self.inner}"


class Problem(NamedTuple):
    """Rows of a step, and several choices of experts, so that no cache holds the weights of the next launch."""

    x: torch.Tensor
    out: torch.Tensor
    choices: list[Chosen]

    def num_bytes(self, stacks: Stacks) -> float:
        """The weights of all experts that a step has chosen, read once, on average over the choices."""
        each = (stacks.gate_up[0].nbytes + stacks.down[0].nbytes) / len(self.choices)
        return sum(each * len(chosen.experts.unique()) for chosen in self.choices)


def problem(layer: Layer, rows: int, device: torch.device) -> Problem:
    x = torch.randn(rows, layer.hidden, dtype=torch.bfloat16, device=device)
    choices = []
    for _ in range(4):
        experts = torch.rand(rows, layer.num_experts, device=device).argsort(1)[:, : layer.top]
        choices.append(Chosen(experts.int().contiguous(), torch.rand(rows, layer.top, device=device)))
    return Problem(x, torch.empty_like(x), choices)


def looped(stacks: Stacks) -> Any:
    """The loop over experts that other devices have; None where it needs packages that are missing."""
    try:
        from vllm_lite.checkpoint.shard import Split
        from vllm_lite.layers.moe.expert_matmul import ExpertSizes, LoopedExperts
        from vllm_lite.layers.weights.matmul import DenseMatmul
    except ModuleNotFoundError:
        return None
    gate_up, down = ([DenseMatmul(weight, None) for weight in stack] for stack in stacks[:2])
    return LoopedExperts(gate_up, down, ExpertSizes(Split.whole(len(stacks.down)), stacks.down.shape[2], "silu"))


def measure(bench: Any, launcher: Launcher, device: torch.device) -> None:
    """Report each way for several numbers of rows: bytes a second, of the weights that have to be read, and products.

    `bench` is a Bench of gpu_check_bench.
    """
    layer = Layer(8, 2, 64, 32) if bench.small else Layer()
    gate_up = torch.empty(layer.num_experts, 2 * layer.inner, layer.hidden, dtype=torch.bfloat16, device=device)
    down = torch.empty(layer.num_experts, layer.hidden, layer.inner, dtype=torch.bfloat16, device=device)
    stacks = Stacks(gate_up.normal_(std=layer.hidden**-0.5), down.normal_(std=layer.inner**-0.5))
    for rows in (3,) if bench.small else (1, 8, 32, 128, 512, 2048, 8192):
        given, flops = problem(layer, rows, device), 6 * rows * layer.top * layer.hidden * layer.inner
        for name, way in ways(launcher, stacks, rows * layer.top).items():
            launch = partial(_launch, way, given)
            if name == LOOP:
                seconds = bench.timer.eager_seconds(launch)
            else:
                seconds = bench.timer.seconds(launch, len(given.choices))
            bench.bytes_row(name, f"{rows} rows, {layer}", seconds, given.num_bytes(stacks))
            rate = flops / seconds / 1e12
            emit(fact={f"{name}, {rows} rows, TFLOP/s": round(rate, 2)}, say=f"{name}: {rate:.1f} TFLOP/s")


def ways(launcher: Launcher, stacks: Stacks, num_pairs: int) -> dict[str, Any]:
    """What can compute a step of so many pairs of tokens and experts."""
    found: dict[str, Any] = {"experts": StackedExperts(launcher, stacks, 0, "silu")}
    grouped = for_weights(launcher, stacks)
    if grouped is not None and num_pairs >= FOR_MANY * len(stacks.down):
        found["experts, torch grouped_mm"] = StackedExperts(launcher, stacks, 0, "silu", grouped)
    if (loop := looped(stacks)) is not None:
        found[LOOP] = loop
    return found


def _launch(way: Any, given: Problem, which: int) -> None:
    way.forward(given.x, given.choices[which % len(given.choices)], given.out)
