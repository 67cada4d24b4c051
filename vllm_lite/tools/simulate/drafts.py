"""Drafts as they were in a recording: for each token of an answer, whether a draft of it was right.

That depends on the token's place: an answer begins with what nobody could know, and many repeat themselves later. So a
simulated request has the drafts of a recorded answer, each at its place. The real scheduler says how many it may make,
which need not be as many as in the recording.
"""

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from vllm_lite.protocol.step import Handle

MAX_HISTORIES, MAX_TOKENS = 512, 1024
"""More are not kept."""
LONGEST = 4
"""Most tokens that n-grams are looked up by: the default of `prompt_lookup_max`."""

RIGHT, WRONG, NOTHING, STOPPED, UNKNOWN = "r", "w", "-", ".", "?"
"""Characters of a history. A draft of the token was right; it was wrong, and as many were made as were allowed; the
drafter found nothing; it found no more behind the drafts before; it was not asked. A digit instead of WRONG: so many
drafts were made from this one on."""
MOST_MADE = 9

History = Annotated[str, Meta(min_length=1, max_length=MAX_TOKENS, pattern=r"^[-rw.?1-9]*$")]
"""A character for each token of an answer."""


class DraftStep(NamedTuple):
    """A step that let an answer of `at` tokens draft. It made `made` drafts, of which the first `right` were right.
    `is_cut`: no more were allowed, so nobody knows how many there would have been."""

    at: int
    made: int
    right: int
    is_cut: bool


def history(steps: Iterable[DraftStep], tokens: Sequence[int], method: str) -> str:
    """The history of an answer. Where no step drafted, it still shows what n-grams would have found in the answer."""
    known = _looked_up(tokens) if method == "ngram" else [UNKNOWN] * len(tokens)
    for at, made, all_right, is_cut in steps:
        right = min(all_right, len(known) - at)  # an answer may end within its drafts
        known[at : at + right] = RIGHT * right
        if at + right == len(known) or (right == made and is_cut):
            continue
        if right < made:
            known[at + right] = WRONG if is_cut else str(min(made - right, MOST_MADE))
        else:
            known[at + right] = STOPPED if made else NOTHING
    return "".join(known[:MAX_TOKENS])


def _looked_up(tokens: Sequence[int]) -> list[str]:
    """For each token: the draft that followed the last tokens before it at their latest occurrence in the answer."""
    known, behind = list[str](), dict[tuple[int, ...], int]()
    for place, token in enumerate(tokens):
        before = [tuple(tokens[place - count : place]) for count in range(min(LONGEST, place), 0, -1)]
        found = next((behind[each] for each in before if each in behind), None)
        known.append(NOTHING if found is None else RIGHT if found == token else WRONG)
        behind.update(dict.fromkeys(before, token))
    return known


def kept(histories: Iterable[str]) -> list[str]:
    """The histories that a fitted file has, of these."""
    some = [each for each in histories if each]
    return some[:: max(1, -(-len(some) // MAX_HISTORIES))]


class DraftDraws:
    """Draws the drafts of an engine's sequences. The same seed draws the same."""

    def __init__(self, histories: Sequence[str], rng: random.Random, *, in_order: bool = False) -> None:
        """`in_order`: requests have the histories one after the other; otherwise each has a random one."""
        self._histories = histories
        self._by_length = sorted(histories, key=len)
        self._lengths = [len(each) for each in self._by_length]
        self._random = rng
        self._in_order = in_order
        self._count = 0
        self._chosen: dict[Handle, tuple[str, int, float]] = {}
        """Each sequence's history, the tokens of its prompt, and the odds that a draft is right."""

    def begin(self, handle: Handle, num_prompt: int) -> None:
        """Choose the history of a sequence, which takes the place of the one before it with this handle."""
        if self._histories:
            place = self._count if self._in_order else self._random.randrange(len(self._histories))
            chosen = self._histories[place % len(self._histories)]
            self._chosen[handle] = chosen, num_prompt, _odds(chosen)
            self._count += 1

    def fork(self, child: Handle, parent: Handle) -> None:
        """Choose the history of a sequence with the prompt of another."""
        if parent in self._chosen:
            self.begin(child, self._chosen[parent][1])

    def draw(self, handle: Handle, num_tokens: int, most: int) -> tuple[int, int]:
        """The next drafts of a sequence that has so many tokens and may make `most`: the number that are made, and of
        those that are right."""
        if handle not in self._chosen:
            return 0, 0
        history, num_prompt, odds = self._chosen[handle]
        if num_tokens - num_prompt >= len(history):
            history, num_prompt, odds = self._chosen[handle] = self._longer(num_tokens - num_prompt, num_prompt)
        for right in range(most):
            kind = _at(history, num_tokens - num_prompt + right)
            if kind == UNKNOWN or (kind == STOPPED and not right):
                kind = RIGHT if self._random.random() < odds else WRONG
            if kind in (NOTHING, STOPPED):
                return right, right
            if kind != RIGHT:
                return most if kind == WRONG else min(most, right + int(kind)), right
        return most, most

    def _longer(self, place: int, num_prompt: int) -> tuple[str, int, float]:
        """Choose a history for an answer that is longer than its own: a random one that has `place`, or else the
        longest."""
        first = min(bisect_right(self._lengths, place), len(self._lengths) - 1)
        chosen = self._by_length[self._random.randrange(first, len(self._lengths))]
        return chosen, num_prompt, _odds(chosen)


def _at(history: str, place: int) -> str:
    """The character of a history for a token. Behind its end, its second half repeats."""
    length = len(history)
    if place < length:
        return history[place]
    half = (length + 1) // 2
    return history[length - half + (place - length) % half] if length else NOTHING


def _odds(history: str) -> float:
    """The chance that a draft is right where those before it were."""
    right = history.count(RIGHT)
    wrong = sum(each == WRONG or each.isdigit() for each in history)
    return (right + 1) / (right + wrong + 2)
