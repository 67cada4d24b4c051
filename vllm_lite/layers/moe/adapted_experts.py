"""Adapters of a layer's experts, on a CPU: each matrix of each expert is a layer that can have adapters.

An adapter has either matrices for each expert ("experts.3.gate_proj"), if experts were modules when it was trained, or
concatenated ones for all experts ("experts.gate_up_proj"), if they were parameters. The latter are split when they are
read. The storage of experts in the model's own files does not matter.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.lora import LoraModule
from vllm_lite.kernels.cpu.weights.lora import LoraSlots
from vllm_lite.kernels.routing import Chosen
from vllm_lite.layers.mlp import GatedNames, first_names, first_rows
from vllm_lite.layers.moe.expert_matmul import ExpertMatmul, LoopedExperts, NativeExperts
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.adapter_rows import AdapterMask, GroupedRows
from vllm_lite.layers.weights.lora import (
    AdaptedMatmul,
    Adapters,
    NativeSlots,
    Site,
    check_matrices,
    read_tensor,
    rows_of,
)
from vllm_lite.layers.weights.weight_form import LinearShape


class ExpertLayout(NamedTuple):
    """Names and sizes of a layer's experts."""

    expert: str
    """Prefix of an expert's names, with {} for its number."""
    matrices: GatedNames
    fused: GatedNames
    held: Split
    """Experts of this rank."""
    inner: Split
    gated: bool


class ExpertAdapters:
    """The adapters of this rank's experts of one layer."""

    def __init__(self, parts: Parts, adapters: Adapters, rows: GroupedRows | AdapterMask, layout: ExpertLayout) -> None:
        self._adapters, self._rows, self._layout = adapters, rows, layout
        hidden, inner = Split.whole(parts.spec.hidden_size), layout.inner
        projections = (inner,) * len(first_names(layout.matrices, gated=layout.gated))
        self._shapes = (
            LinearShape(hidden, projections, parts.dtype, parts.device),
            LinearShape(inner, (hidden,), parts.dtype, parts.device),
        )
        self.gate_up: list[Site] = []
        self.down: list[Site] = []

    @classmethod
    def of(cls, parts: Parts, layout: ExpertLayout) -> "ExpertAdapters | None":
        """Make the adapters of experts; None without adapters, and on a GPU."""
        rows = None if parts.adapters is None or parts.device.type != "cpu" else parts.adapters.rows
        if parts.adapters is None or not isinstance(rows, GroupedRows | AdapterMask):
            return None
        return cls(parts, parts.adapters, rows, layout)

    def join(self, prefix: str) -> None:
        """Register the experts under `prefix`, like "model.layers.0.mlp.", with the model's adapters."""
        layout, others, hidden = self._layout, self._adapters.others, self._shapes[0].inputs
        names = first_names(layout.matrices, gated=layout.gated)
        self.gate_up, self.down = [], []
        for expert in range(layout.held.total):
            own = prefix + layout.expert.format(expert)
            first, second = [f"{own}{name}" for name in names], [f"{own}{layout.matrices.down}"]
            if layout.held.start <= expert < layout.held.end:
                self.gate_up.append(self._adapters.site(first, self._shapes[0]))
                self.down.append(self._adapters.site(second, self._shapes[1]))
            else:
                others.update(dict.fromkeys([*first, *second], _ELSEWHERE))
        fused, rows = layout.fused, first_rows(Split.whole(layout.inner.total), layout.fused, gated=layout.gated)
        others[f"{prefix}{fused.up}"] = FusedSites(self.gate_up, hidden.total, rows, layout.held)
        others[f"{prefix}{fused.down}"] = FusedSites(self.down, layout.inner.total, (hidden,), layout.held)

    def over(self, matmul: ExpertMatmul) -> ExpertMatmul:
        """Wrap the products of the experts to add those of the adapters."""
        if isinstance(matmul, NativeExperts) and isinstance(self._rows, GroupedRows):
            return _Native(matmul, (self.gate_up, self.down), self._rows)
        if isinstance(matmul, LoopedExperts):
            return _Looped(matmul, (self.gate_up, self.down), self._rows)
        raise TypeError(f"{type(matmul).__name__} has no adapters")


class FusedSites:
    """One matrix of all experts of a layer, for adapters that have concatenated ones."""

    def __init__(self, sites: Sequence[Site], inputs: int, rows: Sequence[Split], held: Split) -> None:
        """`rows`: rows of B for each projection of a site."""
        self.sites, self.inputs, self.rows, self.held = sites, inputs, rows, held

    def check(self, modules: Mapping[str, LoraModule], label: str) -> None:
        """See AdaptedPart.check."""
        for name, module in modules.items():
            check_matrices(name, module, self.inputs, self.rows[0].total, label, self.held.total)

    def read(self, modules: Mapping[str, LoraModule]) -> list[Any]:
        """See AdaptedPart.read."""
        (module,) = modules.values()
        down = read_tensor(module.down).unflatten(0, (self.held.total, -1))
        up = (read_tensor(module.up).float() * module.scale).unflatten(1, (-1, self.held.total))
        packed = []
        for expert, site in enumerate(self.sites, self.held.start):
            own = up[:, :, expert]
            parts = {name: rows_of(rows, own) for name, rows in zip(site.names, self.rows, strict=True)}
            packed.append(site.packed(dict.fromkeys(site.names, down[expert]), parts))
        return packed

    def put(self, slot: int, packed: list[Any] | None) -> None:
        """See AdaptedPart.put."""
        for site, own in zip(self.sites, packed or [None] * len(self.sites), strict=True):
            site.put(slot, own)


class _Elsewhere:
    """An expert of another rank, whose adapters are neither checked nor read."""

    def check(self, modules: Mapping[str, LoraModule], label: str) -> None:
        """See AdaptedPart.check; the rank that holds the expert checks its adapters."""

    def read(self, modules: Mapping[str, LoraModule]) -> None:
        """See AdaptedPart.read."""

    def put(self, slot: int, packed: None) -> None:
        """See AdaptedPart.put."""


_ELSEWHERE = _Elsewhere()
_Sites = tuple[Sequence[Site], Sequence[Site]]


def _native_slots(site: Site) -> LoraSlots:
    """Slots of a site. Every expert needs them, as the kernel finds an expert's slots by its index."""
    if not isinstance(site.slots, NativeSlots):
        raise TypeError(f"{type(site.slots).__name__} is not for the native experts")
    return site.slots.slots


class _Native:
    """All experts with their adapters by one operation of csrc/cpu."""

    def __init__(self, experts: NativeExperts, sites: _Sites, rows: GroupedRows) -> None:
        self._packed, self._rows = experts.packed, rows
        self._packed.adapt(*([_native_slots(site) for site in part] for part in sites))

    def forward(self, x: torch.Tensor, chosen: Chosen, out: torch.Tensor) -> None:
        self._packed.forward(x, chosen, out, self._rows.current)


class _Looped(LoopedExperts):
    """One expert after another, each with the adapters of its rows."""

    def __init__(self, experts: LoopedExperts, sites: _Sites, rows: GroupedRows | AdapterMask) -> None:
        gate_up, down = (
            [AdaptedMatmul(matmul, site) for matmul, site in zip(part, own, strict=True)]
            for part, own in zip((experts.gate_up, experts.down), sites, strict=True)
        )
        super().__init__(gate_up, down, experts.sizes)
        self._rows = rows

    def expert(self, index: int, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        all_rows = self._rows.current
        self._rows.select(tokens.numpy())
        try:
            return super().expert(index, x, tokens)
        finally:
            self._rows.current = all_rows
