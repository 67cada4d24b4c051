"""Drafts of forced tokens beside sequences without drafts.

Drafts of all sequences under all other events are in test_scheduler_features.py, test_scheduler_fairness.py and
test_scheduler_properties.py.
"""

import pytest

from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.sequence import Sequence, Status
from vllm_lite.protocol.step import Continue, Draft, SchedulerOutput


def test_sequences_with_grammars_draft_beside_others_and_keep_two_steps_in_flight() -> None:
    plain, jumping = Rig(num_blocks=60, depth=2), Rig(num_blocks=60, depth=2, num_forced=4, max_num_batched_tokens=64)
    for rig in (plain, jumping):
        rig.add("free", [1, 2, 3], max_tokens=30)
        rig.add("guided", [4, 5, 6], max_tokens=30, grammar="any")
        for _ in range(6):
            rig.step()
        assert len(rig.scheduler.in_flight) == 1, "of two, one has its result"
        rig.drain()
    for name in ("free", "guided"):
        assert jumping.output(name) == plain.output(name)
    assert 0 < jumping.worker.num_accepted < jumping.worker.num_drafted
    assert plain.worker.num_drafted == 0
    assert jumping.scheduler.counters.steps <= plain.scheduler.counters.steps


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_only_sequences_with_grammars_draft_without_speculation(depth: int) -> None:
    rig = Rig(num_blocks=60, depth=depth, num_forced=4, max_num_batched_tokens=64)
    free = rig.add("free", [1, 2, 3], max_tokens=12)
    guided = rig.add("guided", [4, 5, 6], max_tokens=12, grammar="any")
    handles = {}
    drafted: dict[int, int] = {}

    def see(step: SchedulerOutput) -> None:
        for request in (free, guided):
            handles.update({sequence.handle: request for sequence in request.sequences if sequence.handle >= 0})
        for entry in step.entries:
            if isinstance(entry, Draft):
                drafted[entry.handle] = max(drafted.get(entry.handle, 0), entry.max_drafts)

    rig.watch(see)
    rig.drain()
    assert [(handles[handle], most) for handle, most in drafted.items()] == [(guided, 4)]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_step_samples_no_more_rows_than_workers_have_memory_for(depth: int) -> None:
    """The first sequences draft as many tokens as they may, and later ones the rest."""
    rig = Rig(num_blocks=60, depth=depth, num_forced=4, max_samples=9, max_num_batched_tokens=64)
    for index in range(3):
        rig.add(f"r{index}", [1, 2, index], max_tokens=14, grammar="any")
    rows: list[list[int]] = []

    def see(step: SchedulerOutput) -> None:
        decodes = [each for each in step.entries if isinstance(each, Draft | Continue)]
        rows.append([1 + (each.max_drafts if isinstance(each, Draft) else 0) for each in decodes])

    rig.watch(see)
    rig.drain()
    assert [5, 3, 1] in rows
    assert max(map(sum, rows)) == 9
    for index in range(3):
        assert rig.output(f"r{index}") == expected([1, 2, index], 14)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_drafts_in_flight_are_computed_again_if_their_sequence_has_to_go(preemption: str, window: int | None) -> None:
    """Only the workers know these drafts, and the number of accepted ones is unknown at that time."""
    options = {"depth": 3, "num_forced": 4, "max_num_batched_tokens": 64, "preemption": preemption}
    rig = Rig(14, windows=(None, window), num_host_blocks=40, **options)  # type: ignore[arg-type]
    lost = []
    roll_back = Sequence.roll_back_drafts

    def watched(sequence: Sequence, count: int) -> None:
        lost.append(sequence.status in (Status.PREEMPTED, Status.SWAPPED))
        roll_back(sequence, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "roll_back_drafts", watched)
        for index in range(3):
            rig.add(f"r{index}", [1, 2, index], max_tokens=14, grammar="any")
        rig.drain()
    assert any(lost)
    assert not all(lost)
    for index in range(3):
        assert rig.output(f"r{index}") == expected([1, 2, index], 14)
