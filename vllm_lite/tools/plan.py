"""Memory of a model on a machine, and the capacity beside it, from config.json and the headers of its weights.

KV blocks, graphs and swap space are computed by the engine's own code (checkpoint/sizing.py and
engine/blocks/groups.py). Weights are exact. Activations and other memory of a process are estimates; on a GPU the
worker measures them.
"""

import shlex
from collections.abc import Iterator
from math import ceil
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.config_json import resolve_dtype
from vllm_lite.checkpoint.draft_model import with_drafter
from vllm_lite.checkpoint.fitting import on_load
from vllm_lite.checkpoint.model_spec import DTYPE_BYTES, ModelSpec
from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.checkpoint.sizing import (
    MIN_BLOCKS,
    bucket_sizes,
    configured_num_blocks,
    most_samples,
    num_host_blocks,
    num_host_states,
    num_state_slots,
    piece_sizes,
    reserved_bytes,
    scratch_slots,
    verified_rows,
)
from vllm_lite.checkpoint.tensors.weight_bytes import (
    Checkpoint,
    active_bytes,
    adapter_bytes,
    copy_bytes,
    frequent_head_bytes,
    head_bytes,
    weights_bytes,
)
from vllm_lite.config import DEMO_MODEL, GIB, EngineConfig
from vllm_lite.engine.blocks.groups import blocks_held, longest_sequence, make_groups
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.kv_dtypes import KV_DTYPE_BYTES, KV_SCALE_BYTES
from vllm_lite.runtime.machine import gpus, memory_limit_bytes, parse_bytes
from vllm_lite.runtime.nested_settings import DEVICE_DEFAULTS, Count
from vllm_lite.runtime.settings import Section, flag_of
from vllm_lite.tools.plan_disk import DiskPlan

OUTSIDE_BYTES = {"cpu": GIB // 2, "cuda": GIB * 3 // 4}
"""Estimated memory of the processes themselves: torch and three interpreters, or a GPU's context and kernels."""
FURTHER_WORKER_BYTES = 200 << 20
"""Added by each further worker of a CPU machine. Measured: 154 MiB of private memory once torch is imported."""
LEAST_TOKENS = 512
"""Minimum length of a useful request, if none is set."""
MAX_SPLITS, SPLIT_TOKENS = 64, 512
"""Splits of long sequences in attention on a GPU, for its scratch memory."""


class PlanConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An engine's settings, and the machine of the plan."""

    gpu: Annotated[
        str | None,
        Section("machine"),
        Meta(description="memory of the planned GPU, like 24GiB (default: this machine's)"),
    ] = None
    memory: Annotated[
        str | None, Meta(description="memory of the planned CPU machine, like 64GiB (default: this machine's)")
    ] = None
    concurrency: Annotated[Count | None, Meta(description="requests of max_model_len that must fit at once")] = None


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one of several ranks. Sizes in bytes; other sizes are about the same for all ranks."""

    rank: int
    num_heads: int
    """Query heads, in the layers with the most."""
    num_kv_heads: int
    vocabulary: tuple[int, int]
    """Its range of token ids, [first, end)."""
    weights_bytes: int
    kv_cache_bytes: int


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and capacity of one device: a GPU, which has one rank, or a CPU machine with all ranks. With several GPUs
    it is the first, which needs the most memory. Sizes in bytes."""

    model: str
    architecture: str
    num_parameters: int
    active_parameters: int
    """Parameters used for one token; fewer than all if the model has experts."""
    device: str
    tensor_parallel_size: int
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    block_size: int
    memory_bytes: int
    usable_bytes: int
    weights_bytes: int
    active_weights_bytes: int
    """Weights of the whole model that a step with one token reads, which bounds the decoding speed."""
    adapter_bytes: int
    """Memory of all adapter slots, for adapters of the maximum rank on every layer."""
    activations_bytes: int
    graph_bytes: int
    outside_bytes: int
    block_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_token_beyond_windows: int
    """Bytes of each further token of a sequence longer than its sliding windows."""
    num_blocks: int
    num_host_blocks: int
    num_host_states: int
    num_state_slots: int
    state_bytes: int
    kv_cache_bytes: int
    kv_tokens: int
    max_model_len: int
    """The maximum length of a request; 0 if none can be served."""
    largest_max_model_len: int
    """The maximum length of `concurrency` concurrent requests with all of the memory, at most the model's."""
    max_position_embeddings: int
    max_num_seqs: int
    max_num_batched_tokens: int
    concurrent_requests: int
    """Number of concurrent requests of max_model_len."""
    needed_bytes: int
    """Memory of a device on which the plan would fit."""
    problems: tuple[str, ...]
    advice: tuple[str, ...] = ()
    """Changes of flags, each of which alone would make the plan fit."""
    command: str = ""
    ranks: tuple[RankPlan, ...] = ()
    """Empty for a single rank."""
    disk: DiskPlan | None = None

    @property
    def fits(self) -> bool:
        return not self.problems


def make_plan(config: PlanConfig, checkpoint: Checkpoint) -> CapacityPlan:
    """The plan, with advice and the command that serves it. Raises ConfigError."""
    config = msgspec.structs.replace(config, quantization=on_load(config, checkpoint.spec))
    plan = _plan(config, checkpoint)
    advice = () if plan.fits else tuple(_advice(config, checkpoint, plan))
    return msgspec.structs.replace(plan, advice=advice, command=_command(config, checkpoint, plan))


# ---- one plan


class _Sizes:
    """The sizes that do not depend on the KV cache's."""

    def __init__(self, config: PlanConfig, checkpoint: Checkpoint) -> None:
        spec, tp, first = checkpoint.spec, config.tensor_parallel_size, Shard.of(config)
        spec.check_tensor_parallel(first)
        drafter, speculation = checkpoint.drafter, config.speculative_config
        spec = with_drafter(config, spec.shared_by(tp), None if drafter is None else drafter.spec)
        dtype = resolve_dtype(config.dtype, spec)
        device, memory_bytes = machine = _machine(config)
        self.tp, self.spec, self.device, self.memory_bytes = tp, spec, device, memory_bytes
        defaults = DEVICE_DEFAULTS[device]
        most = config.max_num_batched_tokens or defaults.max_num_batched_tokens  # a step has a token for each sequence
        self.num_seqs = config.max_num_seqs or min(max(defaults.max_num_seqs, config.concurrency or 1), most)
        self.config = msgspec.structs.replace(config, max_num_seqs=self.num_seqs).resolve(
            max_position_embeddings=spec.max_position_embeddings,
            dtype=dtype,
            model_path=config.model,
            machine=machine,
            kv=spec,
        )
        self.length, self.chunk = self.config.max_model_len, self.config.max_num_batched_tokens
        self.groups = make_groups([group.window for group in spec.kv_groups], config.block_size)
        num_ranks = tp if device == "cpu" else 1  # on the planned device
        kv_dtype = self.config.kv_cache_dtype
        element_bytes, scale_bytes = KV_DTYPE_BYTES[kv_dtype], KV_SCALE_BYTES.get(kv_dtype, 0)
        self.rank_block_bytes = spec.kv_block_bytes(config.block_size, element_bytes, tp, scale_bytes)
        self.block_bytes = self.rank_block_bytes * num_ranks
        size, form = DTYPE_BYTES[dtype], self.config.quantization
        self.rank_weights = [weights_bytes(checkpoint, size, form, shard, device) for shard in first.all_ranks]
        if drafter is not None and speculation is not None:
            form = speculation.quantization
            words = frequent_head_bytes(drafter, first, device) if speculation.method == "draft_model" else 0
            own = [words + weights_bytes(drafter, size, form, shard, device) for shard in first.all_ranks]
            self.rank_weights = [sum(pair) for pair in zip(self.rank_weights, own, strict=True)]
        elif speculation is not None and speculation.method == "mtp":
            own_bytes = head_bytes(checkpoint, size) + frequent_head_bytes(checkpoint, first, device)
            self.rank_weights = [num_bytes + own_bytes for num_bytes in self.rank_weights]
        elif speculation is not None and speculation.method == "self":
            own = [copy_bytes(checkpoint, size, shard, device) for shard in first.all_ranks]
            self.rank_weights = [sum(pair) for pair in zip(self.rank_weights, own, strict=True)]
        self.weights = sum(self.rank_weights[:num_ranks])
        self.activations = num_ranks * self._buffers(spec, size) + self._logits()
        if drafter is not None:
            self.activations += num_ranks * self._buffers(drafter.spec, size)
        elif speculation is not None and speculation.method == "self":
            self.activations += num_ranks * self._buffers(spec, size)
        self.graphs = self._graphs()
        self.outside = OUTSIDE_BYTES[device] + (num_ranks - 1) * FURTHER_WORKER_BYTES
        self.usable = int(memory_bytes * (config.gpu_memory_utilization if device == "cuda" else 1))
        state_bytes, swap_space = spec.state_bytes(tp), self.config.swap_space  # of a rank
        vector_bytes = 0 if spec.vision is None else spec.vision.vector_size * DTYPE_BYTES[dtype]
        self.num_host_blocks = num_host_blocks(swap_space, self.rank_block_bytes, state_bytes, vector_bytes)
        self.num_host_states = num_host_states(swap_space, state_bytes)
        self.num_state_slots = num_state_slots(self.config, state_bytes)
        self.num_state_slots += len(scratch_slots(self.config, self.num_state_slots))
        self.state_bytes = state_bytes * num_ranks
        self.adapters = num_ranks * adapter_bytes(spec, config, DTYPE_BYTES[dtype], device)
        self.fixed = self.weights + self.adapters + self.activations + self.graphs + self.outside
        self.fixed += self.num_state_slots * self.state_bytes
        if device == "cpu":  # swap space is the same memory
            self.fixed += self.num_host_blocks * self.block_bytes + self.num_host_states * self.state_bytes

    def _logits(self) -> int:
        """Logits and the buffers of sampling. Ranks on a CPU share them."""
        return 3 * 4 * most_samples(self.config) * self.spec.vocab_size

    def _buffers(self, spec: ModelSpec, dtype_bytes: int) -> int:
        """One rank's buffers of the largest step, tables of rotary embeddings, and scratch memory."""
        tp = self.tp
        largest = spec.per_rank(Shard(0, tp))  # no rank has more heads than the first
        kinds = {layer.attention for layer in largest.layers}
        turned = sum(size for _, size in {(own.rope, own.rotated_size) for own in largest.layers if own.rope})
        row: int = 2 * spec.hidden_size + sum(
            map(max, zip(*(block.attention_buffers for own in largest.layers for block in own.blocks), strict=True))
        )
        channels = max((own.recurrent.scratch_size for own in largest.layers if own.recurrent is not None), default=0)
        row += channels * 4 // dtype_bytes
        row += 2 * turned + 3 * (spec.intermediate_size // tp) + self._expert_row(spec, dtype_bytes)
        tables = 2 * self.length * turned
        splits = min(MAX_SPLITS, -(-self.length // SPLIT_TOKENS))
        results = max(own.output_size + own.num_heads for own in kinds)
        num_rows = self.num_seqs
        if self.device == "cpu":
            num_rows = verified_rows(self.config)
        scratch = 4 * num_rows * results * splits if splits > 1 else 0
        return (self.chunk * row + tables) * dtype_bytes + scratch

    def _expert_row(self, spec: ModelSpec, dtype_bytes: int) -> int:
        """Memory of experts beside an MLP's for one token, in elements: logits and choice, the shared expert, and for
        each chosen expert its intermediate values and its output in float32."""
        experts = spec.experts
        if experts is None:
            return 0
        routing, inner = experts.routing, experts.inner(Shard.of(self.config)).size
        wide = routing.num_experts + routing.experts_per_token * (2 + spec.hidden_size)
        shared = 3 * (experts.shared_intermediate_size // self.tp)
        return 4 * wide // dtype_bytes + routing.experts_per_token * 3 * inner + shared + 2 * spec.hidden_size

    def _graphs(self) -> int:
        config = self.config
        if self.device == "cpu" or config.enforce_eager or not self.groups:  # encoders do not decode
            return 0
        most, shape = min(self.num_seqs, self.chunk), (-(-self.length // config.block_size), len(self.groups))
        sizes = bucket_sizes(most, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size)
        in_pieces = () if config.enable_lora else piece_sizes(self.chunk, config.cudagraph_piece_sizes)
        return reserved_bytes(sizes, self.spec.vocab_size, *shape, len(in_pieces))

    def num_blocks(self) -> int:
        """Number of blocks that the engine will have. Raises ConfigError for a size that cannot hold a token."""
        configured = configured_num_blocks(self.config, self.rank_block_bytes)
        enough = self.config.enough_blocks(len(self.groups))
        return min(self.possible_blocks(), enough) if configured is None else configured

    def possible_blocks(self) -> int:
        """Number of blocks that fit in memory. An encoder's take none, and it has the minimum number."""
        return max(0, self.usable - self.fixed) // self.block_bytes if self.block_bytes else MIN_BLOCKS

    def room(self, num_blocks: int) -> int:
        """Number of blocks that admitted requests may use."""
        return max(0, num_blocks - 1 - int(self.config.kv_watermark * num_blocks))

    def blocks_for(self, room: int) -> int:
        """The smallest pool with that room."""
        num_blocks = max(MIN_BLOCKS, int((room + 1) / (1 - self.config.kv_watermark)))
        while self.room(num_blocks) < room:
            num_blocks += 1
        return num_blocks


def _blocks(config: PlanConfig, sizes: _Sizes, needed: int) -> tuple[int, int]:
    """Numbers of blocks: in the cache, and possible with the remaining memory."""
    num_blocks, is_default = sizes.num_blocks(), _is_default(config, sizes)
    possible = sizes.possible_blocks() if is_default else num_blocks
    if is_default and sizes.device == "cpu":  # the user sets its size there
        num_blocks = max(needed, min(num_blocks, possible))
    return num_blocks, possible


def _plan(config: PlanConfig, checkpoint: Checkpoint) -> CapacityPlan:
    sizes = _Sizes(config, checkpoint)
    wanted = config.concurrency or 1
    held = blocks_held(sizes.groups, sizes.length, sizes.chunk)
    if config.max_model_len is None and config.concurrency is None:
        held = blocks_held(sizes.groups, min(sizes.length, LEAST_TOKENS), sizes.chunk)
    needed_blocks = sizes.blocks_for(wanted * held)
    num_blocks, possible = _blocks(config, sizes, needed_blocks)
    room = sizes.room(num_blocks)
    limit = sizes.length if config.enable_chunked_prefill else min(sizes.length, sizes.chunk)
    served = longest_sequence(sizes.groups, room, limit, sizes.chunk)
    each = blocks_held(sizes.groups, served, sizes.chunk)
    at_once = room // each if each else sizes.chunk // max(1, served)  # a step of an encoder has whole texts
    longest = checkpoint.spec.max_position_embeddings
    largest = longest_sequence(sizes.groups, sizes.room(max(num_blocks, possible)) // wanted, longest, sizes.chunk)
    needed = sizes.fixed + needed_blocks * sizes.block_bytes
    resolved, per_token = sizes.config, sizes.block_bytes // config.block_size
    plan = CapacityPlan(
        model=config.model,
        architecture=checkpoint.spec.architecture,
        num_parameters=checkpoint.spec.num_parameters(),
        active_parameters=checkpoint.spec.active_parameters(),
        device=sizes.device,
        tensor_parallel_size=sizes.tp,
        dtype=resolved.dtype,
        quantization=resolved.quantization or (own.label if (own := checkpoint.spec.quantization) else None),
        kv_cache_dtype=resolved.kv_cache_dtype,
        block_size=config.block_size,
        memory_bytes=sizes.memory_bytes,
        usable_bytes=sizes.usable,
        weights_bytes=sizes.weights,
        active_weights_bytes=active_bytes(
            checkpoint, DTYPE_BYTES[resolved.dtype], resolved.quantization, resolved.device
        ),
        adapter_bytes=sizes.adapters,
        activations_bytes=sizes.activations,
        graph_bytes=sizes.graphs,
        outside_bytes=sizes.outside,
        block_bytes=sizes.block_bytes,
        kv_bytes_per_token=per_token * len(sizes.groups),
        kv_bytes_per_token_beyond_windows=per_token * sum(group.window is None for group in sizes.groups),
        num_blocks=num_blocks,
        num_host_blocks=sizes.num_host_blocks,
        num_host_states=sizes.num_host_states,
        num_state_slots=sizes.num_state_slots,
        state_bytes=sizes.state_bytes,
        kv_cache_bytes=num_blocks * sizes.block_bytes,
        kv_tokens=max(0, num_blocks - 1) // max(1, len(sizes.groups)) * config.block_size * bool(sizes.groups),
        max_model_len=served,
        largest_max_model_len=largest,
        max_position_embeddings=longest,
        max_num_seqs=sizes.num_seqs,
        max_num_batched_tokens=sizes.chunk,
        concurrent_requests=min(at_once, sizes.num_seqs) if served else 0,
        needed_bytes=ceil(needed / (config.gpu_memory_utilization if sizes.device == "cuda" else 1)),
        problems=(),
        ranks=tuple(_ranks(sizes, num_blocks)) if sizes.tp > 1 else (),
    )
    return msgspec.structs.replace(plan, problems=tuple(_problems(config, sizes, plan)))


def _ranks(sizes: _Sizes, num_blocks: int) -> Iterator[RankPlan]:
    for shard in Shard(0, sizes.tp).all_ranks:
        own = max((layer.attention for layer in sizes.spec.per_rank(shard).layers), key=lambda heads: heads.num_heads)
        vocabulary = Split.vocabulary(sizes.spec.vocab_size, shard)
        yield RankPlan(
            rank=shard.rank,
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            vocabulary=(vocabulary.start, vocabulary.end),
            weights_bytes=sizes.rank_weights[shard.rank],
            kv_cache_bytes=num_blocks * sizes.rank_block_bytes,
        )


def _is_default(config: PlanConfig, sizes: _Sizes) -> bool:
    """Whether the user has not set the size of the KV cache."""
    given = (config.kv_cache_memory_bytes, config.num_gpu_blocks_override)
    return all(value is None for value in given) and (sizes.device == "cuda" or config.cpu_kvcache_space is None)


def _problems(config: PlanConfig, sizes: _Sizes, plan: CapacityPlan) -> Iterator[str]:
    what = f"{_gib(plan.usable_bytes)} of the {'GPU' if plan.device == 'cuda' else 'memory'}"
    if sizes.fixed + MIN_BLOCKS * sizes.block_bytes > plan.usable_bytes:
        yield f"weights and activations take {_gib(sizes.fixed)} and {what} may be used"
        return
    if sizes.fixed + plan.kv_cache_bytes > plan.usable_bytes:
        taken = _gib(sizes.fixed + plan.kv_cache_bytes)
        yield f"with a KV cache of {_gib(plan.kv_cache_bytes)} it takes {taken}, and {what} may be used"
    if (config.concurrency or 0) > sizes.num_seqs:
        limit = "max_num_batched_tokens" if config.max_num_seqs is None else "max_num_seqs"
        yield f"{limit} {sizes.num_seqs} is less than the {config.concurrency} requests asked for"
    if plan.num_blocks < MIN_BLOCKS:
        yield f"the KV cache has {plan.num_blocks} blocks and needs {MIN_BLOCKS}"
    elif config.max_model_len is None and plan.max_model_len < min(LEAST_TOKENS, plan.max_position_embeddings):
        yield f"the KV cache holds sequences of {plan.max_model_len} tokens only"
    elif config.max_model_len is not None and plan.max_model_len < config.max_model_len:
        yield f"the KV cache holds one sequence of {plan.max_model_len} tokens, not of {config.max_model_len}"
    elif config.concurrency is not None and plan.concurrent_requests < min(config.concurrency, sizes.num_seqs):
        held = f"{plan.concurrent_requests} requests of {plan.max_model_len} tokens"
        yield f"the KV cache holds {held}, not {config.concurrency}"


def _machine(config: PlanConfig) -> tuple[Any, int]:
    """The planned device and the bytes of its memory. Raises ConfigError."""
    if config.gpu is not None and config.memory is not None and config.device == "auto":
        raise ConfigError("give either --gpu or --memory: it is one device that is asked about")
    if config.gpu is not None and config.device != "cpu":
        return "cuda", parse_bytes("gpu", config.gpu)
    if config.memory is not None:
        return ("cuda" if config.device == "cuda" else "cpu"), parse_bytes("memory", config.memory)
    if config.resolve_device() == "cpu":
        return "cpu", memory_limit_bytes()
    if not (found := gpus()):
        raise ConfigError("nvidia-smi does not tell how much memory the GPU has; give --gpu, like --gpu 24GiB")
    tp = config.tensor_parallel_size
    if tp > len(found) and config.tensor_parallel_backend != "gloo":  # gloo lets ranks share a GPU
        raise ConfigError(
            f"tensor_parallel_size {tp} needs a GPU for each rank, and this machine has {len(found)}; give --gpu with "
            "the memory of each, like --gpu 24GiB, to plan for another"
        )
    return "cuda", min(gpu.memory_bytes for gpu in found[:tp])


# ---- advice


def _advice(config: PlanConfig, checkpoint: Checkpoint, plan: CapacityPlan) -> Iterator[str]:
    """Every change that alone makes the plan fit, checked by planning with it."""
    spec = checkpoint.spec
    largest = plan.largest_max_model_len
    lengths = [largest // 256 * 256 or largest]  # a round number
    while (halved := (spec.max_position_embeddings >> len(lengths))) >= 128:
        lengths.append(halved)
    shorter = [{"max_model_len": length} for length in lengths if 0 < length < (config.max_model_len or 2**62)]
    found = next((change for change in shorter if _works(config, checkpoint, change)), None)
    if found is not None:
        yield f"--max-model-len {found['max_model_len']}"
    smaller: dict[str, dict[str, Any]] = {}
    if KV_DTYPE_BYTES[plan.kv_cache_dtype] > 1:
        smaller["--kv-cache-dtype fp8"] = {"kv_cache_dtype": "fp8"}
    if config.quantization is None and checkpoint.spec.quantization is None:
        smaller["--quantization int8"] = {"quantization": "int8"}
    fewer = {"--max-num-batched-tokens 512 --max-num-seqs 16": {"max_num_batched_tokens": 512, "max_num_seqs": 16}}
    worked = [flags for flags, change in (smaller | fewer).items() if _works(config, checkpoint, change)]
    yield from worked
    if (
        not worked
        and len(smaller) == 2
        and _works(config, checkpoint, {"kv_cache_dtype": "fp8", "quantization": "int8"})
    ):
        yield " ".join(smaller)
    is_gpu = plan.device == "cuda"
    if is_gpu and config.gpu_memory_utilization < 0.95 and _works(config, checkpoint, {"gpu_memory_utilization": 0.95}):
        yield "--gpu-memory-utilization 0.95"
    for tp in (2, 4, 8) if is_gpu else ():
        if tp > config.tensor_parallel_size and _works(config, checkpoint, {"tensor_parallel_size": tp}):
            yield f"--tensor-parallel-size {tp}, on {tp} such GPUs"
            break
    if plan.needed_bytes > plan.memory_bytes:
        yield f"{'a GPU' if is_gpu else 'a machine'} with {ceil(plan.needed_bytes / GIB * 10) / 10:.1f} GiB of memory"


def _works(config: PlanConfig, checkpoint: Checkpoint, change: dict[str, Any]) -> bool:
    try:
        return _plan(msgspec.structs.replace(config, **change), checkpoint).fits
    except ConfigError:
        return False


def _command(config: PlanConfig, checkpoint: Checkpoint, plan: CapacityPlan) -> str:
    fields = {*EngineConfig.__struct_fields__} - {"model"}
    values = {name: value for name, value in config.changed().items() if name in fields}
    if config.max_model_len is None and 0 < plan.max_model_len < plan.max_position_embeddings:
        values["max_model_len"] = plan.max_model_len
    default = DEVICE_DEFAULTS["cuda" if plan.device == "cuda" else "cpu"].max_num_seqs
    if config.max_num_seqs is None and plan.max_num_seqs > default:
        values["max_num_seqs"] = plan.max_num_seqs
    if plan.device == "cpu" and plan.num_blocks != _Sizes(config, checkpoint).num_blocks():
        values["kv_cache_memory_bytes"] = plan.kv_cache_bytes // plan.tensor_parallel_size  # of each worker
    model = [] if config.model == DEMO_MODEL else [shlex.quote(config.model)]
    return " ".join(["vllm-lite serve", *model, *(flag_of(name, value) for name, value in values.items())])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
