"""Part of `gpu_check_bench`: a layer of experts with our kernels, with torch's grouped product, and with a loop; and a
layer whose weights stay packed."""

from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_check_parts import emit

from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe.experts import FOR_MANY, StackedExperts, Stacks
from vllm_lite.kernels.cuda.moe.packed_experts import GpuPackedExperts, PackedStacks
from vllm_lite.kernels.cuda.moe.packed_stack import PackedStack
from vllm_lite.kernels.cuda.moe.torch_products import for_weights
from vllm_lite.kernels.cuda.weights.packed_weight import OUTPUTS, TILE, TILE_BYTES
from vllm_lite.kernels.routing import Chosen

LOOP = "experts, loop"


class Layer(NamedTuple):
    """Sizes of a layer, by default those of Qwen3-30B-A3B."""

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

    def num_bytes(self, expert_bytes: float) -> float:
        """Bytes of the weights of all experts that a step chooses, on average over the choices."""
        return sum(expert_bytes * len(chosen.experts.unique()) for chosen in self.choices) / len(self.choices)


def problem(layer: Layer, rows: int, device: torch.device) -> Problem:
    x = torch.randn(rows, layer.hidden, dtype=torch.bfloat16, device=device)
    choices = []
    for _ in range(4):
        experts = torch.rand(rows, layer.num_experts, device=device).argsort(1)[:, : layer.top]
        choices.append(Chosen(experts.int().contiguous(), torch.rand(rows, layer.top, device=device)))
    return Problem(x, torch.empty_like(x), choices)


def looped(stacks: Stacks) -> Any:
    """The loop over experts that other devices use; None if packages for it are missing."""
    try:
        from vllm_lite.checkpoint.shard import Split
        from vllm_lite.layers.moe.expert_matmul import ExpertSizes, LoopedExperts
        from vllm_lite.layers.weights.matmul import DenseMatmul
    except ModuleNotFoundError:
        return None
    gate_up, down = ([DenseMatmul(weight, None) for weight in stack] for stack in stacks[:2])
    return LoopedExperts(gate_up, down, ExpertSizes(Split.whole(len(stacks.down)), stacks.down.shape[2], "silu"))


def measure(bench: Any, launcher: Launcher, device: torch.device) -> None:
    """Report each way for several numbers of rows: the bytes per second of the weights that must be read, and products
    per second. `bench` is a Bench of gpu_check_bench.
    """
    layer = Layer(8, 2, 64, 32) if bench.small else Layer()
    gate_up = torch.empty(layer.num_experts, 2 * layer.inner, layer.hidden, dtype=torch.bfloat16, device=device)
    down = torch.empty(layer.num_experts, layer.hidden, layer.inner, dtype=torch.bfloat16, device=device)
    stacks = Stacks(gate_up.normal_(std=layer.hidden**-0.5), down.normal_(std=layer.inner**-0.5))
    expert_bytes = gate_up[0].nbytes + down[0].nbytes
    for rows in (3,) if bench.small else (1, 8, 32, 128, 512, 2048, 8192):
        given = problem(layer, rows, device)
        for name, way in ways(launcher, stacks, rows * layer.top).items():
            report(bench, name, way, given, layer, expert_bytes)
    del stacks, gate_up, down
    layer = Layer(8, 2, 64, 32) if bench.small else Layer(128, 4, 2880, 2880)
    packed = mxfp4_experts(launcher, layer, device)
    for rows in (3,) if bench.small else (1, 8, 64, 512, 4096):
        report(
            bench, "MXFP4 experts", packed, problem(layer, rows, device), layer, packed.num_bytes / layer.num_experts
        )


def report(bench: Any, name: str, way: Any, given: Problem, layer: Layer, expert_bytes: float) -> None:
    """Report one way with one number of rows."""
    rows, launch = len(given.x), partial(_launch, way, given)
    seconds = bench.timer.eager_seconds(launch) if name == LOOP else bench.timer.seconds(launch, len(given.choices))
    bench.bytes_row(name, f"{rows} rows, {layer}", seconds, given.num_bytes(expert_bytes))
    rate = 6 * rows * layer.top * layer.hidden * layer.inner / seconds / 1e12
    emit(fact={f"{name}, {rows} rows, TFLOP/s": round(rate, 2)}, say=f"{name}: {rate:.1f} TFLOP/s")


def mxfp4_experts(launcher: Launcher, layer: Layer, device: torch.device) -> GpuPackedExperts:
    """Experts of random codes, as gpt-oss-120b's layers have them."""
    stacks = []
    for outputs, inputs, in_turn in ((2 * layer.inner, layer.hidden, True), (layer.hidden, layer.inner, False)):
        tiles, chunks, groups = -(-outputs // OUTPUTS) * (OUTPUTS // TILE), -(-inputs // 64), -(-inputs // 64) * 2
        shape = layer.num_experts, tiles, chunks, TILE_BYTES
        codes = torch.randint(256, shape, dtype=torch.uint8, device=device)
        scales = torch.full((layer.num_experts, groups, TILE * tiles, 1), 2.0**-6, dtype=torch.bfloat16, device=device)
        stacks.append(PackedStack((outputs, inputs), codes, scales, 0, "E2M1", "NOTHING", in_turn))
    return GpuPackedExperts(launcher, PackedStacks(stacks[0], stacks[1]), 0, "silu", torch.bfloat16)


def ways(launcher: Launcher, stacks: Stacks, num_pairs: int) -> dict[str, Any]:
    """Ways to compute a step with `num_pairs` pairs of tokens and experts."""
    found: dict[str, Any] = {"experts": StackedExperts(launcher, stacks, 0, "silu")}
    grouped = for_weights(launcher, stacks)
    if grouped is not None and num_pairs >= FOR_MANY * len(stacks.down):
        found["experts, torch grouped_mm"] = StackedExperts(launcher, stacks, 0, "silu", grouped)
    if (loop := looped(stacks)) is not None:
        found[LOOP] = loop
    return found


def _launch(way: Any, given: Problem, which: int) -> None:
    way.forward(given.x, given.choices[which % len(given.choices)], given.out)
