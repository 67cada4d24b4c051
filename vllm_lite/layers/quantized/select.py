"""Choice of the form of a model's weights, by its checkpoint and the quantization requested for dense weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.quantization.spec import (
    AnyQuantization,
    Awq,
    BitsAndBytes4,
    BitsAndBytes8,
    BlockScaled,
    Gguf,
    Gptq,
    MxFp4,
    PackedInts,
    QuantizationSpec,
)
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.layers.quantized import awq, bitsandbytes, bitsandbytes8, block_scaled, gptq, mxfp4, packed_ints
from vllm_lite.layers.quantized.gguf import GgufForm
from vllm_lite.layers.weights.weight_form import DENSE, DenseForm, LinearShape, RemadeForm, StoredWeight, WeightForm

FORMATS: Mapping[type[QuantizationSpec], Callable[[Any, Sequence[str], LinearShape], StoredWeight]] = {
    PackedInts: packed_ints.stored,
    Gptq: gptq.stored,
    Awq: awq.stored,
    BitsAndBytes4: bitsandbytes.stored,
    BitsAndBytes8: bitsandbytes8.stored,
    MxFp4: mxfp4.stored,
    BlockScaled: block_scaled.stored,
}
"""Kind of spec -> function that makes the weight of projections, called as format(spec, names, shape)."""


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """Form of the weights of a quantized checkpoint, some of which are dense."""

    spec: AnyQuantization

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        quantized = [self.quantizes(name) for name in names]
        if not any(quantized):
            return DENSE.stored(names, shape)
        if not all(quantized):
            raise ModelError(f"of {', '.join(names)} some are quantized and some are not; they are one product here")
        specs = [self.spec.of(name) for name in names]
        if any(spec != specs[0] for spec in specs):
            raise ModelError(f"{', '.join(names)}: they are quantized in different ways; they are one product here")
        return FORMATS[type(specs[0])](specs[0], names, shape)

    def quantizes(self, name: str) -> bool:
        return not self.spec.is_dense(name)


def form_for(
    spec: AnyQuantization | None,
    quantization: Quantization | None,
    mixed: MixedForm | None = None,
    *,
    again: bool = False,
) -> WeightForm:
    """Choose the form. `spec`: of the checkpoint; `quantization` and `mixed`: of dense weights on loading, see
    DenseForm; `again`: quantize weights that are quantized in the checkpoint again, all to one form. Raises ConfigError
    if both are given without `again`."""
    if again and spec is not None and quantization is not None:
        return RemadeForm(form_for(spec, None), quantization)
    if spec is None:
        return DenseForm(quantization, mixed)
    if isinstance(spec, Gguf) and (not spec.kinds or quantization is None):
        return GgufForm(spec, DenseForm(quantization, mixed))
    if quantization is not None:
        raise ConfigError(
            f"--quantization {quantization} is for dense checkpoints, and this one is {spec.label} already"
        )
    return QuantizedForm(spec)
