"""Replays the segments of a trace, with a callback for each step."""

from collections.abc import Callable

from vllm_lite.engine.observe.replay import Replay
from vllm_lite.protocol.stats import Stats
from vllm_lite.trace.segments import segment_paths


def walk(path: str, on_step: Callable[[Replay], None], on_end: Callable[[Replay], None]) -> str:
    """Replay the trace at `path` and its later segments. `on_step` is called after each step, `on_end` at the end of
    each segment. Returns a sentence on why the end of the trace was not reached, or "". Raises ProtocolError for a
    damaged file, or one that is not a trace."""
    troubles = []
    for each in segment_paths(path):
        replay = Replay(each).run(on_step=on_step)
        if replay.divergence is None:
            on_end(replay)
        troubles += [f"{each}: {text}" for text in _troubles(replay)]
        if replay.divergence is not None:
            break
    return "; ".join(troubles)


def _troubles(replay: Replay) -> list[str]:
    if replay.divergence is not None:
        step, what = replay.divergence.step, replay.divergence.what
        return [f"this version decides otherwise from step {step} on ({what}), so what comes behind it is not shown"]
    return ["the trace ends within a record; its writer did not end in peace"] if replay.reader.cut_off else []


def stats_of(replay: Replay) -> Stats:
    """The engine's counters and gauges, like EngineCore.stats()."""
    scheduler = replay.scheduler
    stats = scheduler.meter.stats(scheduler.meter.now_s)
    stats.num_running, stats.num_waiting = len(scheduler.running), scheduler.queues.num_waiting
    stats.life, stats.generation = replay.reader.header.life, scheduler.generation
    stats.recovering = "" if scheduler.has_workers else "the workers had died or been ended"
    return stats
