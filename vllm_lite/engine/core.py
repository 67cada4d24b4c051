"""EngineCore: one step is schedule, execute, update. Features hang off these three calls; none is inlined into them."""

import time
from collections import abc
from functools import partial
from typing import Any, NamedTuple

from vllm_lite import __version__
from vllm_lite.checkpoint.sizing import NUM_FORCED, most_samples, num_host_vectors
from vllm_lite.config import ResolvedConfig
from vllm_lite.engine.adapter_loader import AdapterLoader
from vllm_lite.engine.adapters import Adapter
from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.blocks.groups import make_groups
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import CachePart
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.encoder_cache import EncoderCache, EncoderSizes, encoder_sizes
from vllm_lite.engine.intake import Attached, Intake, ModelFacts
from vllm_lite.engine.observe.describe import describe
from vllm_lite.engine.observe.prefix import PrefixQuestions
from vllm_lite.engine.observe.recorder import MakeScheduler, RecordedScheduler, recorded
from vllm_lite.engine.observe.residency import Residency
from vllm_lite.engine.observe.view import block_content, view
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduling import policy
from vllm_lite.engine.scheduling.in_flight import MessageLength, StepInFlight
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.rates import SHARE_BESIDE, PrefillRate, Rates
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.engine.scheduling.step_cost import StepCost
from vllm_lite.engine.sequence import Sequence
from vllm_lite.engine.states.slots import StateSlots
from vllm_lite.engine.stored_media import StoredMedia
from vllm_lite.engine.transfers import Transfers
from vllm_lite.executor.base import Executor
from vllm_lite.kv_disk.directory import hash_seed
from vllm_lite.protocol.api import Descriptions, ForkRequest, Generate, PrefixCacheReset
from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.encoder import GROWTH_ASIDE
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import ModelOutput
from vllm_lite.protocol.view import GetBlock, Look, Seen
from vllm_lite.runtime import log
from vllm_lite.runtime.prefix_hash import PrefixHasher
from vllm_lite.trace.records import Header

logger = log.get(__name__)


class PoolSizes(NamedTuple):
    """Number of blocks in each pool, and the rate at which blocks move between the pools."""

    num_blocks: int
    num_host_blocks: int = 0
    swap_blocks_per_s: float = 0.0


class Lives(NamedTuple):
    """Ordinal numbers of workers and engine: `generation` counts the worker groups of the engine, `life` the engines
    that were started in place of each other, and `launch` is the same for all of these."""

    generation: int = 1
    life: int = 1
    launch: str = ""


class EngineCore:
    """Drives the scheduler, its block manager and the executor, without sockets. It reads time from `clock` only."""

    def __init__(
        self,
        config: ResolvedConfig,
        ready: Ready,
        executor: Executor,
        sizes: PoolSizes,
        lives: Lives,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self._clock = clock
        self.message_length = MessageLength()
        self._prefill_rate = PrefillRate()
        self._is_drafting = config.speculative_config is not None and not config.disable_adaptive_drafts
        # Drafts in flight could pass the end of a block, where a recurrent state is to be saved.
        drafts_states = config.speculative_config is not None and ready.num_state_slots > 0
        self.max_in_flight = 1 + config.num_stages if config.async_scheduling and not drafts_states else 1
        header = _header(config, ready, sizes, lives, clock())
        hasher = PrefixHasher(config.block_size, hash_seed(config))
        self.scheduler = make_scheduler(header, hasher, recorded(config.record, header, clock))
        self.scheduler.on_policy_fault = lambda what: logger.error(
            "scheduling policy %r failed, from here on it is first come, first served: %s", header.policy, what
        )
        self.kv = self.scheduler.kv
        self.meter = self.scheduler.meter
        self.adapters = self.scheduler.queues.adapters
        if config.kv_cache_metrics:
            one_in = round(1 / config.kv_cache_metrics_sample)
            self.meter.counters.blocks = Residency(self.kv.pool, clock, one_in).histograms
        self.adapter_loader = AdapterLoader(self.scheduler, config, self.end_adapter, clock)
        self._step_cost = StepCost(executor.timings() if self._is_drafting else ())
        if self._step_cost.numbers[1]:
            self.scheduler.measured(self._step_cost.rates(self.scheduler.rates))
        self._counts_experts = config.expert_load_metrics
        self._expert_tokens: list[list[int]] = []
        """Tokens per layer and expert that earlier worker groups counted."""
        self.max_model_len = self.scheduler.max_len
        self.intake = Intake(self.scheduler, ModelFacts.of(ready), clock)
        self.prefix_questions = PrefixQuestions(self.scheduler, self.intake)
        self.in_flight = self.scheduler.in_flight
        self._holds = False
        self.transfers = Transfers.of(self.scheduler, clock)

    # ---- requests

    def add(self, client: bytes, message: Generate) -> Attached:
        """Accept a request, or attach `client` to a known one. Raises RequestError, which leaves all else unchanged."""
        return self.intake.add(client, message)

    def fork(self, client: bytes, message: ForkRequest) -> Request:
        """Start a request from the tokens and the KV of a live one. Raises RequestError."""
        return self.intake.fork(client, message)

    def abort(
        self, request_id: str, samples: abc.Sequence[int] = (), *, stopped: bool = False
    ) -> list[tuple[int, int]]:
        """End a request, or only its `samples`. `stopped`: the client has all it wanted, for example a stop string.

        Returns (sample index, number of output tokens) of each sample that this call ended.
        """
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return []
        self.meter.now_s = self._clock()
        return self.scheduler.abort(request, samples, "stop" if stopped else "abort")

    def describe(
        self, request_ids: abc.Sequence[str] = (), external_id: str = "", *, with_content: bool = False
    ) -> Descriptions:
        requests, external = self.scheduler.requests, self.scheduler.queues.external
        known = [requests[request_id] for request_id in request_ids if request_id in requests]
        asked = dict.fromkeys(known + external.live(external_id))
        states = describe(self.scheduler, asked, self._clock(), with_content=with_content)
        return Descriptions(states, external.ended(external_id))

    def look(self, asked: Look) -> Seen:
        """The engine's state now, for a viewer, or the content of one of its blocks."""
        if isinstance(asked, GetBlock):
            return block_content(self.scheduler, asked.block)
        return view(self.scheduler, asked.first_block, self._clock())

    def reset_prefix_cache(self, *, stored: bool = False) -> PrefixCacheReset:
        return self.scheduler.reset_prefix_cache(stored=stored)

    def hold_newcomers(self, *, are_held: bool) -> None:
        """Hold back all requests that arrive from now on, or release them."""
        if are_held != self._holds:
            self._holds = are_held
            self.scheduler.hold_newcomers(are_held=are_held)

    def end_adapter(self, adapter: Adapter, error: str) -> list[Produced]:
        """End the requests that use an adapter which cannot be loaded."""
        self.meter.now_s = self._clock()
        having = [each for each in self.scheduler.requests.values() if each.adapter is adapter]
        return [self.scheduler.fail(request, error) for request in having]

    # ---- the step

    def expire(self) -> list[Produced]:
        """End the requests whose deadline has passed."""
        now_s = self.meter.now_s = self._clock()
        return self.scheduler.expire(now_s)

    def begin(self) -> bool:
        """Schedule one step, if there is work and fewer than the allowed steps are in flight. Returns whether it did.

        Call it until it returns False: only then have all scheduled steps been sent. It does nothing while the engine
        is paused or has no workers.
        """
        now_s = self._clock()
        step = None
        if self.scheduler.is_paused or not self.scheduler.has_workers:
            return False
        if self._may_begin():
            if self.scheduler.requests or (self.transfers is not None and self.kv.is_freeing):
                step = self.scheduler.schedule(now_s)
            else:
                self.meter.rest(now_s)
        ends_message = True
        if step is not None:
            self.meter.scheduled(self.scheduler.num_scheduled_tokens)
            ends_message = (
                not self.in_flight.newest.only_decodes or self.in_flight.num_unsent >= self.message_length.steps
            )
        if self.in_flight.num_unsent and ends_message:
            self.executor.submit(*self.in_flight.send(now_s))
        return step is not None

    def _may_begin(self) -> bool:
        """Whether another step may join the unsent message, or start a new message: workers compute one message while
        the engine makes the next one."""
        return (
            self.in_flight.num_unsent > 0 or len(self.in_flight) <= (self.max_in_flight - 1) * self.message_length.steps
        )

    def finish(self, output: ModelOutput) -> list[Produced]:
        """Apply the result of the oldest step in flight."""
        now_s = self.meter.now_s = self._clock()
        step = self.in_flight.oldest
        step.message.other_s += output.other_s
        if step.ends_message:
            if self._prefill_rate.measure(step.message, now_s):
                self.scheduler.measured(self._prefill_rate.rates(self.scheduler.rates))
            if self._is_drafting and not step.message.num_prefill_tokens:
                self._learn_cost(step, output)
        if self.max_in_flight > 1:
            self.message_length.ended(now_s, steady=step.only_decodes and len(self.in_flight) > 1)
        return self.scheduler.update(output)

    def _learn_cost(self, step: StepInFlight, output: ModelOutput) -> None:
        """Learn from the time of a decode step. One whose drafter found nothing also took the time of a search, so it
        only shows how long a step without drafts takes at most. Where drafts are asked for in nearly all steps, hardly
        any other one would correct a time that is too long, and with which drafts seem to cost nothing."""
        drafted = output.drafted or ()
        num_rows, most_drafts = len(step.sampling) + sum(drafted), max(drafted, default=0)
        took_s = self._prefill_rate.took_s / step.message.num_steps
        if step.drafted and not most_drafts and took_s >= self.scheduler.rates.decode_s(num_rows):
            return
        if self._step_cost.measure(num_rows, most_drafts, took_s):
            self.scheduler.measured(self._step_cost.rates(self.scheduler.rates))

    def lose_workers(self, cause: str, *, are_ended: bool = False) -> list[Produced]:
        """Drop the steps in flight: the workers died of `cause`, or the engine ended them for it (`are_ended`).
        Requests keep their tokens and wait for resume(). Until then begin() does nothing; requests can still be added,
        aborted and expire. Returns those that end here."""
        now_s = self.meter.now_s = self._clock()
        self.message_length = MessageLength()
        ended = self.scheduler.lose_workers(cause, now_s, are_ended=are_ended)
        for item in ended:
            logger.warning("%s", item.error)
        return ended

    def resume(self, executor: Executor, generation: int, swap_blocks_per_s: float) -> None:
        """Continue with the workers of `executor`, a later `generation` with pools of the same sizes."""
        self._expert_tokens = sum_of(self._expert_tokens, self.executor.expert_tokens())
        self.executor = executor
        self.scheduler.resume(generation, swap_blocks_per_s)

    def close(self) -> None:
        """End the trace, if there is one."""
        if isinstance(self.scheduler, RecordedScheduler):
            self.scheduler.close()

    def stats(self) -> Stats:
        """The engine's counters, and the current values of its gauges."""
        counters = self.meter.stats(self._clock())
        if self._counts_experts:
            counters.expert_tokens = sum_of(self._expert_tokens, self.executor.expert_tokens())
        waiting = [*self.scheduler.waiting, *self.scheduler.queues.held] if self.adapters.by_number else []
        counters.running_adapters, counters.waiting_adapters = self.adapters.running_and_waiting(
            self.scheduler.running, waiting
        )
        counters.num_running, counters.num_waiting = len(self.scheduler.running), self.scheduler.queues.num_waiting
        counters.num_deferred = self._num_deferred(waiting)
        if self.transfers is not None:
            counters.disk = self.transfers.usage
        return counters

    def _num_deferred(self, waiting: list[Sequence]) -> int:
        """Number of waiting sequences that lack workers, an adapter or permission to run, and not just room. `waiting`
        holds all waiting sequences if the engine has adapters, else none."""
        scheduler, queues = self.scheduler, self.scheduler.queues
        if scheduler.is_paused or not scheduler.has_workers:
            return queues.num_waiting
        step = self.adapters.of_step(scheduler.running)
        lacking = [s for s in waiting if s not in queues.held and not step.could_take(s.request.adapter)]
        return len(queues.held) + len(lacking)


def sum_of(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    """Add two tables of tokens per layer and expert, [num_layers][num_experts]; either may be empty."""
    if not first or not second:
        return first or second
    return [list(map(sum, zip(*both, strict=True))) for both in zip(first, second, strict=True)]


def make_scheduler(header: Header, hasher: PrefixHasher, make: MakeScheduler = Scheduler) -> Scheduler:
    """Build the scheduler that a trace's header describes, with its policy, block manager and pools, for an engine or
    a replay. Raises ConfigError if the policy cannot be loaded."""
    num_host_blocks, caching = header.num_host_blocks, header.caching
    host = HostTier(num_host_blocks, header.num_blocks, caching) if num_host_blocks else None
    blocks = KVBlocks(
        BlockPool(header.num_blocks, caching),
        make_groups(header.windows, header.block_size),
        header.block_size,
        host=host,
        watermark=header.watermark,
        max_swap_blocks_per_step=header.max_swap_blocks_per_step,
    )
    parts: list[CachePart[Any]] = [blocks]
    states: StateSlots | None = None
    encoder: EncoderCache | None = None
    if header.num_state_slots:
        most = header.max_moved_states  # states with as many bytes as the blocks that a step may move
        room = {"num_host_states": header.num_host_states, "max_moves": most}
        room["blocks_each"] = header.max_swap_blocks_per_step // most
        states = StateSlots(header.num_state_slots, header.block_size, caching, **room)
        parts.append(states)
    if header.encoder is not None:
        sizes = EncoderSizes(*header.encoder)
        parts.append(encoder := EncoderCache(blocks.pool, sizes, whole_media=header.whole_media))
    if header.has_disk:
        parts.append(tier := DiskTier(blocks, states, preload=header.kv_cache_preload))
        if encoder is not None:
            parts.append(StoredMedia(encoder, tier, header.block_size, lambda: kv.hasher))
    kv = KVCacheManager(parts, hasher, blocks.counters)
    scheduler = make(kv, Options(**header.options), policy.load(header.policy))
    scheduler.rates = Rates(0.0, header.swap_blocks_per_s)
    if encoder is not None and (scheduler.options.max_itl_s or scheduler.options.media_aside):
        encoder.others_decode = scheduler.queues.any_decodes
        if not scheduler.options.max_itl_s:
            encoder.most_beside = partial(_media_beside, scheduler, encoder)
    return scheduler


def _media_beside(scheduler: Scheduler, encoder: EncoderCache) -> int:
    """Maximum media tokens in a step beside decoding sequences, where no max_itl_s limits the step."""
    share = SHARE_BESIDE if encoder.is_aside else 1.0
    return scheduler.rates.tokens_beside(GROWTH_ASIDE, scheduler.options.max_num_batched_tokens, share)


def _header(config: ResolvedConfig, ready: Ready, sizes: PoolSizes, lives: Lives, now_s: float) -> Header:
    """The settings that determine every scheduling decision; a trace begins with them."""
    events = config.kv_events_config  # preloaded blocks have no known tokens, so no event could describe them
    options = Options(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=ready.max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
        preemption=config.preemption_mode,
        num_drafts=config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
        num_forced=NUM_FORCED if config.jump_forward else 0,
        max_samples=most_samples(config),
        draft_method=config.speculative_config.method if config.speculative_config else "",
        adaptive_drafts=not config.disable_adaptive_drafts,
        shares_answers=config.speculative_config is not None and config.speculative_config.method == "suffix",
        generation=lives.generation,
        max_itl_s=(config.max_itl_ms or 0) / 1000,
        media_aside=config.media_aside,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_cpu_loras=(config.max_cpu_loras or config.max_loras) if config.enable_lora else 0,
    )
    return Header(
        engine_version=__version__,
        clock_s=now_s,
        wall_s=time.time(),
        options=options._asdict(),
        policy=config.scheduling_policy,
        num_blocks=sizes.num_blocks,
        num_host_blocks=sizes.num_host_blocks,
        block_size=config.block_size,
        caching=config.enable_prefix_caching,
        windows=tuple(group.window for group in ready.groups),
        watermark=config.kv_watermark,
        max_swap_blocks_per_step=config.max_swap_blocks_per_step,
        swap_blocks_per_s=sizes.swap_blocks_per_s,
        tensor_parallel_size=config.tensor_parallel_size,
        launch=lives.launch,
        life=lives.life,
        num_state_slots=ready.num_state_slots,
        num_host_states=ready.num_host_states,
        encoder=encoder_sizes(
            config.max_num_batched_tokens, num_host_vectors(config.swap_space, ready.media_vector_bytes)
        )
        if ready.media_token_bytes
        else None,
        whole_media=ready.whole_media,
        has_disk=config.kv_cache_dir is not None and bool(ready.groups),
        kv_cache_preload=0.0 if events is not None and events.enabled else config.kv_cache_preload,
        max_moved_states=max(1, config.max_swap_blocks_per_step * ready.block_bytes // max(1, ready.state_bytes)),
    )
