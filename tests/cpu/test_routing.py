"""Choice of experts for tokens: the plain reference against the formulas of the families, written out."""

import pytest
import torch

from tests.kernels.routing_cases import V2, V2_LITE, V3
from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec
from vllm_lite.kernels.routing import Chosen, Routing, choose

NUM_TOKENS = 50


def routed(spec: RoutingSpec, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Chosen:
    shape = len(logits), spec.experts_per_token
    chosen = Chosen(torch.empty(shape, dtype=torch.int32), torch.empty(shape))
    choose(logits, Routing(spec, bias), chosen)
    return chosen


def random_logits(num_experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(NUM_TOKENS, num_experts, generator=torch.Generator().manual_seed(seed)) * 2


def test_a_softmax_over_the_chosen_is_one_over_all_that_is_renormalized() -> None:
    """Like Granite and gpt-oss, which choose by logits; a router's bias is part of its logits."""
    logits = random_logits(32)
    best, experts = logits.topk(4)
    chosen = routed(RoutingSpec(32, 4, renormalize=True), logits)
    assert torch.equal(chosen.experts.long(), experts)
    torch.testing.assert_close(chosen.weights, best.softmax(-1))


def test_gemma_4_multiplies_behind_the_sum() -> None:
    logits, factors = random_logits(32), torch.rand(32) + 0.5
    spec = RoutingSpec(32, 4, renormalize=True, expert_factors=True)
    chosen = Chosen(torch.empty(NUM_TOKENS, 4, dtype=torch.int32), torch.empty(NUM_TOKENS, 4))
    choose(logits, Routing(spec, None, factors), chosen)
    best, experts = logits.softmax(-1).topk(4)
    assert torch.equal(chosen.experts.long(), experts)
    torch.testing.assert_close(chosen.weights, best / best.sum(-1, keepdim=True) * factors[experts])


def test_deepseek_v2_takes_the_scores_as_they_are() -> None:
    logits = random_logits(64)
    best, experts = logits.softmax(-1).topk(6)
    chosen = routed(V2_LITE, logits)
    assert torch.equal(chosen.experts.long(), experts)
    assert torch.equal(chosen.weights, best)


def test_deepseek_v2_chooses_from_the_groups_with_the_best_expert() -> None:
    logits = random_logits(160)
    scores = logits.softmax(-1)
    chosen = routed(V2, logits)
    for token in range(NUM_TOKENS):
        groups = scores[token].view(8, 20)
        allowed = set(groups.amax(1).topk(3).indices.tolist())
        ranked = sorted(range(160), key=lambda e: (e // 20 in allowed, scores[token, e].item()), reverse=True)
        assert chosen.experts[token].tolist() == ranked[:6]
        assert torch.equal(chosen.weights[token], scores[token, ranked[:6]] * 16)


def test_deepseek_v3_chooses_by_biased_scores_and_weighs_by_plain_ones() -> None:
    logits = random_logits(256)
    bias = torch.randn(256, generator=torch.Generator().manual_seed(1))
    chosen = routed(V3, logits, bias)
    for token in range(NUM_TOKENS):
        plain = logits[token].sigmoid()
        biased = plain + bias
        allowed = set(biased.view(8, 32).topk(2).values.sum(1).topk(4).indices.tolist())
        ranked = sorted(range(256), key=lambda e: (e // 32 in allowed, biased[e].item()), reverse=True)[:8]
        assert chosen.experts[token].tolist() == ranked
        torch.testing.assert_close(chosen.weights[token], plain[ranked] / (plain[ranked].sum() + 1e-20) * 2.5)


def test_of_equal_scores_the_lower_number_wins() -> None:
    chosen = routed(RoutingSpec(7, 3, renormalize=True), torch.zeros(4, 7))
    assert chosen.experts.tolist() == [[0, 1, 2]] * 4
    grouped = RoutingSpec(8, 2, num_groups=4, groups_per_token=1, group_score="top two")
    assert routed(grouped, torch.zeros(1, 8)).experts.tolist() == [[0, 1]]


def test_a_bias_sends_all_tokens_to_one_expert_and_none_to_another() -> None:
    bias = torch.tensor([0.0, -10.0, 10.0, 0.0, 0.0])
    chosen = routed(RoutingSpec(5, 4, "sigmoid", choice_bias=True), random_logits(5), bias)
    assert set(chosen.experts[:, 0].tolist()) == {2}
    assert 1 not in chosen.experts


@pytest.mark.parametrize("logit", [-1e4, 0.0, 1e4])
def test_sigmoids_that_are_all_zero_or_one_give_finite_weights(logit: float) -> None:
    spec = RoutingSpec(4, 2, "sigmoid", renormalize=True, epsilon=1e-20)
    assert routed(spec, torch.full((1, 4), logit)).weights.isfinite().all()
