"""Splits that rows have in common, in the emulator: every case, every order of threads, what is refused."""

from collections.abc import Callable

import pytest
import torch

from tests.kernels.cascade_attention_cases import CASES, SHARED, run, shared_batch
from tests.kernels.emulator import EmulatorLauncher
from vllm_lite.kernels.cuda.attention.decode_attention import CASCADE_SOURCE, SOURCE
from vllm_lite.kernels.cuda.launcher import Launcher

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def built(launcher: EmulatorLauncher) -> EmulatorLauncher:
    """All instantiations with one run of the compiler for each source."""
    launcher.preload(SOURCE, [setup.kernel for setup in SHARED.values()])
    launcher.preload(CASCADE_SOURCE, [setup.cascade_kernel for setup in SHARED.values()])
    return launcher


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name.replace(" ", "-") for name, _ in CASES])
def test_case(case: Callable[[Launcher, torch.device], None], built: EmulatorLauncher) -> None:
    case(built, CPU)


@pytest.mark.parametrize("name", ["5 of several lengths", "float8", "rows of drafts, padding, prompts"])
def test_the_order_of_threads_changes_no_bit(name: str, built: EmulatorLauncher) -> None:
    batch = shared_batch(SHARED[name], CPU)
    first, *others = (run(batch, EmulatorLauncher(order_seed)) for order_seed in range(4))
    assert all(torch.equal(first, other) for other in others)
