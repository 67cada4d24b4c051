"""Transfers: sends the disk tier's transfer messages to the workers, and their results to the scheduler.

Everything that affects decisions passes through calls of the scheduler, so that traces record it: ends of transfers,
changes of the tier's keys, late loads, and the load rate.
"""

from collections.abc import Callable, Iterator

from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.transfers import LoadBlocks, LoadEncoded, StoredKeys, TierUsage, Transferred

LEAST_PATIENCE_S = 1.0
PATIENCE = 3.0
"""A load is late when it has taken PATIENCE times as long as the mean of earlier ones, and longer than computing the
tokens would take: on a busy machine, where everything is slow, giving up earlier would only cost more time."""
WEIGHT = 0.3
"""Weight of the latest load in the mean rate."""
LAST_WRITES_S = 1.5
"""Seconds in which workers may still write ended chats before they are stopped or load other weights. A supervisor
stops an engine within 4 s, of which its workers may take 2."""
SLEEP_WRITES_S, STALLED_S = 60.0, 10.0
"""Seconds in which workers may still write before a sleep: in total, and since the last write that ended. Computing a
long chat again takes longer than writing it, and no supervisor waits."""
LEAST_MEASURED = 8
"""Minimum blocks of a load from which the rate is learned."""


class Transfers:
    """The transfers of one engine with a DiskTier."""

    def __init__(self, scheduler: Scheduler, tier: DiskTier, clock: Callable[[], float]) -> None:
        self.usage = TierUsage()
        """Latest counts reported by rank 0."""
        self._ended_s = 0.0
        """Time at which the latest transfer ended."""
        self._scheduler = scheduler
        self._tier = tier
        self._clock = clock
        self._executor: Executor | None = None
        self._loading: dict[int, tuple[int, float, float]] = {}
        """Ticket -> (number of items, time of sending, time from which it is late), of running loads."""

    @classmethod
    def of(cls, scheduler: Scheduler, clock: Callable[[], float]) -> "Transfers | None":
        """The transfers of the scheduler's disk tier, if it has one."""
        tier = scheduler.kv.optional_part(DiskTier)
        return None if tier is None else cls(scheduler, tier, clock)

    @property
    def is_writing(self) -> bool:
        """Whether KV or states of ended chats are not on disk yet."""
        return self.is_writing_blocks or self._tier.writes.has_states

    @property
    def is_writing_blocks(self) -> bool:
        """Whether KV of ended chats is not on disk yet; states that wait for the next step are left out."""
        return bool(self._tier.writes.num_writing or self._tier.writes.num_waiting)

    def last_writes(self, limit_s: float) -> Iterator[None]:
        """Yield while workers that are about to end should still write, for at most `limit_s` seconds."""
        began_s = now_s = self._clock()
        while self.is_writing_blocks and now_s <= min(began_s + limit_s, max(began_s, self._ended_s) + STALLED_S):
            yield
            now_s = self._clock()

    def receive(self, executor: Executor) -> None:
        """Read the workers' transfer results. Called in every pass of the engine's loop, before steps are scheduled."""
        if executor is not self._executor:  # new workers know nothing of earlier loads
            self._executor, self._loading = executor, {}
        for answer in executor.transferred():
            if isinstance(answer, StoredKeys):
                self.usage = answer.usage
                if answer.added or answer.removed:
                    self._scheduler.stored_keys(answer.added, answer.removed)
            else:
                self._ended(answer)
        now_s = self._clock()
        for ticket in [ticket for ticket, (_, _, late_s) in self._loading.items() if now_s > late_s]:
            del self._loading[ticket]
            self._scheduler.transfer_late(ticket)

    def send(self, executor: Executor) -> None:
        """Send transfer messages, after the steps that write their contents. Called after the pass has scheduled its
        steps; while scheduled steps are unsent, nothing is sent."""
        if self._scheduler.in_flight.num_unsent:
            return
        for message in self._tier.take_messages():
            if isinstance(message, LoadBlocks | LoadEncoded):
                now_s, count = self._clock(), len(message.keys) if isinstance(message, LoadBlocks) else 1
                self._loading[message.ticket] = count, now_s, now_s + self._patience_s(message.ticket, count)
            executor.transfer(message)

    def _patience_s(self, ticket: int, count: int) -> float:
        """Seconds that a load of `count` items may take."""
        rates, compute_s = self._scheduler.rates, 0.0
        if rates.prefill_tokens_per_s:
            compute_s = self._tier.num_tokens(ticket) / rates.prefill_tokens_per_s
        load_s = PATIENCE * count / rates.load_blocks_per_s if rates.load_blocks_per_s else 10 * LEAST_PATIENCE_S
        return max(LEAST_PATIENCE_S, load_s, compute_s)

    def _ended(self, answer: Transferred) -> None:
        self._ended_s = self._clock()
        sent = self._loading.pop(answer.ticket, None)
        if sent is not None and sent[0] >= LEAST_MEASURED and not answer.failed and answer.took_s > 0:
            rates, rate = self._scheduler.rates, sent[0] / answer.took_s
            known = rates.load_blocks_per_s
            mean = 1 / (WEIGHT / rate + (1 - WEIGHT) / known) if known else rate
            self._scheduler.measured(rates._replace(load_blocks_per_s=mean))
        self._scheduler.transferred(answer.ticket, answer.failed)
