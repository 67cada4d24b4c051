"""as_stored(): detects how a checkpoint's files store experts: fused or separate, transposed or not, dense or not. No
torch.

config.json does not say, and one family is published in several forms: as trained, and as transformers 5 keeps it in
memory, where bitsandbytes leaves experts dense that transformers 4 had it quantize. The files' headers show it.
"""

from pathlib import Path

import msgspec

from vllm_lite.checkpoint.layer_specs.experts import Stored
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.quantization.matching import PART
from vllm_lite.checkpoint.quantization.spec import BitsAndBytes4, BitsAndBytes8
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.errors import ModelError

EXPERTS = ".mlp.experts."
FUSED, FUSED_DOWN = f"{EXPERTS}gate_up_proj", f"{EXPERTS}down_proj"


def as_stored(spec: ModelSpec, folder: Path) -> ModelSpec:
    """`spec` with the storage of experts found in `folder`; unchanged without files or experts. Missing or damaged
    files are ignored: the loader reports them."""
    try:
        headers = read_headers(folder)
        shapes = {name: header.shape for stored, header in headers.items() if EXPERTS in (name := canonical(stored))}
    except (ModelError, OSError):
        return spec
    names, own = list(shapes), spec.experts
    if not names or own is None:
        return spec
    if isinstance(spec.quantization, (BitsAndBytes4, BitsAndBytes8)) and not any(map(_has_scales, names)):
        dense = (*spec.quantization.dense, f"{PART}{EXPERTS}")
        spec = msgspec.structs.replace(spec, quantization=msgspec.structs.replace(spec.quantization, dense=dense))
    if not any(FUSED in name for name in names):
        return _stored_as(spec, "separate")
    turned = {
        FUSED: (spec.hidden_size, 2 * own.intermediate_size),
        FUSED_DOWN: (own.intermediate_size, spec.hidden_size),
    }
    found = {end: [shape[1:] for name, shape in shapes.items() if name.endswith(end)] for end in turned}
    transposed = all(found[end] and set(found[end]) == {shape} for end, shape in turned.items())
    return _stored_as(spec, "fused", transposed=transposed)


def _stored_as(spec: ModelSpec, stored: Stored, *, transposed: bool = False) -> ModelSpec:
    def changed(layer: LayerSpec) -> LayerSpec:
        if layer.experts is None:
            return layer
        experts = msgspec.structs.replace(layer.experts, stored=stored, transposed=transposed)
        return msgspec.structs.replace(layer, experts=experts)

    return msgspec.structs.replace(spec, layers=tuple(map(changed, spec.layers)))


def _has_scales(name: str) -> bool:
    """Whether `name` is a tensor of bitsandbytes' scales."""
    return name.endswith((".absmax", ".SCB"))
