"""StatsLog: a line of statistics in the engine's log every few seconds while there are requests, and one after them.

The engine writes it, not the HTTP server, so that each engine has one line, whatever its number of API servers. The
wording is vLLM's, which operators and scripts look for. A step costs one comparison, `now_s >= due_s`; the rest is read
when a line is due.
"""

from collections import abc, deque
from math import inf
from typing import NamedTuple

from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.request import Request
from vllm_lite.runtime import log

NUM_HIT_LINES = 60
"""Number of lines whose prompts the prefix cache hit rate covers: ten minutes, at a line every ten seconds."""

logger = log.get(__name__)


class _Totals(NamedTuple):
    """Counters since the engine's start; a line shows their increase."""

    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0


class StatsLog:
    """`due_s` is the time of the next call of write(), by the caller's clock; infinity if lines are turned off.

    `owes` is True until a line has reported that nothing runs.
    """

    def __init__(self, interval_s: float | None, device: str) -> None:
        """`interval_s`: seconds between two lines; None: no lines. `device`, cpu or cuda, holds the KV cache."""
        self.due_s = inf if interval_s is None else -inf
        self.owes = False
        self._interval_s = interval_s or inf
        self._kv_name = "GPU" if device == "cuda" else device.upper()
        self._from_s: float | None = None
        """Start of the interval that the next line covers."""
        self._totals = _Totals()
        self._hits: deque[tuple[int, int]] = deque(maxlen=NUM_HIT_LINES)
        """(tokens looked up in the prefix cache, tokens found) per line."""

    def write(self, core: EngineCore, now_s: float) -> None:
        """Write a line, unless the engine has been idle since the previous one, which has reported that."""
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
        """Parts of a line about `took_s` seconds; `num_reqs`: (running, waiting) at their end."""
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
    """Prompt tokens of admitted requests, which the counters include, that are still to be computed."""
    began = [request for request in requests if request.num_cached_at_start is not None]
    return sum(
        max(0, request.num_prompt - request.sequences[0].num_computed)
        for request in began
        if request.first_token_s is None and request.sequences
    )
