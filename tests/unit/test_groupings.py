"""A client of each API gets the same items, however the tokens of an output are grouped into deltas."""

import random
from collections.abc import Sequence

import pytest

from tests.groupings import Case, differences, random_case, random_cuts, rig, spoken
from vllm_lite.client.outputs import CompletionOutput
from vllm_lite.server.calls.call import Call

NUM_GROUPINGS = 12
"""For each of 20 tests; `python -m tests.groupings 10000` takes many more."""


@pytest.mark.parametrize("seed", range(20))
def test_items_do_not_depend_on_how_tokens_are_grouped(seed: int) -> None:
    for number in range(NUM_GROUPINGS):
        assert not differences(random.Random(f"{seed}-{number}"))


def parts(case: Case, cuts: Sequence[int]) -> list[CompletionOutput]:
    """Cut the output into deltas, one part for each token."""
    found: list[CompletionOutput] = []

    def read(call: Call) -> None:
        found.extend(part for _, delta in call.reading.deltas() for part in delta.singly())

    spoken(case, cuts, read, rig(case.format).call(case, logprobs=True))
    return found


def test_a_delta_is_cut_as_if_its_tokens_had_come_singly() -> None:
    """Includes stop strings, which hold back text, and added tokens."""
    for seed in range(150):
        rng = random.Random(f"singly {seed}")
        case = random_case(rng)
        grouped, singly = parts(case, random_cuts(case, rng)), parts(case, range(1, len(case.ids)))
        assert [(each.text, each.token_ids, list(each.marks), each.logprobs) for each in grouped] == [
            (each.text, each.token_ids, list(each.marks), each.logprobs) for each in singly
        ]
        assert [each.finish_reason for each in grouped] == [each.finish_reason for each in singly]
