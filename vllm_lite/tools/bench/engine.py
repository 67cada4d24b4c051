"""`vllm-lite bench engine`: the cost of the engine itself, without any model. Figures are medians on this machine."""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from vllm_lite.client.engines.session import Session
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.blocks.groups import make_groups
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import CachePart
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.process import frozen_objects
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.policy import BUILT_IN, load
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.engine.sequence import Sequence
from vllm_lite.executor import blocking
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import engine_to_worker, pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import Continue, ModelOutput, SchedulerOutput
from vllm_lite.protocol.transfers import StoreBlocks
from vllm_lite.runtime import supervise
from vllm_lite.runtime.prefix_hash import PrefixHasher
from vllm_lite.transport.interface import poller

STUB_WORKER = "vllm_lite.tools.bench.stub_worker"
SIZES = (16, 64, 256, 1024)
BLOCK_SIZE = 16


def run(report: Callable[[str], None] = lambda _line: None) -> dict[str, Any]:
    """Measure all figures; `report` is called with a line that names the next one."""
    figures: dict[str, Any] = {}
    for name, measure in (
        ("import_s", import_s),
        ("engine_ready_s", engine_ready_s),
        ("client_rss_mb", client_rss_mb),
        ("round_trip_us", round_trip_us),
        ("schedule_update_us", lambda: {str(size): schedule_update_us(size) for size in SIZES}),
        ("schedule_update_with_disk", lambda: {str(size): schedule_update_with_disk(size) for size in SIZES}),
        ("schedule_10000_waiting_us", lambda: {policy: schedule_waiting_us(policy, 10_000) for policy in BUILT_IN}),
        ("message_bytes", lambda: {str(size): message_bytes(size) for size in SIZES}),
        ("codec_us", lambda: {str(size): codec_us(size) for size in SIZES}),
        ("block_alloc_free_us", block_alloc_free_us),
        ("block_touch_free_us", block_touch_free_us),
        ("block_cache_us", block_cache_us),
        ("lookup_4096_us", lookup_4096_us),
    ):
        report(f"measuring {name} ...")
        figures[name] = measure()
    return figures


def _median_us(action: Callable[..., object], repeats: int, prepare: Callable[[], tuple[object, ...]] = tuple) -> float:
    """Median time of one call of `action`, in microseconds. `prepare` makes the arguments of each call; its time does
    not count."""
    times = []
    for _ in range(repeats):
        arguments = prepare()
        start = time.perf_counter()
        action(*arguments)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 3)


def _python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.strip()


def import_s() -> float:
    """Seconds of `import vllm_lite` and its public names in a new interpreter, without the start of the interpreter."""
    code = (
        "from time import perf_counter as now; t = now(); import vllm_lite; vllm_lite.SamplingParams; print(now() - t)"
    )
    return round(statistics.median(float(_python(code)) for _ in range(5)), 4)


def client_rss_mb() -> float:
    """Resident memory of a new process that has imported the client, in MB."""
    code = (
        "import vllm_lite, resource; vllm_lite.LLM, vllm_lite.AsyncClient; "
        "print(int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() / 1e6)"
    )
    return round(statistics.median(float(_python(code)) for _ in range(3)), 1)


def _stub_config() -> ResolvedConfig:
    config = EngineConfig.check({"log_level": "error"})
    return config.resolve(max_position_embeddings=4096, dtype="float32", model_path="stub")


def engine_ready_s() -> float:
    """Seconds from the start of an engine process, whose worker has no model, to its answer to Hello."""
    times = []
    for _ in range(5):
        with tempfile.TemporaryDirectory(prefix="vl-") as run_dir:
            address = f"ipc://{run_dir}/clients"
            start = time.perf_counter()
            settings = EngineSettings(_stub_config(), address, run_dir, STUB_WORKER)
            child = supervise.spawn("vllm_lite.engine.process", settings, "engine", lambda _reason: None)
            session = Session.connect(address, alive=child.exited)
            times.append(time.perf_counter() - start)
            session.close()
            child.stop(5.0)
    return round(statistics.median(times), 4)


def round_trip_us() -> float:
    """Microseconds for a step of one sequence to go from the engine to a worker process without a model, and back."""
    with tempfile.TemporaryDirectory(prefix="vl-") as run_dir:
        executor = MultiprocExecutor(_stub_config(), f"ipc://{run_dir}/workers", 1, STUB_WORKER)
        try:
            blocking.load(executor, 60.0)
            blocking.allocate(executor, 16, 0, 60.0)
            watched = poller(executor)
            output = SchedulerOutput(1, 1, [], [Continue(0, 1, [])])

            def trip() -> None:
                executor.submit(output)
                while executor.poll() is None:
                    watched.poll(1000)

            return _median_us(trip, 3000)
        finally:
            executor.close()


def _manager(num_blocks: int, *, disk: bool = False) -> KVCacheManager:
    blocks = KVBlocks(BlockPool(num_blocks), make_groups([None], BLOCK_SIZE), BLOCK_SIZE)
    parts: list[CachePart[Any]] = [blocks, DiskTier(blocks)] if disk else [blocks]
    return KVCacheManager(parts, PrefixHasher(BLOCK_SIZE, "bench"), blocks.counters)


def _scheduler(num_requests: int, *, disk: bool = False) -> Scheduler:
    """Make a scheduler with `num_requests` running, each in the middle of its decode."""
    options = Options(max_num_seqs=num_requests, max_num_batched_tokens=10**9, max_model_len=900)
    scheduler = Scheduler(_manager(num_requests * 64 + 1, disk=disk), options)
    params = SamplingParams(max_tokens=10**6, temperature=0.0)
    for index in range(num_requests):
        prompt = pack_tokens(range(index, index + 100 + index % BLOCK_SIZE))  # blocks fill up at different steps
        scheduler.add(Request(Generate(f"request-{index}", prompt, params), b"client", 900, frozenset((0,))))
    return scheduler


def schedule_update_us(num_requests: int) -> float:
    """Microseconds of schedule() and update() together, for a step of `num_requests` decodes."""
    with frozen_objects():
        scheduler = _scheduler(num_requests)
    tokens = pack_tokens([1] * num_requests)
    times = [_step_s(scheduler, tokens) for _ in range(320)]
    gc.unfreeze()
    scheduler.check_integrity()
    return round(statistics.median(times[20:]) * 1e6, 1)


def schedule_update_with_disk(num_requests: int) -> float:
    """Ratio of the same time with a KV cache on disk to that without. Steps with and without it alternate; the blocks
    that are due are reported as written between steps."""
    with frozen_objects():
        schedulers = [_scheduler(num_requests, disk=disk) for disk in (False, True)]
    tokens = pack_tokens([1] * num_requests)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(320):
        for which in (step % 2, 1 - step % 2):
            times[which].append(_step_s(schedulers[which], tokens))
        for message in schedulers[1].kv.part(DiskTier).take_messages():
            if isinstance(message, StoreBlocks):
                schedulers[1].transferred(message.ticket, ())
    gc.unfreeze()
    if not schedulers[1].kv.part(DiskTier).index:
        raise RuntimeError("nothing was written")
    return round(statistics.median(times[1][20:]) / statistics.median(times[0][20:]), 3)


def _step_s(scheduler: Scheduler, tokens: bytes) -> float:
    """Seconds that schedule() and update() of one step take."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    middle = time.perf_counter()
    if plan is None:
        raise RuntimeError("the scheduler has nothing to do")
    output = ModelOutput(0, plan.step, tokens)
    resumed = time.perf_counter()
    scheduler.update(output)
    return middle - start + time.perf_counter() - resumed


def schedule_waiting_us(policy: str, num_waiting: int) -> float:
    """Microseconds of schedule() for a step with one decode, while `num_waiting` requests of 100 users wait for
    blocks."""
    options = Options(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=1000)
    scheduler = Scheduler(_manager(64), options, load(policy))

    def add(number: int, num_prompt: int) -> None:
        params = SamplingParams(max_tokens=400, priority=number % 7, user=str(number % 100))
        message = Generate(f"request-{number}", pack_tokens(range(number, number + num_prompt)), params)
        request = Request(message, b"client", num_prompt + 400, frozenset((0,)))
        request.deadline_s = 1e9 + number % 13
        scheduler.add(request)

    with frozen_objects():
        add(0, 600)  # first in the queue under every policy
        scheduler.schedule()
        scheduler.update(ModelOutput(0, 1, pack_tokens([1])))
        for number in range(1, num_waiting + 1):
            add(number, 500)
    times = []
    for _ in range(320):
        start = time.perf_counter()
        plan = scheduler.schedule()
        times.append(time.perf_counter() - start)
        if plan is None or len(scheduler.waiting) != num_waiting:
            raise RuntimeError("one sequence should run, and all others wait")
        scheduler.update(ModelOutput(0, plan.step, pack_tokens([1])))
    gc.unfreeze()
    return round(statistics.median(times[20:]) * 1e6, 1)


def _decode_step(num_requests: int) -> SchedulerOutput:
    scheduler = _scheduler(num_requests)
    plan = scheduler.schedule()
    while plan is not None and not all(isinstance(entry, Continue) for entry in plan.entries):
        scheduler.update(ModelOutput(0, plan.step, pack_tokens([1] * num_requests)))
        plan = scheduler.schedule()
    if plan is None:
        raise RuntimeError("the scheduler has nothing to do")
    return plan


def message_bytes(num_requests: int) -> int:
    """Length of the encoded SchedulerOutput of one step of `num_requests` decodes."""
    return len(engine_to_worker.encode(_decode_step(num_requests)))


def codec_us(num_requests: int) -> float:
    """Microseconds to encode and decode that message."""
    plan = _decode_step(num_requests)
    return _median_us(lambda: engine_to_worker.decode(engine_to_worker.encode(plan)), 500)


def block_alloc_free_us() -> float:
    """Microseconds of get_new_blocks() and free() per block, 64 blocks at a time."""
    pool = BlockPool(10_000)
    return round(_median_us(lambda: pool.free(reversed(pool.get_new_blocks(64))), 2000) / 64, 4)


def block_touch_free_us() -> float:
    """Microseconds of touch() and free() per evictable block, 64 blocks at a time."""
    pool = BlockPool(10_000)
    ids = pool.get_new_blocks(64)
    pool.free(ids)

    def action() -> None:
        pool.touch(ids)
        pool.free(ids)

    return round(_median_us(action, 2000) / 64, 4)


def _sequence(kv: KVCacheManager) -> Sequence:
    """A prompt of 4096 tokens."""
    message = Generate("r", pack_tokens(range(4096)), SamplingParams())
    sequence = Request(message, b"client", 10**6, frozenset()).sequences[0]
    kv.register(sequence)
    return sequence


def _admitted() -> tuple[KVCacheManager, Sequence]:
    """A manager, and a prompt of 4096 tokens whose blocks are allocated."""
    kv = _manager(1000)
    sequence = _sequence(kv)
    kv.admit(sequence, kv.no_hit(), 4096)
    return kv, sequence


def block_cache_us() -> float:
    """Microseconds per block to hash and index the full blocks of a prompt of 4096 tokens."""
    return round(_median_us(KVCacheManager.cache_blocks, 100, lambda: (*_admitted(), 4096)) / (4096 / BLOCK_SIZE), 4)


def lookup_4096_us() -> float:
    """Microseconds to hash a prompt of 4096 tokens and find all of its blocks in the cache."""
    kv, first = _admitted()
    kv.cache_blocks(first, 4096)
    return round(_median_us(kv.find_cached, 100, lambda: (_sequence(kv),)), 1)


BUDGETS: tuple[tuple[str, str, float], ...] = (
    ("import_s", "", 0.1),
    ("engine_ready_s", "", 0.5),
    ("client_rss_mb", "", 60.0),
    ("round_trip_us", "", 150.0),
    ("schedule_update_us", "256", 1000.0),
    ("message_bytes", "256", 4096.0),
    ("codec_us", "256", 150.0),
    ("block_alloc_free_us", "", 0.4),
    ("block_touch_free_us", "", 0.24),
)
"""Each entry has a figure's name, its size ("" if it has none) and its upper bound."""
MOST_WITH_DISK = 1.05
"""Upper bound of schedule_update_with_disk at every size."""


def table(figures: dict[str, Any]) -> str:
    """The figures beside their budgets."""
    lines = [f"{'figure':<28}{'measured':>12}{'budget':>12}"]
    for name, size, budget in BUDGETS:
        value = figures[name][size] if size else figures[name]
        label = f"{name} at {size}" if size else name
        lines.append(f"{label:<28}{value:>12g}{budget:>12g}  {'ok' if value < budget else 'OVER'}")
    per_request = {size: figures["schedule_update_us"][str(size)] / size for size in (SIZES[0], SIZES[-1])}
    ratio = per_request[SIZES[-1]] / per_request[SIZES[0]]
    lines.append(f"{'per request, 1024 over 16':<28}{ratio:>12.2f}{1.6:>12g}  {'ok' if ratio <= 1.6 else 'OVER'}")
    with_disk = max(figures["schedule_update_with_disk"].values())
    label = "with a KV cache on disk, over"
    lines.append(f"{label:<29}{with_disk:>11g}{MOST_WITH_DISK:>12g}  {'ok' if with_disk <= MOST_WITH_DISK else 'OVER'}")
    lines.append(f"cores: {os.cpu_count()}, Python {sys.version.split()[0]}")
    return "\n".join(lines)
