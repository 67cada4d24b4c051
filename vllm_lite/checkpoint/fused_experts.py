"""Whether the files of a checkpoint store the experts of a layer in one tensor or each by itself. No torch.

config.json does not say it, and one family is published in both ways: as it was trained, and as transformers 5 keeps
it in memory. The headers of the files do.
"""

from pathlib import Path

import msgspec

from vllm_lite.checkpoint.experts import Stored
from vllm_lite.checkpoint.headers import read_headers
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.tensor_names import canonical
from vllm_lite.errors import ModelError

EXPERTS = ".mlp.experts."
FUSED = f"{EXPERTS}gate_up_proj"


def as_stored(spec: ModelSpec, folder: Path) -> ModelSpec:
    """`spec` with its experts stored as the files of `folder` have them; as it is, where there are no files or none of
    experts. Files that are missing or damaged change nothing: who loads them says what is wrong."""
    stored = _stored(folder)
    if stored is None or spec.experts is None or spec.experts.stored == stored:
        return spec

    def changed(layer: LayerSpec) -> LayerSpec:
        if layer.experts is None:
            return layer
        return msgspec.structs.replace(layer, experts=msgspec.structs.replace(layer.experts, stored=stored))

    return msgspec.structs.replace(spec, layers=tuple(map(changed, spec.layers)))


def _stored(folder: Path) -> Stored | None:
    try:
        names = [name for stored in read_headers(folder) if EXPERTS in (name := canonical(stored))]
    except (ModelError, OSError):
        return None
    if not names:
        return None
    return "fused" if any(name.endswith(FUSED) for name in names) else "separate"
