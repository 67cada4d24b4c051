"""Part of `gpu_check_bench`: recurrent layers over prompts, token by token and in chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from gpu_check_parts import emit

from vllm_lite.kernels.cuda.launcher import Launcher

BY_TOKEN, IN_CHUNKS = "recurrent, by token: ", "recurrent, in chunks: "


class Prompts(NamedTuple):
    """Sequences of a step."""

    batch: int
    rows: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.rows} tokens"


def measure(bench: Any, launcher: Launcher, device: torch.device) -> None:
    """Report both ways for several lengths of prompts, in products per second. For both the products of the
    token-by-token formula are counted. `bench` is a Bench of gpu_check_bench."""
    try:
        from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
        from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
        from vllm_lite.kernels.cuda.recurrent import LaunchedDeltaNet, LaunchedMamba
    except ModuleNotFoundError as error:
        emit(say=f"recurrent layers need {error.name}, which is not installed")
        return
    # the sizes of Qwen3-Next and of Nemotron-H
    delta_net = DeltaNetSpec(1, 1, 128, 128, 4) if bench.small else DeltaNetSpec(16, 32, 128, 128, 4)
    mamba = MambaSpec(1, 64, 128, 4) if bench.small else MambaSpec(128, 64, 128, 4, num_groups=8)
    layers = {
        "delta rule": Layer(LaunchedDeltaNet(delta_net, launcher), delta_net, device),
        "mamba": Layer(LaunchedMamba(mamba, launcher), mamba, device),
    }
    steps = (Prompts(1, 70),) if bench.small else (*(Prompts(1, n) for n in (16, 32, 64, 256, 4096)), Prompts(8, 512))
    for name, layer in layers.items():
        for prompts in steps:
            _measure_one(bench, name, layer, prompts)


class Layer:
    """A layer with random weights and a state for each of some sequences."""

    def __init__(self, op: Any, spec: Any, device: torch.device) -> None:
        from vllm_lite.kernels.delta_rule import DeltaNetWeights
        from vllm_lite.kernels.mamba import MambaWeights

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device)

        self.op, self.spec, self.device = op, spec, device
        self.heads, *matrix = spec.matrix_shape
        self.flops = 6 * self.heads * matrix[0] * matrix[1]
        conv, (decay, bias) = random(spec.conv_size, spec.conv_channels), random(2, self.heads)
        self.weights: Any
        if hasattr(spec, "num_groups"):
            skip = random(self.heads)
            self.weights = MambaWeights(conv, random(spec.conv_channels), decay.exp() / 50, bias, skip)
        else:
            self.weights = DeltaNetWeights(conv, decay.exp() / 50, bias, random(matrix[1]), 1e-6)

    def step(self, prompts: Prompts) -> tuple[Any, ...]:
        """Arguments of `forward`."""
        from vllm_lite.kernels.recurrent import Segments

        batch, rows = prompts
        slots = torch.arange(1, batch + 1, dtype=torch.int32, device=self.device)
        firsts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        segments = Segments(firsts, firsts * rows, torch.zeros_like(slots), slots)
        num_rows, bf16 = batch * rows, torch.bfloat16
        projected = torch.randn(num_rows, self.spec.projected_size, dtype=bf16, device=self.device)
        states = torch.zeros(batch + 1, self.spec.state_elements, device=self.device)
        mixed = torch.empty(num_rows, self.spec.conv_channels, device=self.device)
        out = torch.empty(num_rows, self.spec.value_width, dtype=bf16, device=self.device)
        return projected, self.weights, states, segments, mixed, out


def _measure_one(bench: Any, name: str, layer: Layer, prompts: Prompts) -> None:
    args, against = layer.step(prompts), 0.0
    for way, bound in ((BY_TOKEN, 1 << 30), (IN_CHUNKS, 1)):
        with _chunked_rows(bound):
            seconds = bench.timer.seconds(lambda _: layer.op.forward(*args))
        rate = layer.flops * prompts.batch * prompts.rows / seconds / 1e12
        against = against or rate
        bench.row(f"{way}{name}", prompts, seconds, tflop_s=rate, limit=against, share=rate / against)


@contextmanager
def _chunked_rows(count: int) -> Iterator[None]:
    from vllm_lite.kernels.cuda import recurrent

    kept = recurrent.CHUNKED_ROWS
    recurrent.CHUNKED_ROWS = count
    try:
        yield
    finally:
        recurrent.CHUNKED_ROWS = kept
