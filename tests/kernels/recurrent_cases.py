"""Cases of the kernels of recurrent layers, as named functions of a launcher and a device; no pytest in here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.kernels.cases import Case
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.recurrent import LaunchedConvolution, LaunchedDeltaNet, LaunchedMamba
from vllm_lite.kernels.delta_rule import DeltaNetOp, DeltaNetWeights
from vllm_lite.kernels.mamba import MambaOp, MambaWeights
from vllm_lite.kernels.recurrent import Segments
from vllm_lite.kernels.short_conv import ConvolvedOp, ShortConvOp

NUM_ROWS, NUM_SLOTS = 24, 10


def segments(firsts: list[int], rows: list[int], sources: list[int], targets: list[int]) -> Segments:
    return Segments(*(torch.tensor(part, dtype=torch.int32) for part in (firsts, rows, sources, targets)))


ALONE = segments([0, 1], [0, 24], [0], [3])
CUT = segments([0, 4], [0, 1, 20, 24, 24], [0, 5, 6, 7], [5, 6, 7, 3])
"""The same rows: a step in which a state is saved at 1, 20 and 24."""
MIXED = segments([0, 1, 2, 3, 5], [0, 1, 2, 3, 5, 24], [1, 2, 0, 4, 8], [1, 9, 0, 8, 4])
"""A decode that updates its state in place, one that writes it to another slot, padding, and a prompt that saves a
state."""


class Layer(NamedTuple):
    """Random projections, weights and states of one layer."""

    projected: torch.Tensor
    weights: Any
    states: torch.Tensor
    scratch: int
    width: int

    def run(self, op: Any, of: Segments, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the rows, and the states after the step. Rows and states are views of wider tensors."""
        states = torch.full((NUM_SLOTS, 2 * self.states.shape[1]), torch.nan, device=device)[:, self.states.shape[1] :]
        states.copy_(self.states)
        num_rows, size = self.projected.shape
        rows = torch.full((num_rows, size + 5), torch.nan, dtype=self.projected.dtype, device=device)
        rows[:, 5:] = self.projected
        out = torch.zeros(num_rows, self.width + 3, dtype=self.projected.dtype, device=device)[:, : self.width]
        mixed = torch.full((num_rows, self.scratch), torch.nan, device=device)
        weights = _to(self.weights, device)
        op.forward(rows[:, 5:], weights, states, Segments(*(part.to(device) for part in of)), mixed, out)
        return out.float().cpu(), states.cpu()


def _to(weights: Any, device: torch.device) -> Any:
    if isinstance(weights, torch.Tensor):
        return weights.to(device)
    return weights._make(part.to(device) if isinstance(part, torch.Tensor) else part for part in weights)


def delta_layer(spec: DeltaNetSpec, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> Layer:
    values, heads = _values(), spec.num_value_heads
    weights = DeltaNetWeights(
        values(spec.conv_size, spec.conv_channels), values(heads).exp(), values(heads), values(spec.value_size), 1e-6
    )
    states = values(NUM_SLOTS, spec.state_elements)
    projected = values(num_rows, spec.projected_size).to(dtype)
    return Layer(projected, weights, states, spec.conv_channels, spec.value_width)


def mamba_layer(spec: MambaSpec, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> Layer:
    values, heads = _values(), spec.num_heads
    conv, bias = values(spec.conv_size, spec.conv_channels), values(spec.conv_channels)
    weights = MambaWeights(conv, bias, values(heads).exp(), values(heads), values(heads))
    states = values(NUM_SLOTS, spec.state_elements)
    projected = values(num_rows, spec.projected_size).to(dtype)
    return Layer(projected, weights, states, spec.conv_channels, spec.value_width)


def conv_layer(spec: ShortConvSpec, dtype: torch.dtype) -> Layer:
    values = _values()
    projected, weight = values(NUM_ROWS, spec.projected_size).to(dtype), values(spec.conv_size, spec.channels)
    return Layer(projected, weight, values(NUM_SLOTS, spec.state_elements), 0, spec.channels)


def _values() -> Callable[..., torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=random)


def launched(spec: DeltaNetSpec | MambaSpec | ShortConvSpec, launcher: Launcher) -> Any:
    if isinstance(spec, DeltaNetSpec):
        return LaunchedDeltaNet(spec, launcher)
    if isinstance(spec, MambaSpec):
        return LaunchedMamba(spec, launcher)
    return ConvolvedOp(spec, LaunchedConvolution(launcher))


def layer_of(spec: DeltaNetSpec | MambaSpec | ShortConvSpec, dtype: torch.dtype) -> tuple[Layer, Any]:
    """A layer, and the operation that computes it in plain torch."""
    if isinstance(spec, DeltaNetSpec):
        return delta_layer(spec, dtype), DeltaNetOp(spec)
    if isinstance(spec, MambaSpec):
        return mamba_layer(spec, dtype), MambaOp(spec)
    return conv_layer(spec, dtype), ShortConvOp(spec)


def like_torch(
    spec: DeltaNetSpec | MambaSpec | ShortConvSpec, of: Segments, dtype: torch.dtype = torch.float32
) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        layer, plain = layer_of(spec, dtype)
        wanted, wanted_states = layer.run(plain, of, torch.device("cpu"))
        out, states = layer.run(launched(spec, launcher), of, device)
        tolerance = 5e-4 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(states, wanted_states, atol=5e-4, rtol=5e-4)

    return run


def same_bits(spec: DeltaNetSpec | MambaSpec | ShortConvSpec) -> Case:
    """The bits are the same however a prompt is divided."""

    def run(launcher: Launcher, device: torch.device) -> None:
        layer, op = layer_of(spec, torch.float32)[0], launched(spec, launcher)
        (out, states), (cut_out, cut_states) = (layer.run(op, of, device) for of in (ALONE, CUT))
        assert torch.equal(out, cut_out)
        assert torch.equal(states[3], cut_states[3])
        assert torch.equal(cut_states[7], cut_states[3]), "a segment without rows copies the state"

    return run


SPECS: dict[str, DeltaNetSpec | MambaSpec | ShortConvSpec] = {
    "delta": DeltaNetSpec(1, 3, 24, 20, 3),
    "delta_small": DeltaNetSpec(2, 4, 7, 37, 2),
    "mamba": MambaSpec(2, 41, 23, 3, (0.1, 0.8)),
    "mamba_small": MambaSpec(1, 5, 6, 2),
    "mamba_groups": MambaSpec(4, 20, 24, 3, num_groups=2),
    "conv": ShortConvSpec(200, 3),
}
LARGE: dict[str, DeltaNetSpec | MambaSpec | ShortConvSpec] = {
    "delta_large": DeltaNetSpec(1, 2, 128, 128, 4),
    "mamba_large": MambaSpec(2, 64, 128, 4),
}
CASES: list[tuple[str, Case]] = [
    *((f"{name}_mixed", like_torch(spec, MIXED)) for name, spec in (SPECS | LARGE).items()),
    *((f"{name}_alone", like_torch(spec, ALONE)) for name, spec in SPECS.items()),
    *((f"{name}_bits", same_bits(spec)) for name, spec in SPECS.items()),
    *((f"{name}_bfloat16", like_torch(SPECS[name], MIXED, torch.bfloat16)) for name in ("delta", "mamba", "conv")),
    *((f"{name}_half", like_torch(SPECS[name], MIXED, torch.float16)) for name in ("delta", "mamba", "conv")),
]
