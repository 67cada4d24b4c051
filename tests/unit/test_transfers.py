"""The engine's end of transfers: how long it waits for a load, and when it computes instead."""

from typing import cast

import pytest

from tests.disk_rig import DiskRig, loading
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.transfers import LEAST_PATIENCE_S, Transfers
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.transfers import LoadBlocks, Transfer, TransferAnswer


class Silent:
    """An executor that takes transfers and answers none."""

    def __init__(self) -> None:
        self.sent: list[Transfer] = []

    def transfer(self, message: Transfer) -> None:
        self.sent.append(message)

    def transferred(self) -> list[TransferAnswer]:
        return []


class Stage:
    """A scheduler that waits for a load, behind transfers whose clock the test sets."""

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
