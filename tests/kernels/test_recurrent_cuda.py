"""Recurrent layers on CUDA through the emulator, and under a fake of CUDA's capture."""

import pytest
import torch

from tests.cuda_capture import CapturingLauncher, CudaLikeCapture
from tests.kernels import recurrent_cases as cases
from tests.kernels.emulator import EmulatorLauncher
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.kernels.cuda.recurrent import LaunchedConvolution, LaunchedDeltaNet, LaunchedMamba
from vllm_lite.kernels.recurrent import Taps

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["delta", "mamba", "conv"])
def test_a_graph_serves_whatever_states_a_step_has(name: str, emulated: EmulatorLauncher) -> None:
    """Recorded for four rows of padding: rows and slots are read by each replay."""
    spec = cases.SPECS[name]
    layer, plain = cases.layer_of(spec, torch.float32)
    op, states = cases.launched(spec, CapturingLauncher(emulated)), layer.states.clone()
    projected, mixed = layer.projected[:4].clone(), torch.zeros(4, layer.scratch)
    out, of = torch.zeros(4, layer.width), cases.segments([*range(5)], [*range(5)], [0] * 4, [0] * 4)
    graph = CudaLikeCapture()(lambda: None, lambda: op.forward(projected, layer.weights, states, of, mixed, out))
    for first, sources, targets in ((4, [1, 2, 0, 0], [1, 5, 3, 0]), (8, [5, 3, 1, 0], [5, 3, 6, 0])):
        projected.copy_(layer.projected[first : first + 4])
        of.sources.copy_(torch.tensor(sources))
        of.targets.copy_(torch.tensor(targets))
        wanted, wanted_states = torch.zeros_like(out), states.clone()
        plain.forward(projected, layer.weights, wanted_states, of, torch.zeros_like(mixed), wanted)
        graph.replay()
        torch.testing.assert_close(out, wanted, atol=5e-4, rtol=5e-4)
        torch.testing.assert_close(states, wanted_states, atol=5e-4, rtol=5e-4)


def test_unsupported_sizes_and_shapes_are_refused(emulated: EmulatorLauncher) -> None:
    assert not LaunchedDeltaNet.supports(DeltaNetSpec(1, 1, 129, 64, 4), torch.float32)
    assert not LaunchedDeltaNet.supports(DeltaNetSpec(1, 1, 64, 64, 9), torch.float32)
    assert not LaunchedMamba.supports(MambaSpec(1, 128, 256, 4), torch.float32)
    assert not LaunchedMamba.supports(MambaSpec(1, 64, 128, 4), torch.float64)
    convolution, of = LaunchedConvolution(emulated), cases.segments([0, 1], [0, 2], [0], [1])
    x, taps, kept = torch.zeros(2, 8), Taps(torch.zeros(3, 8)), torch.zeros(4, 2, 8)
    for own_x, own_kept, out, message in (
        (torch.zeros(2, 7), kept, x.clone(), "x and its gates must be"),
        (x, torch.zeros(4, 2, 9)[..., :8], x.clone(), "a slot must be contiguous"),
        (x, kept, torch.zeros(2, 8, dtype=torch.float16), "out must be"),
    ):
        with pytest.raises(ValueError, match=message):
            convolution(own_x, None, taps, own_kept, of, out)
    spec = cases.SPECS["delta"]
    layer, op = cases.layer_of(spec, torch.float32)[0], cases.launched(spec, emulated)
    states, out, scratch = layer.states.clone(), torch.zeros(24, layer.width), torch.zeros(24, layer.scratch + 1)
    with pytest.raises(ValueError, match=r"mixed must be .* with nothing between its rows"):
        op.scan_all(
            op.split_projected(layer.projected), layer.weights, states, cases.ALONE, scratch[:, : layer.scratch], out
        )
