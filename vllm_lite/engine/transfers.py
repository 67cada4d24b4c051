"""Transfers: sends workers what the disk tier wants moved, and the scheduler what has become of it.

Whatever the scheduler decides by goes through its own calls, so that a trace has it: ends of transfers, contents that
have come or gone, a load that is late, and the rate at which loads run.
"""

from collections.abc import Callable, Iterator

from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.transfers import LoadBlocks, LoadEncoded, StoredKeys, TierUsage, Transferred

LEAST_PATIENCE_S = 1.0
PATIENCE = 3.0
"""A load is late when it has taken this many times as long as the last ones did, and as long as computing would: who
gives up sooner on a busy machine, where all is slow, waits longer for it."""
WEIGHT = 0.3
"""The share of the latest load in the mean rate."""
LAST_WRITES_S = 1.5
"""How long workers that are to end, also for other weights, still get chats that have ended to write. Who stops an
engine waits for 4 s, of which its workers may take 2."""
SLEEP_WRITES_S, STALLED_S = 60.0, 10.0
"""How long workers that are to end for a sleep still get to write, at most and since they last wrote something: to
compute a long chat again takes longer than to write it, and no supervisor counts the seconds."""
LEAST_MEASURED = 8
"""Loads of fewer blocks do not show the rate."""


class Transfers:
    """Belongs to one engine whose scheduler has a DiskTier."""

    def __init__(self, scheduler: Scheduler, tier: DiskTier, clock: Callable[[], float]) -> None:
        self.usage = TierUsage()
        """The latest counts of rank 0."""
        self._ended_s = 0.0
        """When the latest transfer ended."""
        self._scheduler = scheduler
        self._tier = tier
        self._clock = clock
        self._executor: Executor | None = None
        self._loading: dict[int, tuple[int, float, float]] = {}
        """By ticket: the number of items, when it was sent, and when it is late."""

    @classmethod
    def of(cls, scheduler: Scheduler, clock: Callable[[], float]) -> "Transfers | None":
        """Return the transfers of the scheduler's disk tier, if it has one."""
        tier = scheduler.kv.optional_part(DiskTier)
        return None if tier is None else cls(scheduler, tier, clock)

    @property
    def is_writing(self) -> bool:
        """Whether anything that has ended is not on disk yet."""
        return self.is_writing_blocks or self._tier.writes.has_states

    @property
    def is_writing_blocks(self) -> bool:
        """As `is_writing`, but for states that a step has to find first."""
        return bool(self._tier.writes.num_writing or self._tier.writes.num_waiting)

    def last_writes(self, limit_s: float) -> Iterator[None]:
        """Yield as long as workers that are to end are to go on writing: for `limit_s` at most."""
        began_s = now_s = self._clock()
        while self.is_writing_blocks and now_s <= min(began_s + limit_s, max(began_s, self._ended_s) + STALLED_S):
            yield
            now_s = self._clock()

    def receive(self, executor: Executor) -> None:
        """Take what workers say. To be called in every pass of the engine's loop, before steps are made."""
        if executor is not self._executor:  # others know nothing of what was being loaded
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
        """Send what is to be moved, behind the steps that contents come from. To be called when no step is made any
        more; steps that wait for others to travel with them are sent first."""
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
