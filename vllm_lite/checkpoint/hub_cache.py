"""Models in the hub's cache: size, family, format and time of last access of each.

The cache is huggingface_hub's, and shared with other programs. A repository may have a model in safetensors, under the
repository's name, and several in GGUF files, with a label appended.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_lite.checkpoint.gguf.files import choose, first_files, part_names
from vllm_lite.checkpoint.gguf.header import read_metadata
from vllm_lite.checkpoint.tensors.headers import weight_files
from vllm_lite.checkpoint.typed_json import read_json
from vllm_lite.errors import ModelError

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo, HFCacheInfo

UNKNOWN = "unknown"


class FileFacts(NamedTuple):
    """Facts in a model's files, read without loading it."""

    family: str
    format: str
    """safetensors or gguf."""
    quantization: str
    context_length: int | None


class CachedModel(NamedTuple):
    """A model in the cache. `path` is the model argument of an engine: a folder, or the first GGUF file."""

    name: str
    commit: str
    path: Path
    num_bytes: int
    used_s: float
    """Time at which one of its files was last read, by the file system."""
    is_whole: bool
    facts: FileFacts


def facts_of(path: Path) -> FileFacts:
    """Read the facts of a model's folder or GGUF file; missing ones are "unknown"."""
    if path.is_file():
        return _gguf_facts(path)
    config: dict[str, Any] = {}
    with suppress(ModelError):
        config = read_json(path / "config.json", lambda value: value if isinstance(value, dict) else {})
    own = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    length = (own or config).get("max_position_embeddings")
    with suppress(ModelError, AttributeError):
        longest = read_json(path / "sentence_bert_config.json", lambda value: value.get("max_seq_length"))
        length = longest if isinstance(longest, int) else length
    return FileFacts(
        str(config.get("model_type") or UNKNOWN),
        "safetensors",
        str(method or config.get("dtype") or config.get("torch_dtype") or UNKNOWN),
        length if isinstance(length, int) else None,
    )


def cached_models(cache_dir: str | None = None) -> list[CachedModel]:
    """All models of the cache, sorted by name; for each repository the latest revision."""
    found: list[CachedModel] = []
    for repository, revision in _revisions(_scan(cache_dir)):
        found += _models_of(repository, revision)
    return sorted(found)


def find_cached(name: str, cache_dir: str | None = None) -> CachedModel:
    """Return the model of this name. Raises ModelError, listing the existing names."""
    models = cached_models(cache_dir)
    wanted = [model for model in models if model.name.lower() == name.lower()]
    wanted = wanted or [model for model in models if model.name.partition(":")[0].lower() == name.lower()]
    if len(wanted) == 1:
        return wanted[0]
    shown = ", ".join(model.name for model in (wanted or models)[:20]) or "nothing"
    number = "several models" if wanted else "no model"
    raise ModelError(f"the cache has {number} {name!r}; it holds {shown}")


def cached_at(path: Path, cache_dir: str | None = None) -> CachedModel:
    """Return the model at `path`. Raises ModelError."""
    found = next((model for model in cached_models(cache_dir) if model.path == path), None)
    if found is None:
        raise ModelError(f"{path}: is not a model of the cache")
    return found


def remove_cached(name: str, cache_dir: str | None = None) -> tuple[CachedModel, int]:
    """Remove a model's files, and its repository with its last model. Returns the model, and the number of bytes freed.
    Raises ModelError."""
    model = find_cached(name, cache_dir)
    repository = model.name.partition(":")[0]
    scan = _scan(cache_dir)
    others = [each for each in cached_models(cache_dir) if each.name.partition(":")[0] == repository and each != model]
    if not others:
        hashes = [revision.commit_hash for name, revision in _all_revisions(scan) if name == repository]
        strategy = scan.delete_revisions(*hashes)
        strategy.execute()
        return model, strategy.expected_freed_size
    names = part_names(model.path.name) if model.path.is_file() else [file.name for file in weight_files(model.path)]
    return model, sum(
        _unlink(model.path.parent / each if model.path.is_file() else model.path / each) for each in names
    )


def _unlink(file: Path) -> int:
    """Remove a file of a snapshot, and the blob to which it links. Returns the bytes freed."""
    blob = file.resolve()
    num_bytes = blob.stat().st_size if blob.exists() else 0
    file.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)
    return num_bytes


def _scan(cache_dir: str | None) -> "HFCacheInfo":
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(cache_dir or constants.HF_HUB_CACHE)
    except CacheNotFound:
        Path(cache_dir or constants.HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
        return scan_cache_dir(cache_dir or constants.HF_HUB_CACHE)


def _all_revisions(scan: "HFCacheInfo") -> Iterator[tuple[str, "CachedRevisionInfo"]]:
    for repository in scan.repos:
        if repository.repo_type == "model":
            for revision in repository.revisions:
                yield repository.repo_id, revision


def _revisions(scan: "HFCacheInfo") -> Iterator[tuple[str, "CachedRevisionInfo"]]:
    """Yield each repository with the revision of its main branch, or the last modified one."""
    latest: dict[str, CachedRevisionInfo] = {}
    for name, revision in _all_revisions(scan):
        before = latest.get(name)
        if before is None or _rank(revision) > _rank(before):
            latest[name] = revision
    yield from latest.items()


def _rank(revision: "CachedRevisionInfo") -> tuple[bool, float]:
    return "main" in revision.refs, revision.last_modified


def _models_of(repository: str, revision: "CachedRevisionInfo") -> Iterator[CachedModel]:
    folder = revision.snapshot_path
    files = {str(file.file_path.relative_to(folder)): file for file in revision.files}
    commit = revision.commit_hash

    def model(name: str, path: Path, held: Iterable[str], *, is_whole: bool) -> CachedModel:
        own = [files[each] for each in held if each in files]
        num_bytes = sum(file.size_on_disk for file in own)
        used_s = max((file.blob_last_accessed for file in own), default=0.0)
        try:
            facts = facts_of(path)
        except (ModelError, OSError):
            facts, is_whole = FileFacts(UNKNOWN, UNKNOWN, UNKNOWN, None), False
        return CachedModel(name, commit, path, num_bytes, used_s, is_whole, facts)

    ggufs = [name for name in files if name.lower().endswith(".gguf")]
    for first in first_files(ggufs):
        base, _, name = first.rpartition("/")
        parts = [f"{base}/{part}" if base else part for part in part_names(name)]
        label = label_of(first, ggufs)
        yield model(f"{repository}:{label}", folder / first, parts, is_whole=all(part in files for part in parts))
    if "config.json" in files and any(name.endswith((".safetensors", ".safetensors.index.json")) for name in files):
        yield model(repository, folder, [name for name in files if name not in ggufs], is_whole=_is_whole(folder))


def _is_whole(folder: Path) -> bool:
    try:
        return all(file.exists() for file in weight_files(folder))
    except ModelError:
        return False


def label_of(first: str, names: Sequence[str]) -> str:
    """Return the shortest label that selects `first` among the GGUF files `names`."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", first.rpartition("/")[2][: -len(".gguf")])
    pieces = re.split(r"([-.])", stem)
    for start in range(len(pieces) - 1, -1, -2):
        label = "".join(pieces[start:])
        with suppress(LookupError):
            if choose(names, label)[0] == first:
                return label
    return stem


def _gguf_facts(path: Path) -> FileFacts:
    metadata = read_metadata(path)
    family = str(metadata.get("general.architecture", UNKNOWN))
    length = metadata.get(f"{family}.context_length")
    label = re.search(
        r"(?i)(?:^|[-._])((?:i?q\d\w*|bf16|f16|f32|mxfp4\w*|tq\d\w*))(?:-\d{5}-of-\d{5})?\.gguf$", path.name
    )
    return FileFacts(family, "gguf", label[1] if label else UNKNOWN, length if isinstance(length, int) else None)
