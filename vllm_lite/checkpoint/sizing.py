"""Computation of memory sizes without a device: KV blocks, graphs, and scratch memory. No torch.

A worker computes its allocations with it, and `vllm-lite plan` those that a worker would make.
"""

from collections.abc import Sequence
from math import ceil

from vllm_lite.checkpoint.shard import num_ranks
from vllm_lite.config import GIB, ResolvedConfig
from vllm_lite.errors import ConfigError

MIN_BLOCKS = 2
"""The null block, and one for tokens."""

DEFAULT_STATE_GIB = 2.0
STATES_PER_SEQUENCE = 16
"""Maximum number of state slots per sequence that may run."""

SCRATCH_STATES = 16
"""Maximum number of sequences of a model with recurrent layers that draft in a step with a copy of the model."""
STATES_SHARE = 0.5
"""Share of the swap space for states of recurrent layers, if the model has some."""
VECTORS_SHARE = 1 / 16
"""Share of the swap space for vectors of media, if the model takes any."""

LARGEST = 512
"""Number of rows above which the device is busy for longer than kernel launches take."""
LOGITS_BYTES = 2 * 4
"""Bytes of one logit: as it is computed, and as it is kept."""
GRAPH_BYTES = 8 << 20
"""Bytes reserved for each graph besides its tensors: an allowance, not a measurement."""


def configured_num_blocks(config: ResolvedConfig, block_bytes: int) -> int | None:
    """Number of KV blocks by the configuration; None if the device must be profiled. A block takes `block_bytes` on
    each rank.

    A number of blocks overrides a number of bytes, which overrides a share of the device. On a CPU the result is never
    None.
    """
    if not block_bytes:  # encoders have no KV, nor have models with only recurrent layers
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
    """Number of KV blocks that fit into the swap space, beside the shares for states and media vectors, if any."""
    share = (1 - STATES_SHARE if state_bytes else 1) - (VECTORS_SHARE if vector_bytes else 0)
    return 0 if not block_bytes else int(share * swap_space_gib * GIB // block_bytes)


def num_host_states(swap_space_gib: float, state_bytes: int) -> int:
    """Number of recurrent states that fit into their share of the swap space."""
    return 0 if not state_bytes else int(STATES_SHARE * swap_space_gib * GIB // state_bytes)


def num_host_vectors(swap_space_gib: float, vector_bytes: int) -> int:
    """Number of media vectors that fit into their share of the swap space."""
    return 0 if not vector_bytes else int(VECTORS_SHARE * swap_space_gib * GIB // vector_bytes)


def num_state_slots(config: ResolvedConfig, state_bytes: int) -> int:
    """Number of state slots of `state_bytes` on each worker, including the unused one; 0 for a model without recurrent
    layers. Raises ConfigError, with a sufficient size, if no sequence could run."""
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
    """Slots after the first `num_slots` for draft states, which a self-drafting model advances and then drops: one for
    each sequence that may draft in a step. Empty for other drafters."""
    speculation = config.speculative_config
    if num_slots == 0 or speculation is None or speculation.method != "self":
        return range(0)
    return range(num_slots, num_slots + min(SCRATCH_STATES, config.max_num_seqs))


def pool_flag(config: ResolvedConfig) -> str:
    """The flag that determines the KV cache's size, as a user would write it."""
    if config.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
    if config.kv_cache_memory_bytes is not None:
        return f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
    if config.device == "cpu":
        return f"--cpu-kvcache-space {config.cpu_kvcache_space:g}"
    return f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"


def check_sizes(config: ResolvedConfig, block_bytes: int, memory_bytes: int) -> None:
    """Raise ConfigError for sizes that a machine with `memory_bytes` can never allocate, before any process starts. GPU
    memory is checked in the worker. All ranks are on one machine, with `block_bytes` per block on each."""
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
    """Raise ConfigError, with a sufficient size, for a KV cache that cannot hold a token; a block takes `block_bytes`
    on each of `tp` ranks."""
    if num_blocks < MIN_BLOCKS:
        gib = ceil(MIN_BLOCKS * block_bytes * tp / GIB * 1000) / 1000
        raise ConfigError(
            f"no memory for KV blocks: {num_blocks} of {block_bytes} bytes fit, at least {MIN_BLOCKS} are needed; give "
            f"--cpu-kvcache-space {gib:.3f} or more, or a smaller --block-size"
        )


NUM_FORCED = 8
"""Maximum drafts per step of a sequence that follows a grammar and does not speculate. Runs of forced tokens are mostly
shorter, and blocks for the drafts of two steps are allocated whether drafts are found or not."""
FORCED_ROWS = 32
"""Maximum rows for such drafts beside a row for each sequence that may run: a step rarely forces tokens of more than a
few sequences, and a row of logits of a large vocabulary has a megabyte."""


def most_samples(config: ResolvedConfig) -> int:
    """Most tokens that a step samples: one after the last token of each sequence, and one after each draft. The
    scheduler keeps to it."""
    num_seqs, drafts = config.max_num_seqs, config.speculative_config
    if drafts is not None:
        num_drafts = num_seqs * drafts.num_speculative_tokens
    else:
        num_drafts = min(num_seqs * NUM_FORCED, FORCED_ROWS) if config.jump_forward else 0
    return min(num_seqs + num_drafts, config.max_num_batched_tokens)


def draft_logits_bytes(config: ResolvedConfig, vocab_size: int) -> int:
    """Maximum bytes of a step's logits of drafts, beside those of one token of each sequence."""
    return (most_samples(config) - config.max_num_seqs) * LOGITS_BYTES * vocab_size


def verified_rows(config: ResolvedConfig) -> int:
    """Most rows of a step that is replayed where drafts are verified as decodes of further sequences."""
    if config.speculative_config is None:
        return config.max_num_seqs
    return max(config.max_num_seqs, min(most_samples(config), LARGEST))


def bucket_sizes(
    max_rows: int, wanted: Sequence[int] | None = None, largest: int | None = None, *, every: bool = False
) -> tuple[int, ...]:
    """Ascending batch sizes to capture: `wanted`, or `every` one, or 1, 2, 4, then in steps of 8 and beyond 256 of 16.

    None exceeds `max_rows`, the maximum number of sequences in a step, or `largest`; without `wanted`, the limit is
    included. Raises ConfigError if none is left.
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
"""Default numbers of tokens for graphs in pieces, each with one piece more than the model has layers. Up to 256 tokens,
padding costs a GPU no time, as it waits for weights; beyond, a step is padded by at most a half."""


def piece_sizes(max_num_tokens: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ascending numbers of tokens for which steps in pieces are captured: `wanted`, or PIECE_SIZES, up to the maximum
    of a step. 0 disables them."""
    sizes = PIECE_SIZES if wanted is None else wanted
    return tuple(sorted({size for size in sizes if 0 < size <= max_num_tokens}))


def reserved_bytes(
    sizes: Sequence[int], vocab_size: int, table_width: int, num_groups: int, num_in_pieces: int = 0
) -> int:
    """Bytes to reserve for graphs of these sizes, and for steps in pieces with `num_in_pieces` sizes: logits as
    computed and as kept, tables, and the graphs. Scratch memory of the attention backend, which graphs share, is
    counted elsewhere."""
    if not sizes:
        return 0
    per_row = LOGITS_BYTES * vocab_size + num_groups * (4 * table_width + 8) + 20
    return int(max(sizes) * per_row + (len(sizes) + num_in_pieces) * GRAPH_BYTES)
