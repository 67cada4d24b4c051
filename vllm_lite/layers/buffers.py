"""Preallocated activations: one set per model, which its layers use in turn, sliced to a step's number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from vllm_lite.attention.backend import Heads
from vllm_lite.checkpoint.layer_specs.latent import LatentSpec
from vllm_lite.checkpoint.model_spec import LayerSpec
from vllm_lite.kernels.ops import Rotation
from vllm_lite.kernels.routing import Chosen
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.rope import RotaryEmbedding
from vllm_lite.layers.parts import Parts


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Attention activations of layers of one kind. Heads are views into the fused rows of `qkv`."""

    qkv: torch.Tensor  # [n, (num_heads + 2 * num_kv_heads) * head_size]; if latent, outputs of the first projections
    heads: Heads  # in qkv
    attended: torch.Tensor  # [n, num_heads * head_size], or num_heads * value_size
    attended_heads: torch.Tensor  # [n, num_heads, head_size or value_size], the same memory
    latent: "LatentRows | None" = None
    gate: torch.Tensor | None = None  # [n, num_heads * head_size or num_heads], in qkv: gate of the output
    mixed: torch.Tensor | None = None  # float32 [n, scratch_size], of recurrent layers


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Buffers of layers with latent attention, beside the absorbed heads that attend to the cache."""

    query: torch.Tensor  # [n, num_heads * query_size], before its projection to the space of the latent
    query_heads: torch.Tensor  # [n, num_heads, query_size], the same memory
    values: torch.Tensor  # [n, num_heads * value_size], the heads' results projected to V
    value_heads: torch.Tensor  # [n, num_heads, value_size], the same memory
    rotation: Rotation  # of the rotated part of Q and K


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Buffers of a layer with experts."""

    logits: torch.Tensor  # float32 [n, num_experts]
    chosen: Chosen  # [n, experts_per_token]
    gate_up: torch.Tensor  # [n, 2 * shared_intermediate_size], of the shared expert; without a gate [n, 0]
    activated: torch.Tensor  # [n, shared_intermediate_size]
    shared: torch.Tensor  # [n, hidden_size], its output, or this rank's part of it
    gates: torch.Tensor  # float32 [n, 1]


@dataclass(frozen=True, slots=True)
class PerLayerRows:
    """Per-layer vectors of tokens, see ModelSpec.per_layer_size."""

    looked_up: torch.Tensor  # [n, num_layers * size]
    projected: torch.Tensor  # [n, num_layers * size]
    gated: torch.Tensor  # [n, num_layers, 2 * size]: room for the layer's gate, then the vector that it multiplies
    activated: torch.Tensor  # [n, size]

    def first(self, n: int) -> "PerLayerRows":
        return PerLayerRows(self.looked_up[:n], self.projected[:n], self.gated[:n], self.activated[:n])


@dataclass(frozen=True, slots=True)
class StepRows:
    """The buffers of a step with n tokens."""

    residual: torch.Tensor  # [n, hidden_size]
    hidden: torch.Tensor  # [n, hidden_size], input and output of every block
    rotations: tuple[Rotation, ...]  # for each kind of rope; the heads that use it refer to it
    by_kind: tuple[HeadRows, ...]  # for each of Parts.kinds; they share one memory
    query_growth: torch.Tensor | None  # float32 [max_model_len], for all positions; None = no layer has it
    gate_up: torch.Tensor  # [n, 2 * intermediate_size]; without a gate [n, 0]
    activated: torch.Tensor  # [n, intermediate_size]
    experts: ExpertRows | None  # None = no layer has experts
    per_layer: PerLayerRows | None  # None = no per-layer vectors


class Buffers:
    """Activations for up to `max_num_tokens` tokens. The sizes are this rank's share of the model's."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(max_num_tokens, size, dtype=parts.dtype, device=parts.device)

        spec, self.kinds = parts.spec, parts.kinds
        sizes_of_mlps = [own.intermediate_size or spec.intermediate_size for own in self.kinds]
        intermediate_size = max(sizes_of_mlps) // parts.shard.world
        self.max_num_tokens = max_num_tokens
        self._ops = ops_for(parts.device)
        self._adapters = parts.adapters
        self.residual = buffer(spec.hidden_size)
        self.hidden = buffer(spec.hidden_size)
        sizes = [max(of_kind) for of_kind in zip(*(kind.attention_buffers for kind in self.kinds), strict=True)]
        self.qkv, self.attended, self.latent = (buffer(size).flatten() for size in sizes)
        recurrent = [kind.recurrent for kind in self.kinds if kind.recurrent is not None]
        channels = max((own.scratch_size for own in recurrent), default=0)
        self.mixed = torch.zeros(max_num_tokens * channels, dtype=torch.float32, device=parts.device)
        self.gate_up = buffer(2 * intermediate_size if spec.gated_mlp else 0)
        self.activated = buffer(intermediate_size)
        ropes = dict.fromkeys((kind.rope, kind.rotated_size) for kind in self.kinds if kind.rope is not None)
        self._ropes = list(ropes)
        self.tables = [RotaryEmbedding(rope, size, max_model_len, device=parts.device) for rope, size in ropes]
        self.rotations = [(buffer(size), buffer(size)) for _, size in ropes]
        self._experts = _expert_rows(parts, max_num_tokens)
        self._per_layer = _per_layer_rows(parts, max_num_tokens)
        self._query_growth = _growth(self.kinds, max_model_len, parts.device)
        self._last: tuple[int, StepRows] | None = None

    @property
    def has_adapters(self) -> bool:
        """Whether rows can have adapters."""
        return self._adapters is not None

    def begin_step(self) -> None:
        """Begin a forward pass: adapters apply to all rows of the step again, not to those gathered in the pass before.
        Otherwise a graph captured after a warm-up step would keep reading the gathered rows' adapters."""
        if self._adapters is not None:
            self._adapters.rows.repeat_step()

    def rows(self, n: int) -> StepRows:
        """Return views of the first n rows; they are cached, as decode steps often have the same n."""
        if self._last is None or self._last[0] != n:
            self._last = (n, self._slice(n))
        return self._last[1]

    def select_rotations(self, rows: StepRows, positions: torch.Tensor, *, on_axes: bool = False) -> None:
        """Look up each token's rotations, once for all layers. positions: int64 [num_tokens]. `on_axes`: positions may
        differ between axes, as `step_batch.on_axes` encodes them."""
        for table, rotation in zip(self.tables, rows.rotations, strict=True):
            select = table.select_axes if on_axes else table.select
            select(positions, rotation)

    def gather(self, rows: StepRows, wanted: torch.Tensor, kind: int, layer: int, *, heads: bool = False) -> StepRows:
        """Move the `wanted` rows (int64 [k], k <= n) of the residual stream, of attention's result and of the per-layer
        vectors from `layer` on to the front; other activations are lost. `heads`: also the rows of Q, if attention is
        still to be computed."""
        all_of, few = rows.by_kind[kind], self.rows(len(wanted))
        few_of = few.by_kind[kind]
        moved = [(rows.residual, few.residual), (all_of.attended, few_of.attended)]
        if heads:
            moved.append((all_of.qkv, few_of.qkv))
        if heads and all_of.latent is not None:  # the absorbed Q is not in `qkv`
            moved.append((all_of.heads.query, few_of.heads.query))
        if rows.per_layer is not None and few.per_layer is not None:
            moved.append((rows.per_layer.gated[:, layer:], few.per_layer.gated[:, layer:]))
        for all_rows, place in moved:
            self._ops.take_rows(all_rows, wanted, place)
        if self._adapters is not None:
            self._adapters.rows.gather(wanted)
        return few

    def _slice(self, n: int) -> StepRows:
        if n > self.max_num_tokens:
            raise ValueError(f"a step of {n} tokens exceeds the {self.max_num_tokens} that the buffers were made for")
        rotations = tuple(Rotation(cos[:n], sin[:n]) for cos, sin in self.rotations)
        return StepRows(
            residual=self.residual[:n],
            hidden=self.hidden[:n],
            rotations=rotations,
            by_kind=tuple(self._head_rows(kind, n, rotations) for kind in self.kinds),
            query_growth=self._query_growth,
            gate_up=self.gate_up[:n],
            activated=self.activated[:n],
            experts=None if self._experts is None else _first_rows(self._experts, n),
            per_layer=None if self._per_layer is None else self._per_layer.first(n),
        )

    def _head_rows(self, kind: LayerSpec, n: int, rotations: Sequence[Rotation]) -> HeadRows:
        own, rope = kind.attention, kind.rope
        heads, keys = own.num_heads, own.num_heads + own.num_kv_heads
        first_size, attended_size, _ = kind.attention_buffers
        qkv = self.qkv[: n * first_size].view(n, first_size)
        attended = self.attended[: n * attended_size].view(n, attended_size)
        if kind.recurrent is not None or not kind.attends:
            none = Heads(attended[:, None, :0], attended[:, None, :0], attended[:, None, :0])
            channels = 0 if kind.recurrent is None else kind.recurrent.scratch_size
            mixed = self.mixed[: n * channels].view(n, channels)
            return HeadRows(qkv, none, attended, attended[:, None], mixed=mixed)
        rotation = None if rope is None else rotations[self._ropes.index((rope, kind.rotated_size))]
        if kind.latent is not None and rotation is not None:
            views, latent = _latent_rows(kind.latent, heads, qkv, self.latent, rotation)
            return HeadRows(qkv, views, attended, attended.view(n, heads, -1), latent)
        by_head = qkv[:, : own.qkv_size].view(n, heads + 2 * own.num_kv_heads, own.head_size)
        views = Heads(by_head[:, :heads], by_head[:, heads:keys], by_head[:, keys:], rotation)
        gate = qkv[:, own.qkv_size :] if kind.output_gate else None
        return HeadRows(qkv, views, attended, attended.view(n, heads, own.head_size), gate=gate)


def _latent_rows(
    spec: LatentSpec,
    num_heads: int,
    projected: torch.Tensor,  # [n, projected_size]
    memory: torch.Tensor,  # for all other_sizes of n tokens
    rotation: Rotation,
) -> tuple[Heads, LatentRows]:
    """Make views for latent attention. Its heads have no `rotation`: the block rotates a part of each itself."""
    n, sizes = len(projected), spec.other_sizes(num_heads)
    ends = accumulate(n * size for size in sizes)
    expanded, absorbed, values = (
        memory[end - n * size : end].view(n, size) for end, size in zip(ends, sizes, strict=True)
    )
    query = expanded if spec.query_rank else projected[:, : num_heads * spec.query_size]
    start = spec.first_size(num_heads)
    key = projected[:, None, start : start + spec.cached_size]
    heads = Heads(absorbed.view(n, num_heads, spec.cached_size), key, key[..., : spec.rank])
    query_heads, value_heads = (flat.view(n, num_heads, -1) for flat in (query, values))
    return heads, LatentRows(query, query_heads, values, value_heads, rotation)


def _expert_rows(parts: Parts, n: int) -> ExpertRows | None:
    """Raises ValueError if layers differ in their experts."""
    kinds = {kind.experts for kind in parts.kinds} - {None}
    if len(kinds) > 1:
        raise ValueError(f"layers differ in their experts: {kinds}")
    spec = parts.spec.experts
    if spec is None:
        return None

    def buffer(size: int, dtype: torch.dtype = parts.dtype) -> torch.Tensor:
        return torch.zeros(n, size, dtype=dtype, device=parts.device)

    shared = spec.shared_intermediate_size // parts.shard.world
    top, hidden = spec.routing.experts_per_token, parts.spec.hidden_size
    return ExpertRows(
        logits=buffer(spec.routing.num_experts, torch.float32),
        chosen=Chosen(buffer(top, torch.int32), buffer(top, torch.float32)),
        gate_up=buffer(2 * shared if spec.gated else 0),
        activated=buffer(shared),
        shared=buffer(hidden if shared or parts.spec.mlp_beside_experts else 0),
        gates=buffer(1, torch.float32),
    )


def _per_layer_rows(parts: Parts, n: int) -> PerLayerRows | None:
    size, num_layers = parts.spec.per_layer_size, parts.spec.num_layers
    if not size:
        return None

    def buffer(*shape: int) -> torch.Tensor:
        return torch.zeros(n, *shape, dtype=parts.dtype, device=parts.device)

    wide = num_layers * size
    return PerLayerRows(buffer(wide), buffer(wide), buffer(num_layers, 2 * size), buffer(size))


def _first_rows(rows: ExpertRows, n: int) -> ExpertRows:
    return ExpertRows(
        rows.logits[:n],
        Chosen(rows.chosen.experts[:n], rows.chosen.weights[:n]),
        rows.gate_up[:n],
        rows.activated[:n],
        rows.shared[:n],
        rows.gates[:n],
    )


def _growth(kinds: Sequence[LayerSpec], max_model_len: int, device: torch.device) -> torch.Tensor | None:
    """Factor of Q at each position: float32 [max_model_len]. Raises ValueError if layers differ in it."""
    growths = {kind.query_growth for kind in kinds} - {None}
    if len(growths) > 1:
        raise ValueError(f"layers differ in how Q grows: {growths}")
    for growth in growths:
        if growth is not None:
            positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
            return 1 + growth.beta * torch.log1p(torch.floor(positions / growth.original))
    return None
