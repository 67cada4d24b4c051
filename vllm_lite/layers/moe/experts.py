"""A layer's experts: a router, which chooses each token's experts, the experts, and an MLP for all tokens.

One all-reduce adds up the outputs of experts and shared MLP of all ranks. Each expert is split over ranks like an MLP,
by columns and rows; with `Shard.expert_parallel` each rank has some of the experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
from vllm_lite.kernels.routing import Routing
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.buffers import ExpertRows, StepRows
from vllm_lite.layers.mlp import GatedNames, first_names, first_rows
from vllm_lite.layers.moe.adapted_experts import ExpertAdapters, ExpertLayout
from vllm_lite.layers.moe.expert_matmul import ExpertMatmul, ExpertSizes, LoopedExperts, NativeExperts
from vllm_lite.layers.moe.packed_experts import PackedMemory, packed_experts
from vllm_lite.layers.moe.stacked_experts import StackMemory, stacked_experts
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights import gpu_matmul
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.matmul import DenseMatmul, Matmul, NativeMatmul
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape, WidenedForm
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot


class SparseNames(NamedTuple):
    """A checkpoint's names for the parts of a layer's experts."""

    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    bias_in_row: bool = False
    """Whether the bias of the router's choice is stored as [1, experts]."""
    factors: str = "gate.per_expert_scale"
    expert: str = "experts.{}."
    matrices: GatedNames = GatedNames()
    """Matrices of an expert."""
    fused: GatedNames = GatedNames("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj")
    """Tensors with the matrices of all experts, if they are stored stacked."""
    transposed: bool = False
    """Whether dense `fused` tensors are stored as [experts, inputs, outputs]."""
    shared: str = "shared_experts."
    shared_matrices: GatedNames = GatedNames()
    shared_gate: str = "shared_expert_gate"


class Router:
    """Chooses each token's experts. Every rank computes it whole; its weights are never quantized."""

    def __init__(self, parts: Parts, spec: ExpertsSpec, names: SparseNames) -> None:
        routing = spec.routing
        self.ops, self.device, self.names = ops_for(parts.device), parts.device, names
        shape = LinearShape(
            Split.whole(parts.spec.hidden_size), (Split.whole(routing.num_experts),), parts.dtype, parts.device
        )
        self.linear = Linear(shape, bias=spec.biases, form=parts.dense_form)
        self.routing = Routing(routing, None)

    def forward(self, x: torch.Tensor, rows: ExpertRows) -> None:
        """x: [num_tokens, hidden_size] -> rows.chosen."""
        self.linear.forward(x, out=rows.logits)
        self.ops.route(rows.logits, self.routing, rows.chosen)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0.mlp."."""
        yield self.linear.group(f"{prefix}{self.names.router}")
        if self.routing.spec.choice_bias:
            slot = whole_slot(f"{prefix}{self.names.choice_bias}", self.routing.spec.num_experts)
            slot = slot._replace(stacked=(0, 1) if self.names.bias_in_row else None)
            yield WeightGroup((WeightStack((slot,), torch.float32, self.device),), self.load_bias)
        if self.routing.spec.expert_factors:
            slot = whole_slot(f"{prefix}{self.names.factors}", self.routing.spec.num_experts)
            yield WeightGroup((WeightStack((slot,), torch.float32, self.device),), self.load_factors)

    def load_bias(self, bias: torch.Tensor) -> None:
        """Keep the bias of the scores for the choice: float32 [num_experts]."""
        self.routing = self.routing._replace(bias=bias)

    def load_factors(self, factors: torch.Tensor) -> None:
        """Keep the factor of each expert's weight: float32 [num_experts]."""
        self.routing = self.routing._replace(factors=factors)


class Experts:
    """This rank's experts, each an MLP."""

    def __init__(self, parts: Parts, spec: ExpertsSpec, names: SparseNames) -> None:
        hidden, inner = Split.whole(parts.spec.hidden_size), spec.inner(parts.shard)
        self.held = spec.held(parts.shard)
        self.names, self.sizes = names, ExpertSizes(self.held, inner.size, parts.spec.activation, spec.gated)
        layout = ExpertLayout(names.expert, names.matrices, names.fused, self.held, inner, spec.gated)
        self.adapters = ExpertAdapters.of(parts, layout)
        self.fused = spec.stored == "fused"
        rows = first_rows(inner, names.fused if self.fused else names.matrices, gated=spec.gated)
        held = [(index, self.held.total) if self.fused else None for index in range(self.held.start, self.held.end)]
        own, packs = parts.without_adapters(), gpu_matmul.launcher_for(parts.dtype, parts.device) is not None
        if parts.device.type != "cpu" and not packs:  # a loop over packed experts waits for the device at each of them
            own = replace(own, form=WidenedForm(parts.form, "experts"))
        first = parts.shard.rank == 0 or parts.shard.expert_parallel  # of the ranks that have a part of an expert
        biases, turned = spec.biases, names.transposed or spec.transposed
        self.gate_up = [own.linear(hidden, *rows, bias=biases, transposed=turned, stacked=stacked) for stacked in held]
        self.down = [
            own.linear(inner, hidden, bias=biases, transposed=turned, stacked=stacked, adds_bias=first)
            for stacked in held
        ]
        none, nothing = [Split(inner.total, 0, 0)] * len(rows), Split(hidden.total, 0, 0)
        self.elsewhere = own.linear(hidden, *none, bias=biases), own.linear(inner, nothing, bias=biases)
        """Layers for experts of other ranks: their tensors must be in the checkpoint, but are not read."""
        self.memories: tuple[StackMemory, StackMemory] | tuple[PackedMemory, PackedMemory] | None = None
        """Memory for the stacked weights of all experts on a GPU; None on a CPU, which packs each expert separately."""
        if parts.form == DENSE and parts.device.type != "cpu":
            shapes = (len(rows) * inner.size, hidden.size), (hidden.size, inner.size)
            one, two = (StackMemory((self.held.size, *shape), parts.dtype, parts.device) for shape in shapes)
            self.memories = one, two
        elif parts.form != DENSE and packs:
            self.memories = PackedMemory(self.gate_up, in_turn=spec.gated), PackedMemory(self.down, in_turn=False)

    @cached_property
    def matmul(self) -> ExpertMatmul:
        """The products of all experts; available once weights are loaded."""
        if self.memories is not None and isinstance(self.memories[0], PackedMemory):
            packed = packed_experts(*self.memories, self.sizes, self.gate_up[0]) if self.gate_up else None
            if packed is not None:
                return packed
        gate_up, down = ([each.matmul for each in linears] for linears in (self.gate_up, self.down))
        made = make_expert_matmul(gate_up, down, self.sizes)
        return made if self.adapters is None else self.adapters.over(made)

    def forward(self, x: torch.Tensor, rows: ExpertRows, out: torch.Tensor) -> None:
        """Write this rank's part of the weighted sum of each token's experts to `out`, which may be x."""
        self.matmul.forward(x, rows.chosen, out)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, one expert after another."""
        if self.adapters is not None:
            self.adapters.join(prefix)
        if self.fused:
            fused = self.names.fused
            for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
                both = gate_up.group(*(f"{prefix}{name}" for name in first_names(fused, gated=self.sizes.gated)))
                yield from self._placed(index, both, down.group(f"{prefix}{fused.down}"))
            return
        names, held = self.names.matrices, range(self.held.start, self.held.end)
        for expert in range(self.held.total):
            own = prefix + self.names.expert.format(expert)
            index = expert - held.start
            gate_up, down = (self.gate_up[index], self.down[index]) if expert in held else self.elsewhere
            first = (f"{own}{name}" for name in first_names(names, gated=self.sizes.gated))
            groups = gate_up.group(*first), down.group(f"{own}{names.down}")
            yield from self._placed(index, *groups) if expert in held else groups

    def _placed(self, index: int, gate_up: WeightGroup, down: WeightGroup) -> tuple[WeightGroup, WeightGroup]:
        """The groups of one of this rank's experts, changed to load into `memories`."""
        if self.memories is None:
            return gate_up, down
        return self.memories[0].place(gate_up, index), self.memories[1].place(down, index)


class SharedExpert:
    """An MLP for all tokens; its partial sums are reduced together with those of the experts."""

    def __init__(self, parts: Parts, spec: ExpertsSpec, names: SparseNames) -> None:
        hidden, inner = Split.whole(parts.spec.hidden_size), Split.even(spec.shared_intermediate_size, parts.shard)
        self.ops, self.activation, self.names = ops_for(parts.device), parts.spec.activation, names
        self.matrices = names.shared_matrices.as_stored(parts.spec)
        self.gated, rows = spec.gated, first_rows(inner, self.matrices, gated=spec.gated)
        self.gate_up = parts.linear(hidden, *rows, bias=False)
        self.down = parts.linear(inner, hidden, bias=False)
        shape = LinearShape(hidden, (Split.whole(1),), parts.dtype, parts.device)
        self.gate = Linear(shape, bias=False, form=DENSE) if spec.shared_gate else None

    def forward(self, x: torch.Tensor, rows: ExpertRows) -> None:
        """Compute this rank's part of its output for x: [num_tokens, hidden_size]."""
        if self.gated:
            self.gate_up.forward(x, out=rows.gate_up)
            self.ops.activate_and_mul(self.activation, rows.gate_up, rows.activated)
        else:
            self.gate_up.forward(x, out=rows.activated)
            self.ops.activate(self.activation, rows.activated)
        self.down.forward(rows.activated, out=rows.shared)
        if self.gate is not None:
            self.gate.forward(x, out=rows.gates)

    def add(self, rows: ExpertRows, out: torch.Tensor) -> None:
        """Add the output of `forward` to `out`."""
        if self.gate is None:
            self.ops.add(out, rows.shared)
        else:
            self.ops.add_gated(out, rows.shared, rows.gates)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`."""
        names, own = self.matrices, f"{prefix}{self.names.shared}"
        yield self.gate_up.group(*(f"{own}{name}" for name in first_names(names, gated=self.gated)))
        yield self.down.group(f"{own}{names.down}")
        if self.gate is not None:
            yield self.gate.group(f"{prefix}{self.names.shared_gate}")


class SparseMLP:
    """The block of experts that replaces a dense layer's MLP. A family whose checkpoints use other names sets
    `names`."""

    names: ClassVar = SparseNames()
    router_block: ClassVar[type[Router]] = Router

    def __init__(self, parts: Parts, spec: ExpertsSpec) -> None:
        self.communicator = parts.communicator
        self.kept: torch.Tensor | None = None
        """Buffer for the chosen experts if they are counted: int32 [max_num_tokens, experts_per_token]."""
        self.router = self.router_block(parts, spec, self.names)
        self.experts = Experts(parts, spec, self.names)
        self.shared = SharedExpert(parts, spec, self.names) if spec.shared_intermediate_size else None

    def forward(self, x: torch.Tensor, rows: StepRows) -> None:
        """Write the output for x: [num_tokens, hidden_size] to rows.hidden, which may be x."""
        own = self.expert_rows(rows)
        self.router.forward(x, own)
        if self.shared is not None:
            self.shared.forward(x, own)
        self.experts.forward(x, own, rows.hidden)
        if self.shared is not None:
            self.shared.add(own, rows.hidden)
        self.communicator.all_reduce(rows.hidden)

    def expert_rows(self, rows: StepRows) -> ExpertRows:
        """The step's buffers; `chosen` is in `kept` if choices are counted."""
        own = rows.experts
        if own is None:
            raise ValueError("the buffers were made for a model without experts")
        if self.kept is None:
            return own
        return replace(own, chosen=own.chosen._replace(experts=self.kept[: len(own.logits)]))

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0.mlp."."""
        yield from self.router.weight_groups(prefix)
        yield from self.experts.weight_groups(prefix)
        if self.shared is not None:
            yield from self.shared.weight_groups(prefix)


def make_expert_matmul(gate_up: Sequence[Matmul], down: Sequence[Matmul], sizes: ExpertSizes) -> ExpertMatmul:
    """Make the fastest products for these weights, given one of each per expert of the rank."""
    native = [[each for each in part if isinstance(each, NativeMatmul)] for part in (gate_up, down)]
    if gate_up and all(len(part) == len(gate_up) and _are_alike(part) for part in native):
        return NativeExperts(native[0], native[1], sizes)
    if any(isinstance(each, DenseMatmul) and each.weight.is_cuda for each in gate_up):
        launcher = default_launcher()
        stacked = None if launcher is None else stacked_experts(gate_up, down, sizes, launcher)
        if stacked is not None:
            return stacked
    return LoopedExperts(gate_up, down, sizes)


def _are_alike(weights: Sequence[NativeMatmul]) -> bool:
    """Whether all experts have weights of one form; some checkpoints quantize only some, or in several ways."""
    return len({each.packed.kind for each in weights}) == 1
