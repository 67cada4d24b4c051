"""Specs of a layer's experts: number, size, and routing. No torch."""

from typing import Literal

import msgspec

from vllm_lite.checkpoint.shard import Shard, Split

Stored = Literal["separate", "fused"]
"""Storage of experts in a checkpoint: each matrix by itself, or those of all experts in one tensor: gate_up_proj
[experts, 2 * inner, hidden] with gate before up, and down_proj [experts, hidden, inner]."""


class RoutingSpec(msgspec.Struct, frozen=True):
    """Routing of a token to its experts, and the weights of their outputs.

    Scores are computed for all experts. The chosen experts have the highest score plus bias within the chosen groups;
    of equal ones the first is taken. Their weights are the scores without the bias.

    A softmax over the chosen logits only, as in Granite and gpt-oss, equals a softmax with `renormalize`.
    """

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Computed in float32, from float32 logits."""
    renormalize: bool = False
    """Whether the weights of a token are divided by their sum plus `epsilon`."""
    epsilon: float = 0.0
    scale: float = 1.0
    """Final factor on weights."""
    choice_bias: bool = False
    """Whether each expert has a learned bias, added to its score only for the choice."""
    expert_factors: bool = False
    """Whether each expert has a learned factor on its weight, applied after renormalization."""
    num_groups: int = 1
    """Number of groups of consecutive experts, of equal size."""
    groups_per_token: int = 1
    """Number of groups from which experts are chosen: those with the highest group score."""
    group_score: Literal["max", "top two"] = "max"
    """Score of a group: the highest score in it, or the sum of the two highest; biases count."""


class ExpertsSpec(msgspec.Struct, frozen=True):
    """Experts of a layer, in place of an MLP. Each expert is an MLP with the model's activation."""

    routing: RoutingSpec
    intermediate_size: int
    """Elements between the matrices of one expert."""
    shared_intermediate_size: int = 0
    """The same for the shared experts as one MLP, which every token uses; 0 = none."""
    shared_gate: bool = False
    """Whether the shared MLP's output is multiplied by a sigmoid gate per token."""
    biases: bool = False
    """Whether the router and each expert's matrices have biases; the shared MLP has none."""
    stored: Stored = "separate"
    transposed: bool = False
    """Whether fused matrices are stored as [experts, inputs, outputs]."""
    gated: bool = True
    """Whether the MLPs have a gate, including the shared one."""

    @property
    def matrices(self) -> int:
        """Number of an expert's matrices."""
        return 2 + self.gated

    def held(self, shard: Shard) -> Split:
        """The experts that a rank holds, whole or in part."""
        num_experts = self.routing.num_experts
        return Split.near_even(num_experts, shard) if shard.expert_parallel else Split.whole(num_experts)

    def inner(self, shard: Shard) -> Split:
        """A rank's part of the intermediate elements of each of its experts."""
        size = self.intermediate_size
        return Split.whole(size) if shard.expert_parallel else Split.even(size, shard)

    def fits(self, shard: Shard) -> bool:
        """Whether the experts can be divided among the ranks, with some for each."""
        num_experts, inner = self.routing.num_experts, self.intermediate_size
        shared = num_experts >= shard.world if shard.expert_parallel else inner % shard.world == 0
        return shared and self.shared_intermediate_size % shard.world == 0

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> int:
        """Number of parameters of the router, of `num_experts` experts (None: all), and of the shared ones."""
        routing = self.routing
        num_experts = routing.num_experts if num_experts is None else num_experts
        inner = num_experts * self.intermediate_size + self.shared_intermediate_size
        router = routing.num_experts * (hidden_size + routing.choice_bias + routing.expert_factors + self.biases)
        biases = self.biases * num_experts * ((self.matrices - 1) * self.intermediate_size + hidden_size)
        return self.matrices * hidden_size * inner + biases + router + self.shared_gate * hidden_size

    def idle_parameters(self, hidden_size: int, num_tokens: int = 1) -> int:
        """Expected number of parameters of experts to which none of `num_tokens` is routed, with uniform routing."""
        return self.matrices * hidden_size * self.intermediate_size * self.num_idle(num_tokens)

    def num_idle(self, num_tokens: int) -> int:
        """Expected number of these experts."""
        num_experts, each = self.routing.num_experts, self.routing.experts_per_token
        return round(num_experts * (1 - each / num_experts) ** num_tokens)
