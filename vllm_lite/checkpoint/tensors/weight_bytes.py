"""Memory of a checkpoint's weights by the headers of its files: exact, and without a model."""

from collections.abc import Mapping
from functools import cached_property
from math import prod

import msgspec
from msgspec.structs import replace

from vllm_lite.checkpoint.frequent_words import LARGE, MERGED, SYMBOLS
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.mtp_head import head_tensors
from vllm_lite.checkpoint.quantization.memory import share, tensor_bytes
from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import Quantization, head_form, quantized_bytes
from vllm_lite.checkpoint.quantization.spec import QuantizationSpec
from vllm_lite.checkpoint.shard import SINGLE, Shard
from vllm_lite.checkpoint.tensors.headers import FLOAT_BYTES, Tensor
from vllm_lite.checkpoint.tensors.rank_shapes import is_of_experts, is_of_latent_heads, is_of_router, rank_shape
from vllm_lite.checkpoint.tensors.tensor_names import DENSE_OF_TOWERS, canonical, is_ignored, is_of_tower
from vllm_lite.config import EngineConfig

COPY: Quantization = "int4_g32"
"""The form of the copy with which a model drafts for itself."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLES = ("model.embed_positions.weight", "model.embed_tokens_per_layer.weight")
"""Lookup tables, which are never quantized."""


class Checkpoint(msgspec.Struct, frozen=True, dict=True):
    """The parts of a checkpoint that a plan needs."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    drafter: "Checkpoint | None" = None
    """The draft model's checkpoint."""

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors that the model loads, by canonical name."""
        spec = self.spec
        tied, unread, without_kv = spec.tie_word_embeddings, spec.unread_layers, spec.layers_without_kv
        named = {canonical(stored_as): tensor.shape for stored_as, tensor in self.tensors.items()}
        return {
            name: shape
            for name, shape in named.items()
            if (spec.vision is not None and is_of_tower(name) and spec.vision.reads(name))
            or not is_ignored(name, tied=tied, unread_layers=unread, without_kv=without_kv)
        }


def weights_bytes(
    checkpoint: Checkpoint,
    dtype_bytes: int,
    quantization: Quantization | None = None,
    shard: Shard = SINGLE,
    device: str = "cpu",
) -> int:
    """Bytes of a rank's weights: every tensor that the model loads. The first rank has the most. `device`: where
    quantized weights are multiplied."""
    return sum(_tensor_bytes(checkpoint, dtype_bytes, quantization, shard, device).values())


def head_bytes(checkpoint: Checkpoint, dtype_bytes: int) -> int:
    """Maximum bytes of the checkpoint's MTP head on a rank, as if it had all of it in its dtype. Raises ConfigError if
    there is none."""
    named = {canonical(stored_as): tensor for stored_as, tensor in checkpoint.tensors.items()}
    return sum(named[name].num_elements for name in head_tensors(checkpoint.spec, named)) * dtype_bytes


def copy_bytes(checkpoint: Checkpoint, dtype_bytes: int, shard: Shard = SINGLE, device: str = "cpu") -> int:
    """Bytes of a rank's 4-bit copy of the layers and of a head that the checkpoint has as floats. Everything else is
    shared with the target model. For quantized layers of the checkpoint this counts the scales, too."""
    spec = checkpoint.spec
    head = EMBEDDING if spec.tie_word_embeddings else HEAD
    shapes = checkpoint.shapes
    layers = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.") and len(shape)}
    named = {canonical(stored_as): tensor.dtype for stored_as, tensor in checkpoint.tensors.items()}
    total, mixed = 0, MixedForm.of(spec, COPY, device)
    for name, stored in layers.items():
        shape = rank_shape(name, stored, spec, shard)
        form = COPY if mixed is None else mixed.form(name)
        is_matrix = is_quantized(name, shape, spec)
        total += quantized_bytes(shape, form, device) if is_matrix else prod(shape) * dtype_bytes
    if head in shapes and named[head] in FLOAT_BYTES:
        total += quantized_bytes(rank_shape(head, shapes[head], spec, shard), COPY, device)
    return total


def frequent_head_bytes(checkpoint: Checkpoint, shard: Shard = SINGLE, device: str = "cpu") -> int:
    """Bytes of a 4-bit head for the frequent words of a large vocabulary, with which an MTP head or a draft model of
    one rank drafts; about, as the tokenizer decides how many they are."""
    spec, head = checkpoint.spec, EMBEDDING if checkpoint.spec.tie_word_embeddings else HEAD
    stored_as = next((tensor.dtype for name, tensor in checkpoint.tensors.items() if canonical(name) == head), "")
    if spec.vocab_size < LARGE or shard.world > 1 or stored_as not in FLOAT_BYTES:
        return 0
    return quantized_bytes((min(MERGED + SYMBOLS, spec.vocab_size // 2), spec.hidden_size), COPY, device)


def active_bytes(
    checkpoint: Checkpoint,
    dtype_bytes: int,
    quantization: Quantization | None = None,
    device: str = "cpu",
    num_tokens: int = 1,
) -> int:
    """Bytes of the weights that a step with `num_tokens` reads: for experts the expected number of chosen ones, and of
    an embedding table that is not also the head only some rows."""
    spec, total, of_experts = checkpoint.spec, 0, 0
    held = _tensor_bytes(checkpoint, dtype_bytes, quantization, SINGLE, device)
    is_head = spec.tie_word_embeddings and HEAD not in held
    for name, num_bytes in held.items():
        if is_of_experts(name, checkpoint.shapes.get(name, ())):
            of_experts += num_bytes
        elif name != EMBEDDING or is_head:
            total += num_bytes
    if spec.experts is None:
        return total + of_experts
    num_experts = spec.experts.routing.num_experts
    return total + of_experts * (num_experts - spec.experts.num_idle(num_tokens)) // num_experts


def _tensor_bytes(
    checkpoint: Checkpoint, dtype_bytes: int, quantization: Quantization | None, shard: Shard, device: str
) -> Mapping[str, int]:
    """Bytes of a rank's part of each tensor; if the head is a copy of the embedding in another form, it is under
    HEAD."""
    spec, held = checkpoint.spec, dict[str, int]()
    if spec.quantization is not None:
        return _quantized_tensors(checkpoint, spec.quantization, dtype_bytes, shard, device)
    heads, mixed = (EMBEDDING, HEAD), MixedForm.of(spec, quantization, device)
    for name, stored in checkpoint.shapes.items():
        shape = rank_shape(name, stored, spec, shard)
        count, embeds = prod(shape), name == EMBEDDING
        dense = device != "cpu" and is_of_latent_heads(name)
        if quantization is not None and not dense and is_quantized(name, shape, spec):
            own = quantization if mixed is None else mixed.form(name)
            form = head_form(quantization) if name in heads or is_of_tower(name) else own
            quantized = quantized_bytes(shape, form, device)
            held[name] = count * dtype_bytes if embeds else quantized  # the head's copy is quantized, the table is not
            if embeds and spec.tie_word_embeddings:
                held[HEAD] = quantized
        else:
            held[name] = count * (4 if name.endswith("e_score_correction_bias") else dtype_bytes)
    return held


def _quantized_tensors(
    checkpoint: Checkpoint, quantization: QuantizationSpec, dtype_bytes: int, shard: Shard, device: str
) -> Mapping[str, int]:
    """As `_tensor_bytes`, for a checkpoint whose weights are quantized."""
    spec, held = checkpoint.spec, dict[str, int]()
    named = {canonical(stored_as): tensor for stored_as, tensor in checkpoint.tensors.items()}
    for name in checkpoint.shapes:
        tensor = named[name]
        whole = tensor_bytes(name, tensor, quantization, dtype_bytes, device)
        if device != "cpu" and name == EMBEDDING and tensor.dtype not in FLOAT_BYTES:  # only the head stays packed
            if spec.tie_word_embeddings:
                held[HEAD] = int(whole * share(name, spec, shard))
            whole = tensor.num_elements * dtype_bytes
        held[name] = int(whole * share(name, spec, shard))
    return held


def is_quantized(name: str, shape: tuple[int, ...], spec: ModelSpec) -> bool:
    """Whether quantization during loading applies to a float tensor."""
    if is_of_tower(name):
        return len(shape) == 2 and not name.endswith(DENSE_OF_TOWERS)
    is_matrix = len(shape) >= 2 and not name.endswith(("bias", ".conv1d.weight"))
    return is_matrix and name not in TABLES and not is_of_router(name, spec)


# ---- Memory of LoRA adapters that adapt every linear layer, by the model's numbers. No torch


def adapter_bytes(spec: ModelSpec, config: EngineConfig, dtype_bytes: int, device: str) -> int:
    """Bytes of all adapters on the first rank, which has the most: `max_cpu_loras` adapters of the maximum rank. On a
    GPU there are additional slots, into which a step's adapters are copied. Raises ConfigError if the model cannot be
    divided."""
    if not config.enable_lora:
        return 0
    num_kept = (config.max_cpu_loras or config.max_loras) + (config.max_loras if device == "cuda" else 0)
    elements = adapted_elements(spec, config.tensor_parallel_size, experts=device == "cpu")
    return num_kept * config.max_lora_rank * dtype_bytes * elements


def adapted_elements(spec: ModelSpec, world: int = 1, *, experts: bool = True) -> int:
    """Sum of the inputs and outputs of all linear layers that can be adapted: the elements of an adapter of rank 1, or
    slightly more, as projections in one matrix of the checkpoint share one A. `experts`: whether routers and single
    experts can be adapted."""
    shard = Shard(0, world)
    own = replace(spec, intermediate_size=-(-spec.intermediate_size // world))
    attention = sum(_attention(layer.per_rank(shard), own) for layer in spec.layers if layer.attends)
    mlps = sum(_mlp(layer, own, world) for layer in spec.layers if layer.has_mlp)
    mixtures = [layer.experts for layer in spec.layers if layer.has_mlp and layer.experts is not None and experts]
    return attention + mlps + sum(_experts(each, spec.hidden_size, world) for each in mixtures)


def _attention(layer: LayerSpec, spec: ModelSpec) -> int:
    heads, hidden, latent, recurrent = layer.attention, spec.hidden_size, layer.latent, layer.recurrent
    if recurrent is not None:
        others = _attention(layer.blocks[0], spec) if recurrent.beside_attention else 0
        return others + (recurrent.num_projections + 1) * hidden + recurrent.projected_size + recurrent.value_width
    if latent is not None:
        query = heads.num_heads * latent.query_size
        queries = hidden + (2 * latent.query_rank if latent.query_rank else 0) + query
        return queries + hidden + latent.cached_size + heads.num_heads * latent.value_size + hidden
    num_kv = 0 if layer.kv_layer is not None else 1 if layer.values_are_keys else 2
    projected = heads.query_size + layer.gate_size + num_kv * heads.num_kv_heads * heads.head_size
    return (1 + num_kv + (layer.output_gate in ("elements", "heads"))) * hidden + projected + heads.output_size + hidden


def _mlp(layer: LayerSpec, spec: ModelSpec, world: int) -> int:
    """Inputs and outputs of an MLP and a shared expert."""
    num_up, sizes = 2 if spec.gated_mlp else 1, []
    if layer.experts is None or spec.mlp_beside_experts:
        sizes.append(-(-layer.intermediate_size // world) if layer.intermediate_size else spec.intermediate_size)
    if layer.experts is not None and layer.experts.shared_intermediate_size:
        sizes.append(-(-layer.experts.shared_intermediate_size // world))
    return sum((num_up + 1) * (spec.hidden_size + size) for size in sizes)


def _experts(spec: ExpertsSpec, hidden: int, world: int) -> int:
    """Inputs and outputs of a router and single experts."""
    count, num_matrices = spec.routing.num_experts, 3 if spec.gated else 2
    return hidden + count + count * num_matrices * (hidden + -(-spec.intermediate_size // world))
