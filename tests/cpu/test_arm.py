"""Kernels for Arm on emulated processors: their choice, and bits that others have. `make arm` builds them, and runs the
tests of most kernels there. Skipped where they are not built."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.arm.remote import Remote, missing
from tests.cpu.conftest import using_isa
from tests.cpu.test_native_grouped import IQ4_NL, grouped
from tests.rows import random
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear
from vllm_lite.kernels.grouped import INT4, INT8, UINT5

_lacks = missing() or (None if cpu.available() else "this machine's own kernels are not built")
pytestmark = pytest.mark.skipif(_lacks is not None, reason=str(_lacks))

BEST = {"max": "neon_i8mm", "neoverse-n1": "neon_dot", "cortex-a72": "baseline"}
"""Emulated processor -> the best instruction set that it has."""
CASES = [(INT4, 32, False), (UINT5, 32, True), (IQ4_NL, 128, False), (INT8, 128, False)]


@contextmanager
def emulated(processor: str) -> Iterator[Remote]:
    """Within the block, kernels are those of an emulated Arm processor."""
    remote = Remote(processor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: remote)
        library.function.cache_clear()
        try:
            yield remote
        finally:
            library.function.cache_clear()
            remote.close()


def products(num_rows: int) -> list[torch.Tensor]:
    found = []
    for values, group_size, minima in CASES:
        weight = grouped(40, 300, group_size, values, minima=minima, scales=torch.bfloat16)
        out = torch.full((num_rows, 40), math.nan)
        linear(random(num_rows, 300), PackedWeight(weight, random(40)), out)
        found.append(out)
    return found


@pytest.mark.parametrize("processor", BEST)
def test_the_best_set_of_the_processor_is_chosen(processor: str) -> None:
    with emulated(processor) as remote:
        assert library.isa() == BEST[processor]
        others = set(library.ISAS) - set(list(BEST.values())[list(BEST).index(processor) :])
        set_isa = library.function("vllm_lite_set_isa", (library.int32,), library.int32)
        assert not any(set_isa(library.ISAS.index(isa)) for isa in others)
        assert remote.vllm_lite_abi() == library.ABI


@pytest.mark.parametrize("num_rows", [1, 5, 13])
def test_products_of_integers_have_the_bits_of_other_processors(num_rows: int) -> None:
    for _ in using_isa("avx512_bf16"):
        expected = products(num_rows)
    for processor in ("max", "neoverse-n1"):
        with emulated(processor):
            for case, out, wanted in zip(CASES, products(num_rows), expected, strict=True):
                assert torch.equal(out, wanted), (processor, case)


def test_a_read_of_unmapped_memory_ends_the_emulated_process() -> None:
    """A test with a kernel that reads outside of any memory therefore fails."""
    with emulated("max"):
        read = library.function("vllm_lite_read", (library.pointer, library.int64), library.int64)
        with pytest.raises(RuntimeError, match="the emulated process ended with 1"):
            read(4096, 128)
