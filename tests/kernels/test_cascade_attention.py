"""Splits that rows have in common, in the emulator, in any order of threads."""

import pytest
import torch

from tests.kernels import cascade_attention_cases as cases
from tests.kernels.emulator import check_orders


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["5 of several lengths", "float8", "rows of drafts, padding, prompts"])
def test_the_order_of_threads_changes_no_bit(name: str) -> None:
    batch = cases.shared_batch(cases.SHARED[name], torch.device("cpu"))
    check_orders(lambda launcher: cases.run(batch, launcher))
