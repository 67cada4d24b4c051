"""Mamba-2, used in a decoder layer instead of attention. It keeps a state and no KV."""

from collections.abc import Iterator

import torch

from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.mamba import MambaWeights
from vllm_lite.kernels.ops import WideNormWeights
from vllm_lite.kernels.select import mamba_op, ops_for
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.recurrence.block import RecurrentBlock, by_tap, conv_slots, specs_of, vector_slots
from vllm_lite.layers.weights.weight_slot import WeightSlot


class MambaBlock(RecurrentBlock):
    """Mamba-2. Groups of heads are split over ranks, each with its b and c; or if there is one group, its heads are,
    and each rank has all of b and c. The norm is over the heads of a group, so these ranks all-reduce its mean square.
    """

    projected_as = ("in_proj",) * 5
    norm: WideNormWeights  # by `load`

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        whole, own = specs_of(parts, layer, MambaSpec)
        self.whole, self.eps, self.heads = whole, parts.spec.norm.eps, whole.held(parts.shard)
        self.groups = whole.held_groups(parts.shard)
        self.ops, self.communicator = ops_for(parts.device), parts.communicator
        values, hidden = self.heads.times(whole.head_size), Split.whole(parts.spec.hidden_size)
        self.values = values
        total, steps = whole.projected_size, whole.value_width + whole.conv_channels
        projected = (
            Split(total, values.start, values.size),
            *(Split(total, whole.value_width + part.start, part.size) for part in self._mixed()),
            Split(total, steps + self.heads.start, self.heads.size),
        )
        self.projections = parts.linear(hidden, *projected, bias=False)
        self.output = parts.row_parallel(values, hidden, bias=False)
        self.op = mamba_op(own, parts.device, parts.dtype)
        self.parts = own.parts

    def project_in(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See RecurrentBlock.project_in; some models multiply each part by its own factor."""
        super().project_in(x, out)
        if self.whole.factors is not None:
            for part, factor in zip(out.split(self.parts, dim=1), self.whole.factors, strict=True):
                if factor != 1.0:
                    self.ops.scale(part, factor)

    def _mixed(self) -> tuple[Split, Split, Split]:
        """This rank's parts of x, b and c."""
        channels, values, shared = self.whole.conv_channels, self.values, self.groups.times(self.whole.state_size)
        starts = values.start, values.total + shared.start, values.total + shared.total + shared.start
        sizes = values.size, shared.size, shared.size
        first, second, third = (Split(channels, *own) for own in zip(starts, sizes, strict=True))
        return first, second, third

    def project(self, rows: StepRows) -> None:
        """Norm the recurrence's output and project it into rows.hidden."""
        read = rows.by_kind[self.kind].attended
        if self.whole.normed:
            self._norm(read)
        self.output.forward(read, out=rows.hidden)
        if self.whole.output_factor != 1.0:
            self.ops.scale(rows.hidden, self.whole.output_factor)

    def _norm(self, read: torch.Tensor) -> None:
        """Norm the output of this rank's heads in place. read: [num_tokens, value_width]."""
        if self.whole.num_groups > 1:
            by_group = read.unflatten(1, (self.groups.size, -1))
            self.ops.wide_norm(by_group, self.norm, by_group)
        elif self.heads.size == self.heads.total:
            self.ops.wide_norm(read, self.norm, read)
        else:
            squares = read.float().square().sum(-1, keepdim=True)
            self.communicator.all_reduce(squares)
            scale = (squares / self.whole.value_width + self.eps).rsqrt_()
            read.copy_(read * scale * self.norm.weight)

    def slots(self, prefix: str) -> Iterator[tuple[WeightSlot, ...]]:
        mixed = self._mixed()
        yield conv_slots(f"{prefix}conv1d.weight", self.whole.conv_size, mixed)
        yield vector_slots(f"{prefix}conv1d.bias", *mixed)
        for name in ("A_log", "dt_bias", "D"):
            yield vector_slots(f"{prefix}{name}", self.heads)
        if self.whole.normed:
            yield vector_slots(f"{prefix}norm.weight", self.values)

    def load(
        self,
        conv: torch.Tensor,  # float32 [conv_channels, 1, conv_size]
        conv_bias: torch.Tensor,
        decay: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        norm: torch.Tensor | None = None,
    ) -> None:
        """Keep the weights beside the projections."""
        self.weights = MambaWeights(by_tap(conv), conv_bias, decay.exp(), dt_bias, skip)
        if norm is None:
            return
        by_group = norm.unflatten(0, (self.groups.size, -1)) if self.whole.num_groups > 1 else norm
        self.norm = WideNormWeights(by_group, None, self.eps, centered=False)
