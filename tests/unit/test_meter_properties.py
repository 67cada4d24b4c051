"""Measurements of the engine while everything happens that can: counters only rise, and every request ends once."""

import random
from typing import Any

import pytest

from tests.recorded import Recorded
from vllm_lite.engine.request import Request
from vllm_lite.protocol.stats import RequestHistograms, Stats

GAUGES = {
    *("num_running", "num_waiting", "num_blocks", "num_used_blocks", "num_cached_blocks"),
    *("num_host_blocks", "num_used_host_blocks", "ended_by", "requests", "blocks"),
    *("life", "generation", "recovering", "restarts", "expert_tokens"),
    *("is_paused", "sleep_level", "model", "running_adapters", "waiting_adapters"),
    *("num_deferred", "drafts_by", "disk"),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("settings", [{}, {"num_host_blocks": 10, "preemption_mode": "swap"}, {"windows": (8, None)}])
def test_nothing_that_is_counted_ever_falls(settings: dict[str, Any], seed: int) -> None:
    """Forks, beams, preemptions, failures, deadlines; and every request that came has ended once, or was replaced."""
    recorded = Recorded(None, **settings)
    loop, before = recorded.loop, list[float]()
    withdraw, withdrawn = recorded.scheduler.queues.withdraw, list[Request]()

    def counted_withdraw(request: Request, *, is_replaced: bool) -> None:
        withdraw(request, is_replaced=is_replaced)
        withdrawn.append(request)

    recorded.scheduler.queues.withdraw = counted_withdraw  # type: ignore[method-assign]

    def checked_loop(fail: bool = False) -> bool:
        more = loop(fail)
        stats = recorded.core.stats()
        measured = stats.requests
        assert measured is not None
        now = [getattr(stats, name) for name in Stats.__struct_fields__ if name not in GAUGES]
        for name in RequestHistograms.__struct_fields__:
            histogram = getattr(measured, name)
            now += [*histogram.counts, histogram.sum]
        assert all(later >= earlier - 1e-6 for earlier, later in zip(before, now, strict=False))
        before[:] = now
        num_ended = recorded.scheduler.queues.num_arrived - len(recorded.scheduler.requests) - len(withdrawn)
        assert sum(stats.ended_by.values()) == sum(measured.whole_s.counts) == sum(measured.queue_s.counts) == num_ended
        assert stats.cached_tokens <= stats.prompt_tokens
        assert 0 <= stats.prompt_tokens + stats.generated_tokens - measured.gained_tokens.sum <= stats.prompt_tokens
        return more

    recorded.loop = checked_loop  # type: ignore[method-assign]
    recorded.random_work(random.Random(seed), 40)
    recorded.drain()
