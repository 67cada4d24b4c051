"""Recurrent layers natively and in plain torch: the same states and outputs, however rows are cut into segments."""

from itertools import pairwise

import pytest
import torch

from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.recurrent import NativeDeltaNet, NativeShortConv
from vllm_lite.kernels.delta_rule import DeltaNetOp, DeltaNetWeights, RuleInputs, chunk_rule, step_rule
from vllm_lite.kernels.recurrent import CHUNK, Segments
from vllm_lite.kernels.short_conv import ShortConvOp

NUM_SLOTS = 12
SPECS = [DeltaNetSpec(2, 4, 128, 128, 4), DeltaNetSpec(1, 3, 24, 20, 3), DeltaNetSpec(2, 2, 7, 37, 2)]
native = pytest.mark.skipif(not cpu.available(), reason="no native library")


def int32s(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ALONE = Segments(int32s(0, 1), int32s(0, 70), int32s(0), int32s(3))
CUT = Segments(int32s(0, 4), int32s(0, 1, 40, 70, 70), int32s(0, 5, 6, 7), int32s(5, 6, 7, 3))
"""The same rows: a step in which a state is saved at 1, 40 and 70."""
MIXED = Segments(int32s(0, 1, 2, 3, 5), int32s(0, 1, 2, 3, 20, 70), int32s(1, 2, 0, 4, 8), int32s(1, 9, 0, 8, 4))
"""A decode that updates its state in place, one that writes it to another slot, padding, and a prompt that saves a
state."""


class Layer:
    def __init__(self, spec: DeltaNetSpec, dtype: torch.dtype = torch.float32) -> None:
        random = torch.Generator().manual_seed(0)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random)

        self.spec = spec
        heads = spec.num_value_heads
        self.weights = DeltaNetWeights(
            values(spec.conv_size, spec.conv_channels),
            values(heads).exp(),
            values(heads),
            values(spec.value_size),
            1e-6,
        )
        self.projected = values(70, spec.projected_size + 5).to(dtype)[:, : spec.projected_size]
        self.states = values(NUM_SLOTS, 2 * spec.state_elements)[:, spec.state_elements :]

    def run(self, op: DeltaNetOp, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the rows, and the states after it."""
        states = torch.zeros(NUM_SLOTS, 2 * self.spec.state_elements)[:, self.spec.state_elements :].copy_(self.states)
        out = torch.zeros(70, self.spec.value_width, dtype=self.projected.dtype)
        mixed = torch.zeros(70, self.spec.conv_channels)
        op.forward(self.projected, self.weights, states, segments, mixed, out)
        return out, states


@native
@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("segments", [ALONE, MIXED], ids=["alone", "mixed"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_kernels_agree_with_torch(spec: DeltaNetSpec, segments: Segments) -> None:
    layer = Layer(spec)
    (out, states), (wanted, wanted_states) = (
        layer.run(op, segments) for op in (NativeDeltaNet(spec), DeltaNetOp(spec))
    )
    torch.testing.assert_close(out, wanted, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(states, wanted_states, atol=2e-4, rtol=2e-4)


@native
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_prompt_that_is_cut_up_gets_the_same_bits(spec: DeltaNetSpec) -> None:
    layer, op = Layer(spec), NativeDeltaNet(spec)
    (out, states), (cut_out, cut_states) = (layer.run(op, segments) for segments in (ALONE, CUT))
    assert torch.equal(out, cut_out)
    assert torch.equal(states[3], cut_states[3])
    assert torch.equal(cut_states[7], cut_states[3]), "a segment without rows copies the state"
    begun = Segments(int32s(0, 1), int32s(0, 1), int32s(0), int32s(5))
    assert torch.equal(layer.run(op, begun)[1][5], cut_states[5])


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    layer = Layer(SPECS[0], dtype)
    out, _ = layer.run(NativeDeltaNet(SPECS[0]), MIXED)
    wanted, _ = layer.run(DeltaNetOp(SPECS[0]), MIXED)
    torch.testing.assert_close(out.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_chunks_and_steps_are_one_recurrence() -> None:
    random, length, heads = torch.Generator().manual_seed(1), 2 * CHUNK + 9, 3
    query, key = (torch.nn.functional.normalize(torch.randn(length, heads, 12, generator=random), dim=-1) for _ in "qk")
    value, decay = torch.randn(length, heads, 10, generator=random), -torch.rand(length, heads, generator=random)
    inputs = RuleInputs(query, key, value, decay, torch.rand(length, heads, generator=random))
    state = torch.randn(heads, 12, 10, generator=random)
    for ours, wanted in zip(chunk_rule(inputs, state), step_rule(inputs, state), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


def test_the_segments_of_this_file_are_valid() -> None:
    for segments in (ALONE, CUT, MIXED):
        assert all(first <= last for first, last in pairwise(segments.rows.tolist()))
        assert segments.firsts[-1] == len(segments.sources) == len(segments.targets) == len(segments.rows) - 1


@native
@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segments", [ALONE, CUT, MIXED], ids=["alone", "cut", "mixed"])
def test_short_convolutions_with_gates(segments: Segments, dtype: torch.dtype) -> None:
    spec, random = ShortConvSpec(600, 3), torch.Generator().manual_seed(2)
    projected = torch.randn(70, spec.projected_size + 3, generator=random).to(dtype)[:, : spec.projected_size]
    weight = torch.randn(spec.conv_size, spec.channels, generator=random)
    begun = torch.randn(NUM_SLOTS, spec.state_elements, generator=random)
    results = []
    for op in (NativeShortConv(spec), ShortConvOp(spec)):
        states, out = begun.clone(), torch.zeros(70, spec.channels, dtype=dtype)
        op.forward(projected, weight, states, segments, torch.zeros(70, 0), out)
        results.append((out, states))
    (out, states), (wanted, wanted_states) = results
    atol = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(out.float(), wanted.float(), atol=atol, rtol=1e-2)
    torch.testing.assert_close(states, wanted_states, atol=1e-5, rtol=1e-5)
