"""The gated MLP of a layer: down(activation(gate(x)) * up(x))."""

from collections.abc import Iterator

from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.ops import ops_for
from vllm_lite.layers.buffers import Rows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weight_slot import WeightGroup


class GatedMLP:
    """Gate and up are one matrix product, split over ranks by columns, and down by rows."""

    def __init__(self, parts: Parts) -> None:
        spec, ops = parts.spec, ops_for(parts.device)
        hidden, inner = Split.whole(spec.hidden_size), Split.even(spec.intermediate_size, parts.shard)
        self.gate_up = parts.linear(hidden, inner, inner, bias=spec.mlp_bias)
        self.activate = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_and_mul}[spec.activation]
        self.down = parts.row_parallel(inner, hidden, bias=spec.mlp_bias)

    def forward(self, rows: Rows) -> None:
        """Replace rows.hidden by the MLP's output."""
        self.gate_up.forward(rows.hidden, out=rows.gate_up)
        self.activate(rows.gate_up, rows.activated)
        self.down.forward(rows.activated, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """What a checkpoint has of this block under `prefix`, like "model.layers.0.mlp."."""
        yield self.gate_up.group(f"{prefix}gate_proj", f"{prefix}up_proj")
        yield self.down.group(f"{prefix}down_proj")
