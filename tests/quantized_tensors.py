"""Writers of matrices in the formats of quantized checkpoints, each with the dense matrix that it encodes.

Each writer is called as write(name, weight [outputs, inputs], quantization_config) and gives tensors and that matrix.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.errors import ModelError

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack codes to one stream of bits, the lowest bit of each first, in words of int32; without the code under
    test."""
    moved = codes.to(torch.uint8).movedim(dim, -1).contiguous().numpy()
    stream = np.unpackbits(moved[..., None], axis=-1, count=bits, bitorder="little").reshape(*moved.shape[:-1], -1)
    packed = np.packbits(stream, axis=-1, bitorder="little").view("<i4")
    return torch.from_numpy(packed).movedim(-1, dim).contiguous()


def zeros_less_one(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Subtract one from zero points as GPTQModel does: from whole words."""
    if bits == 3:
        return words((zeros - 1) % 8, bits, 1)
    return words(zeros, bits, 1) - sum(1 << at for at in range(0, 32, bits))


def integers(weight: torch.Tensor, groups: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """weight: [outputs, inputs], groups: the group of each input -> codes, and zeros and scales [outputs, groups],
    which are numbers of float16."""
    most = 2**bits - 1
    zeros, scales = [], []
    codes = torch.empty_like(weight)
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).half().float().clamp(min=1e-4)
        zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round().clamp(0, most)
        codes[:, groups == group] = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, most)
        zeros.append(zero)
        scales.append(scale)
    return codes, torch.stack(zeros, 1), torch.stack(scales, 1)


def gptq_tensors(name: str, weight: torch.Tensor, config: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    for pattern, others in config.get("dynamic", {}).items():
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
            if pattern.startswith("-:"):
                return {f"{name}.weight": weight}, weight
            config = config | others
            break
    inputs, bits = weight.shape[1], config["bits"]
    size = inputs if config["group_size"] == -1 else config["group_size"]
    groups = torch.arange(inputs) // size
    if config["desc_act"]:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
    codes, zeros, scales = integers(weight, groups, bits, config["sym"])
    v2 = config["checkpoint_format"] == "gptq_v2"
    tensors = {
        f"{name}.qweight": words(codes.t(), bits, 0),
        f"{name}.qzeros": words(zeros.t(), bits, 1) if v2 else zeros_less_one(zeros.t(), bits),
        f"{name}.scales": scales.t().half().contiguous(),
        f"{name}.g_idx": groups.to(torch.int32),
    }
    return tensors, (codes - zeros[:, groups]) * scales[:, groups]


def awq_tensors(name: str, weight: torch.Tensor, config: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    groups = torch.arange(weight.shape[1]) // config["group_size"]
    codes, zeros, scales = integers(weight, groups, 4, symmetric=False)

    def packed(of_outputs: torch.Tensor) -> torch.Tensor:
        columns = of_outputs.t()
        return words(columns.reshape(len(columns), -1, 8)[..., list(AWQ_ORDER)].flatten(1), 4, 1)

    tensors = {
        f"{name}.qweight": packed(codes),
        f"{name}.qzeros": packed(zeros),
        f"{name}.scales": scales.t().half().contiguous(),
    }
    return tensors, (codes - zeros[:, groups]) * scales[:, groups]


def nf4_tensors(name: str, weight: torch.Tensor, config: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Write a matrix in nf4 or fp4, by bitsandbytes itself."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    nested = config.get("bnb_4bit_use_double_quant", False)
    packed, state = quantize_4bit(
        weight, blocksize=64, compress_statistics=nested, quant_type=config["bnb_4bit_quant_type"]
    )
    others = {f"{name}.weight.{key}": value.contiguous() for key, value in state.as_dict(packed=True).items()}
    state.shape = torch.Size((1, weight.numel()))  # its AVX-512 kernels begin a block with each row, which is wrong
    return {f"{name}.weight": packed, **others}, dequantize_4bit(packed, state).view_as(weight)


def int8_tensors(name: str, weight: torch.Tensor, _: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Write a matrix in int8, by bitsandbytes itself."""
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    integers, scales, _ = int8_vectorwise_quant(weight.half())
    stored = {
        f"{name}.weight": integers,
        f"{name}.SCB": scales,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return stored, int8_vectorwise_dequant(integers, scales)


def say_quantized(path: Path, config: dict[str, Any]) -> None:
    """Write `config` as the quantization_config of the checkpoint `path`."""
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))


def gptq_config(**others: Any) -> dict[str, Any]:
    """The usual quantization_config, changed by `others`."""
    usual = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    return {"quant_method": "gptq", **usual, **others}


LARGE: Any = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def float8_tensors(name: str, weight: torch.Tensor, _: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    return {
        f"{name}.weight": weight.to(torch.float8_e4m3fn),
        f"{name}.weight_scale_inv": torch.ones(-(-len(weight) // 128), -(-weight.shape[1] // 128)),
    }, weight


FORMATS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gptq": (gptq_tensors, gptq_config(group_size=128)),
    "gptq, 8 bits": (gptq_tensors, gptq_config(bits=8)),
    "awq": (awq_tensors, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}),
    "nf4": (nf4_tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp8": (float8_tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantized_pair(
    dense: Path,
    packed: Path,
    write: Callable[..., tuple[Tensors, torch.Tensor]],
    config: dict[str, Any],
    chosen: Callable[[str], bool] = is_projection,
    *,
    turned: bool = False,
) -> tuple[Path, Path]:
    """Quantize the chosen matrices of `packed`, and in `dense`, which is equal to it, replace them by their dequantized
    values. `turned`: matrices are stored as [inputs, outputs]."""
    weights, stored = load_file(dense / SINGLE_FILE), Tensors()
    for name, weight in list(weights.items()):
        if not chosen(name):
            stored[name] = weight
            continue
        matrix = weight.float().t().contiguous() if turned else weight.float()
        tensors, made = write(name.removesuffix(".weight"), matrix, config)
        weights[name] = made.t().contiguous() if turned else made
        stored |= tensors
    save_file(weights, dense / SINGLE_FILE)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, packed / SINGLE_FILE)
    say_quantized(packed, config)
    return dense, packed


def quantized(folder: Path, write: Callable[..., Any], config: dict[str, Any]) -> Path:
    """Write a checkpoint of LARGE's sizes with quantized projections to `folder`, and return it."""
    path = make_checkpoint(folder, **LARGE)
    return quantized_pair(path, path, write, config)[1]


def check_refused(path: Path, config: dict[str, Any], problem: str) -> None:
    """Check that a checkpoint with this quantization_config is refused, and that the error names the `problem`."""
    say_quantized(make_checkpoint(path), config)
    with pytest.raises(ModelError, match=problem):
        load_spec(path)
