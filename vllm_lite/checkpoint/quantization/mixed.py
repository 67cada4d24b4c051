"""MixedForm: the matrices to which `--quantization int4_g32` gives more than 4 bits on a CPU: those where 4 bits cost
the most accuracy for their size.

On a real model whose weights are not already on a grid, V causes a quarter of the total loss with 3 % of the weights:
it gets 8 bits. llama.cpp's Q4_K_M also gives more bits to some matrices, and to most of them if rows are not whole
blocks of 256 weights, where it falls back to 5.5 bits. For a fair comparison the number of bits is the same here: if
rows are not whole blocks, Q, K, attention's output and the down projections have 5 bits, and in a third of the layers
the gate and up projections as well.
"""

import re
from typing import NamedTuple, Self

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.on_load import Form, Quantization

BLOCK = 256
"""Number of weights in a block of llama.cpp's Q4_K."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)?([qkvo]|gate|up|down)_proj(?:\.weight)?$")


class MixedForm(NamedTuple):
    """The forms of a model's layers with `--quantization int4_g32`."""

    num_layers: int
    gives_more: bool
    """Whether rows are not whole blocks, so that most matrices have 5 bits."""

    @classmethod
    def of(cls, spec: ModelSpec, quantization: Quantization | None, device: str) -> Self | None:
        """The mixed form of a model; None if all layers have one form. `device` as from config.resolve_device."""
        if quantization != "int4_g32" or device != "cpu":
            return None
        return cls(spec.num_layers, spec.hidden_size % BLOCK != 0)

    def form(self, name: str) -> Form:
        """Form of the linear layer with the canonical `name`, with or without `.weight`. All experts have one form."""
        found = _LAYER.search(name)
        if found is None:
            return "int4_g32"
        layer, kind = int(found[1]), found[2]
        if kind == "v":
            return "int8"
        has_five = self.gives_more and (kind not in ("gate", "up") or self._is_sensitive(layer))
        return "int5_g32" if has_five else "int4_g32"

    def _is_sensitive(self, layer: int) -> bool:
        """Whether a layer is in the first or last eighth, or every sixth one of the others."""
        eighth = self.num_layers // 8
        return layer < eighth or layer >= self.num_layers - eighth or (layer - eighth) % 6 == 5
