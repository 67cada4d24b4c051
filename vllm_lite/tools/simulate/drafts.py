"""Drafts as they were in a recording: for each request, how many tokens each of its steps drafted, and how many were
right. A simulated request goes on like one of the recorded ones, from a random step of it."""

import random
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_lite.protocol.step import Handle

MAX_HISTORIES, MAX_STEPS = 512, 128
"""More are not kept."""

Count = Annotated[int, Meta(ge=0, le=1024)]


class DraftStep(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens that were drafted for a sequence in a step, and the first ones of them that were right. `is_cut`: more
    were not allowed, so that nobody knows how many there would have been."""

    made: Count
    right: Count
    is_cut: bool = False


History = Annotated[list[DraftStep], Meta(min_length=1, max_length=MAX_STEPS)]


def kept(histories: Iterable[Sequence[DraftStep]]) -> list[list[DraftStep]]:
    """The histories that a fitted file has, of these."""
    some = [list(each[:MAX_STEPS]) for each in histories if each]
    return some[:: max(1, -(-len(some) // MAX_HISTORIES))]


class DraftDraws:
    """Draws the drafts of an engine's sequences. The same seed draws the same."""

    def __init__(self, histories: Sequence[Sequence[DraftStep]], rng: random.Random) -> None:
        self._histories = histories
        self._random = rng
        self._places: dict[Handle, tuple[Sequence[DraftStep], int]] = {}

    def begin(self, handle: Handle) -> None:
        """A sequence that has not drafted takes the place of the one before it with this handle."""
        self._places.pop(handle, None)

    def draw(self, handle: Handle, most: int) -> tuple[int, int]:
        """The next drafts of a sequence, of which it may make `most`: how many are made, and how many right."""
        if not self._histories:
            return 0, 0
        if handle not in self._places:
            history = self._random.choice(self._histories)
            self._places[handle] = history, self._random.randrange(len(history))
        history, place = self._places[handle]
        self._places[handle] = history, (place + 1) % len(history)
        step = history[place]
        made, right = most if step.is_cut else min(step.made, most), min(step.right, most)
        if step.right == step.made < made:  # what was not drafted is right with the odds of the others
            odds = _odds(history)
            while right < made and self._random.random() < odds:
                right += 1
        return made, right


def _odds(history: Sequence[DraftStep]) -> float:
    """The chance that a draft is right where those before it were."""
    right, wrong = sum(step.right for step in history), sum(step.right < step.made for step in history)
    return (right + 1) / (right + wrong + 2)
