"""ModelSpec: the numbers of a model in one frozen struct, read by `config_json.load_spec`. Engine, client, planner and
worker derive all sizes from it. No torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.checkpoint.layer_specs.block_sparse import BlockSparse
from vllm_lite.checkpoint.layer_specs.delta_net import STATE_BYTES, DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.layer_specs.latent import LatentSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.checkpoint.layer_specs.pooling import PoolingSpec
from vllm_lite.checkpoint.layer_specs.rope import Rope
from vllm_lite.checkpoint.layer_specs.short_conv import ShortConvSpec
from vllm_lite.checkpoint.layer_specs.vision import VisionSpec
from vllm_lite.checkpoint.parameter_count import describe_parameters
from vllm_lite.checkpoint.quantization.spec import AnyQuantization
from vllm_lite.checkpoint.shard import HeadSplit, Shard
from vllm_lite.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class AttentionSpec(msgspec.Struct, frozen=True):
    """Attention of a layer, as needed by the KV cache and attention backends."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Factor on scores."""
    window: int | None = None
    """Number of tokens that a query sees: query i sees the keys (i - window, i]. None = all keys up to i."""
    soft_cap: float = 0.0
    """Scores become cap * tanh(score / cap), after scaling and before ALiBi; 0 = no cap."""
    alibi_slopes: tuple[float, ...] | None = None
    """Per head: slope * (key position - query position) is added to the score (Press et al. 2022)."""
    sinks: bool = False
    """Whether each head has a learned logit in the softmax without a value (attention sink)."""
    block_sparse: BlockSparse | None = None
    """The pattern of key blocks that a query sees; None = all."""
    value_size: int | None = None
    """None = V has K's size and is stored beside it; else V is this number of K's first elements (latent attention)."""
    index_size: int = 0
    """Further elements per token and KV head stored after K: the key of an index."""
    whole_images: int = 0
    """Maximum number of tokens of an image with bidirectional attention within it; 0 = causal."""

    @property
    def query_size(self) -> int:
        """Elements of a token's Q."""
        return self.num_heads * self.head_size

    @property
    def output_size(self) -> int:
        """Elements of a token's attention output."""
        return self.num_heads * (self.value_size or self.head_size)

    @property
    def cached_parts(self) -> int:
        """Number of parts in the cache: 2 for K and V, 1 if V is a part of K."""
        return 2 if self.value_size is None else 1

    @property
    def cached_size(self) -> int:
        """Elements per token in the cache."""
        return self.num_kv_heads * (self.cached_parts * self.head_size + self.index_size)

    @property
    def qkv_size(self) -> int:
        """Elements of a token's Q, K and V together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    def heads(self, shard: Shard) -> HeadSplit:
        """A rank's heads. Raises ConfigError if they cannot be divided."""
        if not self.fits(shard.world):
            raise ConfigError(
                f"tensor_parallel_size {shard.world} does not fit {self.num_heads} heads with {self.num_kv_heads} KV "
                f"heads, which fit {_listed(filter(self.fits, range(1, self.num_heads + 1)))}"
            )
        return HeadSplit.of(self.num_heads, self.num_kv_heads, shard)

    def fits(self, world: int) -> bool:
        """Whether the heads can be divided by `world`, evenly if a block-sparse pattern shifts from head to head."""
        try:
            HeadSplit.of(self.num_heads, self.num_kv_heads, Shard(0, world))
        except ValueError:
            return False
        return self.block_sparse is None or self.num_heads % world == 0

    def per_rank(self, shard: Shard) -> "AttentionSpec":
        """The attention with a rank's heads. Raises ConfigError if they cannot be divided."""
        query, kv = self.heads(shard)
        slopes = None if self.alibi_slopes is None else self.alibi_slopes[query.start : query.end]
        sparse = self.block_sparse
        if sparse is not None:  # kernels assume that the first head is tp_rank times the number of heads
            shifted = query if sparse.head_step >= 0 else kv
            sparse = replace(sparse, tp_rank=shifted.start // shifted.size)
        return msgspec.structs.replace(
            self, num_heads=query.size, num_kv_heads=kv.size, alibi_slopes=slopes, block_sparse=sparse
        )


class QueryGrowth(msgspec.Struct, frozen=True):
    """Scaling of Q by its position: by 1 + beta * ln(1 + floor(position / original))."""

    beta: float
    original: int


class LayerSpec(msgspec.Struct, frozen=True):
    """One layer of a model."""

    attention: AttentionSpec
    rope: Rope | None
    """None = no rope."""
    query_growth: QueryGrowth | None = None
    """Scaling of Q by its position; None = none."""
    experts: ExpertsSpec | None = None
    """None = an MLP."""
    latent: LatentSpec | None = None
    """The projections of latent attention; None = each head has its own K and V in the cache."""
    values_are_keys: bool = False
    """Whether V is the output of K's projection, before norm and rope."""
    kv_layer: int | None = None
    """The earlier layer whose K and V it attends to; None = it has its own."""
    intermediate_size: int | None = None
    """Intermediate size of its MLP; None = the model's."""
    output_gate: Literal["elements", "elements beside Q", "heads"] | None = None
    """Sigmoid gate on attention's output: per element, or per head. Its projection is a matrix or, "beside Q", rows
    among Q's by head."""
    recurrent: DeltaNetSpec | MambaSpec | ShortConvSpec | None = None
    """The recurrent part, with a state and no KV; `attention` is then that of other layers. With `beside_attention`,
    the layer has both."""
    only: Literal["attention", "MLP"] | None = None
    """The layer's only block, attention (or a recurrent part) or an MLP (or experts); None = both. With only an MLP,
    `attention` is that of other layers."""

    @property
    def attends(self) -> bool:
        """Whether it has attention, or a recurrent part instead."""
        return self.only != "MLP"

    @property
    def has_mlp(self) -> bool:
        return self.only != "attention"

    @property
    def keeps_kv(self) -> bool:
        """Whether it writes its own K and V to the cache."""
        return self.attends and self.kv_layer is None and (self.recurrent is None or self.recurrent.beside_attention)

    @property
    def blocks(self) -> "tuple[LayerSpec, LayerSpec]":
        """The layer with only its attention, and with only its recurrent part; the layer twice if it does not have
        both."""
        if not isinstance(self.recurrent, MambaSpec) or not self.recurrent.beside_attention:
            return self, self
        alone = msgspec.structs.replace(self.recurrent, beside_attention=False)
        return msgspec.structs.replace(self, recurrent=None), msgspec.structs.replace(self, recurrent=alone)

    def per_rank(self, shard: Shard, *, held: bool = True) -> "LayerSpec":
        """The layer with a rank's heads; a layer of another stage (not `held`) keeps nothing. Raises as
        AttentionSpec's."""
        recurrent = self.recurrent.per_rank(shard) if held and self.recurrent is not None else None
        attention, only = self.attention.per_rank(shard), self.only if held else "MLP"
        return msgspec.structs.replace(self, attention=attention, recurrent=recurrent, only=only)

    @property
    def gate_size(self) -> int:
        """Elements of a token's output gate."""
        own = self.attention
        return 0 if self.output_gate is None else own.num_heads if self.output_gate == "heads" else own.query_size

    @property
    def rotated_size(self) -> int:
        """Elements of a head to which `rope` applies."""
        return self.attention.head_size if self.latent is None else self.latent.rope_size

    @property
    def attention_buffers(self) -> tuple[int, int, int]:
        """Elements per token in attention's buffers: output of the first projections, attention output, and further
        buffers."""
        own, latent = self.attention, self.latent
        if not self.attends:
            return 0, 0, 0
        if self.recurrent is not None:
            return self.recurrent.projected_size, self.recurrent.value_width, 0
        if latent is None:
            return own.qkv_size + self.gate_size, own.output_size, 0
        return latent.projected_size(own.num_heads), own.output_size, sum(latent.other_sizes(own.num_heads))


class NormSpec(msgspec.Struct, frozen=True):
    """The norms before and after blocks and after the layers."""

    eps: float
    kind: Literal["rms", "wide rms", "layer"] = "rms"
    """"rms" rounds before multiplying by the weight, as Llama does; "wide rms" computes in float32 and rounds once;
    "layer" is LayerNorm, which also rounds once."""
    bias: bool = False
    plus_one: bool = False
    """Whether weights are stored as differences from 1."""


class EncoderSpec(msgspec.Struct, frozen=True):
    """Parts of an encoder, which processes each text at once and has no KV cache."""

    num_positions: int = 0
    """Rows of its table of learned positions, 0 if there is none."""
    position_offset: int = 0
    """Number of rows of that table before that of position 0."""
    num_types: int = 0
    """Rows of its table of token types, 0 if there is none."""


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers whose KV blocks are allocated together, as they have equal attention and positions."""

    layers: tuple[int, ...]
    attention: AttentionSpec

    @property
    def window(self) -> int | None:
        return self.attention.window

    @property
    def kind(self) -> str:
        return "full" if self.window is None else "sliding"

    def kv_shape(self, block_size: int, row_extra: int = 0) -> tuple[int, int, int, int, int]:
        """Shape of one block: [num_layers, 2, num_kv_heads, block_size, head_size + row_extra]; with 1 in place of 2 if
        V is a part of K, and rows longer by an index's key, if any. `row_extra`: elements per token and head for its
        scale."""
        own = self.attention
        row = own.head_size + own.index_size + row_extra
        return len(self.layers), own.cached_parts, own.num_kv_heads, block_size, row


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a model, read and checked by `config_json.load_spec`: a decoder, unless it has `encoder`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_groups: tuple[LayerGroup, ...]
    draft_layers: tuple[LayerSpec, ...] = ()
    """Layers of a drafter: `kv_groups` have their KV after that of the model's own layers."""
    implementation: Literal["native", "transformers"] = "native"
    """Whether a class of `models` computes it, or transformers' code with the engine's attention and linear layers."""
    folder: str = ""
    """The checkpoint folder, for transformers' models; empty for a native one."""
    activation: Activation = "silu"
    gated_mlp: bool = True
    """Whether the MLP is down(activation(gate(x)) * up(x)); else down(activation(up(x)))."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether attention's output projection has a bias."""
    mlp_bias: bool = False
    qkv_layout: Literal["stacked"] | None = None
    """Order of Q, K and V in the checkpoint's tensors (`layers.attention.qkv_layout`), if not the family's."""
    splits_gate_up: bool = False
    """Whether gate and up are two tensors even if the family's own checkpoints have one."""
    qk_norm: Literal["head", "all heads", "bare head"] | None = None
    """Norms of Q and K before rope: per head ("bare": without a weight), or over all heads of a token."""
    norms_per_layer: int = 2
    output_norm_eps: float | None = None
    """Epsilon of the norms after blocks, if different; None = that of the others."""
    parallel_blocks: bool = False
    """Whether attention and MLP read the same residual stream, in families where models differ in this."""
    embedding_scale: float = 1.0
    """Factor on token embeddings."""
    attention_scale: float = 1.0
    """Factor on attention's output, in families where it differs from that of other blocks."""
    gate_scale: float = 1.0
    """Factor on the gate of MLPs before its activation."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP before they are added."""
    logits_scale: float = 1.0
    """Factor on logits."""
    logits_soft_cap: float = 0.0
    """Logits become cap * tanh(logit / cap), after scaling; 0 = no cap."""
    num_unread_layers: int = 0
    """Number of layers in the files after the others, which predict further tokens (MTP) and are not loaded."""
    qkv_clip: float = 0.0
    """Bound on the magnitude of Q, K and V, before rope; 0 = none."""
    value_norm: bool = False
    """Whether V is normed per head, without a weight."""
    mlp_beside_experts: bool = False
    """Whether layers with experts also have an MLP."""
    per_layer_size: int = 0
    """Elements of per-layer embeddings: the sum of a table's row and a projection; 0 = none."""
    extra_parameters: int = 0
    """Number of parameters that no other field counts, such as learned positions."""
    quantization: AnyQuantization | None = None
    """The checkpoint's quantization, if it has one."""
    kv_cache_dtype: Literal["fp8_e4m3"] | None = None
    """The KV cache dtype for which the checkpoint was calibrated, if not its own."""
    encoder: EncoderSpec | None = None
    """Parts of an encoder, whose layers attend to all tokens of a text and which has no `kv_groups`."""
    vision: VisionSpec | None = None
    """Its vision tower; None: text only."""
    pooling: PoolingSpec | None = None
    """Pooling of its hidden states; None: they only become logits."""
    tied_in_config_only: bool = False
    """Whether config.json ties the head to the embedding but the files have another head; see `tied_head`."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def unread_layers(self) -> range:
        return range(self.num_layers, self.num_layers + self.num_unread_layers)

    @property
    def layers_without_kv(self) -> frozenset[int]:
        """Layers that attend to another layer's K and V."""
        return frozenset(index for index, own in enumerate(self.layers) if own.kv_layer is not None)

    @property
    def experts(self) -> ExpertsSpec | None:
        """Experts of the layers that have some; families whose layers differ in them are refused."""
        return next((own.experts for own in self.layers if own.experts is not None), None)

    def per_rank(self, shard: Shard) -> "ModelSpec":
        """The model with a rank's heads, for its attention and KV cache; layers of other stages keep nothing, other
        sizes are the whole model's. Raises ConfigError if the heads cannot be divided."""
        held, kept = shard.stage.layers(self.num_layers), shard.stage.kept
        layers = tuple(own.per_rank(shard, held=layer in held) for layer, own in enumerate(self.layers))
        groups = tuple(
            LayerGroup(kept(group.layers, self.num_layers), group.attention.per_rank(shard)) for group in self.kv_groups
        )
        return msgspec.structs.replace(self, layers=layers, kv_groups=groups)

    def shared_by(self, world: int) -> "ModelSpec":
        """The model with KV groups of equal bytes on each of `world` ranks. With more ranks than a layer has KV heads,
        each rank holds a whole head, and so a larger share of that layer than of others.

        Raises ConfigError if the heads cannot be divided.
        """
        return (
            self
            if world == 1 or self.encoder is not None
            else msgspec.structs.replace(self, kv_groups=make_kv_groups((*self.layers, *self.draft_layers), world))
        )

    def with_drafter(self, layers: "tuple[LayerSpec, ...]", world: int = 1) -> "ModelSpec":
        """The model on `world` ranks with the KV of a drafter's layers in the same block tables. Raises ConfigError if
        the heads cannot be divided."""
        groups = make_kv_groups((*self.layers, *layers), world)
        return msgspec.structs.replace(self, kv_groups=groups, draft_layers=layers)

    def check_tensor_parallel(self, shard: Shard) -> None:
        """Raise ConfigError, with valid numbers of ranks, unless everything can be divided among the ranks."""
        if self._fits(shard):
            return

        def listed(*, expert_parallel: bool) -> str:
            numbers = range(1, max(kinds)[0] + 1)
            return _listed(world for world in numbers if self._fits(Shard(0, world, expert_parallel)))

        kinds = dict.fromkeys((own.attention.num_heads, own.attention.num_kv_heads) for own in self.layers)
        heads = " and ".join(f"{num_heads} heads with {num_kv_heads} KV heads" for num_heads, num_kv_heads in kinds)
        heads += "".join({f", {own.recurrent.shared}" for own in self.layers if own.recurrent is not None})
        fit = listed(expert_parallel=shard.expert_parallel)
        if self.experts is not None:
            sizes = self.experts.intermediate_size, self.experts.shared_intermediate_size
            heads += f", {self.experts.routing.num_experts} experts of {sizes[0]}"
            heads += f" beside a shared one of {sizes[1]}" if sizes[1] else ""
            other = listed(expert_parallel=not shard.expert_parallel)
            given = "without" if shard.expert_parallel else "with"
            fit += f"; {given} enable_expert_parallel {other}" if other != fit else ""
        raise ConfigError(
            f"tensor_parallel_size {shard.world} does not fit this model, whose {heads}, intermediate_size "
            f"{self.intermediate_size} and vocabulary of {self.vocab_size} fit {fit}"
        )

    def _fits(self, shard: Shard) -> bool:
        tp, experts = shard.world, self.experts
        fits = self.vocab_size >= tp and self.intermediate_size % tp == 0
        fits = fits and (experts is None or experts.fits(shard))
        fits = fits and all(own.recurrent is None or own.recurrent.fits(tp) for own in self.layers)
        return fits and all(own.attention.fits(tp) for own in dict.fromkeys(self.layers))

    def block_elements(self, block_size: int, row_extra: int = 0) -> int:
        """Elements of K and V in one block. Groups share one pool, so smaller ones are padded to the largest."""
        return max((math.prod(group.kv_shape(block_size, row_extra)) for group in self.kv_groups), default=0)

    def kv_block_bytes(self, block_size: int, dtype_bytes: int, tp: int = 1, scale_bytes: int = 0) -> int:
        """Bytes of one KV block on each of `tp` ranks: K and V of `block_size` tokens in all layers of a group, and
        `scale_bytes` for each token and head, a multiple of `dtype_bytes`.

        Raises ConfigError if the heads cannot be divided.
        """
        own = self.shared_by(tp).per_rank(Shard(0, tp))
        return own.block_elements(block_size, scale_bytes // dtype_bytes) * dtype_bytes

    @property
    def state_elements(self) -> int:
        """Elements of a sequence's state over all recurrent layers; 0 = none."""
        return sum(own.recurrent.state_elements for own in self.layers if own.recurrent is not None)

    def state_bytes(self, tp: int = 1) -> int:
        """Bytes of one state slot on each of `tp` ranks. Raises ConfigError if the heads cannot be divided."""
        return self.per_rank(Shard(0, tp)).state_elements * STATE_BYTES if self.state_elements else 0

    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a tied LM head counts once."""
        num_matrices = 3 if self.gated_mlp else 2
        mlps = 0
        for own in self.layers:
            size = own.intermediate_size or self.intermediate_size
            if own.has_mlp and (own.experts is None or self.mlp_beside_experts):
                mlps += num_matrices * self.hidden_size * size
                mlps += self.mlp_bias * ((num_matrices - 1) * size + self.hidden_size)
            mlps += 0 if own.experts is None else own.experts.parameters(self.hidden_size)
        norm = self.hidden_size * (2 if self.norm.bias else 1)
        attention = sum(self._attention_parameters(own) for own in self.layers if own.attends)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = attention + mlps + self.num_layers * self.norms_per_layer * norm
        return embeddings + layers + norm + self.extra_parameters

    def active_parameters(self, num_tokens: int = 1) -> int:
        """Expected number of parameters used by a step of `num_tokens`: all but those of experts to which no token is
        routed."""
        sparse = [own.experts for own in self.layers if own.experts is not None]
        return self.num_parameters() - sum(own.idle_parameters(self.hidden_size, num_tokens) for own in sparse)

    def size(self) -> str:
        """Number of parameters, for humans."""
        return describe_parameters(self.num_parameters(), self.active_parameters())

    def _attention_parameters(self, layer: LayerSpec) -> int:
        spec = layer.attention
        if layer.recurrent is not None:
            beside = layer.recurrent.beside_attention
            others = self._attention_parameters(layer.blocks[0]) if beside else 0
            return others + layer.recurrent.parameters(self.hidden_size)
        if layer.latent is not None:
            return layer.latent.parameters(spec.num_heads, self.hidden_size)
        num_kv = 0 if layer.kv_layer is not None else 1 if layer.values_are_keys else 2
        projected = spec.query_size + num_kv * spec.num_kv_heads * spec.head_size
        matrices = self.hidden_size * (projected + spec.query_size + layer.gate_size)
        biases = self.qkv_bias * projected + self.output_bias * self.hidden_size
        sizes = {"head": min(1 + num_kv, 2), "all heads": spec.num_heads + spec.num_kv_heads}
        heads = 0 if self.qk_norm is None else sizes.get(self.qk_norm, 0)
        return matrices + biases + heads * spec.head_size + spec.sinks * spec.num_heads


def make_kv_groups(layers: Sequence[LayerSpec], world: int = 1) -> tuple[LayerGroup, ...]:
    """Partition the layers with KV into groups of one block size, by equal attention, full attention first, with the
    heads of each of `world` ranks. Raises ConfigError if the heads cannot be divided. Layers without KV of their own
    are in no group.

    All blocks have the same bytes, so a kind with fewer bytes in its layers is padded and one with more is split. Among
    the possible sizes, the one with the smallest sum of padded layers and groups is chosen: a padded layer costs memory
    in every block, a group costs tables and slots in every step. 14 full and 14 sliding layers make 1 + 1 groups of 14;
    4 full and 22 sliding make 1 + 6 of 4, two of them padding; 3 full and 1 sliding make 3 + 1 of 1.
    """
    kinds: dict[AttentionSpec, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.keeps_kv:
            kinds.setdefault(layer.attention, []).append(index)
    if not kinds:
        return ()
    held = {kind: kind.per_rank(Shard(0, world)) for kind in kinds}
    widths = {kind: own.cached_size for kind, own in held.items()}  # elements of a layer in a block, per token
    widest, total = max(widths.values()), sum(widths[kind] * len(members) for kind, members in kinds.items())

    def cost(size: int) -> int:
        num_groups = sum(-(-len(members) // (size // widths[kind])) for kind, members in kinds.items())
        return num_groups * size - total + num_groups * widest

    sizes = {count * widths[kind] for kind, members in kinds.items() for count in range(1, len(members) + 1)}
    size = min(sorted(size for size in sizes if size >= widest), key=cost)
    return tuple(
        LayerGroup(tuple(members[first : first + size // widths[kind]]), kind)
        for kind, members in sorted(kinds.items(), key=lambda kind: kind[0].window or 0)
        for first in range(0, len(members), size // widths[kind])
    )


def _listed(numbers: Iterable[int]) -> str:
    """List numbers like "1, 2 or 4"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
