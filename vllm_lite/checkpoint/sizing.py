"""The arithmetic of memory that needs no device: how many KV blocks, which graphs, how much scratch. No torch.

A worker computes with it what it allocates, and `vllm-lite plan` what a worker would allocate.
"""

from collections.abc import Sequence
from math import ceil

from vllm_lite.checkpoint.shard import num_ranks
from vllm_lite.config import GIB, ResolvedConfig
from vllm_lite.errors import ConfigError

MIN_BLOCKS = 2
"""The null block, and one that can hold a token."""

DEFAULT_STATE_GIB = 2.0
STATES_PER_SEQUENCE = 16
"""At most so many state slots for each sequence that may run."""

SCRATCH_STATES = 16
"""Sequences of a model with recurrent layers that may draft in a step with a copy of the model."""
STATES_SHARE = 0.5
"""The part of the swap space that is for the states of recurrent layers, where there are such layers."""
VECTORS_SHARE = 1 / 16
"""The part that is for vectors of media, where a model sees any."""

LARGEST = 512
"""Above this many rows the device is busy for longer than the launches take."""
GRAPH_BYTES = 8 << 20
"""The memory set aside for each graph beside its tensors: an allowance, not a measurement."""


def configured_num_blocks(config: ResolvedConfig, block_bytes: int) -> int | None:
    """Number of blocks that the configuration gives the KV cache; None if the device has to be profiled. A block takes
    `block_bytes` on each rank.

    A number of blocks wins over a number of bytes, that over a share of the device. On a CPU there is always an answer.
    """
    if not block_bytes:  # an encoder keeps no KV, nor does a model all of whose layers keep states
        return MIN_BLOCKS
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
        if num_blocks < MIN_BLOCKS:
            raise ConfigError(
                f"no memory for KV blocks: kv_cache_memory_bytes {config.kv_cache_memory_bytes} hold {num_blocks} of "
                f"{block_bytes} bytes; give --kv-cache-memory-bytes {MIN_BLOCKS * block_bytes} or more"
            )
        return num_blocks
    if config.device == "cpu":
        return int(config.cpu_kvcache_space * GIB // (block_bytes * num_ranks(config)))
    return None


def num_host_blocks(swap_space_gib: float, block_bytes: int, state_bytes: int = 0, vector_bytes: int = 0) -> int:
    """Whole KV blocks that fit into the swap space, beside the states and vectors of media of a model that has some."""
    share = (1 - STATES_SHARE if state_bytes else 1) - (VECTORS_SHARE if vector_bytes else 0)
    return 0 if not block_bytes else int(share * swap_space_gib * GIB // block_bytes)


def num_host_states(swap_space_gib: float, state_bytes: int) -> int:
    """States of recurrent layers that fit into their share of the swap space."""
    return 0 if not state_bytes else int(STATES_SHARE * swap_space_gib * GIB // state_bytes)


def num_host_vectors(swap_space_gib: float, vector_bytes: int) -> int:
    """Vectors of media that fit into their share of the swap space."""
    return 0 if not vector_bytes else int(VECTORS_SHARE * swap_space_gib * GIB // vector_bytes)


def num_state_slots(config: ResolvedConfig, state_bytes: int) -> int:
    """Number of slots of so many bytes for states of recurrent layers on each worker, the unused one included; 0 for a
    model that has no such layers. Raises ConfigError, with a size that would do, if no sequence could run."""
    if state_bytes == 0:
        return 0
    space = DEFAULT_STATE_GIB if config.state_cache_space is None else config.state_cache_space
    num_slots = int(space * GIB // state_bytes)
    if num_slots < MIN_BLOCKS:
        needed = ceil(MIN_BLOCKS * state_bytes / GIB * 1000) / 1000
        raise ConfigError(
            f"no memory for the states of recurrent layers: state_cache_space {space:g} GiB holds {num_slots} of "
            f"{state_bytes} bytes, at least {MIN_BLOCKS} are needed; give --state-cache-space {needed:.3f} or more"
        )
    return min(num_slots, 1 + STATES_PER_SEQUENCE * config.max_num_seqs)


def scratch_slots(config: ResolvedConfig, num_slots: int) -> range:
    """Slots behind those `num_slots` for the states of drafts, which a model that drafts for itself advances on the way
    and drops: one for each sequence that may draft in a step. There are none where no such model drafts."""
    speculation = config.speculative_config
    if num_slots == 0 or speculation is None or speculation.method != "self":
        return range(0)
    return range(num_slots, num_slots + min(SCRATCH_STATES, config.max_num_seqs))


def pool_flag(config: ResolvedConfig) -> str:
    """The flag that the KV cache's size comes from, as the user would write it."""
    if config.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
    if config.kv_cache_memory_bytes is not None:
        return f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
    if config.device == "cpu":
        return f"--cpu-kvcache-space {config.cpu_kvcache_space:g}"
    return f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"


def check_sizes(config: ResolvedConfig, block_bytes: int, memory_bytes: int) -> None:
    """Refuse what a machine with `memory_bytes` can never allocate, before any process starts. The memory of a GPU is
    checked in the worker. All ranks are on one machine, with `block_bytes` for a block on each. Raises ConfigError.
    """
    tp = config.ranks_on_machine
    sizes = [(f"--swap-space {config.swap_space:g}", config.swap_space * GIB * tp)]
    if config.device == "cpu":
        sizes.append((pool_flag(config), (configured_num_blocks(config, block_bytes) or 0) * block_bytes * tp))
    for flag, num_bytes in sizes:
        if num_bytes > memory_bytes:
            asked = f"{num_bytes / GIB:.1f} GiB" + (f" for {tp} workers" if tp > 1 else "")
            raise ConfigError(
                f"{flag} asks for {asked}, and this machine has {memory_bytes / GIB:.1f} GiB of memory; ask for less"
            )


def check_pool(num_blocks: int, block_bytes: int, tp: int) -> None:
    """Refuse a KV cache that cannot hold a token; a block takes `block_bytes` on each of `tp` ranks. Raises ConfigError
    with a size that would do."""
    if num_blocks < MIN_BLOCKS:
        gib = ceil(MIN_BLOCKS * block_bytes * tp / GIB * 1000) / 1000
        raise ConfigError(
            f"no memory for KV blocks: {num_blocks} of {block_bytes} bytes fit, at least {MIN_BLOCKS} are needed; give "
            f"--cpu-kvcache-space {gib:.3f} or more, or a smaller --block-size"
        )


def bucket_sizes(
    max_rows: int, wanted: Sequence[int] | None = None, largest: int | None = None, *, every: bool = False
) -> tuple[int, ...]:
    """Ascending batch sizes to capture: `wanted`, or `every` one, or 1, 2, 4, then in steps of 8 and beyond 256 of 16.

    None is above `max_rows`, the most sequences that a step can have, nor above `largest`; unless sizes are wanted,
    that limit is one of them. Raises ConfigError if nothing is left.
    """
    limit = min(max_rows, LARGEST if largest is None and wanted is None else largest or max_rows)
    if wanted is None and every:
        return tuple(range(1, limit + 1))
    if wanted is None:
        regular = (1, 2, 4, *range(8, 256, 8), *range(256, limit, 16))
        return (*(size for size in regular if size < limit), limit)
    sizes = tuple(sorted({size for size in wanted if size <= limit}))
    if not sizes:
        raise ConfigError(
            f"cudagraph_capture_sizes must have one of at most {limit} (max_num_seqs, max_num_batched_tokens, "
            f"max_cudagraph_capture_size), got {', '.join(map(str, wanted))}"
        )
    return sizes


PIECE_SIZES = (64, 128, 256, 384, 512, 768, 1024)
"""Each is captured in one piece more than the model has layers. Up to 256 tokens a GPU takes for padding what it takes
without, as it waits for the weights; from there on a step is padded by a half at most."""


def piece_sizes(max_num_tokens: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ascending numbers of tokens that steps in pieces are captured for: `wanted`, or PIECE_SIZES, as far as steps may
    have so many. None are wanted with 0."""
    sizes = PIECE_SIZES if wanted is None else wanted
    return tuple(sorted({size for size in sizes if 0 < size <= max_num_tokens}))


def reserved_bytes(
    sizes: Sequence[int], vocab_size: int, table_width: int, num_groups: int, num_in_pieces: int = 0
) -> int:
    """Bytes to leave free for graphs of these sizes, and of steps in pieces with so many numbers of tokens: logits, as
    the model makes them and as they are kept, tables, and the graphs themselves. The attention backend's scratch memory
    is counted elsewhere: graphs share it.
    """
    if not sizes:
        return 0
    per_row = 2 * 4 * vocab_size + num_groups * (4 * table_width + 8) + 20
    return int(max(sizes) * per_row + (len(sizes) + num_in_pieces) * GRAPH_BYTES)
