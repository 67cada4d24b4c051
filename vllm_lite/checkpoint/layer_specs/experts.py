"""The experts of a layer in numbers: how many there are, how large, and how a token chooses among them. No torch."""

from typing import Literal

import msgspec

from vllm_lite.checkpoint.shard import Shard, Split

Stored = Literal["separate", "fused"]
"""How a checkpoint stores experts: each matrix of each by itself, or those of all in one tensor: gate_up_proj
[experts, 2 * inner, hidden] with gate before up, and down_proj [experts, hidden, inner]."""


class RoutingSpec(msgspec.Struct, frozen=True):
    """Routing of a token to its experts, and the weights of their outputs.

    Scores are those of all experts. Those chosen have the highest score plus bias, within the chosen groups; of equal
    ones the first is taken. Their weights are the scores, without the bias.

    A softmax over the logits of the chosen alone, as of Granite and gpt-oss, is a softmax with `renormalize`.
    """

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Computed in float32, from logits that are kept in float32, too."""
    renormalize: bool = False
    """Whether the weights of a token are divided by their sum plus `epsilon`."""
    epsilon: float = 0.0
    scale: float = 1.0
    """Weights are multiplied by it at last."""
    choice_bias: bool = False
    """Whether each expert has a learned number that is added to its score for the choice alone."""
    expert_factors: bool = False
    """Whether each expert has a learned number that its weight is multiplied by, behind the renormalization."""
    num_groups: int = 1
    """Experts are in so many groups of one size, one behind the other."""
    groups_per_token: int = 1
    """Experts are chosen from so many groups, those with the highest score of a group."""
    group_score: Literal["max", "top two"] = "max"
    """The highest score in a group, or the sum of the two highest; the bias counts."""


class ExpertsSpec(msgspec.Struct, frozen=True):
    """Experts of a layer, in place of an MLP. Each expert is an MLP with the model's activation."""

    routing: RoutingSpec
    intermediate_size: int
    """How many elements lie between the matrices of one expert."""
    shared_intermediate_size: int = 0
    """The same of the MLP that every token passes as well, all shared experts as one; 0 = there is none."""
    shared_gate: bool = False
    """Whether what that gives is multiplied by a sigmoid of the token's own."""
    biases: bool = False
    """Whether the router and the matrices of each expert have one; the shared MLP has none."""
    stored: Stored = "separate"
    transposed: bool = False
    """Whether matrices of all experts in one tensor are stored as [experts, inputs, outputs]."""
    gated: bool = True
    """Whether the MLPs have a gate, the shared one too."""

    @property
    def matrices(self) -> int:
        """Number of an expert's matrices."""
        return 2 + self.gated

    def held(self, shard: Shard) -> Split:
        """Experts of which a rank holds a part."""
        num_experts = self.routing.num_experts
        return Split.near_even(num_experts, shard) if shard.expert_parallel else Split.whole(num_experts)

    def inner(self, shard: Shard) -> Split:
        """A rank's part of the elements between the matrices of each of its experts."""
        size = self.intermediate_size
        return Split.whole(size) if shard.expert_parallel else Split.even(size, shard)

    def fits(self, shard: Shard) -> bool:
        """Whether so many ranks can share them, with something for each."""
        num_experts, inner = self.routing.num_experts, self.intermediate_size
        shared = num_experts >= shard.world if shard.expert_parallel else inner % shard.world == 0
        return shared and self.shared_intermediate_size % shard.world == 0

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> int:
        """Weights of the router, of `num_experts` experts (None: all), and of the shared ones."""
        routing = self.routing
        num_experts = routing.num_experts if num_experts is None else num_experts
        inner = num_experts * self.intermediate_size + self.shared_intermediate_size
        router = routing.num_experts * (hidden_size + routing.choice_bias + routing.expert_factors + self.biases)
        biases = self.biases * num_experts * ((self.matrices - 1) * self.intermediate_size + hidden_size)
        return self.matrices * hidden_size * inner + biases + router + self.shared_gate * hidden_size

    def idle_parameters(self, hidden_size: int, num_tokens: int = 1) -> int:
        """Weights of the experts that none of so many tokens is sent to, where each expert is as likely as another."""
        return self.matrices * hidden_size * self.intermediate_size * self.num_idle(num_tokens)

    def num_idle(self, num_tokens: int) -> int:
        """The number of these experts."""
        num_experts, each = self.routing.num_experts, self.routing.experts_per_token
        return round(num_experts * (1 - each / num_experts) ** num_tokens)
