"""Gated MLPs of transformers' models whose code is the usual line: gate and up become one matrix product, and
activation and multiplication one operation."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.ops import Ops, TorchOps
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.weight_slot import WeightGroup
from vllm_lite.models.transformers.plan import TensorPlan

LINE = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
CODES = ([f"return {LINE}"], [f"down_proj = {LINE}", "return down_proj"])
"""Lines of `forward` by which a module is known to be such an MLP."""
KINDS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "relu")


class GatedModule(nn.Module):
    """The gated MLP; its `down_proj` is replaced like all linear layers."""

    down_proj: nn.Module
    gate_up: Linear
    ops: Ops
    kind: Activation
    size: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated = x.new_empty(*x.shape[:-1], self.size)
        if not x.is_meta:
            rows = x.reshape(-1, x.shape[-1])
            gate_up = rows.new_empty(len(rows), 2 * self.size)
            self.gate_up.forward(rows, gate_up)
            self.ops.activate_and_mul(self.kind, gate_up, activated.view(-1, self.size))
        down: torch.Tensor = self.down_proj(activated)
        return down


def fuse_mlp(name: str, module: Any, plan: TensorPlan, ops: Ops, base: Callable[[str], str]) -> WeightGroup | None:
    """Turn the module `name` into a GatedModule, and request the weights of gate and up; None if it is something else.

    `base`: the checkpoint's name of a matrix, without its ending.
    """
    parts: list[Any] = [getattr(module, part, None) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")]
    if any(type(part) is not nn.Linear for part in parts[:3]) or not _is_usual(module):
        return None
    gate, up, _, act = parts
    kind = _kind(act)
    styles = [plan.style(f"{name}.{part}") for part in ("gate_proj", "up_proj", "down_proj")]
    if kind is None or gate.weight.shape != up.weight.shape or styles[0] != styles[1]:
        return None
    if (gate.bias is None) != (up.bias is None):
        return None
    own: Split = plan.linear(f"{name}.gate_proj", gate, transposed=False).shape.outputs[0]
    linear = plan.parts.linear(Split.whole(gate.in_features), own, own, bias=gate.bias is not None)
    group = linear.group(base(f"{name}.gate_proj.weight"), base(f"{name}.up_proj.weight"))
    module.__class__ = GatedModule
    del module.gate_proj, module.up_proj
    module.gate_up, module.ops, module.kind, module.size = linear, ops, kind, own.size
    return group


def _is_usual(module: Any) -> bool:
    try:
        code = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
    lines = [line.strip() for line in code.splitlines() if line.strip()]
    return lines[0].startswith("def forward(self, x") and lines[1:] in CODES


@torch.inference_mode()
def _kind(act: Any) -> Activation | None:
    """The activation with the same results as `act` in a trial; None if there is none."""
    x = torch.linspace(-6, 6, 101)[None]
    try:
        theirs = act(x.clone())
    except Exception:
        return None
    for kind in KINDS:
        ours = x.clone()
        TorchOps().activate(kind, ours)
        if torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6):
            return kind
    return None
