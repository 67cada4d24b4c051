"""Cases of the routing kernel, as named functions of a launcher and a device; no pytest in here."""

import torch

from tests.kernels.cases import Case
from tests.kernels.fused_cases import draw
from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.routing import Chosen, Routing, choose

V2_LITE = RoutingSpec(64, 6)
V2 = RoutingSpec(160, 6, scale=16.0, num_groups=8, groups_per_token=3)
V3 = RoutingSpec(
    *(256, 8, "sigmoid"),
    renormalize=True,
    epsilon=1e-20,
    scale=2.5,
    choice_bias=True,
    num_groups=8,
    groups_per_token=4,
    group_score="top two",
)


def blank(num_tokens: int, spec: RoutingSpec, device: torch.device) -> Chosen:
    """Ids and weights that no router may leave as they are."""
    shape = (num_tokens, spec.experts_per_token)
    return Chosen(torch.full(shape, -1, dtype=torch.int32, device=device), torch.full(shape, torch.nan, device=device))


def check(launcher: Launcher, logits: torch.Tensor, routing: Routing) -> Chosen:
    """Route by the kernel, and check it against plain torch."""
    ours, theirs = (blank(len(logits), routing.spec, logits.device) for _ in range(2))
    CudaOps(launcher).route(logits, routing, ours)
    choose(logits, routing, theirs)
    assert torch.equal(ours.experts, theirs.experts), f"{ours.experts} instead of {theirs.experts}"
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-5, atol=1e-7)
    return ours


def routed(spec: RoutingSpec, num_tokens: int = 7, gap: int = 0) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        wide = draw((num_tokens, spec.num_experts + gap), torch.float32, device, 3.0)
        bias = draw((spec.num_experts,), torch.float32, device).round() if spec.choice_bias else None
        factors = draw((spec.num_experts,), torch.float32, device) if spec.expert_factors else None
        check(launcher, wide[:, : spec.num_experts], Routing(spec, bias, factors))

    return run


def ties(launcher: Launcher, device: torch.device) -> None:
    """Equal scores: the first are chosen, of groups as of experts; also where only some are equal, or by the bias."""
    for scoring in ("softmax", "sigmoid"):
        plain = RoutingSpec(40, 3, scoring=scoring)
        check(launcher, torch.zeros(2, 40, device=device), Routing(plain, None))
        few = draw((9, 40), torch.float32, device).round()
        check(launcher, few, Routing(plain, None))
        groups = RoutingSpec(40, 5, scoring=scoring, num_groups=8, groups_per_token=3, group_score="top two")
        check(launcher, few, Routing(groups, None))
    biased = RoutingSpec(6, 2, scoring="sigmoid", choice_bias=True)
    chosen = check(launcher, torch.zeros(1, 6, device=device), Routing(biased, torch.eye(6, device=device)[4]))
    assert chosen.experts.tolist() == [[4, 0]]


def subnormal_scores(launcher: Launcher, device: torch.device) -> None:
    """Scores below the smallest normal float are still ordered: none of them counts as 0."""
    logits = torch.tensor([[0.0, -103.0, -100.0, -92.0, -96.0, -98.0]], device=device)
    assert check(launcher, logits, Routing(RoutingSpec(6, 6), None)).experts.tolist() == [[0, 3, 4, 5, 2, 1]]


def no_numbers(launcher: Launcher, device: torch.device) -> None:
    """Whatever the logits are, each id is an expert's, and no expert is chosen twice."""
    for value in (torch.nan, torch.inf, -torch.inf):
        logits = draw((4, 12), torch.float32, device)
        logits[0], logits[1, ::2], logits[2, 3], logits[3, 1:] = value, value, value, value
        for scoring in ("softmax", "sigmoid"):
            for groups in (1, 3):
                spec = RoutingSpec(12, 4, scoring=scoring, num_groups=groups, groups_per_token=(groups + 1) // 2)
                ours = blank(4, spec, device)
                CudaOps(launcher).route(logits, Routing(spec, None), ours)
                assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in ours.experts.tolist())


def no_tokens(launcher: Launcher, device: torch.device) -> None:
    spec = RoutingSpec(8, 2)
    CudaOps(launcher).route(torch.empty(0, 8, device=device), Routing(spec, None), blank(0, spec, device))


CASES: list[tuple[str, Case]] = [
    ("five_experts_top_3", routed(RoutingSpec(5, 3))),
    ("mixtral", routed(RoutingSpec(8, 2, renormalize=True))),
    ("qwen3", routed(RoutingSpec(128, 8, renormalize=True), num_tokens=33)),
    ("gemma4", routed(RoutingSpec(40, 4, renormalize=True, expert_factors=True))),
    ("all_experts", routed(RoutingSpec(33, 33))),
    ("one_expert", routed(RoutingSpec(1, 1, scoring="sigmoid"))),
    ("deepseek_v3", routed(V3)),
    ("deepseek_v2", routed(V2)),
    ("strided_logits", routed(RoutingSpec(60, 4, epsilon=0.1, renormalize=True), gap=4)),
    ("most_experts", routed(RoutingSpec(2048, 10), num_tokens=2)),
    ("ties", ties),
    ("subnormal_scores", subnormal_scores),
    ("no_numbers", no_numbers),
    ("no_tokens", no_tokens),
]
