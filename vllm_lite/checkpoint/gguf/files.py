"""The GGUF files of a model: one, or several parts like model-00001-of-00003.gguf."""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from vllm_lite.checkpoint.gguf.header import GgufHeader, GgufTensor, read_header
from vllm_lite.errors import ModelError

SUFFIX = ".gguf"
MAX_FILES = 1000
MAX_LISTED = 20
SPLIT = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
OTHER_MODELS = ("mmproj", "imatrix")
"""Prefixes of files that are not text models."""


def gguf_files(path: Path) -> list[Path]:
    """The GGUF files of the model at `path`, a file or a folder, in order; none if it is not a GGUF model.

    Raises ModelError for a folder with several models, and for missing parts.
    """
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        return _parts(path)
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return []
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    sets = first_files([file.name for file in files])
    if len(sets) > 1:
        raise ModelError(f"{path}: has several models; give the file of one: {', '.join(sets[:10])}")
    return _parts(path / sets[0]) if sets else []


def choose(names: Sequence[str], label: str | None) -> list[str]:
    """Choose the files of one model in a repository: the only one, or the one whose name ends with `label`.

    Raises LookupError with a clause that lists the models.
    """
    firsts = first_files(names)
    found = firsts if label is None else [name for name in firsts if _is_labelled(name, label)]
    if len(found) == 1:
        folder, slash, name = found[0].rpartition("/")
        parts = [f"{folder}{slash}{part}" for part in part_names(name)]
        if missing := [part for part in parts if part not in names]:
            raise LookupError(f"lacks {missing[0]}, which is one of {len(parts)} parts")
        return parts
    if not firsts:
        raise LookupError(f"has no GGUF files; it holds {', '.join(names) or 'nothing'}")
    number = "several GGUF models" if label is None else f"{len(found) or 'no'} GGUF models {label}"
    raise LookupError(f"has {number}; give one as ORG/MODEL:LABEL: {listed(found or firsts)}")


def listed(names: Sequence[str]) -> str:
    """List the models among the files of a repository, for an error."""
    return ", ".join(first_files(names)[:MAX_LISTED])


def first_files(names: Sequence[str]) -> list[str]:
    """Names of GGUF models: the first parts only, without files that are not models."""
    found = []
    for name in sorted(names):
        own = name.rpartition("/")[2].lower()
        split = SPLIT.fullmatch(own)
        if own.endswith(SUFFIX) and not own.startswith(OTHER_MODELS) and (split is None or int(split["number"]) == 1):
            found.append(name)
    return found


def _is_labelled(name: str, label: str) -> bool:
    """Whether a file's name ends with `label`, like Q4_K_M, before its suffix."""
    own = name.rpartition("/")[2]
    split = SPLIT.fullmatch(own)
    stem = (split["base"] if split is not None else own[: -len(SUFFIX)]).lower()
    return stem == label.lower() or stem.endswith(tuple(f"{sign}{label.lower()}" for sign in "-._"))


def part_names(name: str) -> list[str]:
    """Names of all parts of the model that `name` belongs to. Raises ModelError for too many parts."""
    split = SPLIT.fullmatch(name)
    if split is None:
        return [name]
    count = int(split["count"])
    if not 1 <= int(split["number"]) <= count <= MAX_FILES:
        raise ModelError(f"{name}: is not a part of 1 to {MAX_FILES} files, as its name says")
    return [f"{split['base']}-{number:05d}-of-{split['count']}{name[-len(SUFFIX) :]}" for number in range(1, count + 1)]


def _parts(path: Path) -> list[Path]:
    files = [path.with_name(name) for name in part_names(path.name)]
    for file in files:
        if not file.is_file():
            others = f"; all {len(files)} parts of the model must be in one folder" if len(files) > 1 else ""
            raise ModelError(f"{file}: no such file{others}")
    return files


def read_files(files: list[Path]) -> GgufHeader:
    """Read the metadata of the first file, and the tensors of all. Raises ModelError if they are not one model."""
    return _read(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=2)
def _read(identities: tuple[tuple[Path, int, int], ...]) -> GgufHeader:
    """Read the files; cached, as a starting process calls this several times."""
    files = [file for file, _, _ in identities]
    headers = [read_header(file) for file in files]
    count = headers[0].metadata.get("split.count", 1)
    if count not in (0, len(files)):
        raise ModelError(f"{files[0]}: is one of {count} files, as split.count says, and {len(files)} are there")
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelError(f"{tensor.file}: tensor {name!r} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    return GgufHeader(headers[0].metadata, tensors)
