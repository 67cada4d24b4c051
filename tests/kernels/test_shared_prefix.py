"""Rows that share splits: each split of a row is computed once, and a shared split is in blocks of all of its rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.kernels.cuda.attention.attention_work import TILE, RowWork, num_splits, tiles_a_split
from vllm_lite.kernels.cuda.attention.shared_prefix import CascadeLists, Worth, cascade_lists

BLOCK = 16


def tables_of(parents: list[tuple[int, int]], seen: list[int]) -> np.ndarray:
    """Row i begins with (row, blocks) of an earlier one; all other blocks are its own."""
    width = max(seen) // BLOCK + 3
    tables = np.arange(1, len(seen) * width + 1, dtype=np.int32).reshape(len(seen), width)
    for i, (parent, blocks) in enumerate(parents):
        tables[i, :blocks] = tables[min(parent, i), :blocks]
    return tables


def rows_for(seen: list[int]) -> RowWork:
    places = np.arange(len(seen))
    return RowWork(places + 3, places, np.array(seen))


def check(lists: CascadeLists, rows: RowWork, tables: np.ndarray, most_rows: int, worth: Worth) -> None:
    counts = num_splits(rows.seen)
    places = np.cumsum(np.maximum(counts, 1)) - np.maximum(counts, 1)
    of_place = {int(place): i for i, place in enumerate(places)}
    done: dict[int, list[int]] = {i: [] for i in range(len(counts))}
    for sequence, split, first_seen, packed in lists.shared.tolist():
        members = lists.rows[packed // 16 : packed // 16 + packed % 16 + 1].tolist()
        assert len(members) <= most_rows
        end = 0
        for at, (token, place) in enumerate(members):
            row = of_place[place]
            assert token == rows.tokens[row]
            if at == 0:
                assert (sequence, first_seen) == (row, rows.seen[row])
                size = TILE * int(tiles_a_split(np.array(-(-first_seen // TILE))))
                end = (split + 1) * size
            assert TILE * int(tiles_a_split(-(-rows.seen[row : row + 1] // TILE))[0]) == size, "cut alike"
            assert rows.seen[row] > end, "the last split is a row's own"
            assert (tables[row, : -(-end // BLOCK)] == tables[sequence, : -(-end // BLOCK)]).all()
            done[row].append(split)
    for row, own in done.items():
        assert own == list(range(len(own))), "splits from the first one on, each once"
        if own:
            size = TILE * int(tiles_a_split(-(-rows.seen[row : row + 1] // TILE))[0])
            assert len(own) * size >= worth.tokens
    for (token, row, seen, split), first in zip(lists.splits[1:].tolist(), lists.firsts.tolist(), strict=True):
        assert (token, seen, first) == (rows.tokens[row], rows.seen[row], places[row])
        done[row].append(split)
    assert all(own == list(range(max(1, int(counts[row])))) for row, own in done.items())
    assert lists.splits[0].tolist() == [len(lists.splits) - 1, len(lists.shared), 0, 0]
    assert lists.num_parts == np.maximum(counts, 1).sum()


lengths = st.sampled_from([0, 512, 1024, 1025, 1280, 1281, 1500, 2048, 2600, 4096, 4097, 5000])
row = st.tuples(lengths, st.integers(0, 3), st.sampled_from([0, 38, 64, 70, 80, 128, 150, 256, 310]))


@given(st.lists(row, min_size=2, max_size=12), st.sampled_from([2, 3, 16]), st.sampled_from([600, 1024]))
def test_every_split_is_computed_once(given_rows: list[tuple[int, int, int]], most_rows: int, tokens: int) -> None:
    seen = [length for length, _, _ in given_rows]
    tables = tables_of([(parent, blocks) for _, parent, blocks in given_rows], [5000] * len(seen))
    rows, worth = rows_for(seen), Worth(tokens, 2, 1)
    lists = cascade_lists(rows, tables, BLOCK, most_rows, 1, worth=worth)
    size = tiles_a_split(-(-rows.seen // TILE)) * TILE
    shared = [
        (size[i] == size[j])
        and min(int((tables[i] == tables[j]).cumprod().sum()) * BLOCK, seen[i] - 1, seen[j] - 1) // size[i] * size[i]
        >= tokens
        for i in range(len(seen))
        for j in range(i)
    ]
    assert (lists is not None) == any(shared)
    if lists is not None:
        check(lists, rows, tables, most_rows, worth)


def test_levels() -> None:
    """A system prompt of all, and behind it the conversations of some: each block is read by as few as there can be."""
    seen = [2100] * 12
    tables = tables_of([(0, 64)] * 6 + [(0, 128)] * 3 + [(3, 96)] * 3, seen)
    tables[9:, :96] = tables[3, :96]
    order = np.random.default_rng(1).permutation(12)
    lists = cascade_lists(rows_for(seen), tables[order], BLOCK, 4, 8, worth=Worth(rows=2, saved_blocks=1))
    assert lists is not None
    check(lists, rows_for(seen), tables[order], 4, Worth())
    split, count = np.unique(lists.shared[:, 1], return_counts=True)
    assert split.tolist() == list(range(8))
    assert count.tolist() == [3, 3, 3, 3, 2, 2, 1, 1], "12 rows, then two families of 4, then one"


def test_prefixes_that_are_not_worth_it() -> None:
    seen = [4200] * 8
    alike = tables_of([(0, 256)] * 8, [5000] * 8)

    def made(rows: RowWork, tables: np.ndarray, **changes: int) -> CascadeLists | None:
        return cascade_lists(rows, tables, BLOCK, 4, 8, worth=Worth(**changes))

    assert made(rows_for(seen), alike, saved_blocks=384) is not None
    assert made(rows_for(seen[:7]), alike, saved_blocks=1) is None, "too few"
    assert made(rows_for(seen), alike, saved_blocks=385) is None, (
        "8 splits of 8 rows, read twice instead of 8 times, by 8 heads"
    )
    assert made(rows_for(seen), tables_of([(0, 63)] * 8, seen), saved_blocks=1) is None, "less than 1024 tokens"
    assert made(rows_for([1024] * 8), alike, saved_blocks=1) is None


def test_only_rows_that_are_cut_alike_share() -> None:
    rows, tables = rows_for([5000, 4000] * 4), tables_of([(0, 256)] * 8, [5000] * 8)
    lists = cascade_lists(rows, tables, BLOCK, 16, 8, worth=Worth(saved_blocks=1))
    assert lists is not None
    check(lists, rows, tables, 16, Worth())
    assert len(lists.shared) == 8 + 15, "splits of 512 tokens and of 256"


def test_the_last_split_of_a_row_is_its_own() -> None:
    rows, tables = rows_for([1280] * 8), tables_of([(0, 80)] * 8, [1280] * 8)
    lists = cascade_lists(rows, tables, BLOCK, 16, 8, worth=Worth(saved_blocks=1))
    assert lists is not None
    check(lists, rows, tables, 16, Worth())
    assert (len(lists.shared), len(lists.splits) - 1) == (4, 8)


@pytest.mark.parametrize("block_size", [1, 4, 64, 256])
def test_other_block_sizes(block_size: int) -> None:
    tables = np.arange(1, 1 + 9 * (3072 // block_size), dtype=np.int32).reshape(9, -1)
    tables[:, : 1536 // block_size] = tables[0, : 1536 // block_size]
    lists = cascade_lists(rows_for([2900] * 9), tables, block_size, 4, 8, worth=Worth(saved_blocks=1))
    assert lists is not None
    assert sorted(set(lists.shared[:, 1].tolist())) == [0, 1, 2, 3, 4, 5]
