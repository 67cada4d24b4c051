"""Windows of long texts: each token counts in one window, and the results of windows are joined."""

import random
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.client.prompt import Prompt
from vllm_lite.client.windows import cut, joined_rows, mean_vector, windows_of
from vllm_lite.errors import RequestError


@given(st.integers(1, 400), st.integers(1, 60), st.data())
def test_every_token_counts_in_one_window(num_tokens: int, room: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, room - 1))
    windows = cut(num_tokens, room, overlap)
    assert [place for own in windows for place in range(own.first, own.last)] == list(range(num_tokens))
    for before, own in pairwise(windows):
        assert own.start == before.end - overlap
        assert before.end - before.start == room
    for own in windows:
        assert 0 < own.end - own.start <= room
        assert own.start <= own.first < own.last <= own.end
        assert not own.start or own.first - own.start == overlap // 2, "each has the nearer half of an overlap"


@given(st.integers(1, 90), st.integers(0, 2), st.integers(0, 2), st.integers(0, 5))
def test_rows_come_back_in_their_places(num_own: int, before: int, behind: int, overlap: int) -> None:
    """Each token's row is its place in the text, as the window sees it."""
    ids = [*range(before), *range(100, 100 + num_own), *range(10, 10 + behind)]
    windows = list(windows_of(Prompt("text", ids), (before, behind), 10, overlap))
    for prompt, part in windows:
        assert prompt.token_ids[:before] == ids[:before]
        assert prompt.token_ids[len(prompt.token_ids) - behind :] == ids[len(ids) - behind :]
        assert len(prompt.token_ids) <= 10
        assert part.whole.token_ids == ids
    rows = [array("f", [number for token in prompt.token_ids for number in (token, -token)]) for prompt, _ in windows]
    found = joined_rows(
        [(own.tobytes(), part) for own, (_, part) in zip(rows, windows, strict=True)],
        [len(prompt.token_ids) for prompt, _ in windows],
    )
    assert array("f", found).tolist() == [number for token in ids for number in (token, -token)]
    assert [part.is_last for _, part in windows] == [*[False] * (len(windows) - 1), True]


def test_windows_that_would_not_advance_are_refused() -> None:
    with pytest.raises(RequestError, match="windows of 10 tokens, 2 of them special, must have more than the 8"):
        list(windows_of(Prompt(None, [1] * 30), (1, 1), 10, 8))


@pytest.mark.parametrize("normalizes", [True, False])
def test_the_mean_of_vectors_is_weighted(normalizes: bool) -> None:
    rng = random.Random(4)
    rows = [[rng.gauss(0, 1) for _ in range(5)] for _ in range(3)]
    vectors = [array("f", row).tobytes() for row in rows]
    want = [sum(w * row[place] for w, row in zip((7, 7, 2), rows, strict=True)) / 16 for place in range(5)]
    if normalizes:
        length = sum(number * number for number in want) ** 0.5
        want = [number / length for number in want]
    found = array("f", mean_vector(vectors, [7, 7, 2], normalizes=normalizes)).tolist()
    assert found == pytest.approx(want, abs=1e-6)
    zeros = array("f", [0.0] * 3).tobytes()
    assert mean_vector([zeros], [1], normalizes=normalizes) == zeros
