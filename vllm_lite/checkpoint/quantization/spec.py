"""QuantizationSpec: the form in which a checkpoint stores its weights, as made by `read`."""

import re
from typing import Literal

import msgspec

from vllm_lite.checkpoint.quantization.matching import first_fit
from vllm_lite.checkpoint.tensors.tensor_names import HEAD, TABLES

EXPERTS = ".experts."
"""Substring of the names of experts' matrices."""
_NUMBERED = re.compile(r"(\.experts|_proj)\.(?P<number>\d+)(?=\.|$)")
"""Pattern of the number in the name of one of several matrices that a file has in one tensor."""


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="method", tag=str.lower):
    """Common fields of all methods. A module of `layers.quantized` reads the tensors of each subclass."""

    dense: tuple[str, ...] = ()
    """Modules that are not quantized: names, or their first or last dotted parts; see `matching` for other patterns."""
    targets: tuple[str, ...] = ()
    """Modules that are quantized, in the same form; (): all."""
    embedding: bool = False
    """Whether token embedding tables are quantized as well."""

    def is_dense(self, name: str) -> bool:
        """Whether the matrix `name` (canonical, without ".weight") is stored as floats."""
        if name in TABLES and not self.embedding:
            return True
        if self.targets and first_fit(self.targets, name) is None:
            return True
        return first_fit(self.dense, name) is not None

    def of(self, name: str) -> "QuantizationSpec":  # noqa: ARG002
        """The form of the quantized matrix `name`."""
        return self

    @property
    def label(self) -> str:
        """The method's name in logs and plans."""
        return type(self).__name__


class PackedInts(QuantizationSpec, frozen=True, kw_only=True):
    """compressed-tensors' pack-quantized: 4- or 8-bit integers in int32 words along the inputs."""

    bits: int
    group_size: int | None
    """Number of inputs that share a scale; None: one scale per output."""
    zeros: bool = False
    """Whether there are zero points, in words along the outputs."""
    sorted_columns: bool = False
    """Whether a tensor `weight_g_idx` gives each input's group (actorder "group")."""

    @property
    def label(self) -> str:
        return f"compressed-tensors w{self.bits}a16"


class GptqLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a GPTQ checkpoint that are quantized differently from most."""

    pattern: str
    """A pattern as in QuantizationSpec.dense."""
    bits: int | None
    """None: dense."""
    group_size: int | None = None
    """As in PackedInts."""
    sorted_columns: bool = False
    """As in Gptq."""


class Gptq(QuantizationSpec, frozen=True, kw_only=True):
    """2-, 3-, 4- or 8-bit integers with zero points, in int32 words along the inputs."""

    bits: int
    group_size: int | None
    """As PackedInts'."""
    sorted_columns: bool = False
    """Whether inputs were grouped by activation (desc_act); a tensor `g_idx` then gives each input's group."""
    zeros_less_one: bool = True
    """Whether zero points are stored minus one, as in the first version of the format."""
    has_indices: bool = True
    """Whether there is a tensor `g_idx`."""
    layers: tuple[GptqLayers, ...] = ()
    """Layers that differ. The first whose pattern matches a name applies."""
    only: tuple[str, ...] = ()
    """Endings of the names of all quantized layers except the head; (): all are quantized."""

    def is_dense(self, name: str) -> bool:
        if super().is_dense(name):
            return True
        if (own := self._own(name)) is not None:
            return own.bits is None
        return bool(self.only) and name != HEAD.removesuffix(".weight") and not name.endswith(self.only)

    def of(self, name: str) -> "Gptq":
        own = self._own(name)
        if own is None or own.bits is None:
            return self
        return msgspec.structs.replace(
            self, bits=own.bits, group_size=own.group_size, sorted_columns=own.sorted_columns, layers=()
        )

    def _own(self, name: str) -> GptqLayers | None:
        index = first_fit(tuple(layers.pattern for layers in self.layers), name)
        return None if index is None else self.layers[index]

    @property
    def label(self) -> str:
        return f"GPTQ with {self.bits} bits"


class Awq(QuantizationSpec, frozen=True, kw_only=True):
    """4-bit integers with zero points, in int32 words along the outputs."""

    group_size: int | None
    """As PackedInts'."""

    @property
    def label(self) -> str:
        return "AWQ with 4 bits"


class BitsAndBytes4(QuantizationSpec, frozen=True, kw_only=True):
    """bitsandbytes' indices into a table of 16 numbers, with a scale per 64 consecutive weights of a matrix, across
    rows."""

    table: Literal["nf4", "fp4"]
    nested: bool = False
    """Whether the scales are quantized as well (double quantization)."""

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.table}"


class BitsAndBytes8(QuantizationSpec, frozen=True, kw_only=True):
    """bitsandbytes' 8-bit integers, with one scale per output."""

    @property
    def label(self) -> str:
        return "bitsandbytes int8"


class MxFp4(QuantizationSpec, frozen=True, kw_only=True):
    """4-bit floats with a power-of-two scale per 32 inputs, for experts that a checkpoint stores in one tensor."""

    def is_dense(self, name: str) -> bool:
        return EXPERTS not in name or super().is_dense(name)

    @property
    def label(self) -> str:
        return "MXFP4"


class BlockScaled(QuantizationSpec, frozen=True, kw_only=True):
    """8-bit floats (E4M3) or integers, with a scale for each rectangle of a matrix."""

    numbers: Literal["float8", "int8"]
    block: tuple[int | None, int | None]
    """Numbers of outputs and inputs that share a scale; None: all."""
    scale: str
    """Name of the tensor of scales after the layer's. Scales are factors, also as weight_scale_inv."""
    zeros: str | None = None
    """Name of the tensor of zero points, if there is one."""
    unread: tuple[str, ...] = ()
    """Further tensors of each layer, which are not read: scales of activations."""
    float8_rows: bool = False
    """Whether activations may be quantized to float8 (E4M3). Their scales are computed from them, regardless of the
    checkpoint's."""

    @property
    def label(self) -> str:
        return self.numbers


class Mixed(QuantizationSpec, frozen=True, kw_only=True):
    """Layers of several kinds."""

    parts: tuple[PackedInts | BlockScaled, ...]
    """The first part that includes a layer applies."""

    def is_dense(self, name: str) -> bool:
        return all(part.is_dense(name) for part in self.parts)

    def of(self, name: str) -> PackedInts | BlockScaled:
        return next(part for part in self.parts if not part.is_dense(name))

    @property
    def label(self) -> str:
        return " and ".join(dict.fromkeys(part.label for part in self.parts))


class Gguf(QuantizationSpec, frozen=True, kw_only=True):
    """GGUF blocks, with a type per tensor."""

    kinds: dict[str, str]
    """Types of quantized tensors by canonical name without ".weight"; for experts, and heads with separate matrices,
    with "{}" in place of the number."""
    qkv_rows: Literal["turned", "stacked"] | None = None
    """Reordering of rows by the converter: in Q and K, the halves of each head are interleaved ("turned"); or Q is
    stacked before K and V, which the family's own checkpoints store head by head. See layers/weights/lora.py."""
    inputs: dict[str, tuple[int, ...]] = {}
    """Quantized matrices with permuted inputs: the model's input of each column."""
    factors: dict[str, tuple[float, ...]] = {}
    """Global factor of a matrix, besides the scales in its blocks; by the names of `kinds`, for all experts
    together."""

    def kind(self, name: str) -> str | None:
        """The type of the matrix `name`; None if it is stored as floats."""
        found = self.kinds.get(name)
        return found or self.kinds.get(_NUMBERED.sub(r"\1.{}", name))

    def factor(self, name: str) -> float:
        """The global factor of the matrix `name`."""
        found = _NUMBERED.search(name)
        together = self.factors.get(_NUMBERED.sub(r"\1.{}", name)) if found is not None else None
        if found is not None and together is not None:
            return together[int(found["number"])]
        return self.factors.get(name, (1.0,))[0]

    def is_dense(self, name: str) -> bool:
        return self.kind(name) is None

    @property
    def label(self) -> str:
        return f"GGUF {', '.join(sorted(set(self.kinds.values())) or ('of floats',))}"


AnyQuantization = PackedInts | Gptq | Awq | BitsAndBytes4 | BitsAndBytes8 | MxFp4 | BlockScaled | Mixed | Gguf
"""Union of the subclasses, distinguished by tag."""
