"""The part of a plan on KV on disk (--kv-cache-dir): its capacity, and its rates."""

from pathlib import Path

import msgspec

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.kv_disk.probe import probe_disk
from vllm_lite.runtime.machine import parse_bytes


class DiskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Free space and measured rates of the disk for KV. Rates are 0 if nothing could be written."""

    folder: str
    kind: str
    free_bytes: int
    size_bytes: int
    """Maximum bytes of the files."""
    tokens: int
    """Number of tokens whose KV fits, without states of recurrent layers."""
    write_bytes_per_s: float
    read_bytes_per_s: float
    warnings: tuple[str, ...]


def plan_disk(config: EngineConfig, kv_bytes_per_token: int) -> DiskPlan | None:
    """Measure the disk of `config`; `kv_bytes_per_token` is for all ranks. None if there is no --kv-cache-dir. Raises
    ConfigError."""
    if config.kv_cache_dir is None:
        return None
    try:
        found = probe_disk(Path(config.kv_cache_dir))
    except OSError as error:
        raise ConfigError(f"kv_cache_dir {config.kv_cache_dir} cannot be looked at: {error.strerror}") from error
    size_bytes = parse_bytes("kv_cache_dir_size", config.kv_cache_dir_size)
    warnings = [found.warning] if found.warning is not None else []
    if found.free_bytes < size_bytes:
        free = f"{found.free_bytes / 2**30:.1f} GiB"
        warnings.append(f"{free} are free, less than --kv-cache-dir-size: when it is full, nothing more is written")
    return DiskPlan(
        folder=config.kv_cache_dir,
        kind=found.kind,
        free_bytes=found.free_bytes,
        size_bytes=size_bytes,
        tokens=size_bytes // max(1, kv_bytes_per_token),
        write_bytes_per_s=found.write_bytes_per_s,
        read_bytes_per_s=found.read_bytes_per_s,
        warnings=tuple(warnings),
    )
