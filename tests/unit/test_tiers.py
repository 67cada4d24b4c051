"""A slow tier: sequences whose blocks are being loaded are parked, and admitted when these have arrived."""

from collections.abc import Iterable
from collections.abc import Sequence as Many

import pytest

from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.tier import AT_HAND
from vllm_lite.protocol.step import BlockOp, SchedulerOutput


class SlowTier(HostTier):
    """A block that was written can be read again once it has been loaded, which takes three steps."""

    def __init__(self, num_blocks: int, first_id: int, enable_caching: bool = True) -> None:
        super().__init__(num_blocks, first_id, enable_caching)
        self.at_hand: set[int] = set()
        self.loading: dict[int, tuple[int, list[int]]] = {}
        self.num_begun = 0

    def reserve(self, keys: Many[bytes | None]) -> list[int]:
        ids = super().reserve(keys)
        self.at_hand -= set(ids)
        return ids

    def begin_load(self, ids: Iterable[int]) -> int:
        ids = list(ids)
        if self.at_hand >= set(ids):
            return AT_HAND
        self.num_begun += 1
        self.loading[self.num_begun] = 3, ids
        return self.num_begun

    def poll(self) -> list[int]:
        self.loading = {ticket: (left - 1, ids) for ticket, (left, ids) in self.loading.items()}
        ended = [ticket for ticket, (left, _) in self.loading.items() if not left]
        for ticket in ended:
            self.at_hand |= set(self.loading.pop(ticket)[1])
        return ended


class Slow:
    """A rig with a slow host tier. It is stepped while nothing runs, too, because arriving blocks wake the engine."""

    def __init__(self, num_blocks: int, **options: int | str) -> None:
        self.rig = Rig(num_blocks, host_tier=SlowTier, preemption="swap", **options)  # type: ignore[arg-type]
        assert isinstance(self.rig.host, SlowTier)
        self.tier = self.rig.host

    def drain(self) -> None:
        for _ in range(1000):
            if not self.rig.scheduler.requests:
                return
            for _ in range(4):
                if not self.rig.scheduler.in_flight:
                    self._submit(self.rig.scheduler.schedule())
            self.rig.step()
        raise AssertionError("requests are left that make no progress")

    def _submit(self, output: SchedulerOutput | None) -> None:
        if output is not None:
            self.check(output)
            self.rig.worker.submit(output)

    def check(self, output: SchedulerOutput) -> None:
        read = {src for op, src, _ in output.block_ops if op == BlockOp.SWAP_IN}
        assert read <= self.tier.at_hand, "a step reads blocks that are not there"


@pytest.mark.parametrize("max_swap_blocks", [2, 10**9])
@pytest.mark.parametrize("num_blocks", [7, 9, 12])
def test_swapped_sequences_continue_once_they_are_loaded(num_blocks: int, max_swap_blocks: int) -> None:
    slow = Slow(num_blocks, num_host_blocks=60, max_swap_blocks=max_swap_blocks)
    prompts = {f"r{number}": [number] * 8 for number in range(4)}
    for name, prompt in prompts.items():
        slow.rig.add(name, prompt, 9)
    slow.drain()
    assert slow.rig.scheduler.counters.swaps
    assert slow.tier.num_begun
    assert not slow.rig.blocks.swapping.loading
    assert {name: slow.rig.output(name) for name in prompts} == {n: expected(p, 9) for n, p in prompts.items()}


def test_a_cached_prefix_is_loaded_while_others_run() -> None:
    slow = Slow(12, num_host_blocks=40)
    rig = slow.rig
    rig.add("first", [1] * 17, 1)
    slow.drain()
    rig.add("other", [2] * 40, 1)  # evicts the first, which is demoted
    slow.drain()
    rig.add("runs", [3] * 4, 12)
    rig.step()
    again = rig.add("again", [1] * 17, 1)
    rig.step()
    assert again.sequences[0].host_ids is not None
    for _ in range(2):
        begun = len(rig.output("runs"))
        rig.step()
        assert len(rig.output("runs")) == begun + 1, "the others do not wait for what is loaded"
        assert ("waits_for_swap", {"need": 5, "free": 9, "watermark": 0}) in rig.decisions
        assert rig.kv.swap_in_admission(again.sequences[0], 16).is_arriving
    slow.drain()
    assert slow.tier.num_begun == 1
    assert again.num_cached_at_start == 16
    assert rig.output("again") == expected([1] * 17, 1)


def test_sequences_that_end_during_their_load_are_not_waited_for() -> None:
    slow = Slow(12, num_host_blocks=40)
    for name, token in (("first", 1), ("other", 2)):
        slow.rig.add(name, [token] * 40, 1)
        slow.drain()
    slow.rig.add("again", [1] * 40, 1)
    assert slow.rig.scheduler.schedule() is None
    assert slow.rig.blocks.swapping.loading
    slow.rig.abort("again")
    assert not slow.rig.blocks.swapping.loading
    slow.rig.scheduler.check_integrity()
    assert slow.tier.num_used == 0


def test_the_first_in_the_queue_takes_no_blocks_of_others_while_its_own_are_loaded() -> None:
    """Blocks of those that are parked behind it would not bring it in any sooner."""
    slow = Slow(12, num_host_blocks=60)
    for name, token in (("first", 1), ("other", 2)):
        slow.rig.add(name, [token] * 40, 1)
        slow.drain()
    slow.rig.add("again", [1] * 24, 1)
    asked: list[object] = []
    reclaim = slow.rig.kv.reclaim
    slow.rig.kv.reclaim = lambda keep=None: asked.append(keep) or reclaim(keep)  # type: ignore[method-assign,func-returns-value]
    for _ in range(2):
        assert slow.rig.scheduler.schedule() is None
    assert asked == []
    slow.drain()
    assert slow.rig.output("again") == expected([1] * 24, 1)
