"""What a checkpoint says of the form in which its weights are stored. `read` makes it of config.json."""

import re

import msgspec

from vllm_lite.checkpoint.tensor_names import EMBEDDING, canonical

REGEX = "re:"
"""What a pattern begins with that is a regular expression, and no name."""


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="method", tag=str.lower):
    """What all methods have in common. A module of `layers.quantized` reads the tensors of each subclass."""

    dense: tuple[str, ...] = ()
    """Names of what is not quantized: layers, or all that lies below, or "re:" and a regular expression."""
    embedding: bool = False
    """Whether the table of token vectors is quantized, too."""

    def is_dense(self, name: str) -> bool:
        """Whether the matrix `name` (as `tensor_names.canonical` has it, without ".weight") is stored as it is."""
        if name == EMBEDDING.removesuffix(".weight") and not self.embedding:
            return True
        return any(_fits(pattern, name) for pattern in self.dense)

    @property
    def label(self) -> str:
        """What logs and plans call it."""
        return type(self).__name__


def _fits(pattern: str, name: str) -> bool:
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), name) is not None
    own = canonical(f"{pattern}.").removesuffix(".")
    return name == own or name.startswith(f"{own}.")


class PackedInts(QuantizationSpec, frozen=True, kw_only=True):
    """compressed-tensors' pack-quantized: integers of 4 or 8 bits in int32 words along the inputs."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: one scale for each output."""
    symmetric: bool
    sorted_columns: bool = False
    """Whether columns were sorted before they were grouped; a tensor `weight_g_idx` then says which is in which."""

    @property
    def label(self) -> str:
        return f"compressed-tensors w{self.bits}a16"


AnyQuantization = PackedInts
"""The subclasses, each by its tag."""
