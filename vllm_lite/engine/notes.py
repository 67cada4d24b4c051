"""Why the scheduler decided as it did: a code per decision, with its numbers. Without a listener nothing is made."""

from collections.abc import Callable

from vllm_lite.engine.blocks.manager import Admission
from vllm_lite.engine.sequence import Sequence

Note = Callable[[str, Sequence | None, dict[str, int | str]], None]
"""Told every decision: its code, the sequence it is about, and the numbers behind it."""


def came_in(note: Note | None, sequence: Sequence, admission: Admission, num_tokens: int, *, swapped: bool) -> None:
    """A waiting sequence runs now; a long one with a part of its tokens only."""
    if note is None:
        return
    numbers = {"tokens": num_tokens, "cached": sequence.num_cached, "blocks": admission.required}
    note("swapped_in" if swapped else "admitted", sequence, {**numbers})
    left = sequence.num_tokens - sequence.num_computed
    if left:
        note("chunked", sequence, {"tokens": num_tokens, "left": left})


def waits(note: Note | None, sequence: Sequence, admission: Admission) -> None:
    """It does not fit, or this step has moved enough blocks already."""
    if note is not None:
        need = {"need": admission.required, "free": admission.free, "watermark": admission.watermark}
        fits = admission.free - admission.required >= admission.watermark
        note("waits_for_swap" if fits else "waits_for_blocks", sequence, {**need})


def waits_for_budget(note: Note | None, sequence: Sequence, budget: int) -> None:
    """The step has too few tokens left for it."""
    if note is not None:
        note("waits_for_budget", sequence, {"budget": budget})


def queue_waits(note: Note | None, sequence: Sequence, budget: int, max_num_seqs: int) -> None:
    """The step has no seat or no budget left for the sequence whose turn it would be."""
    if note is not None:
        if budget > 0:
            note("waits_for_seat", sequence, {"seats": max_num_seqs})
        else:
            waits_for_budget(note, sequence, budget)
