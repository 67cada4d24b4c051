"""One native operation for all experts of a layer. Kernel: csrc/cpu/experts.cpp."""

import ctypes
from collections.abc import Sequence

import torch

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.kernels.cpu.dtypes import FLOATS, dtype_code
from vllm_lite.kernels.cpu.fused import KINDS
from vllm_lite.kernels.cpu.library import function, int32, int64, pointer
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.kernels.cpu.weights.lora import LoraSlots
from vllm_lite.kernels.routing import Chosen

_TYPES = (
    *(pointer, pointer, int64, int32, pointer, pointer, int64, int64, pointer, int64),
    *(pointer, pointer, pointer),
)


class _Record(ctypes.Structure):
    """The same record as `ExpertWeights` in csrc/cpu/experts.cpp."""

    _fields_ = (
        ("gate_up", pointer),
        ("down", pointer),
        ("first_expert", int64),
        ("num_experts", int64),
        ("hidden", int64),
        ("inner", int64),
        ("activation", int32),
        ("gated", int32),
    )


class _Adapters(ctypes.Structure):
    """The same record as `ExpertAdapters` there."""

    _fields_ = (("gate_up", pointer), ("down", pointer), ("num_slots", int64))


class PackedExperts:
    """The experts with numbers from `first` on. Each is an MLP of two packed weights, gate_up [2 * inner, hidden], with
    the gate first, and down [hidden, inner]. Without a gate, the first is [inner, hidden]."""

    def __init__(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        first: int,
        activation: Activation,
        *,
        gated: bool = True,
    ) -> None:
        """Raises ValueError unless all experts have the same shapes and their weights the same kind."""
        shapes = {
            (both.num_outputs, both.num_inputs, one.num_outputs, one.num_inputs)
            for both, one in zip(gate_up, down, strict=True)
        }
        if len(shapes) != 1:
            raise ValueError(f"experts must have one shape, got {sorted(shapes)}")
        between, self.hidden, outputs, inner = shapes.pop()
        if outputs != self.hidden or between != (1 + gated) * inner:
            kind = "gated MLP" if gated else "MLP without a gate"
            raise ValueError(f"an expert of [{between}, {self.hidden}] and [{outputs}, {inner}] is not a {kind}")
        kinds = {weight.kind for weight in gate_up}, {weight.kind for weight in down}
        if max(map(len, kinds)) > 1:
            raise ValueError(f"experts must have weights of one kind, got {sorted(map(sorted, kinds))}")
        self._kept = gate_up, down
        self._addresses = [(pointer * len(part))(*(each.address for each in part)) for part in self._kept]
        self._record = _Record(
            *map(ctypes.addressof, self._addresses), first, len(gate_up), self.hidden, inner, KINDS[activation], gated
        )
        self._adapters: _Adapters | None = None

    def adapt(self, gate_up: Sequence[LoraSlots], down: Sequence[LoraSlots]) -> None:
        """Add LoRA slots to the two products of each expert. Their addresses must not change."""
        slots = gate_up, down
        addresses = [(pointer * len(part))(*(each.address for each in part)) for part in slots]
        self._adapters = _Adapters(*map(ctypes.addressof, addresses), gate_up[0].num_slots)
        self._adapted = slots, addresses

    def forward(
        self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """out = sum over a token's experts of weight * expert(x), in float32, in the order of the experts' numbers,
        rounded once. x, out: [num_tokens, hidden]; they may be the same tensor. Experts of other ranks add nothing.

        `rows`: rows and starts as in LoraSlots.add, int32 [n] and int32 [num_slots + 1]; None: no token has an adapter.

        The result of a row depends only on the row, its experts, its adapter and the instruction set. Raises ValueError
        for tensors of other shapes, types or strides.
        """
        num_tokens, top = chosen.experts.shape
        if x.shape != (num_tokens, self.hidden) or out.shape != x.shape or chosen.weights.shape != (num_tokens, top):
            raise ValueError(f"{list(x.shape)} -> {list(out.shape)} with {self.hidden} elements, {num_tokens} choices")
        if x.dtype not in FLOATS or out.dtype != x.dtype or x.stride(1) != 1 or out.stride(1) != 1:
            raise ValueError(f"rows must be contiguous floats of one type, got {x.dtype} -> {out.dtype}")
        if not chosen.experts.is_contiguous() or not chosen.weights.is_contiguous():
            raise ValueError("choices must be contiguous")
        adapters: tuple[int | None, ...] = None, None, None
        if rows is not None and self._adapters is not None:
            adapters = ctypes.addressof(self._adapters), *(each.data_ptr() for each in rows)
        function("vllm_lite_experts", _TYPES)(
            ctypes.addressof(self._record), x.data_ptr(), x.stride(0), dtype_code(x.dtype),
            chosen.experts.data_ptr(), chosen.weights.data_ptr(), num_tokens, top,
            out.data_ptr(), out.stride(0), *adapters,
        )  # fmt: skip
