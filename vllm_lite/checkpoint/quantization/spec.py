"""The form in which a checkpoint stores its weights. `read` makes it of config.json."""

import re
from typing import Literal

import msgspec

from vllm_lite.checkpoint.quantization.matching import first_fit
from vllm_lite.checkpoint.tensors.tensor_names import HEAD, TABLES

EXPERTS = ".experts."
"""What the names of experts' matrices have within them."""
_NUMBERED = re.compile(r"(\.experts|_proj)\.(?P<number>\d+)(?=\.|$)")
"""What one of several matrices, which a file has in one tensor, has in its name."""


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="method", tag=str.lower):
    """Common fields of all methods. A module of `layers.quantized` reads the tensors of each subclass."""

    dense: tuple[str, ...] = ()
    """What is not quantized: names, or their first or last parts between dots; or see `matching`."""
    targets: tuple[str, ...] = ()
    """What is quantized, in the same way; nothing: all."""
    embedding: bool = False
    """Whether the tables of token vectors are quantized, too."""

    def is_dense(self, name: str) -> bool:
        """Whether the matrix `name` (as `tensor_names.canonical` has it, without ".weight") is stored as it is."""
        if name in TABLES and not self.embedding:
            return True
        if self.targets and first_fit(self.targets, name) is None:
            return True
        return first_fit(self.dense, name) is not None

    @property
    def label(self) -> str:
        """The method's name in logs and plans."""
        return type(self).__name__


class PackedInts(QuantizationSpec, frozen=True, kw_only=True):
    """compressed-tensors' pack-quantized: integers of 4 or 8 bits in int32 words along the inputs."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: one scale for each output."""
    zeros: bool = False
    """Whether there are zero points, in words along the outputs."""
    sorted_columns: bool = False
    """Whether a tensor `weight_g_idx` says which inputs are grouped (actorder "group")."""

    @property
    def label(self) -> str:
        return f"compressed-tensors w{self.bits}a16"


class GptqLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a GPTQ checkpoint that are quantized in another way than most."""

    pattern: str
    """As those of QuantizationSpec.dense."""
    bits: int | None
    """None: they are dense."""
    group_size: int | None = None
    """As PackedInts'."""
    sorted_columns: bool = False
    """As Gptq's."""


class Gptq(QuantizationSpec, frozen=True, kw_only=True):
    """Integers of 2, 3, 4 or 8 bits with zero points, in int32 words along the inputs."""

    bits: int
    group_size: int | None
    """As PackedInts'."""
    sorted_columns: bool = False
    """Whether inputs were grouped by their activations (desc_act); a tensor `g_idx` then says which is in which."""
    zeros_less_one: bool = True
    """Whether zero points are stored less one, as in the first version of the format."""
    has_indices: bool = True
    """Whether there is a tensor `g_idx`."""
    layers: tuple[GptqLayers, ...] = ()
    """Those that differ. The first whose pattern fits a name counts."""
    only: tuple[str, ...] = ()
    """What the names of all quantized layers but the head end with; nothing: all are quantized."""

    def is_dense(self, name: str) -> bool:
        if super().is_dense(name):
            return True
        if (own := self._own(name)) is not None:
            return own.bits is None
        return bool(self.only) and name != HEAD.removesuffix(".weight") and not name.endswith(self.only)

    def of(self, name: str) -> "Gptq":
        """The form of the quantized matrix `name`."""
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
    """Integers of 4 bits with zero points, in int32 words along the outputs."""

    group_size: int | None
    """As PackedInts'."""

    @property
    def label(self) -> str:
        return "AWQ with 4 bits"


class BitsAndBytes4(QuantizationSpec, frozen=True, kw_only=True):
    """bitsandbytes' tables of 16 numbers, with a scale for each 64 weights of a matrix, whatever its rows are."""

    table: Literal["nf4", "fp4"]
    nested: bool = False
    """Whether the scales are quantized, too (double quantization)."""

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.table}"


class BitsAndBytes8(QuantizationSpec, frozen=True, kw_only=True):
    """bitsandbytes' integers of 8 bits, with one scale for each output."""

    @property
    def label(self) -> str:
        return "bitsandbytes int8"


class MxFp4(QuantizationSpec, frozen=True, kw_only=True):
    """Floats of 4 bits with a power of two for each 32 inputs, of experts that a checkpoint stores in one tensor."""

    def is_dense(self, name: str) -> bool:
        return EXPERTS not in name or super().is_dense(name)

    @property
    def label(self) -> str:
        return "MXFP4"


class BlockScaled(QuantizationSpec, frozen=True, kw_only=True):
    """Floats (E4M3) or integers of 8 bits, each rectangle of a matrix with a scale."""

    numbers: Literal["float8", "int8"]
    block: tuple[int | None, int | None]
    """Outputs and inputs that share a scale; None: all."""
    scale: str
    """What the tensor of scales is called, behind the name of the layer. It multiplies, also as weight_scale_inv."""
    zeros: str | None = None
    """The tensor of zero points, where there is one."""
    unread: tuple[str, ...] = ()
    """Numbers that each layer has besides: the scales of activations."""
    float8_rows: bool = False
    """Whether activations may become float8 (E4M3), too. Their scales are made of them, whatever the checkpoint has."""

    @property
    def label(self) -> str:
        return self.numbers


class Mixed(QuantizationSpec, frozen=True, kw_only=True):
    """Layers of several kinds."""

    parts: tuple[PackedInts | BlockScaled, ...]
    """The first that has a layer counts."""

    def is_dense(self, name: str) -> bool:
        return all(part.is_dense(name) for part in self.parts)

    def of(self, name: str) -> PackedInts | BlockScaled:
        """The form of a layer that is not dense."""
        return next(part for part in self.parts if not part.is_dense(name))

    @property
    def label(self) -> str:
        return " and ".join(dict.fromkeys(part.label for part in self.parts))


class Gguf(QuantizationSpec, frozen=True, kw_only=True):
    """Blocks of GGUF files, of another type in each tensor."""

    kinds: dict[str, str]
    """The types of what is not stored as floats, by canonical names without ".weight"; of experts, and of heads that
    have matrices of their own, with "{}" in place of their number."""
    qkv_rows: Literal["turned", "stacked"] | None = None
    """How rows were moved when the file was made: those of each head's halves lie in turn, in Q and K; or all of Q lies
    before K and V, which the family's own checkpoints have head by head. See layers/weights/lora.py."""
    inputs: dict[str, tuple[int, ...]] = {}
    """Matrices of blocks whose inputs are in another order than the model's: which of its inputs each column is for."""
    factors: dict[str, tuple[float, ...]] = {}
    """The number that a matrix is multiplied by, beside the scales in its blocks; under the names of `kinds`, and those
    of all experts together."""

    def kind(self, name: str) -> str | None:
        """The type of the matrix `name`; None if it is stored as floats."""
        found = self.kinds.get(name)
        return found or self.kinds.get(_NUMBERED.sub(r"\1.{}", name))

    def factor(self, name: str) -> float:
        """The number that the matrix `name` is multiplied by."""
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
"""The subclasses, each by its tag."""
