"""Spans of the likeliest path through tags, against all paths that there are."""

from array import array
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lite.client.tag_paths import Span, SpanTags, best_spans

LABELS = ("O", "B-x", "I-x", "E-x", "S-x", "S-y", "E-y", "I-y", "B-y")
PLACES = {label: place for place, label in enumerate(LABELS)}
BIAS_PLACES = {"OO": 0, "OB": 1, "OS": 1, "BI": 2, "II": 2, "BE": 3, "IE": 3, "EO": 4, "SO": 4}
BIAS_PLACES |= dict.fromkeys(("EB", "ES", "SB", "SS"), 5)


def step(before: str, after: str, biases: Sequence[float]) -> float | None:
    """The bias of a step from one label to the next; None if there is no such step."""
    place = BIAS_PLACES.get(before[0] + after[0])
    inside = before[0] in "BI" or after[0] in "IE"
    if place is None or (inside and before[2:] != after[2:]):
        return None
    return biases[place]


def score_of(path: Sequence[str], rows: Sequence[Sequence[float]], biases: Sequence[float]) -> float | None:
    """The sum of a path's logits and biases; None if it is none."""
    if path[0][0] in "IE" or path[-1][0] in "BI":
        return None
    total = sum(row[PLACES[label]] for row, label in zip(rows, path, strict=True))
    for before, after in pairwise(path):
        bias = step(before, after, biases)
        if bias is None:
            return None
        total += bias
    return total


def path_of(spans: Sequence[Span], num_tokens: int) -> list[str]:
    """The labels of spans, which must not overlap."""
    path = ["O"] * num_tokens
    for kind, start, end in spans:
        assert path[start:end] == ["O"] * (end - start)
        assert start < end
        path[start:end] = ["S-" + kind] if end == start + 1 else [f"I-{kind}"] * (end - start)
        if end > start + 1:
            path[start], path[end - 1] = f"B-{kind}", f"E-{kind}"
    return path


numbers = st.integers(-40, 40).map(lambda number: number / 8)  # exact sums, so that the best is known without rounding


@settings(max_examples=120)
@given(st.data())
def test_no_other_path_is_better(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.lists(numbers, min_size=9, max_size=9), min_size=count, max_size=count))
    biases = data.draw(st.lists(numbers, min_size=6, max_size=6))
    tags = SpanTags.of(LABELS)
    assert tags is not None
    flat = array("f", (number for row in rows for number in row))
    spans = best_spans(flat, tags, len(LABELS), biases)
    assert spans == sorted(spans, key=lambda span: span.start)
    scores = (score_of(path, rows, biases) for path in product(LABELS, repeat=count))
    best = max(score for score in scores if score is not None)
    assert score_of(path_of(spans, count), rows, biases) == best


def test_labels_that_contradict_each_other_never_come_out() -> None:
    """The most likely label of each token alone would continue a span that has no beginning."""
    tags = SpanTags.of(LABELS)
    assert tags is not None
    rows = [[1.0 if label == wanted else 0.0 for label in LABELS] for wanted in ("O", "I-x", "E-x", "O", "B-y")]
    rows[1][PLACES["B-x"]] = 0.5
    flat = array("f", (number for row in rows for number in row))
    assert best_spans(flat, tags, len(LABELS)) == [Span("x", 1, 3)]
    assert best_spans(array("f"), tags, len(LABELS)) == []


@pytest.mark.parametrize(
    "labels",
    [
        ("O", "B-x", "I-x"),
        ("O", "B-x", "I-x", "E-x", "S-x", "N"),
        ("B-x", "I-x", "E-x", "S-x"),
        ("O", "B-x", "B-x", "I-x", "E-x", "S-x"),
        ("POS", "NEG"),
        (),
    ],
)
def test_other_labels_are_no_tags_of_spans(labels: tuple[str, ...]) -> None:
    assert SpanTags.of(labels) is None


def test_a_label_may_have_a_dash() -> None:
    tags = SpanTags.of(("O", *(f"{tag}-first-name" for tag in "BIES")))
    assert tags == SpanTags(0, {"first-name": (1, 2, 3, 4)})
