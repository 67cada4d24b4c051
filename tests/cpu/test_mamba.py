"""Mamba-2 layers natively and in plain torch: the same states and outputs, however rows are cut into segments."""

import pytest
import torch

from tests.cpu.test_delta_rule import ALONE, CUT, MIXED, NUM_SLOTS
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.recurrent import NativeMamba
from vllm_lite.kernels.mamba import MambaOp, MambaWeights
from vllm_lite.kernels.recurrent import Segments

SPECS = [
    MambaSpec(3, 64, 128, 4),
    MambaSpec(2, 41, 23, 3, (0.1, 0.8)),
    MambaSpec(1, 5, 6, 2),
    MambaSpec(6, 21, 23, 3, num_groups=3),
]
native = pytest.mark.skipif(not cpu.available(), reason="no native library")


def run(op: MambaOp, segments: Segments, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of rows of random tokens, and the states after it."""
    spec, random = op.spec, torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    conv, bias = values(spec.conv_size, spec.conv_channels), values(spec.conv_channels)
    weights = MambaWeights(conv, bias, values(spec.num_heads).exp(), values(spec.num_heads), values(spec.num_heads))
    projected = values(70, spec.projected_size + 5).to(dtype)[:, : spec.projected_size]
    states = values(NUM_SLOTS, 2 * spec.state_elements)[:, spec.state_elements :]
    out, mixed = torch.zeros(70, spec.value_width, dtype=dtype), torch.zeros(70, spec.conv_channels)
    op.forward(projected, weights, states, segments, mixed, out)
    return out, states


@native
@pytest.mark.usefixtures("each_vector_isa")
@pytest.mark.parametrize("segments", [ALONE, MIXED], ids=["alone", "mixed"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_kernels_agree_with_torch(spec: MambaSpec, segments: Segments) -> None:
    (out, states), (wanted, wanted_states) = (run(op, segments) for op in (NativeMamba(spec), MambaOp(spec)))
    torch.testing.assert_close(out, wanted, atol=5e-4, rtol=5e-4)
    torch.testing.assert_close(states, wanted_states, atol=2e-4, rtol=2e-4)


@native
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_prompt_that_is_cut_up_gets_the_same_bits(spec: MambaSpec) -> None:
    (out, states), (cut_out, cut_states) = (run(NativeMamba(spec), segments) for segments in (ALONE, CUT))
    assert torch.equal(out, cut_out)
    assert torch.equal(states[3], cut_states[3])
    assert torch.equal(cut_states[7], cut_states[3]), "a segment without rows copies the state"


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    (out, _), (wanted, _) = (run(op, MIXED, dtype) for op in (NativeMamba(SPECS[0]), MambaOp(SPECS[0])))
    torch.testing.assert_close(out.float(), wanted.float(), atol=3e-2, rtol=3e-2)
