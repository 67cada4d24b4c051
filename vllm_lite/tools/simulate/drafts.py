"""Recorded drafts: for each token of an answer, whether a draft of it was right.

That depends on the token's position: nobody can predict the beginning of an answer, while many answers repeat
themselves later. So a simulated request has the drafts of a recorded answer, each at its position. The real scheduler
decides how many it may make, which may differ from the recording.
"""

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from vllm_lite.protocol.step import Handle

MAX_HISTORIES, MAX_TOKENS = 512, 1024
"""Limits of stored histories, and of tokens in each."""
LONGEST = 4
"""Maximum tokens by which n-grams are looked up: the default of `prompt_lookup_max`."""

RIGHT, WRONG, NOTHING, STOPPED, UNKNOWN = "r", "w", "-", ".", "?"
"""Characters of a history. RIGHT: the draft of this token was right. WRONG: it was wrong, and as many drafts were made
as were allowed. NOTHING: the drafter found nothing. STOPPED: it found nothing after earlier drafts of the step.
UNKNOWN: it was not asked. A digit: the draft was wrong; the digit is the number of drafts from this token on."""
MOST_MADE = 9

History = Annotated[str, Meta(min_length=1, max_length=MAX_TOKENS, pattern=r"^[-rw.?1-9]*$")]
"""A character for each token of an answer."""


class DraftStep(NamedTuple):
    """Drafts of a step after `at` tokens of an answer. It made `made` drafts, of which the first `right` were right.
    `is_cut`: it made as many as were allowed, so it might have made more."""

    at: int
    made: int
    right: int
    is_cut: bool


def history(steps: Iterable[DraftStep], tokens: Sequence[int], method: str) -> str:
    """The history of an answer. For tokens without recorded drafts, the method "ngram" is simulated on the answer
    itself."""
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
    """For each token: whether the token that followed at the latest occurrence of the tokens before it is the same."""
    known, behind = list[str](), dict[tuple[int, ...], int]()
    for place, token in enumerate(tokens):
        before = [tuple(tokens[place - count : place]) for count in range(min(LONGEST, place), 0, -1)]
        found = next((behind[each] for each in before if each in behind), None)
        known.append(NOTHING if found is None else RIGHT if found == token else WRONG)
        behind.update(dict.fromkeys(before, token))
    return known


def kept(histories: Iterable[str]) -> list[str]:
    """The histories to store in a fitted file: an even selection of these."""
    some = [each for each in histories if each]
    return some[:: max(1, -(-len(some) // MAX_HISTORIES))]


class DraftDraws:
    """Draws the drafts of an engine's sequences, depending on the seed."""

    def __init__(self, histories: Sequence[str], rng: random.Random, *, in_order: bool = False) -> None:
        """`in_order`: requests get the histories in turn; otherwise each gets a random one."""
        self._histories = histories
        self._by_length = sorted(histories, key=len)
        self._lengths = [len(each) for each in self._by_length]
        self._random = rng
        self._in_order = in_order
        self._count = 0
        self._chosen: dict[Handle, tuple[str, int, float]] = {}
        """Each sequence's history, number of prompt tokens, and odds that a draft is right."""

    def begin(self, handle: Handle, num_prompt: int) -> None:
        """Choose the history of a new sequence, also if its handle had another one before."""
        if self._histories:
            place = self._count if self._in_order else self._random.randrange(len(self._histories))
            chosen = self._histories[place % len(self._histories)]
            self._chosen[handle] = chosen, num_prompt, _odds(chosen)
            self._count += 1

    def fork(self, child: Handle, parent: Handle) -> None:
        """Choose the history of a sequence that has the prompt of another one."""
        if parent in self._chosen:
            self.begin(child, self._chosen[parent][1])

    def draw(self, handle: Handle, num_tokens: int, most: int) -> tuple[int, int]:
        """Draw the next drafts of a sequence with `num_tokens` tokens, which may make `most`. Returns the number of
        drafts, and of right ones."""
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
        """Choose a history for an answer that exceeds its own: a random one that has `place`, or else the longest."""
        first = min(bisect_right(self._lengths, place), len(self._lengths) - 1)
        chosen = self._by_length[self._random.randrange(first, len(self._lengths))]
        return chosen, num_prompt, _odds(chosen)


def _at(history: str, place: int) -> str:
    """The history's character for a token. Beyond its end, its second half repeats."""
    length = len(history)
    if place < length:
        return history[place]
    half = (length + 1) // 2
    return history[length - half + (place - length) % half] if length else NOTHING


def _odds(history: str) -> float:
    """The odds that a draft is right after right ones."""
    right = history.count(RIGHT)
    wrong = sum(each == WRONG or each.isdigit() for each in history)
    return (right + 1) / (right + wrong + 2)
