"""The recurrent block of a decoder layer, used instead of attention: it keeps a state per sequence instead of KV."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.kernels.recurrent import Segments
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack

S = TypeVar("S")


class RecurrentOp(Protocol):
    """A layer's recurrence over the tokens of a sequence."""

    graph_safe: bool
    """Whether a graph can capture it."""

    def forward(
        self,
        projected: torch.Tensor,  # [n, projected_size]
        weights: Any,  # the layer's own beside its projections
        states: torch.Tensor,  # float32 [num_slots, state_elements]
        segments: Segments,
        mixed: torch.Tensor,  # float32 [n, scratch_size]
        out: torch.Tensor,  # [n, value_width]
    ) -> None:
        """Write each token's output, and update the states."""
        ...


class RecurrentBlock(ABC):
    """A projection, a recurrence over tokens, and another projection. A subclass makes these, and names the tensors
    that are loaded beside the projections."""

    projected_as: tuple[str, ...]
    """Checkpoint tensor of each part of the first projection."""
    output_as: ClassVar[str] = "out_proj"
    projections: Any
    output: Any
    op: RecurrentOp
    load: Callable[..., None]
    """Function that keeps the tensors of `slots` as `weights`."""
    weights: Any
    tentative: torch.Tensor  # [num_tentative, projected_size], of draft tokens, by the last step that had any

    def __init__(self, parts: Parts, layer: int) -> None:
        self.device = parts.device
        self.kind = parts.kinds.index(parts.layers[layer].blocks[1])
        self.kv_scales: KVScales | None = None

    def write(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        rows: StepRows,
        kv: torch.Tensor,  # the layer's states: float32 [num_slots, state_elements]
        batch: StepBatch,
        backend: AttentionBackend,  # noqa: ARG002 (the protocol's)
    ) -> None:
        """Update the states of the step's sequences by their tokens, and keep each token's output for `project`."""
        own = rows.by_kind[self.kind]
        if batch.states is None or own.mixed is None:
            raise ValueError("a step of a recurrent model says nothing of its states")
        self.project_in(x, own.qkv)
        if batch.tentative is not None:
            self.tentative = own.qkv[batch.tentative]
        self.op.forward(own.qkv, self.weights, kv, batch.states, own.mixed, own.attended)

    def project_in(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the inputs of the recurrence. out: [num_tokens, projected_size]."""
        self.projections.forward(x, out=out)

    def attend(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:  # noqa: B027
        """Do nothing: `write` has computed the outputs."""

    def take_up(self, tokens: torch.Tensor, rows: StepRows, kv: torch.Tensor, segments: Segments) -> None:
        """Update states by the accepted ones of the last step's draft tokens, whose outputs are known already.
        tokens: int64 [n], indices into `tentative`; rows: of n tokens."""
        own = rows.by_kind[self.kind]
        if own.mixed is None:
            raise ValueError("the buffers are not those of a recurrent layer")
        self.op.forward(self.tentative[tokens], self.weights, kv, segments, own.mixed, own.attended)

    def project(self, rows: StepRows) -> None:
        """Project the recurrence's output into rows.hidden."""
        self.output.forward(rows.by_kind[self.kind].attended, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0.linear_attn."."""
        yield self.projections.group(*(f"{prefix}{name}" for name in self.projected_as))
        stacks = (WeightStack(slots, torch.float32, self.device) for slots in self.slots(prefix))
        yield WeightGroup(tuple(stacks), self.load)
        yield self.output.group(f"{prefix}{self.output_as}")

    @abstractmethod
    def slots(self, prefix: str) -> Iterator[tuple[WeightSlot, ...]]:
        """Tensors beside the projections; `load` gets the parts of each concatenated."""


def specs_of(parts: Parts, layer: int, kind: type[S]) -> tuple[S, S]:
    """Specs of a recurrent layer: whole, and this rank's part. Raises TypeError for a layer of another kind."""
    whole, own = parts.spec.layers[layer].recurrent, parts.layers[layer].recurrent
    if not isinstance(whole, kind) or not isinstance(own, kind):
        raise TypeError(f"layer {layer} has no {kind.__name__}")
    return whole, own


def conv_slots(name: str, conv_size: int, held: Sequence[Split]) -> tuple[WeightSlot, ...]:
    """Request the parts `held` of a convolution's weight, [channels, 1, conv_size]."""
    return tuple(
        WeightSlot(name, (part.total, 1, conv_size), (part.start, 0, 0), (part.size, 1, conv_size)) for part in held
    )


def vector_slots(name: str, *held: Split) -> tuple[WeightSlot, ...]:
    """Request the parts `held` of a vector."""
    return tuple(WeightSlot(name, (part.total,), (part.start,), (part.size,)) for part in held)


def by_tap(conv: torch.Tensor) -> torch.Tensor:  # [channels, 1, conv_size] -> [conv_size, channels]
    """A convolution's weight as kernels read it."""
    return conv[:, 0].T.contiguous()
