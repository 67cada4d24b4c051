"""Matrices to which `--quantization int4_g32` gives 8 bits, on a CPU: those where 4 cost the most for their size.

Measured on a real model whose weights lie on no grid, one kind of matrix with 4 bits at a time, V costs a quarter of
all that is lost and has 3 % of the weights; down projections cost as much. llama.cpp's Q4_K_M gives more bits to the
same ones. So that it is a race of equals there are as many bits as that has: where rows are no whole blocks of 256
weights it falls back to 5.5 bits for most, and here K and half of the down projections have 8 bits, too.
"""

import re
from typing import NamedTuple, Self

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.on_load import Quantization

BLOCK = 256
"""Weights of a block of llama.cpp's Q4_K."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)?(k_proj|v_proj|down_proj)(?:\.weight)?$")


class MixedForm(NamedTuple):
    """The forms of a model's layers with `--quantization int4_g32`."""

    num_layers: int
    gives_more: bool
    """Whether K and some down projections have 8 bits, too."""

    @classmethod
    def of(cls, spec: ModelSpec, quantization: Quantization | None, device: str) -> Self | None:
        """`device`: as config.resolve_device has it. None where all layers have one form."""
        if quantization != "int4_g32" or device != "cpu":
            return None
        return cls(spec.num_layers, spec.hidden_size % BLOCK != 0)

    def form(self, name: str) -> Quantization:
        """`name`: canonical, of a linear layer's matrix, with or without `.weight`. Experts all have one form."""
        found = _LAYER.search(name)
        if found is None:
            return "int4_g32"
        layer, kind = int(found[1]), found[2]
        if kind == "v_proj" or (self.gives_more and (kind == "k_proj" or self._is_sensitive(layer))):
            return "int8"
        return "int4_g32"

    def _is_sensitive(self, layer: int) -> bool:
        """Whether its down projection is one of those: the first and the last eighth, and a third of the others."""
        eighth = self.num_layers // 8
        return layer < eighth or layer >= self.num_layers - eighth or (layer - eighth) % 3 == 2
