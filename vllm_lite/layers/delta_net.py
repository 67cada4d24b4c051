"""A Gated DeltaNet layer: what stands in a decoder layer where others have attention. It keeps a state and no KV."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.kv_scales import KVScales
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.delta_rule import DeltaNetWeights, Segments, delta_net_op
from vllm_lite.layers.buffers import Rows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weight_slot import WeightGroup, WeightSlot, WeightStack, whole_slot


class DeltaNetNames(NamedTuple):
    """What a checkpoint calls the parts of the layer."""

    mixed: str = "in_proj_qkv"
    z: str = "in_proj_z"
    b: str = "in_proj_b"
    a: str = "in_proj_a"
    conv: str = "conv1d.weight"
    decay: str = "A_log"
    dt_bias: str = "dt_bias"
    norm: str = "norm.weight"
    output: str = "out_proj"


class DeltaNetBlock:
    """Ranks share the heads: each has some key heads and the value heads that these serve."""

    names = DeltaNetNames()
    weights: DeltaNetWeights  # by `load`
    tentative: torch.Tensor  # [num_tentative, projected_size], by the last step that had any

    def __init__(self, parts: Parts, layer: int) -> None:
        spec, whole, own = parts.spec, parts.spec.layers[layer].recurrent, parts.layers[layer]
        if whole is None or own.recurrent is None:
            raise ValueError(f"layer {layer} is not recurrent")
        self.whole, self.device, self.eps = whole, parts.device, spec.norm.eps
        self.kind = parts.kinds.index(own)
        self.kv_scales: KVScales | None = None
        key_heads, self.heads = whole.heads(parts.shard)
        keys, values = key_heads.times(whole.key_size), self.heads.times(whole.value_size)
        self.mixed = (
            Split(whole.conv_channels, keys.start, keys.size),
            Split(whole.conv_channels, whole.key_width + keys.start, keys.size),
            Split(whole.conv_channels, 2 * whole.key_width + values.start, values.size),
        )
        hidden = Split.whole(spec.hidden_size)
        self.projections = parts.linear(hidden, *self.mixed, values, self.heads, self.heads, bias=False)
        self.output = parts.row_parallel(values, hidden, bias=False)
        self.op = delta_net_op(own.recurrent, parts.device, parts.dtype)

    def attend(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        rows: Rows,
        kv: torch.Tensor,  # the layer's states: float32 [num_slots, state_elements]
        batch: StepBatch,
        backend: AttentionBackend,  # noqa: ARG002 (the protocol's)
    ) -> None:
        """Bring the states of the step's sequences up to their tokens, and read them for `project`."""
        own = rows.by_kind[self.kind]
        if batch.states is None or own.mixed is None:
            raise ValueError("a step of a recurrent model says nothing of its states")
        self.projections.forward(x, out=own.qkv)
        if batch.tentative is not None:
            self.tentative = own.qkv[batch.tentative]
        self.op.forward(own.qkv, self.weights, kv, batch.states, own.mixed, own.attended)

    def take_up(self, tokens: torch.Tensor, rows: Rows, kv: torch.Tensor, segments: Segments) -> None:
        """Bring states up to some of the tokens that the last step left tentative; what these read is known already.
        tokens: int64 [n], their places; rows: n of them."""
        own = rows.by_kind[self.kind]
        if own.mixed is None:
            raise ValueError("the buffers are not those of a recurrent layer")
        self.op.forward(self.tentative[tokens], self.weights, kv, segments, own.mixed, own.attended)

    def project(self, rows: Rows) -> None:
        """Project what was read into rows.hidden."""
        self.output.forward(rows.by_kind[self.kind].attended, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """What a checkpoint has of it under `prefix`, like "model.layers.0.linear_attn."."""
        names, spec, heads = self.names, self.whole, self.heads
        projections = (names.mixed, names.mixed, names.mixed, names.z, names.b, names.a)
        yield self.projections.group(*(f"{prefix}{name}" for name in projections))
        conv = tuple(
            WeightSlot(
                f"{prefix}{names.conv}",
                (spec.conv_channels, 1, spec.conv_size),
                (part.start, 0, 0),
                (part.size, 1, spec.conv_size),
            )
            for part in self.mixed
        )
        vectors = [
            (WeightSlot(f"{prefix}{name}", (heads.total,), (heads.start,), (heads.size,)),)
            for name in (names.decay, names.dt_bias)
        ]
        norm = (whole_slot(f"{prefix}{names.norm}", spec.value_size),)
        stacks = (WeightStack(slots, torch.float32, self.device) for slots in (conv, *vectors, norm))
        yield WeightGroup(tuple(stacks), self.load)
        yield self.output.group(f"{prefix}{names.output}")

    def load(self, conv: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor, norm: torch.Tensor) -> None:
        """Keep what lies beside the projections; conv: float32 [conv_channels, 1, conv_size]."""
        by_tap = conv[:, 0].T.contiguous()
        self.weights = DeltaNetWeights(by_tap, decay.exp(), dt_bias, norm, self.eps)
