"""The routing kernel through the emulator, and the errors of its Python side."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import routing_cases as cases
from tests.kernels.emulator import EmulatorLauncher
from tests.routing_rules import routing_rules
from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.routing import Routing

CPU = torch.device("cpu")


@settings(max_examples=60)
@given(spec=routing_rules(14), seed=st.integers(0, 2**31), scale=st.sampled_from([0.0, 0.5, 4.0]))
def test_routing_agrees_with_plain_torch(
    spec: RoutingSpec, seed: int, scale: float, launcher: EmulatorLauncher
) -> None:
    """With scale 0 all scores are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, spec.num_experts, generator=generator)
    bias = torch.randn(spec.num_experts, generator=generator).round() if spec.choice_bias else None
    cases.check(launcher, logits, Routing(spec, bias))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "a layer has 0 experts"),
        ({"num_experts": 4096}, "takes 1 to 2048"),
        ({"experts_per_token": 9}, "cannot choose 9 of 8 experts"),
        ({"num_groups": 3}, "8 experts do not make 3 groups"),
        ({"num_groups": 2, "groups_per_token": 3}, "cannot choose 3 of 2 groups"),
        ({"num_groups": 8, "group_score": "top two"}, "no two scores"),
    ],
)
def test_rules_that_no_kernel_may_follow_are_refused(
    changes: dict[str, Any], message: str, launcher: EmulatorLauncher
) -> None:
    spec = RoutingSpec(**({"num_experts": 8, "experts_per_token": 2} | changes))
    with pytest.raises(ValueError, match=message):
        CudaOps(launcher).route(torch.zeros(1, 8), Routing(spec, None), cases.blank(1, spec, CPU))


def test_other_tensors_are_refused(launcher: EmulatorLauncher) -> None:
    spec, ops = RoutingSpec(8, 2), CudaOps(launcher)
    routing, chosen = Routing(spec, None), cases.blank(3, spec, CPU)
    with pytest.raises(ValueError, match=r"float32 \[num_tokens, 8\].*float64"):
        ops.route(torch.zeros(3, 8).double(), routing, chosen)
    with pytest.raises(ValueError, match="with contiguous rows"):
        ops.route(torch.zeros(8, 3).t(), routing, chosen)
    with pytest.raises(ValueError, match=r"ids must be a contiguous torch\.int32 \[3, 2\]"):
        ops.route(torch.zeros(3, 8), routing, chosen._replace(experts=chosen.experts.long()))
    with pytest.raises(ValueError, match=r"weights must be .*\[3, 2\]"):
        ops.route(torch.zeros(3, 8), routing, chosen._replace(weights=chosen.weights[:2]))
    with pytest.raises(ValueError, match=r"bias of a choice must be a contiguous float32 \[8\]"):
        ops.route(torch.zeros(3, 8), Routing(spec, torch.zeros(7)), chosen)
