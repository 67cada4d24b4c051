"""Worker: loads one rank's shard, reports the KV blocks that fit, and runs the engine's steps; without its process."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.int8_rows import scale_bytes
from vllm_lite.attention.select import select_backend
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.fitting import check_staged_settings
from vllm_lite.checkpoint.layer_specs.delta_net import STATE_BYTES
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.shard import Shard, num_ranks
from vllm_lite.checkpoint.sizing import (
    bucket_sizes,
    configured_num_blocks,
    draft_logits_bytes,
    num_host_states,
    num_state_slots,
    piece_sizes,
    pool_flag,
    reserved_bytes,
    scratch_slots,
    verified_rows,
)
from vllm_lite.checkpoint.tensors.kv_scales import KVScales, has_kv_scales, read_kv_scales
from vllm_lite.checkpoint.tensors.lora import is_lora
from vllm_lite.config import GIB, ResolvedConfig
from vllm_lite.errors import ConfigError, ModelError, ProtocolError
from vllm_lite.kernels.select import is_graph_safe
from vllm_lite.layers.weights.gpu_matmul import launcher_for
from vllm_lite.layers.weights.lora import AdapterLimits, Adapters
from vllm_lite.models.registry import Sizes, build, examine
from vllm_lite.models.weight_cache import PackedSource
from vllm_lite.models.weight_source import open_source
from vllm_lite.models.weights import load_weights
from vllm_lite.parallel.communicator import Communicator, SingleRank
from vllm_lite.protocol.control import (
    AdapterRead,
    BeginProfile,
    EndProfile,
    KVGroupInfo,
    Profiled,
    ReadAdapter,
    Ready,
    Start,
    Started,
)
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.runtime import log
from vllm_lite.runtime.cpu_binding import NONE
from vllm_lite.runtime.machine import num_physical_cores
from vllm_lite.structured.sources.grammars import Grammars
from vllm_lite.structured.sources.vocabulary import load_vocabulary
from vllm_lite.worker.batch.part import StepPart
from vllm_lite.worker.device import KV_DTYPES, Device, open_device, set_threads
from vllm_lite.worker.disk.opening import AdapterFiles, open_disk, pools_of, shelf_of
from vllm_lite.worker.disk.transfers import DiskTransfers
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.drafting.timing import timings_of
from vllm_lite.worker.forward import EagerForward
from vllm_lite.worker.graphs import DecodeGraphs
from vllm_lite.worker.kernels_in_use import kernels_in_use
from vllm_lite.worker.memory.cache_engine import NULL_BLOCK, CacheEngine
from vllm_lite.worker.memory.profile import Baseline, DeviceMemory, check_free, profile_memory, warn_if_short
from vllm_lite.worker.memory.touch_ahead import TouchAhead, take_pages
from vllm_lite.worker.model_runner import ModelRunner, StepLimits, warm_up_step
from vllm_lite.worker.overlap import Overlap, run_ahead
from vllm_lite.worker.pieces import PieceCapture
from vllm_lite.worker.profiler import Profiler
from vllm_lite.worker.progress import LoadReport, Progress
from vllm_lite.worker.sampling.ranked_sampler import sampler_of
from vllm_lite.worker.step_parts.adapter_cache import AdapterCache
from vllm_lite.worker.step_parts.drafts import Drafts, drafter_of
from vllm_lite.worker.step_parts.expert_load import ExpertLoad
from vllm_lite.worker.step_parts.media import encode_largest, media_facts, media_parts
from vllm_lite.worker.step_parts.pooling import PooledPrompts, pooler_info
from vllm_lite.worker.step_parts.prompt_scores import PromptScorer
from vllm_lite.worker.step_parts.rules import Rules
from vllm_lite.worker.step_parts.states import RowStates

PATIENCE = 0.75
"""Share of heartbeat_timeout_s that a device may take for a step. The engine ends a worker without progress after all
of it, and the worker should report before that that its device hangs."""

logger = log.get(__name__)


class Worker:
    """Call load(), then start(), then execute() for each step."""

    def __init__(
        self, config: ResolvedConfig, rank: int, progress: Progress, device: Device | None = None, generation: int = 0
    ) -> None:
        """`device` replaces the configured one. `generation`: that of the worker group, for Ready."""
        check_staged_settings(config)
        self.config, self.speculation = config, config.speculative_config
        self.rank, self.generation, self.progress = rank, generation, progress
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        spec, world = load_spec(config.model, config.model_impl, config.pooling), config.tensor_parallel_size
        spec = examine(spec, self.dtype, config.max_model_len).shared_by(world)
        self.spec = replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *config.end_token_ids))))
        self.drafter = drafter_of(config)
        if own := self.drafter.kv_layers:
            self.spec = self.spec.with_drafter(own, world)
        self.kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, self.dtype)
        self.device = device or open_device(config, rank)
        self.limits = _limits(config, self.spec)
        shard = Shard.of(config, rank, config.num_stages)
        self.own_spec = self.spec.per_rank(shard)
        """The model's spec with only this rank's heads and layers, for attention and the KV cache."""
        by_stage = [self.spec.per_rank(each) for each in shard.all_stages]  # sizes are those of the largest stage
        self._block_sizes = config.block_size, self.kv_dtype.itemsize, 1, scale_bytes(self.kv_dtype)
        self.block_bytes = max(own.kv_block_bytes(*self._block_sizes) for own in by_stage)
        self.state_bytes = max(own.state_elements for own in by_stage) * STATE_BYTES
        self.num_state_slots = num_state_slots(config, self.state_bytes)
        self.scratch = scratch_slots(config, self.num_state_slots)
        self.graph_sizes: tuple[int, ...] = ()
        self.overlap: Overlap | None = None  # set by start()
        self.disk: DiskTransfers | None = None

    def max_logits_bytes(self) -> int:
        """Maximum bytes of a step's logits over the whole vocabulary."""
        return 0 if self.spec.encoder is not None else 4 * self.limits.max_num_tokens * self.spec.vocab_size

    def _set_threads(self) -> int:
        share = max(1, num_physical_cores() // num_ranks(self.config))
        return set_threads(self.config.cpu_threads, share, self.config.cpu_bind != NONE)

    def load(self, communicator: Communicator | None = None, ahead: PackedSource | None = None) -> Ready:
        """Load the weights and report the number of KV blocks that fit beside them. Raises ModelError or ConfigError.

        `communicator`: the connection to the other ranks; None for a single rank. `ahead` has read or packed weights
        while the model was being built.
        """
        self.communicator = communicator or SingleRank(self.device.torch)
        spec, folder = self.spec, self.config.tokenizer
        self.grammars = Grammars(lambda: load_vocabulary(folder, spec.vocab_size, spec.eos_token_ids))
        num_threads = self._set_threads() if self.device.torch.type == "cpu" else 0
        num_blocks = configured_num_blocks(self.config, self.block_bytes)
        initial_used_bytes = 0
        if num_blocks is None:
            initial_used_bytes = check_free(self._memory(), self.config.gpu_memory_utilization)
        self.backend = select_backend(self._attention_shape(), self.config.attention_backend)
        self.graph_sizes = self._graph_sizes()
        if self.block_bytes:
            layout = [self.backend.layout_name, self.block_bytes, self.state_bytes, self.spec.kv_groups]
            self.disk = open_disk(self.config, layout, self.rank, self.generation, self._take_room(num_blocks))
        started = time.monotonic()
        weights_bytes = self._load_model(ahead)
        logger.info(
            "%s (%s) with %s parameters in %s loaded on %s in %.2f s%s",
            self.spec.architecture,
            self.spec.implementation,
            self.spec.size(),
            self.config.dtype,
            self.device.torch,
            time.monotonic() - started,
            f", threads: {num_threads}" if num_threads else "",
        )
        if spec.tied_in_config_only:
            logger.info("the head is that of the files: config.json calls it tied to the embedding, which differs")
        _log_ropes(spec, self.limits.max_model_len)
        if num_blocks is None:
            possible = self.determine_num_available_blocks(initial_used_bytes, weights_bytes)
            possible -= -(-(self.num_state_slots + len(self.scratch)) * self.state_bytes // self.block_bytes)
            num_blocks = min(possible, self.config.enough_blocks(len(self.spec.kv_groups)))
        if self.block_bytes:
            logger.info("room for %d KV blocks of %.1f KiB", num_blocks, self.block_bytes / 1024)
        if self.num_state_slots:
            logger.info("%d slots for recurrent states of %.1f KiB", self.num_state_slots, self.state_bytes / 1024)
        warn_if_short(num_blocks, self.block_bytes, self.spec.kv_groups, self.config)
        return Ready(
            rank=self.rank,
            generation=self.generation,
            num_blocks=num_blocks,
            block_bytes=self.block_bytes,
            groups=tuple(KVGroupInfo(group.kind, len(group.layers), group.window) for group in self.spec.kv_groups),
            max_model_len=self.limits.max_model_len,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
            pooler=pooler_info(self.spec),
            num_state_slots=self.num_state_slots,
            state_bytes=self.state_bytes,
            num_host_states=num_host_states(self.config.swap_space, self.state_bytes),
            kernels=kernels_in_use(self.model, self.backend, self.device.torch, self.graph_sizes),
            **media_facts(self.spec, self.dtype),
        )

    def _take_room(self, num_blocks: int | None) -> TouchAhead | None:
        """Begin to allocate the KV pool on a CPU with a KV directory, while the weights are loaded."""
        if self.config.kv_cache_dir is None or self.device.torch.type != "cpu":
            return None
        return take_pages(num_blocks, self.own_spec.kv_block_bytes(*self._block_sizes))

    def _load_model(self, ahead: PackedSource | None) -> int:
        """Build the model and load its weights. Returns their bytes, or 0 if memory is not measured."""
        memory, limits, device = self.device.memory, self.limits, self.device.torch
        adapters, exact = self._make_adapters(), self.config.exact_activations
        sizes = Sizes(limits.max_model_len, limits.max_num_tokens, adapters, exact)
        self.model = build(self.spec, self.dtype, device, sizes, self.config.quantization, self.communicator)
        counts = self.config.expert_load_metrics and self.rank == 0
        self.expert_load = ExpertLoad.of(self.model, limits.max_num_tokens, device) if counts else None
        allocated_bytes = memory.allocated_bytes() if memory else 0  # tables, and buffers for activations
        load_weights(
            self.model,
            self.config.model,
            load_format=self.config.load_format,
            seed=self.config.seed,
            progress=LoadReport(self.progress),
            ahead=ahead,
        )
        if self.model.pooler is not None and self.config.load_format != "dummy":
            self.model.pooler.load_modules(Path(self.config.model), open_source)
        if scales := self._kv_scales():
            self.model.take_kv_scales(scales)
        self.drafter.load(self._draft_place(scales))
        if not memory:
            return 0
        memory.trim()
        return memory.allocated_bytes() - allocated_bytes

    def _draft_place(self, scales: tuple[KVScales, ...]) -> DraftPlace:
        return DraftPlace(
            self.config,
            self.spec,
            self.model,
            self.backend,
            self.device,
            self.dtype,
            self.limits,
            self.graph_sizes,
            scales,
            self.scratch,
            self.progress.advance,
            LoadReport(self.progress),
        )

    def _make_adapters(self) -> Adapters | None:
        config = self.config
        self.adapters: AdapterCache | None = None
        if not config.enable_lora:
            return None
        limits = AdapterLimits(config.max_loras, config.max_lora_rank)
        made = Adapters(limits, self.limits.max_num_tokens, self.dtype, self.device.torch)
        self.adapters = AdapterCache(made)
        return made

    def _kv_scales(self) -> tuple[KVScales, ...]:
        """The checkpoint's KV scales for a cache in fp8_e4m3. Empty for other caches, with a line in the log."""
        config, folder = self.config, Path(self.config.model)
        if config.load_format == "dummy" or self.kv_dtype.itemsize > 1:
            return ()
        if config.kv_cache_dtype == "fp8_e4m3":
            scales = read_kv_scales(folder, self.spec.num_layers)
            if self.spec.kv_cache_dtype and not scales and self.rank == 0:
                logger.warning("the checkpoint asks for an fp8 KV cache and has no scales for it: it is not scaled")
            return scales
        if self.rank == 0 and has_kv_scales(folder):
            finer = "has its own for each token and head" if config.kv_cache_dtype == "int8" else "has none"
            logger.info("the checkpoint's KV scales are not used: a cache in %s %s", config.kv_cache_dtype, finer)
        return ()

    def determine_num_available_blocks(self, initial_used_bytes: int, weights_bytes: int) -> int:
        """Run the largest step, log the use of memory, and return the number of KV blocks that fit into the rest.

        Raises ConfigError, with flags that would work, if they are too few.
        """
        config = self.config
        baseline = Baseline(initial_used_bytes, weights_bytes, *self._set_aside())
        profile = profile_memory(
            self._memory(), self.run_largest_step, baseline, config.gpu_memory_utilization, self.block_bytes
        )
        for line in profile.lines(int(config.swap_space * GIB)):
            logger.info("%s", line)
        profile.check()
        return profile.num_blocks

    def _set_aside(self) -> tuple[int, int, int]:
        """Bytes that the largest step does not use: (attention over the longest contexts, graphs, logits of drafts)."""
        limits, workspace, vocab_size = self.limits, self.backend.workspace_bytes, self.spec.vocab_size
        num_tokens, num_seqs, longest = limits.max_num_tokens, limits.max_num_seqs, limits.max_model_len
        shown, most_rows = min(longest, -(-num_tokens // num_seqs)), max((num_seqs, *self.graph_sizes))
        scratch_bytes = max(workspace(num_tokens, most_rows, longest) - workspace(num_tokens, num_seqs, shown), 0)
        shape = (vocab_size, -(-longest // limits.block_size), limits.num_groups)
        graph_bytes = reserved_bytes(self.graph_sizes, *shape, len(self._piece_sizes()))
        return scratch_bytes, graph_bytes, draft_logits_bytes(self.config, vocab_size)

    @torch.inference_mode()
    def run_largest_step(self) -> None:
        """Run the step that needs the most memory. All slots are padding and all tables name the null block, the only
        one yet. All tokens are equal and choose the same experts, which get all rows: the worst case of routing."""
        device = self.device.torch
        cache = CacheEngine(self.own_spec, self.config.block_size, 1, 0, self.kv_dtype, device)
        views, num_layers = cache.layer_views(), self.spec.num_layers
        forward = EagerForward(self.model, views[:num_layers], self.backend, device, self.progress.advance)
        self.drafter.run_largest(views[num_layers:], views[:num_layers])
        held = None if self.model.tower is None else encode_largest(self.model.tower, self.limits.max_num_tokens)
        warm_up_step(forward, sampler_of(self.model, device), self.limits, self.limits.max_num_tokens)
        del held

    def start(self, start: Start) -> Started:
        """Allocate the KV cache with the engine's number of blocks, and warm up.

        The Started that is returned has the rate at which blocks move to and from the host.
        """
        cache_engine = self._allocate(start)
        swap_blocks_per_s = cache_engine.measure_swap()
        cache_engine.expect(self.limits.max_num_tokens)
        cache_engine.use(NULL_BLOCK)
        progress, model = self.progress, self.model
        views, num_layers = cache_engine.layer_views(), self.spec.num_layers
        device = cache_engine.pool.device
        forward = EagerForward(model, views[:num_layers], self.backend, device, progress.advance)
        self.drafter.begin(views[num_layers:], views[:num_layers])
        self.runner = ModelRunner(self.limits, forward, cache_engine, progress, self._parts(forward))
        self.runner.warm_up()
        if self.device.capture is not None and self.graph_sizes:
            self.runner.capture_graphs(self.device.capture, self.graph_sizes, self._piece_sizes())
        if self.expert_load is not None:
            progress.expert_tokens = self.expert_load.tokens
        self.generation = start.generation
        self.overlap = Overlap.of(self.runner)
        place = self.config.first_rank + self.rank, self.device.torch
        if self.disk is not None:
            self.disk.use(lambda: pools_of(cache_engine), shelf_of(self.runner.parts))
        self.profiler = Profiler(self.config.profiler_config, *place, self.runner.ranges, self.progress)
        timings = timings_of(self.runner, self.drafter.rehearse, self.config)
        return Started(self.rank, start.generation, swap_blocks_per_s, timings)

    def _parts(self, forward: EagerForward) -> list[StepPart]:
        """StepParts of this model and these settings, in the order of their hooks: drafts set `num_kept` before rules
        lower it, pooling follows the parts that read hidden states, and states are last."""
        model, communicator = self.model, self.model.communicator
        rules = Rules(communicator, self.grammars.source_of, self.progress.advance)
        scores = PromptScorer(model, self.progress.advance)
        pooled = PooledPrompts(model.pooler, communicator.shard.rank)
        states = RowStates(self.num_state_slots, forward.take_up) if self.num_state_slots else None
        parts: list[StepPart] = [
            Drafts(self.drafter, rules, states),
            rules,
            scores,
            pooled,
        ]
        if self.adapters is not None:
            parts.append(self.adapters)
        if self.expert_load is not None:
            self.expert_load.follow(forward)
            parts.append(self.expert_load)
        if model.tower is not None:
            parts += media_parts(model.tower, self.progress.advance, self.config.max_itl_ms)
        if states is not None:
            parts.append(states)
        return parts

    def _allocate(self, start: Start) -> CacheEngine:
        """Allocate the KV cache. Raises ConfigError, with the flags, if there is too little memory."""
        sizes, device = (start.num_blocks, start.num_host_blocks), self.device.torch
        try:
            engine = CacheEngine(self.own_spec, self.config.block_size, *sizes, self.kv_dtype, device)
            if self.disk is not None and self.disk.pages is not None:
                engine.take(self.disk.pages)
            if self.num_state_slots:
                on_host = num_host_states(self.config.swap_space, self.state_bytes)
                engine.make_states(self.num_state_slots, on_host, len(self.scratch))
            return engine
        except (OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError on every device
            pool, swap = (self.block_bytes * count / GIB for count in sizes)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"{pool:.1f} GiB of KV cache on {device} ({pool_flag(self.config)}) and {swap:.1f} GiB of host memory "
                f"(--swap-space {self.config.swap_space:g}) cannot be allocated: {reason}; ask for less"
            ) from error

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step. Raises ProtocolError for a step of another generation or one that does not fit."""
        if step.generation != self.generation:
            other = f"generation {step.generation}, this worker's is {self.generation}"
            raise ProtocolError(f"step {step.step} is of {other}")
        output = self.runner.execute(step)
        self.progress.advance()
        return output

    def record_ahead(self) -> bool:
        """See DecodeGraphs.record_ahead."""
        forward = self.runner.forward
        return isinstance(forward, DecodeGraphs) and forward.record_ahead()

    def can_run_ahead(self, step: SchedulerOutput) -> bool:
        """Whether `overlap` can launch the step before the host has the tokens of earlier steps."""
        return self.overlap is not None and step.generation == self.generation and self.overlap.can_launch(step)

    def run(self, steps: Sequence[SchedulerOutput]) -> list[ModelOutput]:
        """Run the steps of one message."""
        if self.overlap is None or any(step.generation != self.generation for step in steps):
            return [self.execute(step) for step in steps]
        return run_ahead(self.overlap, steps, self.execute)

    @torch.inference_mode()
    def load_adapter(self, message: ReadAdapter) -> AdapterRead:
        """Load an adapter between two steps; the answer has an error if it cannot be loaded."""
        error, is_missing, files = None, False, AdapterFiles(message.path, self.disk)
        try:
            self._cache().load(message.number, message.name, message.path)
        except ModelError as caught:
            error, is_missing = str(caught), not is_lora(message.path)
        self.progress.advance()
        return AdapterRead(self.rank, self.generation, message.number, error, is_missing, files.digest())

    @torch.inference_mode()
    def drop_adapter(self, number: int) -> None:
        """Drop an adapter that no step uses any more."""
        self._cache().drop(number)

    def profile(self, message: BeginProfile | EndProfile) -> Profiled:
        """Begin or end a profile between two steps; the answer has an error if that fails."""
        error = self.profiler.begin() if isinstance(message, BeginProfile) else self.profiler.end()
        self.progress.advance()
        return Profiled(self.rank, self.generation, error)

    def _cache(self) -> AdapterCache:
        if self.adapters is None:
            raise ProtocolError("an adapter was sent, but enable_lora is off")
        return self.adapters

    def _attention_shape(self) -> AttentionShape:
        spec = self.own_spec
        if spec.encoder is not None:
            groups = tuple(kind.attention for kind in dict.fromkeys(spec.layers))
        else:
            groups = tuple(group.attention for group in spec.kv_groups)
        return AttentionShape(
            groups=groups,
            is_encoder=spec.encoder is not None,
            block_size=self.config.block_size,
            dtype=self.dtype,
            device=self.device.torch,
            shares_prefixes=not self.config.disable_cascade_attn,
            max_seq_len=self.limits.max_model_len,
            kv_dtype=None if self.kv_dtype == self.dtype else self.kv_dtype,
        )

    def _piece_sizes(self) -> tuple[int, ...]:
        """Token counts of piecewise graphs. None without decode graphs captured at the start; with adapters, whose rows
        the host sorts in each step; or with recurrent states, whose sequences have many rows."""
        capture, is_plain = self.device.capture, not (self.config.enable_lora or self.num_state_slots)
        if not self.graph_sizes or not isinstance(capture, PieceCapture) or not is_plain:
            return ()
        return piece_sizes(self.limits.max_num_tokens, self.config.cudagraph_piece_sizes)

    def _graph_sizes(self) -> tuple[int, ...]:
        config, capture = self.config, self.device.capture
        if capture is None or self.spec.implementation == "transformers" or self.spec.encoder is not None:
            return ()  # torch's own operations, or a model that does not decode
        for part in (self.backend, self.communicator):
            if not part.graph_safe:
                logger.warning("decode steps run without graphs: %s is not graph-safe", type(part).__name__)
                return ()
        kinds = {own.recurrent for own in self.own_spec.layers}
        if not (capture.on_demand or all(is_graph_safe(kind, self.device.torch, self.dtype) for kind in kinds)):
            logger.warning("decode steps run without graphs: recurrent layers are plain torch on this device")
            return ()
        packs = capture.on_demand or launcher_for(self.dtype, self.device.torch) is not None
        if self.spec.experts is not None and config.quantization is not None and not packs:
            logger.warning("decode steps run without graphs: a loop over experts of %s waits", config.quantization)
            return ()
        rows = verified_rows(config) if capture.on_demand else config.max_num_seqs
        sizes, largest = config.cudagraph_capture_sizes, config.max_cudagraph_capture_size
        return bucket_sizes(rows, sizes, largest, every=capture.on_demand)

    def _memory(self) -> DeviceMemory:
        if self.device.memory is None:
            raise ConfigError(f"the memory of device {self.device.torch} cannot be profiled; give the KV cache a size")
        return self.device.memory


def _log_ropes(spec: ModelSpec, max_model_len: int) -> None:
    """Log the rope settings that depend on max_model_len."""
    for rope in dict.fromkeys(layer.rope for layer in spec.layers):
        if rope is not None and (pinned := rope.pinned(max_model_len)) is not None:
            logger.info("rope: %s", pinned)


def _limits(config: ResolvedConfig, spec: ModelSpec) -> StepLimits:
    return StepLimits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len,
        config.block_size,
        len(spec.kv_groups),
        PATIENCE * config.heartbeat_timeout_s,
    )
