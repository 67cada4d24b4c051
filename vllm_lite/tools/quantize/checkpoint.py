"""Quantizes a checkpoint tensor by tensor, without a model in memory."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.spec import Gguf, PackedInts
from vllm_lite.checkpoint.tensors.headers import INDEX_FILE, weight_files
from vllm_lite.checkpoint.tensors.tensor_names import EMBEDDING, HEAD, canonical
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.layers.weights.weight_slot import WeightSlot
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import check_weights
from vllm_lite.tools.quantize.schemes import SCHEMES, Scheme

SHARD_BYTES = 4 << 30
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates")
"""Files of a checkpoint beside its weights; config.json and the index are written anew."""
PACKED = ".weight_packed"
SMALL = Sizes(8, 8)
"""Sizes for models that only give the names of their weights."""
Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and the total."""


class Written(NamedTuple):
    """Facts about the written checkpoint."""

    folder: Path
    num_quantized: int
    """Number of quantized matrices."""
    kept: list[str]
    """Matrices that are not quantized, though the model supports it."""
    num_bytes: int
    """Bytes of all weights."""


def quantize_checkpoint(source: Path, out: Path, scheme: str, progress: Progress = lambda *_: None) -> Written:
    """Write a quantized copy of the dense checkpoint in `source` to the folder `out`, which must not exist or be empty;
    it appears when it is complete. Raises ModelError and ConfigError."""
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme {scheme!r} is not supported; supported: {', '.join(SCHEMES)}")
    place = Path(os.path.realpath(out))  # a link's target is written
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{out}: is there already; give a folder that is new or empty")
    names = _check_source(source)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _check_space(source, place.parent)
        draft = Path(mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        _copy(source, draft)
        writer = _Writer(draft, SCHEMES[scheme], names)
        writer.go_through(source, progress)
        if not writer.num_quantized:
            raise ConfigError(f"{source}: has no matrix whose inputs are whole groups of {scheme}; try --scheme int8")
        _write_config(source, draft, writer.config)
        draft.chmod(0o755)
        draft.rename(place)  # `place` may be an empty folder
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Written(out, writer.num_quantized, sorted(writer.kept), writer.num_bytes)


def _check_source(source: Path) -> frozenset[str]:
    """Names of the checkpoint's `quantizable` matrices. Raises ModelError unless it is dense and supported."""
    spec = load_spec(source, "native")
    if isinstance(spec.quantization, Gguf):
        raise ModelError(f"{source}: is of GGUF, and serve takes it as it is; a checkpoint in safetensors is expected")
    if spec.quantization is not None:
        raise ModelError(f"{source}: is quantized already ({spec.quantization.label}); a dense checkpoint is expected")
    check_weights(build(spec, torch.float32, "cpu", SMALL), source)
    return quantizable(spec)


def quantizable(spec: ModelSpec) -> frozenset[str]:
    """Canonical names of the matrices that can be quantized, without ".weight": those that the model requests as
    quantized if only the head is dense. Raises ModelError if there are none."""
    form = PackedInts(bits=32, group_size=None, dense=(HEAD[:-7],))  # with a word per weight, all sizes are divisible
    asked = msgspec.structs.replace(spec, quantization=form)
    groups = build(asked, torch.float32, "cpu", SMALL).weight_groups()
    slots = [slot for group in groups for slot in group.slots if slot.name.endswith(PACKED)]
    odd = {slot.name for slot in slots if not _is_plain(slot)}
    names = frozenset(slot.name.removesuffix(PACKED) for slot in slots if slot.name not in odd)
    if not names:
        raise ModelError(f"{spec.architecture}: its matrices are stored in ways that quantized checkpoints do not have")
    return names


def _is_plain(slot: WeightSlot) -> bool:
    """Whether a weight is stored as [outputs, inputs], and not with several experts in a tensor."""
    return slot.stacked is None and not slot.transposed


class _Writer:
    """Writes a folder, in files of at most SHARD_BYTES."""

    def __init__(self, folder: Path, scheme: Scheme, names: frozenset[str]) -> None:
        self.folder, self.scheme, self.names = folder, scheme, names
        self.kept, self.num_quantized, self.num_bytes = set[str](), 0, 0
        self._ignored = {HEAD.removesuffix(".weight")}  # transformers has one even if it is tied
        self._files: list[tuple[Path, list[str]]] = []
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0

    @property
    def config(self) -> dict[str, Any]:
        return self.scheme.config(sorted(self._ignored))

    def go_through(self, source: Path, progress: Progress) -> None:
        files = weight_files(source)
        done, total = 0, sum(file.stat().st_size for file in files)
        for file in files:
            for name, tensor in _tensors(file):
                done += tensor.nbytes
                for each, made in self._made(name, tensor):
                    self._add(each, made)
                progress(min(done, total), total)
        self._write()
        self._finish()

    def _made(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        own, is_weight = canonical(name).removesuffix(".weight"), name.endswith(".weight")
        if own in self.names and is_weight and self.scheme.takes(tensor.shape):
            self.num_quantized += 1
            if not bool(tensor.isfinite().all()):
                raise ModelError(f"tensor {name!r} has values that are infinite or no numbers; it cannot be quantized")
            layer = name.removesuffix(".weight")
            yield from ((f"{layer}.{ending}", made) for ending, made in self.scheme.make(tensor).items())
            return
        if is_weight and tensor.dim() == 2 and canonical(name) != EMBEDDING:
            self._ignored.add(name.removesuffix(".weight"))
        if tensor.dim() == 3:
            self._ignored.add(own)  # experts in one tensor, named differently in a model
        if own in self.names:
            self.kept.add(name)
        yield name, tensor.clone()  # a copy, not mapped from the file

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if self._waiting and self._waiting_bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def _write(self) -> None:
        if not self._waiting:
            return
        path = self.folder / f"part-{len(self._files)}.safetensors"
        save_file(self._waiting, path, metadata={"format": "pt"})
        self._files.append((path, list(self._waiting)))
        self._waiting, self._waiting_bytes = {}, 0

    def _finish(self) -> None:
        """Give the files their final names, and write the index if there are several."""
        count, places = len(self._files), dict[str, str]()
        for number, (path, names) in enumerate(self._files, 1):
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self.folder / name)
            places |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
            (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{file}: not a valid safetensors file: {error}") from error


def _copy(source: Path, draft: Path) -> None:
    """Copy the files beside the weights, except config.json."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, draft / path.name)
            elif path.name not in ("config.json", INDEX_FILE):
                try:
                    shutil.copyfile(path, draft / path.name)
                except OSError as error:
                    raise ConfigError(f"{path}: cannot be copied ({error.strerror})") from error


def _write_config(source: Path, draft: Path, quantization: dict[str, Any]) -> None:
    """Write the source's config.json with `quantization`."""
    config = json.loads((source / "config.json").read_bytes())
    (draft / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}, indent=2))


def _check_space(source: Path, parent: Path) -> None:
    """Raise ConfigError if there is no space for a folder of about half the weights' size: int8 instead of 16 bits."""
    weights = sum(file.stat().st_size for file in weight_files(source))
    free, needed = shutil.disk_usage(parent).free, weights * 6 // 10
    if free < needed:
        raise ConfigError(f"{parent}: has {free >> 20} MiB free, and about {needed >> 20} MiB are needed")
