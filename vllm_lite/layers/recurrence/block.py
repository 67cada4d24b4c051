"""The recurrent block of a decoder layer, in the place of attention: it keeps a state of the sequence instead of KV."""

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
    """The operation of a layer that goes from token to token."""

    graph_safe: bool
    """Whether a graph can hold it."""

    def forward(
        self,
        projected: torch.Tensor,  # [n, projected_size]
        weights: Any,  # the layer's own beside its projections
        states: torch.Tensor,  # float32 [num_slots, state_elements]
        segments: Segments,
        mixed: torch.Tensor,  # float32 [n, scratch_size]
        out: torch.Tensor,  # [n, value_width]
    ) -> None:
        """Write what each token gets, and change the states."""
        ...


class RecurrentBlock(ABC):
    """A projection, what goes from token to token, and another projection. A kind of layer makes these, and names what
    is loaded beside the projections."""

    projected_as: tuple[str, ...]
    """Tensor in a checkpoint of each part that `projections` gives."""
    output_as: ClassVar[str] = "out_proj"
    projections: Any
    output: Any
    op: RecurrentOp
    load: Callable[..., None]
    """Keeps the tensors of `slots` as `weights`."""
    weights: Any
    tentative: torch.Tensor  # [num_tentative, projected_size], by the last step that had any

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
        """Bring the states of the step's sequences up to their tokens, and read them for `project`."""
        own = rows.by_kind[self.kind]
        if batch.states is None or own.mixed is None:
            raise ValueError("a step of a recurrent model says nothing of its states")
        self.project_in(x, own.qkv)
        if batch.tentative is not None:
            self.tentative = own.qkv[batch.tentative]
        self.op.forward(own.qkv, self.weights, kv, batch.states, own.mixed, own.attended)

    def project_in(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Make what goes from token to token. out: [num_tokens, projected_size]."""
        self.projections.forward(x, out=out)

    def attend(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:  # noqa: B027
        """Nothing: the tokens have read their states on the way."""

    def take_up(self, tokens: torch.Tensor, rows: StepRows, kv: torch.Tensor, segments: Segments) -> None:
        """Bring states up to some of the tokens that the last step left tentative; what these read is known already.
        tokens: int64 [n], their places; rows: n of them."""
        own = rows.by_kind[self.kind]
        if own.mixed is None:
            raise ValueError("the buffers are not those of a recurrent layer")
        self.op.forward(self.tentative[tokens], self.weights, kv, segments, own.mixed, own.attended)

    def project(self, rows: StepRows) -> None:
        """Project what was read into rows.hidden."""
        self.output.forward(rows.by_kind[self.kind].attended, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights of it in a checkpoint under `prefix`, like "model.layers.0.linear_attn."."""
        yield self.projections.group(*(f"{prefix}{name}" for name in self.projected_as))
        stacks = (WeightStack(slots, torch.float32, self.device) for slots in self.slots(prefix))
        yield WeightGroup(tuple(stacks), self.load)
        yield self.output.group(f"{prefix}{self.output_as}")

    @abstractmethod
    def slots(self, prefix: str) -> Iterator[tuple[WeightSlot, ...]]:
        """The tensors beside the projections, each in parts that `load` gets together, one behind the other."""


def specs_of(parts: Parts, layer: int, kind: type[S]) -> tuple[S, S]:
    """A recurrent layer in numbers, and this rank's share of it. Raises TypeError for a layer of another kind."""
    whole, own = parts.spec.layers[layer].recurrent, parts.layers[layer].recurrent
    if not isinstance(whole, kind) or not isinstance(own, kind):
        raise TypeError(f"layer {layer} has no {kind.__name__}")
    return whole, own


def conv_slots(name: str, conv_size: int, held: Sequence[Split]) -> tuple[WeightSlot, ...]:
    """Parts of a convolution's weight, [channels, 1, conv_size]."""
    return tuple(
        WeightSlot(name, (part.total, 1, conv_size), (part.start, 0, 0), (part.size, 1, conv_size)) for part in held
    )


def vector_slots(name: str, *held: Split) -> tuple[WeightSlot, ...]:
    """Parts of a vector."""
    return tuple(WeightSlot(name, (part.total,), (part.start,), (part.size,)) for part in held)


def by_tap(conv: torch.Tensor) -> torch.Tensor:  # [channels, 1, conv_size] -> [conv_size, channels]
    """A convolution's weight as kernels read it."""
    return conv[:, 0].T.contiguous()
