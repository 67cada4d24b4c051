"""From a trace's header to the scheduler it describes: a core and a replay of its trace are built in one place."""

from vllm_lite.engine import policy
from vllm_lite.engine.blocks.groups import make_groups
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.blocks.prefix_hash import PrefixHasher
from vllm_lite.engine.plan import Options, Rates
from vllm_lite.engine.scheduler import Scheduler
from vllm_lite.trace.records import Header


def assemble(header: Header, hasher: PrefixHasher) -> Scheduler:
    """A new scheduler with its policy, block manager and pools. Raises ConfigError if the policy cannot be loaded."""
    num_host_blocks, caching = header.num_host_blocks, header.caching
    host = HostTier(num_host_blocks, header.num_blocks, caching) if num_host_blocks else None
    kv = KVCacheManager(
        BlockPool(header.num_blocks, caching),
        make_groups(header.windows, header.block_size),
        hasher,
        host=host,
        watermark=header.watermark,
        max_swap_blocks_per_step=header.max_swap_blocks_per_step,
    )
    scheduler = Scheduler(kv, Options(**header.options), policy.load(header.policy))
    scheduler.rates = Rates(0.0, header.swap_blocks_per_s)
    return scheduler
