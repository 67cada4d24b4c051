"""The engine's end of transfers: how long it waits for a load, and when it computes instead."""

from typing import cast

import pytest

from tests.disk_rig import PROMPT, DiskRig, loading
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.transfers import LEAST_PATIENCE_S, SLEEP_WRITES_S, STALLED_S, Transfers
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.transfers import LoadBlocks, StoreBlocks, Transfer, TransferAnswer, Transferred


class Silent:
    """An executor that takes transfers and answers none."""

    def __init__(self) -> None:
        self.sent: list[Transfer] = []

    def transfer(self, message: Transfer) -> None:
        self.sent.append(message)

    def transferred(self) -> list[TransferAnswer]:
        return []


class Stage:
    """A scheduler that waits for a load, with transfers whose clock the test sets."""

    def __init__(self, rates: Rates) -> None:
        self.now_s = 0.0
        self.rig: DiskRig = loading()
        self.rig.scheduler.rates = rates
        (self.load,) = self.rig.loads
        self.transfers = Transfers(self.rig.scheduler, self.rig.tier, lambda: self.now_s)
        self.silent = Silent()
        self.executor = cast("Executor", self.silent)
        self.transfers.receive(self.executor)
        self.rig.tier.writes.messages.append(self.load)  # it was taken when it was begun
        self.transfers.send(self.executor)
        assert self.silent.sent == [self.load]

    def waits_at(self, now_s: float) -> bool:
        self.now_s = now_s
        self.transfers.receive(self.executor)
        return bool(self.rig.tier._waits)


NUM_ITEMS, NUM_TOKENS = 7, 28


@pytest.mark.parametrize(
    ("rates", "patience_s"),
    [
        (Rates(), 10 * LEAST_PATIENCE_S),
        (Rates(load_blocks_per_s=1e6, prefill_tokens_per_s=1e6), LEAST_PATIENCE_S),
        (Rates(load_blocks_per_s=NUM_ITEMS / 2, prefill_tokens_per_s=1e6), 6.0),
        (Rates(load_blocks_per_s=NUM_ITEMS / 2, prefill_tokens_per_s=NUM_TOKENS / 50), 50.0),
    ],
    ids=["unknown", "least", "three times a load", "as long as computing"],
)
def test_a_load_is_late_when_neither_it_nor_computing_would_take_so_long(rates: Rates, patience_s: float) -> None:
    stage = Stage(rates)
    assert isinstance(stage.load, LoadBlocks)
    assert (len(stage.load.keys), stage.rig.tier.num_tokens(stage.load.ticket)) == (NUM_ITEMS, NUM_TOKENS)
    assert stage.waits_at(0.99 * patience_s)
    assert not stage.waits_at(1.01 * patience_s)


class Slow(Silent):
    """A disk that has written one run whenever it is asked, if it writes at all."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self._writes = writes

    def transferred(self) -> list[TransferAnswer]:
        stores = [message for message in self.sent if isinstance(message, StoreBlocks)]
        if not stores or not self._writes:
            return []
        self.sent.remove(stores[0])
        return [Transferred(0, 1, stores[0].ticket, (), 1, 1.0)]


@pytest.mark.parametrize(
    ("every_s", "writes", "ends_s", "is_whole"),
    [
        (0.7 * STALLED_S, True, 8 * 0.7 * STALLED_S, True),
        (0.9 * STALLED_S, True, SLEEP_WRITES_S, False),
        (0.1 * STALLED_S, False, STALLED_S, False),
    ],
    ids=["to the end", "not for ever", "no longer than it writes"],
)
def test_workers_that_are_to_sleep_write_as_long_as_they_get_on(
    every_s: float, writes: bool, ends_s: float, is_whole: bool
) -> None:
    rig, now_s = DiskRig(), 0.0
    transfers = Transfers(rig.scheduler, rig.tier, lambda: now_s)
    slow = Slow(writes=writes)
    executor = cast("Executor", slow)
    rig.holds = True
    rig.add("a", PROMPT)
    while rig.scheduler.requests:
        rig.step()
    slow.sent, rig.pending = rig.pending, []
    for _ in transfers.last_writes(SLEEP_WRITES_S):
        now_s += every_s
        transfers.receive(executor)
        transfers.send(executor)
    assert ends_s <= now_s <= ends_s + 1.01 * every_s
    assert transfers.is_writing_blocks is not is_whole
