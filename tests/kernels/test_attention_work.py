"""Lists of work: each row exactly once, cut as the kernel cuts it, and no more of it than was announced."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.kernels.cuda.attention.attention_work import (
    MAX_SHORT_SPLITS,
    MAX_SPLITS,
    PREFILL_ROWS,
    has_several,
    most_splits,
    num_splits,
    prefill_tiles,
    rows_of,
    short_chunks,
    split_list,
    tiles_a_split,
)

lengths = st.lists(
    st.tuples(st.integers(0, 70), st.integers(0, 9000)).map(lambda pair: (pair[0], max(pair))), min_size=1, max_size=12
)
windows = st.sampled_from([None, 1, 17, 600, 5000])


def arrays(of: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    query_lens, seq_lens = zip(*of, strict=True)
    return np.array(query_lens), np.array(seq_lens)


@given(lengths, st.integers(0, 9), windows)
def test_rows_are_listed_once_with_all_their_splits(
    of: list[tuple[int, int]], padding: int, window: int | None
) -> None:
    query_lens, seq_lens = arrays(of)
    chosen = (query_lens <= 5) | (seq_lens == 0)
    starts = np.cumsum(query_lens) - query_lens
    num_tokens = int(query_lens.sum()) + padding
    want = {
        (int(starts[i]) + j, i, int(max(0, seq_lens[i] - query_lens[i] + j + 1)) if seq_lens[i] else 0)
        for i in np.flatnonzero(chosen)
        for j in range(query_lens[i])
    } | {(token, 0, 0) for token in range(int(query_lens.sum()), num_tokens)}
    rows = rows_of(query_lens, seq_lens, num_tokens, chosen)
    assert set(zip(*(part.tolist() for part in rows), strict=True)) == want
    splits = split_list(rows, window)
    assert splits[0, 0] == len(splits) - 1
    by_token: dict[int, list[int]] = {}
    for token, sequence, seen, split in splits[1:].tolist():
        assert (token, sequence, seen) in want
        by_token.setdefault(token, []).append(split)
    assert len(by_token) == len(want)
    for token, _, seen in want:
        count = max(1, int(num_splits(np.array([seen]), window)[0]))
        assert by_token[token] == list(range(count))
        assert count <= most_splits(max(seen, 1), window)
    assert has_several(splits) == any(len(own) > 1 for own in by_token.values())
    for at, (token, _, _, split) in enumerate(splits[1:].tolist()):  # the kernel counts from a row's first entry
        assert splits[1 + at - split].tolist()[::3] == [token, 0]


@given(lengths, st.sampled_from([1, 3, 8, 71]))
def test_tiles_cover_each_chunk_once_and_longest_contexts_are_first(of: list[tuple[int, int]], group: int) -> None:
    query_lens, seq_lens = arrays(of)
    chosen = query_lens > 1
    tiles = prefill_tiles(query_lens, seq_lens, group, chosen)
    want = [(i, t) for i in np.flatnonzero(chosen) for t in range(-(-int(query_lens[i]) * group // PREFILL_ROWS))]
    assert sorted(map(tuple, tiles.tolist())) == want
    ends = [
        int(seq_lens[i] - query_lens[i] + min((t + 1) * PREFILL_ROWS // group, query_lens[i]))
        for i, t in tiles.tolist()
    ]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 33, 512, 513, 4096, 4097, 5000])
def test_no_row_has_more_splits_than_announced(window: int | None) -> None:
    seen = np.arange(1, 70_000)
    counts = num_splits(seen, window)
    for longest in (1, 512, 513, 4096, 4097, 32_768, 40_000, 69_000):
        assert counts[:longest].max() <= most_splits(longest, window)
    assert counts.max() <= MAX_SPLITS


def test_sizes_of_splits() -> None:
    """A context of 2048 tokens is read by 8 blocks a KV head, whatever the longest may be; see merge_splits.cuh."""
    tiles = np.array([1, 32, 33, 128, 256, 257, 512, 2048, 2049, 8192])
    assert tiles_a_split(tiles).tolist() == [32, 32, 16, 16, 16, 32, 32, 32, 33, 128]
    assert num_splits(np.array([0, 1, 512, 513, 2048, 4096, 8192, 131_072])).tolist() == [0, 1, 1, 3, 8, 16, 16, 64]
    assert num_splits(np.array([100]), 4, 16).tolist() == [1]
    assert num_splits(np.array([97]), 4, 16).tolist() == [2], "a window across the border of two tiles"


def test_few_rows_are_decoded_while_they_are_few() -> None:
    query_lens, seq_lens = np.array([1, 2, 16, 17, 5, 5]), np.array([600, 600, 600, 600, 512, 513])
    assert short_chunks(query_lens, seq_lens).tolist() == [False, True, True, False, False, True]
    many = np.full(MAX_SHORT_SPLITS // (5 * 16), 5), np.full(MAX_SHORT_SPLITS // (5 * 16), 4096)
    assert short_chunks(*many).all()
    assert not short_chunks(np.append(many[0], 5), np.append(many[1], 4096)).any()
