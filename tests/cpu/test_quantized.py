"""Quantized checkpoints: their tensors against the format's own library, and their logits against transformers'."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.paged import Oracle
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.kernels.grouped import INT4, UINT4, GroupedWeight, dequantize, unpack


def test_a_grouped_weight_is_its_values_times_scales_minus_minima() -> None:
    codes = torch.tensor([[0, 15, 8, 9, 3]], dtype=torch.uint8)
    scales, minima = torch.tensor([[0.5, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 3.0]])
    plain = dequantize(GroupedWeight(codes, INT4, scales, 2))
    assert plain.tolist() == [[-4.0, 3.5, 0.0, 2.0, -5.0]]
    assert dequantize(GroupedWeight(codes, UINT4, scales, 2, minima)).tolist() == [[-1.0, 6.5, 16.0, 18.0, 0.0]]
    order = torch.tensor([4, 0, 1, 2, 3])
    assert dequantize(GroupedWeight(codes, INT4, scales, 2, order=order)).tolist() == [[3.5, 0.0, 2.0, -5.0, -4.0]]


def test_codes_are_unpacked_along_either_dimension() -> None:
    word = torch.tensor([[0xFEBA9870 - (1 << 32)]], dtype=torch.int32)
    assert unpack(word, 4, dim=1).tolist() == [[0, 7, 8, 9, 10, 11, 14, 15]]
    assert unpack(word, 4, dim=0).tolist() == [[0], [7], [8], [9], [10], [11], [14], [15]]


def packed_checkpoint(folder: Path, bits: int, group_size: int | None) -> tuple[Path, Path]:
    """A checkpoint in the packed form, and the same one with dequantized weights."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    dense, packed = make_checkpoint(folder / "dense"), make_checkpoint(folder / "packed")
    weights, stored = load_file(dense / SINGLE_FILE), {}
    for name, weight in list(weights.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        grouped = weight.view(len(weight), -1, group_size or weight.shape[1])
        most = 2 ** (bits - 1) - 1
        scales = (grouped.abs().amax(2) / most).to(torch.bfloat16).float()
        integers = (grouped / scales[..., None]).round().clamp(-most - 1, most)
        weights[name] = (integers * scales[..., None]).view_as(weight)
        flat = integers.view_as(weight).to(torch.int8)
        stored[f"{name}_packed"] = pack_to_int32(flat, bits)
        stored[f"{name}_scale"] = scales.to(torch.bfloat16)
        stored[f"{name}_shape"] = torch.tensor(weight.shape)
    save_file(weights, dense / SINGLE_FILE)
    save_file(stored, packed / SINGLE_FILE)
    config = json.loads((packed / "config.json").read_text())
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group_size else "channel"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme | {"group_size": group_size}}},
        "ignore": ["lm_head"],
    }
    (packed / "config.json").write_text(json.dumps(config))
    return dense, packed


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, None), (8, 16)])
@pytest.mark.usefixtures("float_products")
def test_packed_integers_agree_with_their_dense_weights(tmp_path: Path, bits: int, group_size: int | None) -> None:
    dense, packed = packed_checkpoint(tmp_path, bits, group_size)
    oracle = Oracle(dense)
    assert oracle.difference(oracle.logits_of(packed)) < 3e-4
