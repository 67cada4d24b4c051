"""The engine's attention for transformers' layers: an entry of its AttentionInterface."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from vllm_lite.attention.backend import AttentionBackend, Heads
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.errors import ModelError
from vllm_lite.models.transformers.library import INTERFACE


@dataclass(slots=True)
class LayerStep:
    """Inputs of all layers' attention in one step."""

    batch: StepBatch
    kv_caches: list[torch.Tensor]
    backend: AttentionBackend
    progress: Callable[[], None]


class Seen(NamedTuple):
    """A layer's attention in the dry run."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None
    soft_cap: float
    sinks: bool


class PagedAttention:
    """The attention of one model's layers: over the paged cache in steps; the dry run only records it.

    It is the attribute `paged` of every module with a `layer_idx`, where `attend` finds it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.groups = {layer: index for index, group in enumerate(spec.kv_groups) for layer in group.layers}
        self.seen: dict[int, list[Seen]] = {}
        self.step: LayerStep | None = None
        self.kv_scales: dict[int, KVScales] = {}
        self._sinks: dict[int, torch.Tensor] = {}

    def observe(self, layer: int, seen: Seen) -> None:
        self.seen.setdefault(layer, []).append(seen)

    def attend(self, layer: int, heads: Heads, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend over the paged cache, or record the call. Returns [num_tokens, num_heads, head_size]."""
        step = self.step
        if step is None:
            raise RuntimeError("a layer attends outside of a step")
        out = torch.empty_like(heads.query)
        kv, group = step.kv_caches[layer], self.groups[layer]
        scales = self.kv_scales.get(layer)
        step.backend.write_kv(heads, kv, step.batch, group, scales)
        given: dict[str, Any] = {"scales": scales, "new": heads}
        if sinks is not None:
            if layer not in self._sinks:
                self._sinks[layer] = sinks.detach().float()
            given["sinks"] = self._sinks[layer]
        step.backend.attend(heads.query, kv, step.batch, group, out, **given)
        step.progress()
        return out


def register() -> None:
    """Register the interface with transformers by its name."""
    AttentionInterface.register(INTERFACE, attend)


def install(model: Any, paged: PagedAttention) -> None:
    """Let the layers of `model` attend through `paged`."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            module.paged = paged


def attend(
    module: Any,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_size]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_size]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_size]
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' layers. Returns [1, num_tokens, num_heads, head_size]."""
    paged: PagedAttention = module.paged
    sinks = options.get("s_aux")
    if query.is_meta:
        paged.observe(module.layer_idx, _observed(module, (query, key, value), attention_mask, options))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None
    heads = Heads(_rows(query), _rows(key), _rows(value))
    return paged.attend(module.layer_idx, heads, sinks)[None], None


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[1, heads, num_tokens, size] -> [num_tokens, heads, size], with the heads of a row contiguous."""
    rows = heads[0].transpose(0, 1)
    return rows if rows.stride(1) == rows.shape[2] and rows.stride(2) == 1 else rows.contiguous()


def _observed(module: Any, heads: tuple[torch.Tensor, ...], mask: torch.Tensor | None, options: dict[str, Any]) -> Seen:
    """Describe the attention of a layer's call. Raises ModelError if the engine's attention does not support it."""
    query, key, value = heads
    where = f"layer {module.layer_idx} ({type(module).__name__})"
    others = sorted(name for name, given in options.items() if name not in KNOWN and isinstance(given, torch.Tensor))
    if mask is not None or others:
        raise ModelError(f"{where} adds something of its own to the scores ({', '.join(others) or 'a mask'})")
    causal = options.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise ModelError(f"{where} attends to later tokens, too")
    if query.shape[2] != key.shape[2]:
        raise ModelError(f"{where} attends to {key.shape[2]} keys with {query.shape[2]} queries")
    scale = options.get("scaling")
    return Seen(
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        query.shape[3] ** -0.5 if scale is None else float(scale),
        options.get("sliding_window"),
        float(options.get("softcap") or 0.0),
        options.get("s_aux") is not None,
    )


KNOWN = ("s_aux", "position_ids", "cache_position", "scaling")
"""Options that may be tensors."""
