"""Random rules of routers, for the kernels of a CPU and of a GPU."""

from hypothesis import strategies as st

from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec


@st.composite
def routing_rules(draw: st.DrawFn, most_in_a_group: int, *, may_have_factors: bool = False) -> RoutingSpec:
    num_groups, size = draw(st.integers(1, 5)), draw(st.integers(2, most_in_a_group))
    left = draw(st.integers(1, num_groups))
    return RoutingSpec(
        num_groups * size,
        draw(st.integers(1, left * size)),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(st.booleans()),
        epsilon=draw(st.sampled_from([0.0, 1e-20, 0.1])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        choice_bias=draw(st.booleans()),
        expert_factors=may_have_factors and draw(st.booleans()),
        num_groups=num_groups,
        groups_per_token=left,
        group_score=draw(st.sampled_from(["max", "top two"])),
    )
