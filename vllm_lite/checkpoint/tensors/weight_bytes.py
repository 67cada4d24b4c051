"""Memory of a checkpoint's weights, by the headers of its files: exactly, and without a model."""

from collections.abc import Mapping
from functools import cached_property
from math import prod

import msgspec

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.memory import share, tensor_bytes
from vllm_lite.checkpoint.quantization.on_load import Quantization, head_form, quantized_bytes
from vllm_lite.checkpoint.quantization.spec import QuantizationSpec
from vllm_lite.checkpoint.shard import SINGLE, Shard
from vllm_lite.checkpoint.tensors.headers import FLOAT_BYTES, Tensor
from vllm_lite.checkpoint.tensors.rank_shapes import is_of_experts, is_of_router, rank_shape
from vllm_lite.checkpoint.tensors.tensor_names import canonical, is_ignored

EMBEDDING = "model.embed_tokens.weight"
TABLES = ("model.embed_positions.weight", "model.embed_tokens_per_layer.weight")
"""Rows of them are looked up; they are never quantized."""


class Checkpoint(msgspec.Struct, frozen=True, dict=True):
    """The parts of a checkpoint that a plan needs."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors that a model takes, by their canonical names."""
        spec = self.spec
        tied, unread, without_kv = spec.tie_word_embeddings, spec.unread_layers, spec.layers_without_kv
        named = {canonical(stored_as): tensor.shape for stored_as, tensor in self.tensors.items()}
        return {
            name: shape
            for name, shape in named.items()
            if not is_ignored(name, tied=tied, unread_layers=unread, without_kv=without_kv)
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


def active_bytes(
    checkpoint: Checkpoint, dtype_bytes: int, quantization: Quantization | None = None, device: str = "cpu"
) -> int:
    """Bytes of the weights that a step with one token reads: of the experts those that it is sent to, and of a table
    of token vectors that is not the head, too, one row."""
    spec, total, of_experts = checkpoint.spec, 0, 0
    for name, num_bytes in _tensor_bytes(checkpoint, dtype_bytes, quantization, SINGLE, device).items():
        if is_of_experts(name, checkpoint.shapes[name]):
            of_experts += num_bytes
        elif name != EMBEDDING or spec.tie_word_embeddings:
            total += num_bytes
    if spec.experts is None:
        return total + of_experts
    routing = spec.experts.routing
    return total + of_experts * routing.experts_per_token // routing.num_experts


def _tensor_bytes(
    checkpoint: Checkpoint, dtype_bytes: int, quantization: Quantization | None, shard: Shard, device: str
) -> Mapping[str, int]:
    """Bytes of what a rank has of each tensor."""
    spec, held = checkpoint.spec, dict[str, int]()
    if spec.quantization is not None:
        return _quantized_tensors(checkpoint, spec.quantization, dtype_bytes, shard, device)
    heads = EMBEDDING, "lm_head.weight"
    for name, stored in checkpoint.shapes.items():
        shape = rank_shape(name, stored, spec, shard)
        count, embeds = prod(shape), name == EMBEDDING
        if quantization is not None and _is_quantized(name, shape, spec):
            form = head_form(quantization) if name in heads else quantization
            quantized = quantized_bytes(shape, form, device)
            kept = count * dtype_bytes if embeds else 0  # the head's copy is quantized, the table is not
            held[name] = kept + (quantized if not embeds or spec.tie_word_embeddings else 0)
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
            whole = tensor.num_elements * dtype_bytes + (whole if spec.tie_word_embeddings else 0)
        held[name] = int(whole * share(name, spec, shard))
    return held


def _is_quantized(name: str, shape: tuple[int, ...], spec: ModelSpec) -> bool:
    is_matrix = len(shape) >= 2 and not name.endswith(("bias", ".conv1d.weight"))
    return is_matrix and name not in TABLES and not is_of_router(name, spec)
