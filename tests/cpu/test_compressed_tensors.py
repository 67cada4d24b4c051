"""compressed-tensors and float8 checkpoints give the same products as their dequantized weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.paged import Oracle
from tests.quantized_tensors import Tensors, check_refused, quantized_pair
from tests.thread_group import on_ranks
from vllm_lite.checkpoint.quantization.spec import PackedInts
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ConfigError
from vllm_lite.kernels.grouped import dequantize
from vllm_lite.layers.quantized import packed_ints
from vllm_lite.layers.weights.weight_form import LinearShape

Scheme = dict[str, Any]
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


def scales_of(weight: torch.Tensor, scheme: Scheme) -> tuple[Tensors, torch.Tensor | None]:
    """`weight_scale`, and `weight_zero_point` where there is one, as an observer would choose them; the group of each
    input, where they are sorted by activations."""
    outputs, inputs = weight.shape
    groups = None
    match scheme.get("strategy"):
        case "group":
            size = scheme["group_size"]
            if scheme.get("actorder") == "group":
                groups = (torch.arange(inputs) // size)[
                    torch.randperm(inputs, generator=torch.Generator().manual_seed(3))
                ]
            parts = weight if groups is None else weight[:, groups.argsort(stable=True)]
            parts = parts.view(outputs, -1, size)
        case "block":
            high, wide = scheme["block_structure"]
            padded = torch.nn.functional.pad(weight, (0, -inputs % wide, 0, -outputs % high))
            parts = padded.view(-(-outputs // high), high, -1, wide).transpose(1, 2).flatten(2)
        case "channel":
            parts = weight[:, None]
        case _:
            parts = weight.view(1, 1, -1)
    most = 448.0 if scheme["type"] == "float" else 2 ** (scheme["num_bits"] - 1) - 1
    if scheme.get("symmetric", True):
        scales = (parts.abs().amax(-1) / most).to(torch.bfloat16).float()  # the library computes in this type
        return {"weight_scale": scales.view(-1) if scheme.get("strategy") == "tensor" else scales}, groups
    low, high = parts.amin(-1), parts.amax(-1)
    scales = ((high - low) / (2 * most + 1)).to(torch.bfloat16).float()
    zeros = (-most - 1 - low / scales).round().clamp(-most - 1, most).to(torch.int8)
    return {"weight_scale": scales, "weight_zero_point": zeros}, groups


def write(form: str, scheme: Scheme, name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The tensors that the library writes for a matrix, and the matrix that it reads back."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    library, args = BaseCompressor.get_value_from_registry(form), QuantizationArgs(**scheme)
    own = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    scales, groups = scales_of(weight, scheme)
    if groups is not None:
        scales["weight_g_idx"] = groups.to(torch.int32)
    stored = library.compress({"weight": weight, **scales}, own)
    dense = library.decompress(dict(stored), own)["weight"]
    return {f"{name}.{key}": value.contiguous() for key, value in stored.items()}, dense.float().contiguous()


def blocks(name: str, weight: torch.Tensor, ending: str = "weight_scale_inv") -> tuple[Tensors, torch.Tensor]:
    """Quantize in blocks, like DeepSeek's checkpoints."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 48]}
    scales = scales_of(weight, scheme)[0]["weight_scale"]
    spread = scales.repeat_interleave(32, 0).repeat_interleave(48, 1)[: len(weight), : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.{ending}": scales}, codes.float() * spread


def numbers(ending: str, activation: str, shape: tuple[int, ...], name: str, weight: torch.Tensor) -> Any:
    """Quantize with one scale for each matrix and one for its inputs, like transformers and AutoFP8."""
    scale = (weight.abs().amax() / 448).to(torch.bfloat16)
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    others = {f"{name}.{ending}": scale.view(shape), f"{name}.{activation}": torch.full(shape, 0.5)}
    return {f"{name}.weight": codes, **others}, codes.float() * scale.float()


def checkpoints(folder: Path, write: Writer, config: dict[str, Any]) -> tuple[Path, Path]:
    """A checkpoint with dequantized weights, and the same one quantized."""
    dense, packed = (make_checkpoint(folder / name, intermediate_size=96) for name in ("dense", "packed"))
    return quantized_pair(dense, packed, lambda name, weight, _: write(name, weight), config)


def of_library(form: str, *schemes: Scheme, targets: tuple[str, ...] = ("Linear",), **others: Any) -> dict[str, Any]:
    groups = {
        f"group_{number}": {"targets": [target], "weights": scheme, "input_activations": None}
        for number, (scheme, target) in enumerate(zip(schemes, targets, strict=False))
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"], **others
    }  # fmt: skip


def scheme(kind: str, strategy: str, **others: Any) -> Scheme:
    return {"num_bits": int(kind[-1]), "type": kind[:-1], "strategy": strategy, "symmetric": True, **others}


SCHEMES = {
    "w4 zeros": ("pack-quantized", scheme("int4", "group", group_size=32, symmetric=False)),
    "w4 zeros, channel": ("pack-quantized", scheme("int4", "channel", symmetric=False)),
    "w8 zeros": ("pack-quantized", scheme("int8", "group", group_size=16, symmetric=False)),
    "w8a8": ("int-quantized", scheme("int8", "channel")),
    "w8a8 zeros": ("int-quantized", scheme("int8", "channel", symmetric=False)),
    "fp8 tensor": ("float-quantized", scheme("float8", "tensor")),
    "fp8 channel": ("float-quantized", scheme("float8", "channel")),
    "fp8 block": ("float-quantized", scheme("float8", "block", block_structure=[32, 48])),
    "fp8 naive": ("naive-quantized", scheme("float8", "channel")),
}


def are_alike(dense: Path, packed: Path, ranks: int = 2) -> None:
    oracle = Oracle(dense)
    assert oracle.difference(oracle.logits_of(packed)) < 3e-4
    if ranks > 1:
        for logits in oracle.logits_on_two_ranks(packed):
            assert oracle.difference(logits) < 3e-4


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("name", SCHEMES)
def test_checkpoints_of_the_library_are_read_as_the_library_reads_them(tmp_path: Path, name: str) -> None:
    form, own = SCHEMES[name]
    dense, packed = checkpoints(tmp_path, partial(write, form, own), of_library(form, own))
    are_alike(dense, packed, 1 if "pack" in form and own["strategy"] == "group" and own["group_size"] == 32 else 2)


@pytest.mark.usefixtures("float_products")
def test_inputs_that_are_sorted_by_activations(tmp_path: Path) -> None:
    own = scheme("int4", "group", group_size=32, actorder="group")

    def by_hand(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        scales, groups = scales_of(weight, own)
        assert groups is not None
        spread = scales["weight_scale"][:, groups]
        integers = (weight / spread).round().clamp(-8, 7)
        stored = {
            "weight_packed": pack_to_int32(integers.to(torch.int8), 4),
            "weight_shape": torch.tensor(weight.shape),
            "weight_g_idx": groups.to(torch.int32),
            **scales,
        }
        return {f"{name}.{key}": value for key, value in stored.items()}, integers * spread

    dense, packed = checkpoints(tmp_path, by_hand, of_library("pack-quantized", own))
    are_alike(dense, packed, 1)
    oracle = Oracle(dense)  # outside of the threads: transformers changes globals while it loads
    with pytest.raises(ConfigError, match=r"actorder.*use --tensor-parallel-size 1"):
        on_ranks(2, lambda rank: oracle.stored_as(packed, rank))


@pytest.mark.usefixtures("float_products")
def test_layers_of_several_kinds(tmp_path: Path) -> None:
    """Attention by names, the rest by an expression; a layer that is in neither is dense."""
    own = scheme("float8", "channel"), scheme("int4", "group", group_size=32)

    def by_name(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if name.endswith("o_proj"):
            return {f"{name}.weight": weight}, weight
        return write(*(("pack-quantized", own[1]) if ".mlp." in name else ("float-quantized", own[0])), name, weight)

    config = of_library("mixed-precision", *own, targets=(r"re:.*self_attn\.(q|k|v)_proj$", "re:.*mlp.*"))
    config["config_groups"]["group_0"]["format"] = "float-quantized"
    config["config_groups"]["group_1"]["format"] = "pack-quantized"
    are_alike(*checkpoints(tmp_path, by_name, config), 1)


def test_zero_points_of_projections_with_partly_filled_words() -> None:
    """Each tensor begins with a new word."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    shape = LinearShape(Split.whole(8), (Split.whole(5), Split(12, 4, 8)), torch.float32, torch.device("cpu"))
    weight = packed_ints.stored(PackedInts(bits=4, group_size=8, zeros=True), ["a", "b"], shape)
    zeros = torch.arange(-8, 8, dtype=torch.int8)[:, None]
    stored = torch.cat([pack_to_int32(part, 4, packed_dim=0) for part in (zeros[:5], zeros[4:16])])
    words = torch.zeros(13, 1, dtype=torch.int32)  # a code of 0 means -8
    made = weight.take(words, torch.ones(13, 1), torch.zeros(4, dtype=torch.int64), stored)
    assert dequantize(made)[:, 0].tolist() == [*(-8.0 - zero for zero in range(-8, -3)), *range(-8, -16, -1)]


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NUMBERS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "blocks": (blocks, FP8 | {"weight_block_size": [32, 48]}),
    "transformers' numbers": (
        partial(numbers, "weight_scale_inv", "activation_scale", ()),
        FP8 | {"weight_block_size": None, "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
    ),
    "AutoFP8's numbers": (
        partial(numbers, "weight_scale", "input_scale", (1,)),
        FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
}


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("name", NUMBERS)
def test_float8_checkpoints(tmp_path: Path, name: str) -> None:
    writer, config = NUMBERS[name]
    are_alike(*checkpoints(tmp_path, writer, config))


@pytest.mark.usefixtures("float_products")
def test_layers_that_are_not_converted_are_found_by_the_end_of_their_names(tmp_path: Path) -> None:
    config = FP8 | {
        "weight_block_size": [32, 48],
        "modules_to_not_convert": ["lm_head", "mlp.down_proj", "model.layers.1"],
    }

    def by_name(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        is_dense = name.endswith("mlp.down_proj") or ".layers.1." in name
        return ({f"{name}.weight": weight}, weight) if is_dense else blocks(name, weight)

    are_alike(*checkpoints(tmp_path, by_name, config), 1)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (of_library("marlin-24", scheme("int4", "group", group_size=32)), "format 'marlin-24' with int4 weights"),
        (of_library("nvfp4-pack-quantized", scheme("float4", "tensor_group")), "float4 weights by 'tensor_group'"),
        (of_library("pack-quantized", scheme("int3", "channel")), "with int3 weights"),
        (of_library("dense", scheme("int8", "channel"), sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
        (
            of_library("int-quantized", scheme("int8", "channel"), transform_config={"config_groups": {"a": 1}}),
            "rotated",
        ),
        (of_library("float-quantized"), "has no scheme for weights"),
        (of_library("float-quantized", scheme("float8", "channel"), targets=("re:(a+",)), "not a regular expression"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (FP8 | {"fmt": "e5m2"}, "fmt: must be one of e4m3, float8_e4m3fn, but it is 'e5m2'"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    check_refused(tmp_path, config, problem)
