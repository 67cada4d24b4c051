"""StatsLog: a line of statistics in the engine's log every few seconds while there are requests, and one behind them.

The engine writes it, not the HTTP server: there is one line for each engine, however many API servers it has. The words
are vLLM's, which operators and their scripts look for. A step pays for one comparison, `now_s >= due_s`; everything
else is read when a line is due.
"""

from collections import abc, deque
from math import inf
from typing import NamedTuple

from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.request import Request
from vllm_lite.runtime import log

NUM_HIT_LINES = 60
"""The prefix cache's hit rate is that of the prompts of so many lines: ten minutes, at a line every ten seconds."""

logger = log.get(__name__)


class _Totals(NamedTuple):
    """Counters since the engine's start; a line shows what they grew by."""

    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0


class StatsLog:
    """`due_s` is when write() is to be called next, by the clock of its caller; infinity if there are to be no lines.

    `owes` is True while the last line does not say yet that nothing runs and nothing is computed.
    """

    def __init__(self, interval_s: float | None, device: str) -> None:
        """`interval_s` lies between two lines; None: there are none. `device`, cpu or cuda, holds the KV cache."""
        self.due_s = inf if interval_s is None else -inf
        self.owes = False
        self._interval_s = interval_s or inf
        self._kv_name = "GPU" if device == "cuda" else device.upper()
        self._from_s: float | None = None
        """When the time began that the next line is about."""
        self._totals = _Totals()
        self._hits: deque[tuple[int, int]] = deque(maxlen=NUM_HIT_LINES)
        """Tokens looked up in the prefix cache and tokens found, of each line."""

    def write(self, core: EngineCore, now_s: float) -> None:
        """Write a line, unless the engine was idle since the one before, which has said so."""
        from_s, self._from_s, self.due_s = self._from_s, now_s, now_s + self._interval_s
        if from_s is None:
            return
        stats = core.stats()
        totals = _Totals(
            stats.prompt_tokens - stats.cached_tokens - _num_uncomputed(core.scheduler.requests.values()),
            stats.generated_tokens,
            stats.preemptions,
            stats.cache_queries,
            stats.cached_tokens,
        )
        grown = _Totals(*(new - old for new, old in zip(totals, self._totals, strict=True)))
        self._totals = totals
        is_busy = bool(core.scheduler.requests or grown.computed_prompt_tokens > 0 or grown.generated_tokens)
        if not is_busy and not self.owes:
            return
        self.owes = is_busy
        if grown.cache_queries:
            self._hits.append((grown.cache_queries, grown.cache_hits))
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        logger.info("%s", ", ".join(self._parts(grown, now_s - from_s, (stats.num_running, stats.num_waiting), usage)))

    def _parts(self, grown: _Totals, took_s: float, num_reqs: tuple[int, int], usage: float) -> list[str]:
        """The parts of a line about `took_s` seconds, at the end of which (running, waiting) are `num_reqs`."""
        parts = [
            f"Avg prompt throughput: {max(0, grown.computed_prompt_tokens) / took_s:.1f} tokens/s",
            f"Avg generation throughput: {grown.generated_tokens / took_s:.1f} tokens/s",
            f"Running: {num_reqs[0]} reqs",
            f"Waiting: {num_reqs[1]} reqs",
        ]
        if grown.preemptions:
            parts.append(f"Preemptions: {grown.preemptions}")
        parts.append(f"{self._kv_name} KV cache usage: {usage:.1%}")
        if num_queries := sum(queries for queries, _ in self._hits):
            parts.append(f"Prefix cache hit rate: {sum(hits for _, hits in self._hits) / num_queries:.1%}")
        return parts


def _num_uncomputed(requests: abc.Iterable[Request]) -> int:
    """Prompt tokens that the counters have, since their requests were admitted, and that are still to be computed."""
    began = [request for request in requests if request.num_cached_at_start is not None]
    return sum(
        max(0, request.num_prompt - request.sequences[0].num_computed)
        for request in began
        if request.first_token_s is None and request.sequences
    )
