"""Facts about models from their files: sizes and descriptions, without loading them."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lite.checkpoint.config_json import load_spec, resolve_dtype
from vllm_lite.checkpoint.fitting import on_load
from vllm_lite.checkpoint.hub import is_hub_id
from vllm_lite.checkpoint.hub_cache import FileFacts, cached_models, facts_of
from vllm_lite.checkpoint.model_spec import DTYPE_BYTES
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.config import DEMO_MODEL, GIB, demo_folder
from vllm_lite.errors import ModelError
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.ollama.information import details_of, entry_of, iso
from vllm_lite.server.openai.formats import architectures_of
from vllm_lite.server.router.catalog import Entry

UNKNOWN = FileFacts("unknown", "unknown", "unknown", None)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_GENERATES = ("CausalLM", "ConditionalGeneration", "LMHeadModel")
_EMBEDDERS = ("bert", "nomic-bert", "jina-bert-v2", "xlm-roberta")
MAX_TEMPLATE_BYTES = 1 << 20
BASE_BYTES, RANK_BYTES = GIB // 2, 200 << 20
"""Estimated memory of a model's processes in addition to its weights, and of each further rank, as in `plan`."""


class Known(NamedTuple):
    """A model as its files describe it."""

    num_bytes: int
    modified_s: float
    facts: FileFacts
    capabilities: tuple[str, ...]
    template: str


@cache
def hub_paths() -> dict[str, Path]:
    """Paths of the models in the hub's cache, by name. Cached until forget_hub()."""
    paths: dict[str, Path] = {}
    for model in cached_models():
        if model.is_whole:
            paths[model.name] = model.path
            paths.setdefault(model.name.partition(":")[0], model.path)
    return paths


def forget_hub() -> None:
    hub_paths.cache_clear()


def path_of(model: str) -> Path | None:
    """The folder or file of a model; None for a hub id that is not in the cache."""
    if model == DEMO_MODEL:
        return Path(demo_folder())
    if is_hub_id(model):
        return hub_paths().get(model)
    return Path(model)


def files_bytes(model: str) -> int:
    """Bytes of a model's weight files; 0 if they are not downloaded."""
    path = path_of(model)
    return 0 if path is None else sum(file.stat().st_size for file in _weights(path))


def estimate(config: ServeConfig | None) -> int:
    """Estimate a model's memory before it is measured: its weights and its drafter's in their loaded form, and its
    processes. Reads the headers of the files."""
    if config is None:
        return 0
    drafter = config.speculative_config.model if config.speculative_config is not None else None
    held = _held_bytes(config) + (_known_bytes(drafter) if drafter else 0)
    return config.data_parallel_size * (held + BASE_BYTES + (config.tensor_parallel_size - 1) * RANK_BYTES)


def _held_bytes(config: ServeConfig) -> int:
    """Bytes of weights in memory by dtype and quantization; those of the files if that is not known."""
    if (path := path_of(config.model)) is None:
        return 0
    try:
        spec = load_spec(path, config.model_impl, config.pooling)
        checkpoint, size = Checkpoint(spec, read_headers(path)), DTYPE_BYTES[resolve_dtype(config.dtype, spec)]
        ranks, form = Shard.of(config).all_ranks, on_load(config, spec)
        return sum(weights_bytes(checkpoint, size, form, rank) for rank in ranks)
    except Exception:  # the model's own server reports the error
        return _known_bytes(config.model)


def _known_bytes(model: str) -> int:
    """As files_bytes(); 0 if the files cannot be read, which the model's own server reports."""
    try:
        return files_bytes(model)
    except OSError:
        return 0


def _weights(path: Path) -> list[Path]:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return [file for file in files if file.is_file()]


def describe(entry: Entry) -> Known:
    """Read a model's description from its files."""
    path = None if entry.config is None else path_of(entry.config.model)
    if path is None:
        return Known(0, 0.0, UNKNOWN, (), "")
    try:
        files, facts = _weights(path), facts_of(path)
    except (ModelError, OSError):
        return Known(0, 0.0, UNKNOWN, (), "")
    stats = [file.stat() for file in files]
    template = _template(path)
    names = architectures_of(str(path))
    generates = any(kind in name for name in names for kind in _GENERATES) or facts.format == "gguf"
    is_embedder = facts.family in _EMBEDDERS or not generates
    can = [
        ("completion", not is_embedder),
        ("embedding", is_embedder),
        ("tools", "tools" in template),
        ("thinking", "enable_thinking" in template or "<think>" in template),
    ]
    size = sum(each.st_size for each in stats)
    modified_s = max((each.st_mtime for each in stats), default=0.0)
    return Known(size, modified_s, facts, tuple(name for name, is_able in can if is_able), template)


def _template(path: Path) -> str:
    for name in _TEMPLATES if path.is_dir() else ():
        file = path / name
        if file.is_file() and file.stat().st_size <= MAX_TEMPLATE_BYTES:
            text = file.read_text(errors="replace")
            if name != "tokenizer_config.json" or "chat_template" in text:
                return text
    return ""


def ollama_details(known: Known) -> dict[str, Any]:
    return details_of(known.facts.format, known.facts.family, known.facts.quantization)


def ollama_entry(entry: Entry, name: str, known: Known) -> dict[str, Any]:
    """An entry of /api/tags."""
    root = "" if entry.config is None else entry.config.model
    digest_of = f"{root}/{known.modified_s}"
    return entry_of(name, iso(known.modified_s), known.num_bytes, digest_of, ollama_details(known))
