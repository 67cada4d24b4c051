"""However the tokens of an output are grouped into deltas, a client of each dialect gets the same items."""

import random

import pytest

from tests.groupings import differences

NUM_GROUPINGS = 12
"""For each of 20 tests; `python -m tests.groupings 10000` takes many more."""


@pytest.mark.parametrize("seed", range(20))
def test_items_do_not_depend_on_how_tokens_are_grouped(seed: int) -> None:
    for number in range(NUM_GROUPINGS):
        assert not differences(random.Random(f"{seed}-{number}"))
