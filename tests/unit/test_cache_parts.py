"""The block manager composes parts and knows none of them: a third one joins in without a change of it."""

from collections.abc import Sequence as Many
from pathlib import Path

import pytest

import vllm_lite
from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.part import CachePart, Forgotten, Growth, PrefixHit
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.blocks.verdict import OK, Admission, Verdict
from vllm_lite.engine.sequence import Sequence
from vllm_lite.engine.states.slots import StateSlots
from vllm_lite.protocol.stats import Stats
from vllm_lite.protocol.step import Entry

PACKAGE = Path(vllm_lite.__file__).parent


class NotePart(CachePart[int]):
    """Keeps a note of each sequence that is on the device, of at most `room` at once, and of cached beginnings those
    that `has` a note."""

    keeps = False

    def __init__(self, room: int = 8, has: int = 10**9) -> None:
        self.pool = BlockPool(2)
        self.room, self.has = room, has
        self.notes: dict[Sequence, str] = {}
        self.is_stuck = False
        self.num_steps = self.num_published = self.num_reset = self.num_grown = 0
        self.searched: list[int] = []

    def begin_step(self) -> None:
        self.num_steps += 1

    def register(self, sequence: Sequence) -> None:
        assert sequence not in self.notes

    def search(self, sequence: Sequence) -> "NotePart":  # noqa: ARG002
        return self

    def longest(self, num_blocks: int) -> int:
        return min(num_blocks, self.has)

    def find(self, num_blocks: int) -> int:
        self.searched.append(num_blocks)
        return num_blocks

    def nothing(self) -> int:
        return 0

    def admission(self, sequence: Sequence, found: int, chunk: int) -> Admission:  # noqa: ARG002
        is_full = sum(how != "out" for how in self.notes.values()) >= self.room
        return Admission(Verdict.LATER, lacks="state") if is_full else OK

    def admit(self, sequence: Sequence, hit: PrefixHit, found: int, num_tokens: int) -> bool:  # noqa: ARG002
        assert found * 4 == hit.num_tokens
        assert sequence not in self.notes
        self.notes[sequence] = "in"
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> Growth:  # noqa: ARG002
        assert self.notes[sequence] == "in"
        self.num_grown += 1
        return Growth([])

    def publish(self, sequence: Sequence, first: int, last: int) -> None:
        assert self.notes[sequence] == "in"
        assert first < last
        self.num_published += last - first

    def can_fork(self, parent: Sequence, position: int, num_scheduled: int) -> bool:  # noqa: ARG002
        return len(self.notes) < self.room

    def fork(self, parent: Sequence, child: Sequence, num_scheduled: int) -> Many[Entry]:  # noqa: ARG002
        assert self.notes[parent] == "in"
        self.notes[child] = "in"
        return ()

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:  # noqa: ARG002
        self.notes.pop(sequence, None)

    def may_swap_out(self, sequence: Sequence) -> bool:  # noqa: ARG002
        return not self.is_stuck

    def swap_out(self, sequence: Sequence) -> bool:
        assert self.notes[sequence] == "in"
        self.notes[sequence] = "out"
        return True

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self.notes

    def holds_device(self, sequence: Sequence) -> bool:
        return self.notes.get(sequence) == "in"

    def push_out(self, sequence: Sequence) -> bool:
        was_in, self.notes[sequence] = self.notes[sequence] == "in", "out"
        return was_in

    def swap_in(self, sequence: Sequence, num_tokens: int, *, in_parts: bool = True) -> bool:  # noqa: ARG002
        self.notes[sequence] = "in"
        return True

    def reset(self) -> Forgotten:
        self.num_reset += 1
        return Forgotten()

    def count(self, stats: Stats) -> None:
        stats.num_deferred = len(self.notes)

    def check_integrity(self, sequences: Many[Sequence]) -> None:
        holders = {each for each in sequences if each.host_ids is not None or each.tables[0].ids}
        if holders != self.notes.keys():
            raise RuntimeError("notes are kept of other sequences than hold blocks")


def rig_with(part: NotePart, num_blocks: int = 20, **options: int | str) -> Rig:
    return Rig(num_blocks, more_parts=(part,), **options)  # type: ignore[arg-type]


def test_the_manager_does_not_know_its_parts_kinds() -> None:
    text = (PACKAGE / "engine/blocks/manager.py").read_text()
    assert [name for name in ("self.states", "host_tier", "disk_tier") if name in text] == []
    assert [line for line in text.splitlines() if "tails" in line and " if " in f" {line.strip()} "] == []


def test_a_third_part_lives_through_everything_with_the_sequences() -> None:
    part = NotePart()
    rig = rig_with(part, 9, num_host_blocks=40, preemption="swap")
    prompts = {f"r{number}": [number] * 8 for number in range(4)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 9)
    rig.add("samples", [7] * 6, 5, n=3)
    while rig.scheduler.requests:
        rig.step()  # each step checks that the part's notes are of those that hold blocks
        rig.kv.count()
        assert rig.kv.counters.num_deferred == len(part.notes)
    assert rig.scheduler.counters.swaps
    assert {name: rig.output(name) for name in prompts} == {n: expected(p, 9) for n, p in prompts.items()}
    assert part.num_steps
    assert part.num_published
    assert part.num_grown
    assert not part.notes
    rig.scheduler.reset_prefix_cache()
    assert part.num_reset == 1


def test_a_sequence_waits_for_the_part_that_has_no_room() -> None:
    part = NotePart(room=1)
    rig = rig_with(part)
    rig.add("first", [1] * 5, 3)
    rig.add("second", [2] * 5, 3)
    rig.step()
    assert list(part.notes.values()) == ["in"]
    assert [code for code, _ in rig.decisions].count("waits_for_state")
    rig.drain()
    assert rig.output("second") == expected([2] * 5, 3)


def test_a_hit_is_as_long_as_the_shortest_hit_of_a_part() -> None:
    part = NotePart(has=1)
    rig = rig_with(part)
    rig.add("first", [1] * 13, 1)
    rig.drain()
    part.searched.clear()
    again = rig.add("again", [1] * 13, 1)
    rig.step()
    assert part.searched == [1]
    assert again.num_cached_at_start == 4


def test_tokens_that_one_part_cannot_swap_are_computed_again() -> None:
    part = NotePart()
    part.is_stuck = True
    rig = rig_with(part, 9, num_host_blocks=40, preemption="swap")
    for number in range(4):
        rig.add(f"r{number}", [number] * 8, 9)
    rig.drain()
    assert rig.scheduler.counters.preemptions
    assert rig.scheduler.counters.swaps == 0


def test_a_part_that_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match="the cache has no StateSlots"):
        Rig().kv.part(StateSlots)
    with pytest.raises(LookupError, match="keeps nothing beside memory"):
        Rig().scheduler.stored_keys([], [])
    assert Rig().kv.part(KVBlocks).groups
