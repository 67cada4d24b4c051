"""The instruction sets that native kernels are compiled for, one after another."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.library import ISAS, function, int32

EMULATED = "amx_emulated"
"""AMX in plain C++, for products of matrices in bfloat16 or int8; all else is as with the newest vectors."""


@contextmanager
def isa_in_use(name: str) -> Iterator[bool]:
    """The block runs on this instruction set, if the value is true: if the machine has it."""
    set_isa = function("vllm_lite_set_isa", (int32,), int32)
    before = ISAS.index(cpu.isa())
    has_it = bool(set_isa(ISAS.index(name)))
    try:
        yield has_it
    finally:
        set_isa(before)


@cache
def _has_it(name: str) -> bool:
    with isa_in_use(name) as has_it:
        return has_it


def on_each(names: Sequence[str] = ISAS) -> Iterator[str]:
    """Set each of `names` that this machine supports, and yield it while it is set."""
    for name in names:
        if _has_it(name):
            with isa_in_use(name):
                yield name


def _of_this_machine() -> list[str]:
    """Leave AMX out where the machine has none: hundreds of skipped tests would say nothing."""
    return [*VECTORS, "amx"] if cpu.available() and _has_it("amx") else VECTORS


ON_ARM = os.uname().machine == "aarch64" or "VLLM_LITE_GUEST_CPU" in os.environ
"""Whether the library runs on such a processor, or an emulated one (tests/arm)."""

VECTORS = [isa for isa in ISAS if not isa.startswith(("amx", "avx") if ON_ARM else ("amx", "neon"))]
"""Sets that every kernel is compiled for. AMX has other code for products of matrices and for attention alone."""

OF_THIS_MACHINE = _of_this_machine()
PRODUCTS = OF_THIS_MACHINE if ON_ARM else [*OF_THIS_MACHINE, EMULATED]
