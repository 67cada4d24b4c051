"""DraftPlace: the data of a worker with which a drafter loads its own model."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.config import ResolvedConfig
from vllm_lite.models.registry import Model
from vllm_lite.worker.device import Device
from vllm_lite.worker.model_runner import StepLimits


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """The worker's settings, and the loaded verifying model."""

    config: ResolvedConfig
    spec: ModelSpec
    """Spec of the verifying model, with the KV groups of the drafter's layers after its own."""
    model: Model
    backend: AttentionBackend
    device: Device
    dtype: torch.dtype
    limits: StepLimits
    graph_sizes: tuple[int, ...] = ()
    """Batch sizes for which decode steps are recorded; none: they run eagerly."""
    kv_scales: tuple[KVScales, ...] = ()
    """KV scales of the model's layers, if the checkpoint has some and the cache uses them."""
    scratch: range = range(0)
    """Slots of recurrent states for drafts, whose contents are temporary."""
    progress: Callable[[], None] = lambda: None
    """Called once a layer, as EagerForward does."""
    loaded: Callable[[int, int], None] = lambda done, total: None  # noqa: ARG005
    """Called with the bytes loaded, as load_weights does."""

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """The `graph_sizes` of drafting passes, which have a row for each sequence."""
        return self.graph_sizes[: bisect_left(self.graph_sizes, self.limits.max_num_seqs) + 1]
