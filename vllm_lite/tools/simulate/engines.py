"""The engines of a simulation: cores whose workers and disks only take time, and the router before several of them."""

import heapq
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, Literal

import msgspec

from vllm_lite.client.engines.data_parallel import prompt_hashes
from vllm_lite.client.engines.routing import PrefixRouter
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.engine.blocks.groups import KVGroup
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.pool import BlockPool, PoolObserver
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.request import Produced
from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import ConfigError, RequestError
from vllm_lite.executor.simulated import SimulatedExecutor, SimulatedSequence, VirtualClock
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.control import KVGroupInfo, Ready, StepTiming
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import Draft, Fork, Handle, ModelOutput, NewRequest, Resume, SchedulerOutput
from vllm_lite.protocol.transfers import (
    ForgetStored,
    LoadBlocks,
    StoreBlocks,
    Ticket,
    Transfer,
    TransferAnswer,
    Transferred,
)
from vllm_lite.runtime.nested_settings import WITH_MODEL, Speculation
from vllm_lite.tools.simulate.cost import StepTimer, StepTimes
from vllm_lite.tools.simulate.features import StepDone, StepReader
from vllm_lite.tools.simulate.load import TOKEN_BITS, SimulatedRequest
from vllm_lite.trace.records import Header

VARIED = (
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill", "enable_prefix_caching"),
    *("preemption_mode", "scheduling_policy", "max_itl_ms", "kv_watermark", "max_swap_blocks_per_step"),
    *("num_gpu_blocks_override", "async_scheduling", "data_parallel_size", "disable_adaptive_drafts", "kv_cache_dir"),
)
"""Engine settings that a simulation may change. All others change the time of a step, for which a recording with these
settings is necessary."""
HASH_SEED = "simulated"


class SimulatedDisk:
    """A disk tier that is empty at first and never evicts. Loads are made one after the other, and so are writes, in
    parallel to the loads; a block or a state takes the same time either way."""

    def __init__(self, blocks_per_s: float) -> None:
        self._block_s = 1 / blocks_per_s
        self._keys: set[bytes] = set()
        self._free_s = {True: 0.0, False: 0.0}
        """End of the last load (True) and the last write (False)."""
        self._under_way: list[tuple[float, Ticket, Transferred, Iterable[bytes]]] = []

    @property
    def next_s(self) -> float | None:
        """End of the next transfer; None if there is none."""
        return self._under_way[0][0] if self._under_way else None

    def begin(self, message: Transfer, now_s: float) -> None:
        if isinstance(message, ForgetStored):
            self._keys.difference_update(self._keys.copy() if message.keys is None else message.keys)
        elif isinstance(message, LoadBlocks | StoreBlocks):
            loads, keys = isinstance(message, LoadBlocks), message.keys
            failed = tuple(place for place, key in enumerate(keys) if key not in self._keys) if loads else ()
            begin_s = max(now_s, self._free_s[loads])
            end_s = self._free_s[loads] = begin_s + len(keys) * self._block_s
            answer = Transferred(0, 1, message.ticket, failed, took_s=end_s - begin_s)
            heapq.heappush(self._under_way, (end_s, message.ticket, answer, () if loads else keys))

    def take(self, now_s: float) -> list[Transferred]:
        """Take the answers of transfers that have ended."""
        found = list[Transferred]()
        while self._under_way and self._under_way[0][0] <= now_s:
            _, _, answer, stored = heapq.heappop(self._under_way)
            self._keys.update(stored)
            found.append(answer)
        return found


class TimedExecutor(SimulatedExecutor):
    """Workers whose messages take the fitted times. The results of a message arrive together."""

    def __init__(self, ready: Ready, clock: VirtualClock, fitted: StepTimes, timer: StepTimer) -> None:
        super().__init__(ready, clock, swap_blocks_per_s=fitted.header.swap_blocks_per_s)
        self._timer = timer
        self._engine_s = fitted.engine_s
        self._reader = StepReader()
        self._draws = timer.drafts
        self._drafts: dict[Handle, tuple[int, int]] = {}
        """Drafts of the current step."""
        self._timings = tuple(StepTiming(*each) for each in fitted.timings)
        self.disk = SimulatedDisk(fitted.load_blocks_per_s or inf) if fitted.header.has_disk else None

    def timings(self) -> tuple[StepTiming, ...]:
        return self._timings

    def transfer(self, message: Transfer) -> None:
        if self.disk is not None:
            self.disk.begin(message, max(self._free_at_s, self.clock.now_s))

    def transferred(self) -> list[TransferAnswer]:
        return [] if self.disk is None else [*self.disk.take(self.clock.now_s)]

    @property
    def next_event_s(self) -> float | None:
        """Time of the next result or end of a transfer; None if there is none."""
        times = [self.next_result_s, None if self.disk is None else self.disk.next_s]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def _draft(self, entry: Draft) -> tuple[int, int]:
        num_tokens = self._sequences[entry.handle].num_tokens
        made, right = self._drafts[entry.handle] = self._draws.draw(entry.handle, num_tokens, entry.max_drafts)
        return made, right

    def _place(self, entry: NewRequest | Resume) -> tuple[SimulatedSequence, int]:
        if isinstance(entry, NewRequest):
            self._draws.begin(entry.handle, entry.num_prompt_tokens)
        return super()._place(entry)

    def _change(self, entry: object) -> None:
        if isinstance(entry, Fork):
            self._draws.fork(entry.child, entry.parent)
        super()._change(entry)

    def submit(self, *steps: SchedulerOutput) -> None:
        results, done = list[ModelOutput](), list[StepDone]()
        for step in steps:
            self._drafts = {}
            result = self._run(step)[1]
            num_sampled = len(result.tokens) // 4 if result.counts is None else len(result.counts)
            results.append(result)
            done.append(StepDone(step, num_sampled, self._drafts))
        was_idle = not self._results
        begin_s = max(self._free_at_s, self.clock.now_s + self._engine_s)
        took_s = self._timer.took_s(self._reader.message(done, was_idle=was_idle))
        self.busy_s += took_s
        self._free_at_s = begin_s + took_s
        self._results.extend((self._free_at_s, result) for result in results)


class SimulatedEngine:
    def __init__(
        self, fitted: StepTimes, settings: Mapping[str, Any], timer: StepTimer, clock: VirtualClock, record: str | None
    ) -> None:
        """Raises ConfigError."""
        config, ready, sizes = _described(fitted.header, settings)
        config = msgspec.structs.replace(config, record=record, prefix_hash_seed=HASH_SEED, kv_cache_preload=0.0)
        self.executor = TimedExecutor(ready, clock, fitted, timer)
        self.core = EngineCore(config, ready, self.executor, sizes, Lives(), clock)
        self.core.adapter_loader.receive(self.executor, [])  # makes the loader know these workers

    def step(self) -> list[Produced]:
        """Take available results, and begin the steps that may be begun."""
        core, produced, transfers = self.core, list[Produced](), self.core.transfers
        if transfers is not None:
            transfers.receive(self.executor)
        while (output := self.executor.poll()) is not None:
            produced += core.finish(output)
        while core.begin():
            pass
        while core.adapters.wanted:
            core.adapter_loader.send(self.executor)
            core.adapter_loader.receive(self.executor, produced)
            if not core.begin():
                break
        if transfers is not None:
            transfers.send(self.executor)
        return produced

    def add(self, message: Generate) -> None:
        """Raises RequestError."""
        adapters = self.core.adapters
        if message.adapter and adapters.get(message.adapter) is None:
            adapters.enlist(adapters.make(message.adapter, ""))
        self.core.add(b"simulation", message)


class SimulatedEngines:
    """One or several engines, each on a separate machine: they do not slow each other down."""

    def __init__(self, count: int, make: Callable[[int], SimulatedEngine]) -> None:
        """`make` makes the engine with a given number."""
        self.all = [make(number) for number in range(count)]
        self.router = PrefixRouter[int]() if count > 1 else None
        if self.router is not None:
            for number, engine in enumerate(self.all):
                self.router.add(number, engine.core.kv.pool.num_usable)
                _Announcer(engine.core.kv.part(KVBlocks), self.router, number)

    @property
    def max_model_len(self) -> int:
        return self.all[0].core.max_model_len

    @property
    def next_event_s(self) -> float | None:
        """Time of the next event of any engine; None if there is none."""
        times = [each.executor.next_event_s for each in self.all]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def add(self, number: int, request: SimulatedRequest) -> None:
        """Submit a request. Raises ConfigError if the engine refuses it."""
        params = SamplingParams(max_tokens=request.output_len, temperature=0.0, seed=0, ignore_eos=True)
        adapter = f"adapter {request.adapter}" if request.adapter else ""
        message = Generate(str(number), request.tokens, params, adapter=adapter)
        try:
            self._choose(message).add(message)
        except RequestError as error:
            raise ConfigError(f"the engine refuses a request of {len(request.tokens) // 4} tokens: {error}") from error

    def _choose(self, message: Generate) -> SimulatedEngine:
        if self.router is None:
            return self.all[0]
        hashes = prompt_hashes(self.all[0].core.kv.hasher, message)
        loads = {number: len(engine.core.scheduler.requests) for number, engine in enumerate(self.all)}
        chosen = self.router.choose(hashes, loads).engine
        self.router.stored(chosen, hashes)
        return self.all[chosen]

    def step(self) -> list[Produced]:
        return [item for engine in self.all for item in engine.step()]

    def close(self) -> None:
        for engine in self.all:
            engine.core.close()


class _Announcer(PoolObserver):
    """Reports the contents of an engine's cache to the router, for the first group of layers, as KV events do."""

    def __init__(self, blocks: KVBlocks, router: PrefixRouter[int], engine: int) -> None:
        self._pool: BlockPool = blocks.pool
        self._router = router
        self._engine = engine
        blocks.on_store = self._stored
        blocks.pool.observers.append(self)

    def _stored(self, sequence: Sequence, group: KVGroup, index: int) -> None:
        if group.index == 0:
            self._router.announced(self._engine, [sequence.block_hashes[index]])

    def evicted(self, block_id: int, block_hash: bytes) -> None:  # noqa: ARG002
        if block_hash[-1] == 0 and self._pool.get_cached_block(block_hash) is None:
            self._router.dropped(self._engine, [block_hash[:-1]])

    def cleared(self) -> None:
        self._router.cleared(self._engine)


def _speculation(method: str, count: int) -> Speculation:
    """The recorded method of drafting; a model that it names is not loaded here."""
    model = "recorded" if method in WITH_MODEL else None
    return Speculation(method=method, num_speculative_tokens=count, model=model)  # type: ignore[arg-type]


def _described(header: Header, settings: Mapping[str, Any]) -> tuple[ResolvedConfig, Ready, PoolSizes]:
    """The recorded engine with other `settings`. Raises ConfigError."""
    if unknown := settings.keys() - set(VARIED):
        raise ConfigError(f"{', '.join(sorted(unknown))} cannot be varied: one of {', '.join(VARIED)}")
    options = header.options
    recorded = {
        "max_num_seqs": options["max_num_seqs"],
        "max_num_batched_tokens": options["max_num_batched_tokens"],
        "enable_chunked_prefill": options["chunked_prefill"],
        "preemption_mode": options["preemption"],
        "max_itl_ms": 1000 * options["max_itl_s"] or None,
        "scheduling_policy": header.policy,
        "block_size": header.block_size,
        "enable_prefix_caching": header.caching,
        "kv_watermark": header.watermark,
        "max_swap_blocks_per_step": header.max_swap_blocks_per_step,
        "jump_forward": False,
        "disable_adaptive_drafts": not options["adaptive_drafts"],
    }
    if options.get("max_loras"):
        recorded |= {"enable_lora": True} | {name: options[name] for name in ("max_loras", "max_cpu_loras")}
    if header.has_disk:
        recorded["kv_cache_dir"] = "simulated"
    elif settings.get("kv_cache_dir") is not None:
        raise ConfigError("kv_cache_dir cannot be simulated: the engine that was recorded kept nothing on a disk")
    if options["draft_method"]:
        recorded["speculative_config"] = _speculation(options["draft_method"], options["num_drafts"])
    machine: tuple[Literal["cpu"], int] = ("cpu", 1 << 30)  # no time and no size depends on it
    positions = options["max_model_len"]
    config = EngineConfig.check(recorded | dict(settings)).resolve(
        max_position_embeddings=positions, dtype="float32", model_path="simulated", machine=machine
    )
    num_blocks = config.num_gpu_blocks_override or header.num_blocks
    groups = tuple(KVGroupInfo("sliding" if window else "full", 1, window) for window in header.windows)
    ready = Ready(
        rank=0,
        generation=1,
        num_blocks=num_blocks,
        # not real bytes: with this and state_bytes the engine computes the recorded max_moved_states again
        block_bytes=header.max_moved_states,
        groups=groups,
        max_model_len=config.max_model_len,
        vocab_size=1 << TOKEN_BITS,
        eos_token_ids=(),
        num_state_slots=header.num_state_slots,
        state_bytes=header.max_swap_blocks_per_step,
        num_host_states=header.num_host_states,
    )
    return config, ready, PoolSizes(num_blocks, header.num_host_blocks, header.swap_blocks_per_s)
