"""Forgetting the prefix cache: nothing computed before is found by who comes later, and who runs goes on unharmed."""

from typing import TYPE_CHECKING

from vllm_lite.protocol.api import PrefixCacheReset

if TYPE_CHECKING:
    from vllm_lite.engine.blocks.manager import KVCacheManager
    from vllm_lite.engine.scheduler import Scheduler
    from vllm_lite.engine.sequence import Sequence

_RETIRED = "computed before the cache was reset"


def reset_cache(scheduler: "Scheduler") -> PrefixCacheReset:
    """Forget every cached block of both tiers. Decides what later steps find, so it belongs into a trace."""
    kv = scheduler.kv
    num_blocks = kv.pool.reset_cache()
    num_host_blocks = kv.host.pool.reset_cache() if kv.host is not None else 0
    holders = [sequence for sequence in (*scheduler.running, *scheduler.waiting) if _holds_blocks(sequence)]
    if kv.pool.enable_caching:
        for sequence in holders:
            _retire(kv, sequence)
    return PrefixCacheReset(num_blocks, num_host_blocks, len(holders))


def _holds_blocks(sequence: "Sequence") -> bool:
    return sequence.host_ids is not None or any(table.ids for table in sequence.tables)


def _retire(kv: "KVCacheManager", sequence: "Sequence") -> None:
    """Give what `sequence` holds, and computes from it, names of its own: it will be cached again when the sequence
    grows, moves to the host or comes back, and only the likes of it may find that."""
    sequence.hash_root = kv.hasher.root((sequence.hash_root.hex(), _RETIRED))
    sequence.block_hashes = []
    sequence.num_hashed_blocks = 0
