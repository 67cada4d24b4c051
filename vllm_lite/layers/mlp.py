"""The MLP of a layer, with a gate or without."""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup


class GatedNames(NamedTuple):
    """A checkpoint's names for the matrices of a gated MLP. If gate and up are one tensor, their rows are concatenated,
    or alternate."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    in_turn: bool = False

    def as_stored(self, spec: ModelSpec) -> "GatedNames":
        """Names in a checkpoint that may have two tensors for gate and up although its family has one."""
        if not spec.splits_gate_up or self.gate != self.up:
            return self
        gate, up = (self.gate.replace("gate_up_proj", name) for name in ("gate_proj", "up_proj"))
        return self._replace(gate=gate, up=up)


def gate_and_up(inner: Split, names: GatedNames, *, up_first: bool = False) -> tuple[Split, Split]:
    """Rows of gate and of up for a rank that holds the part `inner` of the intermediate elements."""
    if names.gate != names.up:
        return inner, inner
    if names.in_turn:
        rows = range(2 * inner.start, 2 * inner.end, 2)
        first, second = Split.of(2 * inner.total, rows), Split.of(2 * inner.total, [row + 1 for row in rows])
    else:
        first = Split(2 * inner.total, inner.start, inner.size)
        second = first._replace(start=inner.total + inner.start)
    return (second, first) if up_first else (first, second)


def first_rows(inner: Split, names: GatedNames, *, gated: bool) -> tuple[Split, ...]:
    """A rank's rows of an MLP's first matrices, with or without a gate."""
    return gate_and_up(inner, names) if gated else (inner,)


def first_names(names: GatedNames, *, gated: bool) -> tuple[str, ...]:
    """Names of an MLP's first matrices."""
    return (names.gate, names.up) if gated else (names.up,)


class GatedMLP:
    """down(activation(gate(x)) * up(x)). Gate and up are one matrix product; ranks split it by columns, and down by
    rows."""

    names: ClassVar = GatedNames()
    up_first: ClassVar = False
    """Whether up is before the gate if they are one tensor."""
    down_bias: ClassVar = False
    """Whether `down` has a bias even if the others have none."""

    def __init__(self, parts: Parts, size: int | None = None) -> None:
        """`size`: intermediate size, if it is not the model's."""
        spec = parts.spec
        self.ops, self.activation = ops_for(parts.device), spec.activation
        self.gate_scale = spec.gate_scale
        hidden, inner = Split.whole(spec.hidden_size), Split.even(size or spec.intermediate_size, parts.shard)
        self.size = inner.size
        self.matrices = self.names.as_stored(spec)
        outputs = gate_and_up(inner, self.matrices, up_first=self.up_first)
        self.gate_up = parts.linear(hidden, *outputs, bias=spec.mlp_bias)
        self.down = parts.row_parallel(inner, hidden, bias=spec.mlp_bias or self.down_bias)

    def forward(self, x: torch.Tensor, rows: StepRows) -> None:
        """Write the MLP's output for x: [num_tokens, hidden_size] to rows.hidden, which may be x."""
        gate_up, activated = rows.gate_up[:, : 2 * self.size], rows.activated[:, : self.size]
        self.gate_up.forward(x, out=gate_up)
        if self.gate_scale != 1.0:
            self.ops.scale(gate_up[:, : self.size], self.gate_scale)
        self.ops.activate_and_mul(self.activation, gate_up, activated)
        self.down.forward(activated, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0.mlp."."""
        yield self.gate_up.group(f"{prefix}{self.matrices.gate}", f"{prefix}{self.matrices.up}")
        yield self.down.group(f"{prefix}{self.matrices.down}")


class FusedGatedMLP(GatedMLP):
    """A gated MLP whose checkpoint has gate and up in one tensor."""

    names: ClassVar = GatedNames(gate="gate_up_proj", up="gate_up_proj")


class MLPNames(NamedTuple):
    """A checkpoint's names for the matrices of an MLP without a gate."""

    up: str = "up_proj"
    down: str = "down_proj"


class MLP:
    """down(activation(up(x))). Ranks share up by columns and down by rows."""

    names: ClassVar = MLPNames()
    transposed: ClassVar[bool] = False
    """Whether the checkpoint stores [inputs, outputs]."""

    def __init__(self, parts: Parts, size: int | None = None) -> None:
        spec = parts.spec
        self.ops, self.activation = ops_for(parts.device), spec.activation
        hidden, inner = Split.whole(spec.hidden_size), Split.even(size or spec.intermediate_size, parts.shard)
        self.up = parts.linear(hidden, inner, bias=spec.mlp_bias, transposed=self.transposed)
        self.down = parts.row_parallel(inner, hidden, bias=spec.mlp_bias, transposed=self.transposed)

    def forward(self, x: torch.Tensor, rows: StepRows) -> None:
        """See GatedMLP.forward."""
        self.up.forward(x, out=rows.activated)
        self.ops.activate(self.activation, rows.activated)
        self.down.forward(rows.activated, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """See GatedMLP.weight_groups."""
        yield self.up.group(f"{prefix}{self.names.up}")
        yield self.down.group(f"{prefix}{self.names.down}")
