"""Metadata: typed access to the metadata of a GGUF file. A ModelError names the key and the value."""

from array import array
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar, overload

from vllm_lite.checkpoint.gguf.header import Array, GgufHeader, GgufTensor, Value
from vllm_lite.errors import ModelError

T = TypeVar("T")
_NEEDED = object()
MAX_LAYERS = 10_000
MAX_NUMBERS = 4096
"""Maximum number of factors, such as rope's for each pair of a head, or scales for each expert."""


class Metadata:
    """A file's metadata. Keys are given without the prefix of the architecture, like "llama." in
    "llama.block_count"."""

    def __init__(self, header: GgufHeader) -> None:
        self.all: Mapping[str, Value] = header.metadata
        self.tensors: Mapping[str, GgufTensor] = header.tensors
        self.architecture = str(header.metadata.get("general.architecture", ""))

    @cached_property
    def num_layers(self) -> int:
        count = self.integer("block_count") - self.num_unread
        if not 1 <= count <= MAX_LAYERS:
            raise ModelError(f"{self.named('block_count')} gives {count} layers; it must be 1 to {MAX_LAYERS}")
        return count

    @property
    def num_unread(self) -> int:
        """Number of trailing layers that predict further tokens (MTP), which are not read."""
        return self.integer("nextn_predict_layers", 0)

    @cached_property
    def head_size(self) -> int:
        size = self.integer("attention.key_length", None)
        return size or self.integer("embedding_length") // max(1, self.integer("attention.head_count"))

    @overload
    def integer(self, key: str) -> int: ...

    @overload
    def integer(self, key: str, default: T) -> int | T: ...

    def integer(self, key: str, default: Any = _NEEDED) -> Any:
        """An integer. Raises ModelError if it is missing and there is no default."""
        found = self.value(key)
        if found is None and default is not _NEEDED:
            return default
        if not isinstance(found, int) or isinstance(found, bool):
            raise ModelError(f"{self.named(key)} must be a whole number, and it is {_shown(found)}")
        return found

    @overload
    def same(self, key: str) -> int: ...

    @overload
    def same(self, key: str, default: T) -> int | T: ...

    def same(self, key: str, default: Any = _NEEDED) -> Any:
        """As `integer`, but a file may also give a number per layer, if all are equal."""
        found = self.value(key)
        if isinstance(found, Array) and not found.is_text and 0 < len(found) <= MAX_LAYERS:
            numbers = set(found.numbers())
            if len(numbers) > 1:
                raise ModelError(f"{self.named(key)} differs by layer ({sorted(numbers)[:8]}), which is not supported")
            return int(numbers.pop())
        return self.integer(key, default)

    def whole_numbers(self, key: str) -> list[int]:
        """Integers, one for each layer. Raises ModelError for anything else."""
        found, count = self.value(key), self.num_layers
        if not isinstance(found, Array) or found.is_text or len(found) not in (count, count + self.num_unread):
            raise ModelError(f"{self.named(key)} must be a number for each layer, and it is {_shown(found)}")
        return [int(number) for number in found.numbers()[:count]]

    def by_layer(self, key: str) -> list[int]:
        """As `whole_numbers`, but a file may also give one number for all layers."""
        found = self.value(key)
        return self.whole_numbers(key) if isinstance(found, Array) else [self.integer(key)] * self.num_layers

    def number(self, key: str, default: T) -> float | T:
        """A float with the seven digits of a float32: 1e-5, which as a double would be 9.99999974e-06."""
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise ModelError(f"{self.named(key)} must be a number, and it is {_shown(found)}")
        return float(f"{found:.7g}")

    def flag(self, key: str, *, default: bool) -> bool:
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise ModelError(f"{self.named(key)} must be true or false, and it is {_shown(found)}")
        return found

    def booleans(self, key: str) -> list[bool] | None:
        """Flags, one for each layer; None if there are none."""
        found = self.value(key)
        if not isinstance(found, Array) or found.is_text or len(found) > MAX_LAYERS:
            return None
        return [bool(number) for number in found.numbers()]

    def text(self, key: str, default: T) -> str | T:
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, str):
            raise ModelError(f"{self.named(key)} must be a string, and it is {_shown(found)}")
        return found

    def must_be(self, key: str, wanted: int) -> None:
        """Raise ModelError if the file has another value than `wanted`."""
        found = self.value(key)
        if found is not None and found != wanted:
            raise ModelError(f"{self.named(key)} {_shown(found)} is not supported; it must be {wanted}")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ModelError if it is missing."""
        if name not in self.tensors:
            raise ModelError(f"has no tensor {name!r}")
        return self.tensors[name].shape

    def factors(self, name: str) -> list[float] | None:
        """The values of a small float tensor; None if it is missing."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_NUMBERS:
            raise ModelError(f"tensor {name} is {tensor.kind.name} {list(tensor.shape)}; it must be a row of F32")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            return array("f", stream.read(tensor.num_bytes)).tolist()

    def token(self, key: str) -> int | None:
        """The id of a special token of the tokenizer, like "eos"."""
        found = self.all.get(f"tokenizer.ggml.{key}_token_id")
        return found if isinstance(found, int) and found >= 0 else None

    def value(self, key: str) -> Value | None:
        return self.all.get(self.named(key))

    def named(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def _shown(value: Value | None) -> str:
    if isinstance(value, Array):
        return f"an array of {len(value)}"
    return "missing" if value is None else repr(value)[:80]
