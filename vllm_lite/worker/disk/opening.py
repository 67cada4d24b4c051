"""Opens the disk tier of one rank: whose files it shares, and over which pools."""

from collections.abc import Sequence
from contextlib import suppress

from vllm_lite.config import ResolvedConfig
from vllm_lite.kv_disk.directory import open_directory
from vllm_lite.kv_disk.fingerprint import fingerprint, folder_digest
from vllm_lite.kv_disk.store import DiskStore
from vllm_lite.kv_disk.usage import ABOUT
from vllm_lite.runtime.machine import parse_bytes
from vllm_lite.worker.disk.items import items_of
from vllm_lite.worker.disk.transfers import DiskTransfers, Pools
from vllm_lite.worker.memory.cache_engine import CacheEngine


def open_disk(config: ResolvedConfig, layout: Sequence[object], rank: int, generation: int) -> DiskTransfers | None:
    """Begin to look at the directory of the KV cache, if there is one. `layout`: facts about blocks that `config` does
    not say. Raises ConfigError."""
    if config.kv_cache_dir is None:
        return None
    root, quota = open_directory(config.kv_cache_dir), parse_bytes("kv_cache_dir_size", config.kv_cache_dir_size)
    place = rank, config.tensor_parallel_size

    def make_store() -> DiskStore:
        store = DiskStore(root, fingerprint(config, layout), place, quota)
        store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = f"{config.served_model_name} ({config.dtype}, KV {config.kv_cache_dtype})"
        (store.folder.parent / ABOUT).write_text(about)
        return store

    disk = DiskTransfers(make_store, rank, generation)
    disk.start()
    return disk


def pools_of(cache: CacheEngine) -> Pools:
    """The blocks and the states of a cache, for one thread."""
    return items_of(cache.pool), items_of(cache.states) if cache.states.shape[1] else None


def adapter_digest(disk: DiskTransfers | None, path: str) -> bytes:
    """Digest of an adapter's files, by which KV on disk is found again; empty where there is no disk, or no such
    files."""
    with suppress(OSError):
        return b"" if disk is None else folder_digest(path)
    return b""
