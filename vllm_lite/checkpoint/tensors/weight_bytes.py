"""Memory of a checkpoint's weights, by the headers of its files: exactly, and without a model."""

from collections.abc import Mapping
from functools import cached_property
from math import prod

import msgspec
from msgspec.structs import replace

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
"""The form of a model's copy that drafts for it."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLES = ("model.embed_positions.weight", "model.embed_tokens_per_layer.weight")
"""Rows of them are looked up; they are never quantized."""


class Checkpoint(msgspec.Struct, frozen=True, dict=True):
    """The parts of a checkpoint that a plan needs."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    drafter: "Checkpoint | None" = None
    """The model that drafts for it."""

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors that a model takes, by their canonical names."""
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
    """Bytes of a rank's weights, of which the first has most: every tensor that the model takes. `device`: whose
    kernels multiply what the checkpoint has quantized."""
    return sum(_tensor_bytes(checkpoint, dtype_bytes, quantization, shard, device).values())


def head_bytes(checkpoint: Checkpoint, dtype_bytes: int) -> int:
    """The most bytes that a rank holds of the checkpoint's MTP head, as if it had all of it in its dtype. Raises
    ConfigError if there is none."""
    named = {canonical(stored_as): tensor for stored_as, tensor in checkpoint.tensors.items()}
    return sum(named[name].num_elements for name in head_tensors(checkpoint.spec, named)) * dtype_bytes


def copy_bytes(checkpoint: Checkpoint, dtype_bytes: int, shard: Shard = SINGLE, device: str = "cpu") -> int:
    """Bytes of a rank's copy in 4 bits of the layers and of a head that the checkpoint has in floats. All else it
    shares with the model that it drafts for. Of layers that the checkpoint has quantized this counts the scales, too.
    """
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


def active_bytes(
    checkpoint: Checkpoint,
    dtype_bytes: int,
    quantization: Quantization | None = None,
    device: str = "cpu",
    num_tokens: int = 1,
) -> int:
    """Bytes of the weights that a step with so many tokens reads: of the experts those that they are likely to be sent
    to, and of a table of token vectors that is not the head, too, some rows."""
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
    """Bytes of what a rank has of each tensor; where the head is a copy of the embedding in another form it is HEAD."""
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
    """The same of a quantized checkpoint."""
    spec, held = checkpoint.spec, dict[str, int]()
    named = {canonical(stored_as): tensor for stored_as, tensor in checkpoint.tensors.items()}
    for name in checkpoint.shapes:
        tensor = named[name]
        whole = tensor_bytes(name, tensor, quantization, dtype_bytes, device)
        if device != "cpu" and name == EMBEDDING and tensor.dtype not in FLOAT_BYTES:  # the head alone is packed
            if spec.tie_word_embeddings:
                held[HEAD] = int(whole * share(name, spec, shard))
            whole = tensor.num_elements * dtype_bytes
        held[name] = int(whole * share(name, spec, shard))
    return held


def is_quantized(name: str, shape: tuple[int, ...], spec: ModelSpec) -> bool:
    """Whether a tensor of floats becomes another form where a load quantizes."""
    if is_of_tower(name):
        return len(shape) == 2 and not name.endswith(DENSE_OF_TOWERS)
    is_matrix = len(shape) >= 2 and not name.endswith(("bias", ".conv1d.weight"))
    return is_matrix and name not in TABLES and not is_of_router(name, spec)


# ---- Memory of LoRA adapters that adapt every linear layer, by the model's numbers alone. No torch


def adapter_bytes(spec: ModelSpec, config: EngineConfig, dtype_bytes: int, device: str) -> int:
    """Bytes of all adapters on the first rank, which has most: as many as are kept, of the largest rank. On a GPU there
    are slots besides, into which those of a step are copied. Raises ConfigError if the ranks cannot share the model."""
    if not config.enable_lora:
        return 0
    num_kept = (config.max_cpu_loras or config.max_loras) + (config.max_loras if device == "cuda" else 0)
    elements = adapted_elements(spec, config.tensor_parallel_size, experts=device == "cpu")
    return num_kept * config.max_lora_rank * dtype_bytes * elements


def adapted_elements(spec: ModelSpec, world: int = 1, *, experts: bool = True) -> int:
    """The inputs and outputs of all linear layers that can be adapted, added up: the elements of an adapter of rank 1,
    or a few more, as projections that are one matrix in the checkpoint have one A. `experts`: whether routers and
    single experts can be."""
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
    """An MLP and a shared expert."""
    num_up, sizes = 2 if spec.gated_mlp else 1, []
    if layer.experts is None or spec.mlp_beside_experts:
        sizes.append(-(-layer.intermediate_size // world) if layer.intermediate_size else spec.intermediate_size)
    if layer.experts is not None and layer.experts.shared_intermediate_size:
        sizes.append(-(-layer.experts.shared_intermediate_size // world))
    return sum((num_up + 1) * (spec.hidden_size + size) for size in sizes)


def _experts(spec: ExpertsSpec, hidden: int, world: int) -> int:
    """A router, and single experts."""
    count, num_matrices = spec.routing.num_experts, 3 if spec.gated else 2
    return hidden + count + count * num_matrices * (hidden + -(-spec.intermediate_size // world))
