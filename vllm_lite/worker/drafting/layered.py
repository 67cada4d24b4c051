"""LayeredDrafter: a drafter with its own layers, whose KV is stored in the sequence's blocks after that of the
model."""

import dataclasses
from abc import ABC, abstractmethod

import torch
from msgspec.structs import replace

from vllm_lite.attention.select import select_backend
from vllm_lite.checkpoint.model_spec import LayerGroup, ModelSpec
from vllm_lite.models.registry import Model
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.forward import EagerForward, Forward
from vllm_lite.worker.graphs import DecodeGraphs
from vllm_lite.worker.model_runner import warm_up_step
from vllm_lite.worker.sampling.drafter import Drafter, KVViews
from vllm_lite.worker.sampling.ranked_sampler import sampler_of
from vllm_lite.worker.sampling.sampler import TokenSampler

FEW_TOKENS = 16
"""Tokens of the warm-up step of a drafter."""


class LayeredDrafter(Drafter, ABC):
    """A drafter with layers. A subclass creates its model in `make`."""

    spec: ModelSpec
    """The drafting layers as a model."""
    _place: DraftPlace  # by `load`
    _model: Model
    _groups: tuple[int, ...]
    """For each KV group of the drafter, the batch's KV group that has its layers."""
    _eager: EagerForward  # by `begin`

    @abstractmethod
    def make(self, place: DraftPlace) -> Model:
        """Create and load the model of `spec`, whose KV groups are set already."""

    def load(self, place: DraftPlace) -> None:
        self._place, config = place, place.config
        self._groups, local = self.tables(place)
        self.spec = replace(self.spec, kv_groups=local)
        self._model = self.make(place)
        groups = self.spec.per_rank(place.model.communicator.shard).kv_groups
        shape = dataclasses.replace(place.backend.shape, groups=tuple(group.attention for group in groups))
        self._backend = select_backend(shape, config.attention_backend)

    def tables(self, place: DraftPlace) -> tuple[tuple[int, ...], tuple[LayerGroup, ...]]:
        """The result of `local_groups` for this drafter."""
        return local_groups(place.spec, self.spec)

    # ---- the KV cache and the batch

    def run_largest(self, own: KVViews, of_model: KVViews) -> None:  # noqa: ARG002 (it reads no layers but its own)
        self._warm_up(self._forward_over(own), self._place.limits.max_num_tokens)

    def begin(self, own: KVViews, of_model: KVViews) -> None:  # noqa: ARG002 (as above)
        self._eager = self._forward_over(own)
        self._warm_up(self._eager, FEW_TOKENS)

    def sampler(self) -> TokenSampler:
        return sampler_of(self._model, self._place.device.torch, self._place.limits.patience_s)

    def _forward_over(self, own: KVViews) -> EagerForward:
        keeping = [index for index, layer in enumerate(self.spec.layers) if layer.keeps_kv]
        views = dict(zip(keeping, own, strict=True))
        layers, nothing = enumerate(self.spec.layers), own[0][:0]
        caches = [views.get(index if layer.kv_layer is None else layer.kv_layer, nothing) for index, layer in layers]
        return EagerForward(self._model, caches, self._backend, self._place.device.torch, self._place.progress)

    def _warm_up(self, forward: Forward, num_tokens: int) -> None:
        limits, sampler = self._place.limits, sampler_of(self._model, self._place.device.torch)
        limits = dataclasses.replace(limits, num_groups=len(self._groups))
        warm_up_step(forward, sampler, limits, min(num_tokens, limits.max_num_tokens))


def local_groups(spec: ModelSpec, own: ModelSpec) -> tuple[tuple[int, ...], tuple[LayerGroup, ...]]:
    """The KV groups of a drafting model, and for each of them the group of `spec`, the verifying model, whose block
    tables it uses. Layers with different windows are separate groups over the same tables."""
    tables: list[int] = []
    groups: list[LayerGroup] = []
    for index, group in enumerate(spec.kv_groups):
        layers = [layer - spec.num_layers for layer in group.layers if layer >= spec.num_layers]
        for attention in dict.fromkeys(own.layers[layer].attention for layer in layers):
            members = tuple(layer for layer in layers if own.layers[layer].attention == attention)
            groups.append(LayerGroup(members, attention))
            tables.append(index)
    return tuple(tables), tuple(groups)


@torch.inference_mode()
def recorded(eager: EagerForward, place: DraftPlace) -> Forward:
    """Recorded decode steps, if they are recorded on demand (on a CPU); a GPU would need memory for each."""
    capture, limits = place.device.capture, place.limits
    if capture is None or not place.graph_sizes or not capture.on_demand:
        return eager
    sizes = {"max_model_len": limits.max_model_len, "block_size": limits.block_size}
    return DecodeGraphs(eager, capture, place.pass_sizes, **sizes)
