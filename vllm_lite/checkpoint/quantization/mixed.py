"""Matrices to which `--quantization int4_g32` gives more than 4 bits, on a CPU: those where 4 cost the most for their
size.

Measured on a real model whose weights lie on no grid V costs a quarter of all that is lost and has 3 % of the weights:
it has 8 bits. llama.cpp's Q4_K_M gives more bits to some matrices, too, and to most where rows are no whole blocks of
256 weights: it falls back to 5.5 there. So that it is a race of equals there are as many bits as that has: where rows
are no whole blocks Q, K, the outputs of attention and the down projections have 5 bits, and in a third of the layers
the gate and up projections.
"""

import re
from typing import NamedTuple, Self

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.on_load import Form, Quantization

BLOCK = 256
"""Weights of a block of llama.cpp's Q4_K."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)?([qkvo]|gate|up|down)_proj(?:\.weight)?$")


class MixedForm(NamedTuple):
    """The forms of a model's layers with `--quantization int4_g32`."""

    num_layers: int
    gives_more: bool
    """Whether rows are no whole blocks, so that most matrices have 5 bits."""

    @classmethod
    def of(cls, spec: ModelSpec, quantization: Quantization | None, device: str) -> Self | None:
        """`device`: as config.resolve_device has it. None where all layers have one form."""
        if quantization != "int4_g32" or device != "cpu":
            return None
        return cls(spec.num_layers, spec.hidden_size % BLOCK != 0)

    def form(self, name: str) -> Form:
        """`name`: canonical, of a linear layer's matrix, with or without `.weight`. Experts all have one form."""
        found = _LAYER.search(name)
        if found is None:
            return "int4_g32"
        layer, kind = int(found[1]), found[2]
        if kind == "v":
            return "int8"
        has_five = self.gives_more and (kind not in ("gate", "up") or self._is_sensitive(layer))
        return "int5_g32" if has_five else "int4_g32"

    def _is_sensitive(self, layer: int) -> bool:
        """Whether it is one of the first and the last eighth, or of a sixth of the others."""
        eighth = self.num_layers // 8
        return layer < eighth or layer >= self.num_layers - eighth or (layer - eighth) % 6 == 5
