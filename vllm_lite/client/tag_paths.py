"""Spans as the likeliest path through tags: B begins a span, I continues it, E ends it, S is a span of one token.

Each kind of span has these four labels, and one label is the background. A path may not leave a span before its end,
nor continue one that it has not begun, so results never contain contradictory labels (Viterbi 1967).
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_lite.checkpoint.layer_specs.pooling import Calibration

TAGS = "BIES"


class SpanTags(NamedTuple):
    """Indices of the labels: of the background, and of B, I, E and S of each kind of span."""

    background: int
    kinds: dict[str, tuple[int, int, int, int]]

    @classmethod
    def of(cls, labels: Sequence[str]) -> "SpanTags | None":
        """The tags among `labels`; None unless they are those of spans and one more."""
        found: dict[str, dict[str, int]] = {}
        others = list[int]()
        for number, label in enumerate(labels):
            tag, dash, kind = label.partition("-")
            if dash and len(tag) == 1 and tag in TAGS and tag not in found.get(kind, {}):
                found.setdefault(kind, {})[tag] = number
            else:
                others.append(number)
        if not found or len(others) != 1 or any(len(own) < len(TAGS) for own in found.values()):
            return None
        kinds = {kind: (own["B"], own["I"], own["E"], own["S"]) for kind, own in found.items()}
        return cls(others[0], kinds)


class Span(NamedTuple):
    """Tokens [start, end) of one kind."""

    kind: str
    start: int
    end: int


NO_BIASES = (0.0,) * 6
OUTSIDE = -1
"""Background, in the place of a kind's number."""


class _Steps(NamedTuple):
    """Choices of the best paths at each token, for the way back."""

    to_background: list[int]
    """Kind of the span that ended before a token of the background, or OUTSIDE."""
    to_start: list[int]
    """Kind of the span that ended before the first token of a span, or OUTSIDE."""
    is_single: list[list[bool]]
    """For each kind: whether a span that ends at this token also begins here."""
    is_begin: list[list[bool]]
    """For each kind: whether a span that continues after this token begins here."""


def best_spans(numbers: "array[float]", tags: SpanTags, num_labels: int, biases: Sequence[float] = ()) -> list[Span]:
    """Find the spans of the likeliest path. `numbers`: logits [tokens, labels] of a text; `biases`: of Calibration, in
    order; () for none."""
    biased = Calibration(*(biases or NO_BIASES))
    kinds, steps = [*tags.kinds.values()], _Steps([], [], [], [])
    unreached = float("-inf")
    background, inside, ended, last = 0.0, [unreached] * len(kinds), unreached, OUTSIDE
    stay = start = 0.0  # before the first token there is nothing to stay in
    num_tokens = len(numbers) // num_labels
    for token in range(num_tokens):
        row = numbers[token * num_labels : (token + 1) * num_labels].tolist()
        stays, leaves = background + stay, ended + biased.transition_bias_end_to_background
        first, again = background + start, ended + biased.transition_bias_end_to_start
        steps.to_background.append(OUTSIDE if stays >= leaves else last)
        steps.to_start.append(OUTSIDE if first >= again else last)
        background, enter = max(stays, leaves) + row[tags.background], max(first, again)
        single, begin, ended = [False] * len(kinds), [False] * len(kinds), unreached
        for kind, (begins, goes_on, ends, alone) in enumerate(kinds):
            as_single = enter + row[alone]
            as_end = inside[kind] + biased.transition_bias_inside_to_end + row[ends]
            as_begin = enter + row[begins]
            as_inside = inside[kind] + biased.transition_bias_inside_to_continue + row[goes_on]
            single[kind], begin[kind] = as_single >= as_end, as_begin >= as_inside
            inside[kind] = max(as_begin, as_inside)
            if max(as_single, as_end) > ended:
                ended, last = max(as_single, as_end), kind
        steps.is_single.append(single)
        steps.is_begin.append(begin)
        stay, start = biased.transition_bias_background_stay, biased.transition_bias_background_to_start
    found = _way_back(steps, num_tokens, OUTSIDE if background >= ended else last)
    names = list(tags.kinds)
    return [Span(names[kind], first, end) for kind, first, end in reversed(list(found))]


def _way_back(steps: _Steps, num_tokens: int, kind: int) -> Iterator[tuple[int, int, int]]:
    """Yield kind, first token and end of each span, the last one first. `kind`: of the span that the last token ends,
    or OUTSIDE."""
    token = num_tokens - 1
    while token >= 0:
        if kind == OUTSIDE:
            kind, token = steps.to_background[token], token - 1
            continue
        end, first = token + 1, token
        if not steps.is_single[token][kind]:
            first -= 1
            while not steps.is_begin[first][kind]:
                first -= 1
        yield kind, first, end
        kind, token = steps.to_start[first], first - 1
