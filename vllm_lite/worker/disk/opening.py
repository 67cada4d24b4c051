"""Opens the disk tier of one rank: its directory, named by what must match to share files, and its pools."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from vllm_lite.config import ResolvedConfig
from vllm_lite.kernels.cpu.library import isa
from vllm_lite.kv_disk.directory import open_directory
from vllm_lite.kv_disk.fingerprint import adapter_digest, adapter_stamp, fingerprint
from vllm_lite.kv_disk.store import DiskStore
from vllm_lite.runtime.machine import parse_bytes
from vllm_lite.worker.batch.part import StepPart
from vllm_lite.worker.disk.items import HostItems, TieredItems, items_of
from vllm_lite.worker.disk.media_items import MediaShelf
from vllm_lite.worker.disk.transfers import DiskTransfers, Pools
from vllm_lite.worker.memory.cache_engine import CacheEngine
from vllm_lite.worker.memory.touch_ahead import TouchAhead
from vllm_lite.worker.step_parts.media import MediaVectors


def open_disk(
    config: ResolvedConfig, layout: Sequence[object], rank: int, generation: int, pages: TouchAhead | None
) -> DiskTransfers | None:
    """Begin to scan the KV cache's directory, if one is configured. `layout`: facts about blocks that `config` lacks.
    `pages`: memory for blocks, of which as much is allocated ahead as files are found. Raises ConfigError."""
    if config.kv_cache_dir is None:
        return None
    root, quota = open_directory(config.kv_cache_dir), parse_bytes("kv_cache_dir_size", config.kv_cache_dir_size)
    place = rank, config.tensor_parallel_size
    if config.deterministic:  # others may have summed in another order, by other settings or on another processor
        layout = [*layout, isa()]

    def make_store() -> DiskStore:
        about = f"{config.served_model_name} ({config.dtype}, KV {config.kv_cache_dtype})"
        store = DiskStore(root, fingerprint(config, layout), place, quota, about=about)
        try:
            store.folders.make()
        except OSError as error:  # a read-only directory is still read
            store.refused(error)
        return store

    disk = DiskTransfers(make_store, rank, generation, pages)
    disk.start()
    return disk


def pools_of(cache: CacheEngine) -> Pools:
    """The blocks and the states of a cache, for one thread."""
    blocks = items_of(cache.pool)
    tiers = TieredItems(blocks, HostItems(cache.host_pool), cache.num_blocks) if cache.num_host_blocks else blocks
    return tiers, items_of(cache.states) if cache.states.shape[1] else None


def shelf_of(parts: Iterable[StepPart]) -> MediaShelf | None:
    """The StepPart that stores media vectors, if the model takes media."""
    return next((part for part in parts if isinstance(part, MediaVectors)), None)


class AdapterFiles:
    """The files of an adapter, digested around its load: KV on disk is found again by their digest."""

    def __init__(self, path: str, disk: DiskTransfers | None) -> None:
        self._path = path
        self._digest, self._stamp = b"", list[tuple[str, int, int, int]]()
        if disk is not None:
            with suppress(OSError):
                self._stamp, self._digest = adapter_stamp(path), adapter_digest(path)

    def digest(self) -> bytes:
        """Digest of the files; empty without a disk tier, or if they were replaced during the load."""
        with suppress(OSError):
            return self._digest if self._stamp == adapter_stamp(self._path) else b""
        return b""
