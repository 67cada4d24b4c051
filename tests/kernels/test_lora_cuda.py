"""Adapters on CUDA through the emulator, and under a fake of CUDA's capture."""

import numpy as np
import pytest
import torch

from tests.cuda_capture import CapturingLauncher, CudaLikeCapture
from tests.kernels.emulator import EmulatorLauncher
from tests.kernels.fused_cases import draw
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.cuda.weights import lora
from vllm_lite.layers.weights.adapter_rows import LaunchedRows
from vllm_lite.layers.weights.lora import AdapterLimits, LaunchedSlots
from vllm_lite.layers.weights.weight_form import LinearShape

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def test_a_graph_serves_whatever_adapters_a_step_has(launcher: EmulatorLauncher) -> None:
    """Recorded once, when no slot had an adapter: rows, slots and ranks are read by each replay, and so it is behind
    `gather`, which a step that is not recorded calls."""
    shape = LinearShape(Split.whole(64), (Split.whole(48), Split.whole(16)), BF16, CPU)
    rows, capturing = LaunchedRows(2, 12, CPU), CapturingLauncher(launcher)
    slots = LaunchedSlots(AdapterLimits(2, 8), shape, [0, 1], rows, capturing)
    x, out = draw((9, 64), BF16, CPU), torch.zeros(9, 64)
    graph = CudaLikeCapture()(lambda: None, lambda: slots.add(x, out))
    down, up = draw((8, 64), BF16, CPU), [draw((48, 8), BF16, CPU), draw((16, 4), BF16, CPU)]
    slots.put(0, slots.pack([down, None], [up[0], None]))
    slots.put(1, slots.pack([None, down[:4]], [None, up[1]]))
    first, second = (
        x.double() @ down.double().t() @ up[0].double().t(),
        x.double() @ down[:4].double().t() @ up[1].double().t(),
    )
    for chosen in ([0, 1, -1, 0, 0, 1], [1] * 9, [-1] * 9):
        rows.begin_step(np.array(chosen))
        out.zero_()
        graph.replay()
        expected = torch.zeros(9, 64, dtype=torch.float64)
        for row, slot in enumerate(chosen):
            if slot >= 0:
                expected[row] = torch.cat([first[row] * (slot == 0), second[row] * (slot == 1)])
        assert (out - expected).abs().max() < 1e-4
    rows.begin_step(np.array([0, -1, 1, 1, 0]))
    wanted = torch.tensor([4, 1, 3])
    rows.gather(wanted)
    slots.add(x[wanted], kept := torch.zeros(3, 64))
    assert (kept[0, :48] - first[4]).abs().max() < 1e-4
    assert not kept[1].any()
    assert (kept[2, 48:] - second[3]).abs().max() < 1e-4
    slots.put(0, None)
    rows.begin_step(np.array([0, 0]))
    slots.add(x[:2], nothing := torch.zeros(2, 64))
    assert not nothing.any()


def test_tensors_of_other_shapes_are_refused(launcher: EmulatorLauncher) -> None:
    like = torch.empty(0, dtype=BF16)
    with pytest.raises(ValueError, match="matrices must be"):
        lora.LoraStack.empty(1, 4, 8, [8, 8, 8], [0, 0, 1], like)
    stack = lora.LoraStack.empty(1, 4, 8, [8], [0], like)
    groups, hidden = (torch.zeros(2, dtype=torch.int32),) * 2, torch.zeros(2, 4)
    for x, out, scratch, message in (
        (torch.zeros(2, 8), torch.zeros(2, 8), hidden, "x must be"),
        (torch.zeros(2, 8, dtype=BF16), torch.zeros(2, 9), hidden, "out must be"),
        (torch.zeros(2, 8, dtype=BF16), torch.zeros(2, 8), hidden[:1], "hidden must have 2"),
    ):
        with pytest.raises(ValueError, match=message):
            lora.add(launcher, stack, groups, x, out, scratch)
