"""Memory of a quantized checkpoint's tensors by their types, for plans.

CPU kernels keep weights as stored, except GGUF blocks whose codes have neither 4 nor 8 bits, and whose scales become
separate numbers. A GPU has kernels for some types, and makes others dense.
"""

from fractions import Fraction
from math import prod

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.spec import (
    EXPERTS,
    Awq,
    BitsAndBytes8,
    BlockScaled,
    Gguf,
    Gptq,
    MxFp4,
    PackedInts,
    QuantizationSpec,
)
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import FLOAT_BYTES, Tensor
from vllm_lite.checkpoint.tensors.rank_shapes import is_of_latent_heads, rank_shape

BLOCK_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q8_0": 8.5,
    "Q2_K": 5.25,
    "Q3_K": 8.75,
    "Q4_K": 4.75,
    "Q5_K": 5.75,
    "Q6_K": 8.75,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.5,
    "MXFP4": 4.5,
    "IQ2_XXS": 5,
    "IQ2_XS": 6,
    "IQ2_S": 6,
    "IQ3_XXS": 5,
    "IQ3_S": 5,
    "IQ1_S": 5,
    "IQ1_M": 6,
    "TQ1_0": 4.125,
    "TQ2_0": 4.125,
    "NVFP4": 5,
}
"""Bits per GGUF weight in memory, including scales and minima."""
GPU_BLOCK_BITS = {"Q4_0": 4.5, "Q4_1": 6, "Q5_0": 8.5, "Q5_1": 10, "Q8_0": 8.5, "Q4_K": 6, "Q5_K": 10}
GPU_BLOCK_BITS |= {"TQ1_0": 4.0625, "TQ2_0": 4.0625, "MXFP4": 4.5}
"""The same on a GPU for types that it keeps: a minimum makes two float32 numbers of a scale."""
GPU_GROUP = 32
"""Number of inputs that share a scale on a GPU, or a multiple."""
CODE_BYTES = {"I32": 4, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}
MX_SCALE_BYTES = 2
"""Bytes of a power-of-two scale in memory."""
CODES = (".weight", ".qweight", ".weight_packed", "_blocks")
"""Endings of tensors of codes, not scales."""
WHOLE = 2**10 * 3**4 * 5**2 * 7 * 11 * 13
"""A size that is divisible by all usual numbers of heads."""


def tensor_bytes(name: str, tensor: Tensor, spec: QuantizationSpec, dtype_bytes: int, device: str) -> int:
    """Bytes of a tensor in memory, with `dtype_bytes` per element if it is dense. `device` as from
    config.resolve_device."""
    count = tensor.num_elements
    dense = device != "cpu" and not kept_on_gpu(name, tensor, spec, dtype_bytes)
    if tensor.dtype in BLOCK_BITS:
        bits = BLOCK_BITS if device == "cpu" else GPU_BLOCK_BITS
        return count * dtype_bytes if dense else int(count * bits[tensor.dtype] / 8)
    if tensor.dtype in FLOAT_BYTES and name.endswith((".weight", "bias", ".sinks")):
        return count * dtype_bytes
    if not dense and isinstance(spec, MxFp4) and name.endswith("_scales"):
        return count * MX_SCALE_BYTES
    if not dense:
        return count * (CODE_BYTES | FLOAT_BYTES).get(tensor.dtype, 8)
    return int(count * codes_in(tensor.dtype, spec)) * dtype_bytes if name.endswith(CODES) else 0


def kept_on_gpu(name: str, tensor: Tensor, spec: QuantizationSpec, dtype_bytes: int) -> bool:
    """Whether a GPU multiplies this weight as it is stored: see layers/weights/gpu_matmul.py; for experts
    layers/moe/packed_experts.py, for latent attention's heads layers/attention/head_matmul.py."""
    if dtype_bytes != 2 or is_of_latent_heads(name):
        return False
    layer = name.rpartition(".")[0]
    match own := spec if spec.is_dense(layer) else spec.of(layer):
        case Gguf():
            return tensor.dtype in GPU_BLOCK_BITS
        case PackedInts() | Gptq() if own.sorted_columns and EXPERTS in name:
            return False
        case PackedInts() | Gptq() | Awq():
            size = own.group_size
        case BlockScaled():
            size = own.block[1]
        case _:
            return isinstance(own, BitsAndBytes8 | MxFp4)
    return size is None or size % GPU_GROUP == 0


def codes_in(dtype: str, spec: QuantizationSpec) -> Fraction:
    """Number of weights in one element."""
    match dtype:
        case "I32":
            return Fraction(32, getattr(spec, "bits", 4))
        case "U8":
            return Fraction(2)
    return Fraction(1)


def share(name: str, spec: ModelSpec, shard: Shard) -> Fraction:
    """A rank's fraction of a layer's tensors, of which `name` is one. Words, groups and blocks, which ranks do not
    divide, are ignored."""
    layer, _, kind = name.rpartition(".")
    if spec.experts is not None and layer.endswith(".experts"):  # all experts in one tensor
        sizes = (spec.experts.routing.num_experts, *[spec.experts.intermediate_size] * (1 if "bias" in kind else 2))
        stem = name.removesuffix("_blocks").removesuffix("_scales")
        return Fraction(prod(rank_shape(stem, sizes, spec, shard)), prod(sizes))
    own = spec.experts.intermediate_size if spec.experts is not None and ".experts." in name else WHOLE
    shape = (own, own)
    return Fraction(prod(rank_shape(f"{layer}.weight", shape, spec, shard)), prod(shape))
