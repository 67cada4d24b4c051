"""Checkpoints whose experts are stored in MXFP4, like the published gpt-oss."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.quantized_tensors import say_quantized
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.kernels.grouped import E2M1
from vllm_lite.layers.quantized.mxfp4 import BLOCK

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def as_mxfp4(packed: Path, dense: Path | None = None) -> None:
    """Store the experts of the gpt-oss in the folder `packed` as 4-bit floats, and in its copy `dense` the values that
    transformers reads from these."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, plain = dict[str, torch.Tensor](), load_file(packed / SINGLE_FILE)
    for name, tensor in list(plain.items()):
        if not name.endswith(EXPERTS):
            stored[name] = tensor
            continue
        blocks, scales = to_mxfp4(tensor.transpose(1, 2))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(stored, packed / SINGLE_FILE, metadata={"format": "pt"})
    say_quantized(packed, CONFIG)
    if dense is not None:
        save_file(plain, dense / SINGLE_FILE, metadata={"format": "pt"})


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [..., inputs] -> blocks uint8 [..., inputs / 32, 16] and scales uint8 [..., inputs / 32]."""
    groups = weight.float().unflatten(-1, (-1, BLOCK))
    exponents = (groups.abs().amax(-1) / 6).clamp(min=2.0**-126).log2().ceil()
    codes = ((groups / exponents.exp2()[..., None])[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
