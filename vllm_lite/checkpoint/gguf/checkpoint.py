"""GgufCheckpoint: a model in GGUF files as a checkpoint: a ModelSpec, and tensors by canonical names."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from vllm_lite.checkpoint.gguf.architecture import Architecture
from vllm_lite.checkpoint.gguf.changes import Change, HeadOrder
from vllm_lite.checkpoint.gguf.config import architecture_of, config_of
from vllm_lite.checkpoint.gguf.encoders import modules_of
from vllm_lite.checkpoint.gguf.files import gguf_files, read_files
from vllm_lite.checkpoint.gguf.header import GgufHeader, GgufTensor
from vllm_lite.checkpoint.gguf.kinds import FLOATS, READ
from vllm_lite.checkpoint.gguf.metadata import Metadata
from vllm_lite.checkpoint.gguf.names import SCALE, halves, in_layer, name_here
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec, Projections
from vllm_lite.checkpoint.layer_specs.pooling import SentenceModules
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.quantization.spec import Gguf
from vllm_lite.errors import ModelError

MAX_MATRICES = 16384
"""Maximum number of experts or heads in one tensor."""
MAX_TENSORS = 1 << 20
"""Maximum number of tensors, with one for each matrix of each expert."""


class GgufCheckpoint:
    """The GGUF files of one model, of which only headers are read."""

    def __init__(self, files: list[Path]) -> None:
        """Read the headers. Raises ModelError for files that are damaged or do not belong together."""
        self.file = files[0]
        self.header: GgufHeader = read_files(files)

    @classmethod
    def find(cls, path: Path) -> "GgufCheckpoint | None":
        """The model at `path`, a file or a folder; None if it has no GGUF files. Raises ModelError."""
        files = gguf_files(path)
        return cls(files) if files else None

    @property
    def architecture(self) -> Architecture:
        """The model's architecture. Raises ModelError, with its name, if it is not supported."""
        return architecture_of(self.header)

    def spec(self, parse: Callable[[Any], ModelSpec]) -> ModelSpec:
        """The spec that `parse` makes of the derived config.json, adapted to the file's layout. Raises ModelError with
        the file's name."""
        try:
            return self._as_stored(parse(config_of(self.header)))
        except ModelError as error:
            raise ModelError(f"{self.file}: {error}") from None

    def modules(self) -> SentenceModules | None:
        """The pooling described in the file, if any. Raises ModelError with the file's name."""
        try:
            return modules_of(Metadata(self.header))
        except ModelError as error:
            raise ModelError(f"{self.file}: {error}") from None

    def _as_stored(self, spec: ModelSpec) -> ModelSpec:
        own = self.architecture

        def layer(each: LayerSpec) -> LayerSpec:
            if each.experts is not None:
                each = replace(each, experts=replace(each.experts, stored="separate"))
            if isinstance(each.recurrent, DeltaNetSpec) and each.recurrent.stored != "apart":
                stored: Projections = "by key head" if self._has("ssm_in.weight") else "b and a by key head"
                each = replace(each, recurrent=replace(each.recurrent, stored=stored))
            if each.latent is not None:
                each = replace(each, latent=replace(each.latent, stored="by head"))
            if each.rope is None or not own.is_interleaved:
                return each
            return replace(each, rope=replace(each.rope, interleaved=True))

        return replace(
            spec,
            layers=tuple(map(layer, spec.layers)),
            norm=replace(spec.norm, plus_one=spec.norm.plus_one and not own.plus_one),
            qkv_bias=self._has_bias("attn_q", "attn_qkv"),
            output_bias=self._has_bias("attn_output"),
            mlp_bias=self._has_bias("ffn_down"),
            qkv_layout="stacked" if own.stacks_qkv else spec.qkv_layout,
            splits_gate_up=own.splits_gate_up,
            num_unread_layers=Metadata(self.header).num_unread,
            quantization=Gguf(
                kinds=dict(self._kinds()),
                qkv_rows=self._qkv_rows,
                inputs=dict(self._inputs()),
                factors=dict(self._factors()),
            ),
        )

    def _has_bias(self, *parts: str) -> bool:
        return self._has(*(f"{part}.bias" for part in parts))

    def _has(self, *names: str) -> bool:
        """Whether any layer has a tensor with one of these names."""
        return any(in_layer(stored) in names for stored in self.header.tensors)

    @property
    def _qkv_rows(self) -> Literal["turned", "stacked"] | None:
        if self.architecture.is_interleaved:
            return "turned"
        return "stacked" if self.architecture.stacks_qkv else None

    def _kinds(self) -> Iterator[tuple[str, str]]:
        own = self.architecture.names
        for stored, tensor in self.header.tensors.items():
            name = name_here(stored, own)
            if name is None or tensor.kind.name in FLOATS:
                continue
            if tensor.kind.name not in READ:
                raise ModelError(
                    f"tensor {stored!r} is of type {tensor.kind.name}, which is not supported; supported: "
                    f"{', '.join((*FLOATS, *READ))}"
                )
            for each in halves(name):
                yield each.removesuffix(".weight"), tensor.kind.name

    def _changed(self) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the tensors of the model by name, with their changes."""
        own = self.architecture
        changes = own.changes(Metadata(self.header))
        for stored, tensor in self.header.tensors.items():
            name = name_here(stored, own.names)
            if name is not None:
                yield name, tensor._replace(changes=changes.get(in_layer(stored), ()))

    def _inputs(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the quantized matrices whose inputs are permuted heads, with the permutation."""
        for name, tensor in self._changed():
            moved = [change for change in tensor.changes if _is_of_inputs(change, tensor)]
            if isinstance(heads := next(iter(moved), None), HeadOrder):
                if tensor.shape[-1] != heads.end:
                    raise ModelError(f"{name} has {tensor.shape[-1]} inputs; its heads have {heads.end}")
                yield name.removesuffix(".weight"), tuple(heads.inverse())

    def _factors(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Yield the global scales of NVFP4 matrices, one or one per expert, which multiply the scales in their
        blocks."""
        own, of = self.architecture.names, Metadata(self.header)
        for stored in self.header.tensors:
            if not stored.endswith(SCALE) or name_here(stored, own) is not None:
                continue
            weight = f"{stored.removesuffix(SCALE)}.weight"
            tensor, name, numbers = self.header.tensors.get(weight), name_here(weight, own), of.factors(stored) or []
            if tensor is None or name is None or tensor.kind.name != "NVFP4":
                raise ModelError(f"tensor {stored!r} must be the scale of a matrix of NVFP4, {weight!r}")
            if len(numbers) != (tensor.shape[0] if "{}" in name else 1):
                raise ModelError(f"tensor {stored!r} has {len(numbers)} numbers; it must have one for each matrix")
            for each in halves(name):
                yield each.removesuffix(".weight"), tuple(numbers)

    def tensors(self) -> Mapping[str, GgufTensor]:
        """The model's weights by canonical name, with expert tensors split into their experts. Raises ModelError for
        two tensors with one name."""
        found = dict[str, GgufTensor]()
        for name, whole in self._changed():
            left = tuple(change for change in whole.changes if not _is_of_inputs(change, whole))
            tensor = whole._replace(changes=left)
            for each, part in _each(name, tensor) if "{}" in name else ((name, tensor),):
                if len(found) > MAX_TENSORS:
                    raise ModelError(f"{self.file}: has more than {MAX_TENSORS} matrices")
                if each in found:
                    raise ModelError(f"{self.file}: has tensor {each!r} twice")
                found[each] = part
        return found


def _is_of_inputs(change: Change, tensor: GgufTensor) -> bool:
    """Whether a change is left to the product; see `changes`."""
    return isinstance(change, HeadOrder) and change.axis == 1 and tensor.kind.name not in FLOATS


def _each(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the matrices, or biases, stacked along the first axis."""
    count, *shape = tensor.shape
    if len(shape) != (1 if name.endswith(".bias") else 2) or count > MAX_MATRICES:
        raise ModelError(f"{tensor.file}: the matrices of {name} have the shape {list(tensor.shape)}")
    names, (rows, *columns) = halves(name), shape
    if rows % len(names):
        raise ModelError(f"{tensor.file}: gate and up of {name} have {rows} rows, which is an odd number")
    part = tensor._replace(shape=(rows // len(names), *columns))
    for index in range(count * len(names)):
        expert, half = divmod(index, len(names))
        yield names[half].format(expert), part._replace(offset=tensor.offset + index * part.num_bytes)
