"""Common parts of recurrent layers: a step's segments, the contents of a state slot, the short convolution, and
interfaces of implementations.

In plain torch, segment by segment."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.nn.functional import conv1d, silu

if TYPE_CHECKING:
    from collections.abc import Iterator


CHUNK = 64
"""Tokens that are computed together if there is no kernel."""


class KVAndStates(NamedTuple):
    """Cache of a layer with attention and a recurrent block."""

    kv: torch.Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_size]
    states: torch.Tensor  # float32 [num_slots, state_elements]


class Segments(NamedTuple):
    """State slots that the sequences of a step read and write.

    The rows of a sequence are cut into consecutive segments. A segment starts with the state in slot `sources`, 0 for
    the state before the first token, and writes its last state to slot `targets`, 0 for none. A segment without rows
    copies a state.
    """

    firsts: torch.Tensor  # int32 [num_seqs + 1], the segments of each sequence
    rows: torch.Tensor  # int32 [num_segments + 1], the rows of each segment
    sources: torch.Tensor  # int32 [num_segments]
    targets: torch.Tensor  # int32 [num_segments]

    def each(self) -> "Iterator[tuple[int, int, int, int]]":
        """First row, end row, source and target of each segment."""
        rows, sources, targets = (part.tolist() for part in self[1:])
        return zip(rows, rows[1:], sources, targets, strict=False)


class StateShape(Protocol):
    """The parts of a layer's state of one sequence."""

    @property
    def conv_shape(self) -> tuple[int, int]: ...

    @property
    def matrix_shape(self) -> tuple[int, int, int]: ...


class ConvWeights(Protocol):
    """Weights of the convolution, which every recurrent layer has."""

    @property
    def conv(self) -> torch.Tensor: ...  # float32 [conv_size, channels]

    @property
    def conv_bias(self) -> torch.Tensor | None: ...  # float32 [channels]


Spec = TypeVar("Spec", bound=StateShape)
Parts = TypeVar("Parts", bound=NamedTuple)
Weights = TypeVar("Weights", bound=ConvWeights)


def split_state(states: torch.Tensor, spec: StateShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Split one layer's part of the slots, float32 [num_slots, state_elements], into the last inputs of the
    convolution, [num_slots, conv_size - 1, conv_channels], and the matrices, [num_slots, num_heads, ...]."""
    size = spec.conv_shape[0] * spec.conv_shape[1]
    return states[:, :size].unflatten(1, spec.conv_shape), states[:, size:].unflatten(1, spec.matrix_shape)


def convolve(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A causal convolution of each channel: [conv_size - 1 + n, channels] -> [n, channels]."""
    return conv1d(inputs.T[None], weight.T[:, None].contiguous(), bias, groups=weight.shape[1])[0].T


class SegmentedOp(ABC, Generic[Spec, Parts, Weights]):
    """A layer with a state matrix for each head. A subclass defines how projections are split, where the part `mixed`
    passes the convolution, and how they are scanned."""

    graph_safe = False
    """Whether a graph can record it; not if the ends of segments are read on the host."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def split_projected(self, projected: torch.Tensor) -> Parts:
        """Split `projected`, [n, projected_size], into its parts."""

    @abstractmethod
    def scan(self, own: Parts, weights: Weights, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs for the tokens of a segment, and the state after them; `mixed` has passed the convolution."""

    def forward(
        self,
        projected: torch.Tensor,  # [n, projected_size]
        weights: Weights,
        states: torch.Tensor,  # float32 [num_slots, state_elements]
        segments: Segments,
        mixed: torch.Tensor,  # float32 [n, conv_channels], scratch memory
        out: torch.Tensor,  # [n, value_width]
    ) -> None:
        """Write the output of each token, and update the states."""
        parts = self.split_projected(projected)
        kept, matrices = split_state(states, self.spec)
        for first, last, source, target in segments.each():
            if first == last:
                states[target] = states[source]
                continue
            own = parts._replace(**{name: part[first:last].float() for name, part in parts._asdict().items()})
            before = kept[source] if source else torch.zeros_like(kept[0])
            state = matrices[source] if source else torch.zeros_like(matrices[0])
            inputs = torch.cat((before, own._asdict()["mixed"]))
            mixed[first:last] = silu(convolve(inputs, weights.conv, weights.conv_bias))
            out[first:last], state = self.scan(own._replace(mixed=mixed[first:last]), weights, state)
            if target:
                kept[target], matrices[target] = inputs[last - first :], state


class Taps(NamedTuple):
    """The weights of a convolution, float32."""

    weight: torch.Tensor  # [conv_size, channels]
    bias: torch.Tensor | None = None  # [channels]


class Convolution(Protocol):
    """The short convolution of all sequences of a step, followed by SiLU. With `gates`, x is multiplied by the first
    one before, and the result by the second one instead of SiLU."""

    def __call__(
        self,
        x: torch.Tensor,  # [n, channels], rows strided
        gates: tuple[torch.Tensor, torch.Tensor] | None,  # as x
        taps: Taps,
        kept: torch.Tensor,  # float32 [num_slots, conv_size - 1, channels], slots strided
        segments: Segments,
        out: torch.Tensor,  # [n, channels], float32, or with gates in the dtype of x
    ) -> None: ...


class TwoCalls(SegmentedOp[Spec, Parts, Weights]):
    """An implementation with two kernels over all sequences of a step: the convolution, and then the scan."""

    graph_safe = True
    convolution: Convolution

    @abstractmethod
    def scan_all(
        self,
        parts: Parts,
        weights: Weights,
        matrices: torch.Tensor,  # float32 [num_slots, num_heads, ...], slots strided
        segments: Segments,
        mixed: torch.Tensor,  # float32 [n, conv_channels], after the convolution
        out: torch.Tensor,
    ) -> None:
        """Scan all sequences, after the convolution."""

    def forward(
        self,
        projected: torch.Tensor,
        weights: Weights,
        states: torch.Tensor,
        segments: Segments,
        mixed: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        parts = self.split_projected(projected)
        kept, matrices = split_state(states, self.spec)
        x: torch.Tensor = parts._asdict()["mixed"]
        self.convolution(x, None, Taps(weights.conv, weights.conv_bias), kept, segments, mixed)
        self.scan_all(parts, weights, matrices, segments, mixed, out)
