"""The fingerprint of everything except tokens that KV depends on: engines with the same one share files.

Weights are not read whole, which would take as long as loading them. Of each file the size, the header, and some pages
count: PAGES at equal distances, and one in the middle of each tensor, so that a change of any tensor is detected.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.gguf.files import gguf_files
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ModelError

LAYOUT_VERSION = 2
"""Version of the layout of K, V and states in a block, and of the input of a block's hash; increase it when they
change."""
PAGES = 256
PAGE_BYTES = 4096
FINGERPRINT_BYTES = 32
_FIELDS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "exact_activations",
    "block_size",
    "load_format",
    "hf_overrides",
    "tensor_parallel_size",
    "enable_expert_parallel",
    "device",
)
"""Settings that change a token's KV, or its layout in a block."""


def fingerprint(config: ResolvedConfig, layout: Sequence[object]) -> bytes:
    """Digest of the model in `config`, its settings, and `layout`, the worker's description of its blocks and kernels.

    Raises OSError or ModelError for files that cannot be read.
    """
    state = blake2b(digest_size=FINGERPRINT_BYTES)
    parts: list[object] = [LAYOUT_VERSION, *(getattr(config, name) for name in _FIELDS), *layout]
    spec = load_spec(config.model, config.model_impl, config.pooling)
    parts.append(spec.implementation)
    ropes = dict.fromkeys(layer.rope for layer in spec.layers)
    parts += [rope.pinned(config.max_model_len) for rope in ropes if rope is not None]
    if spec.implementation == "transformers":
        parts.append(config.max_model_len)
    if config.load_format == "dummy":
        parts.append(config.seed)
    if config.speculative_config is not None:
        parts.append(repr(config.speculative_config))
    if config.deterministic:
        parts.append("deterministic")
    for part in parts:
        _add(state, repr(part).encode())
    folder = Path(config.model)
    _add(state, _config_text(folder))
    if config.load_format != "dummy":
        for file in _weight_files(folder):
            _add(state, file.name.encode())
            _add(state, file_digest(file))
    return state.digest()


def adapter_digest(folder: str) -> bytes:
    """Digest of all files of an adapter, which are small; empty if they change meanwhile. Raises OSError."""
    state, before = blake2b(digest_size=FINGERPRINT_BYTES), adapter_stamp(folder)
    for file in _adapter_files(folder):
        _add(state, file.name.encode())
        with file.open("rb") as stream:
            _add(state, hashlib.file_digest(stream, "blake2b").digest())
    return state.digest() if before == adapter_stamp(folder) else b""


def adapter_stamp(folder: str) -> list[tuple[str, int, int, int]]:
    """Names, sizes, inodes and times of an adapter's files, which change when a file is written. Raises OSError."""
    found = [(file.name, file.stat()) for file in _adapter_files(folder)]
    return [(name, status.st_size, status.st_ino, status.st_ctime_ns) for name, status in found]


def _adapter_files(folder: str) -> list[Path]:
    return [file for file in sorted(Path(folder).glob("adapter_*")) if file.is_file()]


def file_digest(file: Path) -> bytes:
    """Digest of a file's size, header and pages. Raises OSError."""
    state = blake2b(digest_size=FINGERPRINT_BYTES)
    with file.open("rb", buffering=0) as stream:
        descriptor, size = stream.fileno(), os.fstat(stream.fileno()).st_size
        state.update(size.to_bytes(8, "little"))
        head = os.pread(descriptor, 8, 0)
        length = int.from_bytes(head, "little")
        is_safetensors = file.suffix == ".safetensors" and length <= min(size, 100_000_000)
        header = os.pread(descriptor, length, 8) if is_safetensors else b""
        state.update(header)
        places = [number * max(size - PAGE_BYTES, 0) // PAGES for number in range(PAGES + 1)]
        for place in dict.fromkeys([*places, *_middles(header, 8 + length)]):
            state.update(os.pread(descriptor, PAGE_BYTES, place))
    return state.digest()


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


def _middles(header: bytes, start: int) -> Iterable[int]:
    """Positions in the middle of each tensor of a safetensors file."""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor]) if header else {}
    except (msgspec.MsgspecError, UnicodeDecodeError):  # the loader reports the error
        return []
    return sorted({start + (first + last) // 2 for first, last in (t.data_offsets for t in tensors.values())})


def _weight_files(folder: Path) -> list[Path]:
    files = gguf_files(folder) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: there are no weights")
    return files


def _config_text(folder: Path) -> bytes:
    """The normalized config.json; empty if there is none, as beside a GGUF file."""
    path = folder / "config.json"
    if not path.is_file():
        return b""
    return msgspec.json.encode(msgspec.json.decode(path.read_bytes()), order="deterministic")


def _add(state: blake2b, data: bytes) -> None:
    state.update(len(data).to_bytes(8, "little") + data)
