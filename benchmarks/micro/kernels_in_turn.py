"""`python benchmarks kernels --library OTHER.so`: products and attention by another build of the native library and by
this one, in turn, in one process.

Neighbouring calls of one process find the same clock rate, the same memory and the same neighbours, which processes in
turn (`benchmarks beside`) do not. Each build packs weights of its own, from the same numbers, and has threads of its
own, which rest while the other one's compute.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from micro import beside
from micro.kernels_attention import AttentionSelection, attend_all, batches_of
from micro.kernels_linear import FILE_FORMS, FORMS, MIB, LinearSelection, kernels_of
from micro.kernels_timing import clock_for, name_of
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library

LEAST_S = 0.002
"""Least time of one measurement, which repeats quick calls."""

Call = Callable[[], object]
Make = Callable[[], tuple[Call, torch.Tensor]]
"""Makes a call of the library that is open, and the tensor with its result."""


def run(
    path: Path,
    threads: Sequence[int],
    products: LinearSelection,
    cases: Sequence[AttentionSelection],
    pairs: int,
    report: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Measure `products`, and `cases` of attention in the types of `products`, `pairs` times with each library.
    `ratios` are as in beside.run; `differing` are the names of those whose results differ in their bits. Raises
    ConfigError for a library that cannot be opened."""
    ratios, differing = dict[str, dict[str, float]](), list[str]()
    for num_threads in threads:
        for case, make in [*_products(products), *_attention(products, cases)]:
            name = f"{case}, threads: {num_threads}"
            report(f"measuring {name} ...")
            with _opened(path):
                other, expected = _made(make, num_threads)
            here, found = _made(make, num_threads)
            measured = _in_turn(other, here, pairs, clock_for(num_threads))
            ratios[name] = beside.compared(measured)
            if not torch.equal(found, expected):
                differing.append(name)
    return {"library": str(path), "pairs": pairs, "ratios": ratios, "differing": differing}


def table(figures: dict[str, Any]) -> str:
    lines = [beside.table(figures), "other and here: microseconds of a pass over all copies"]
    return "\n".join([*lines, *(f"other bits: {name}" for name in figures["differing"])])


@contextmanager
def _opened(path: Path) -> Iterator[None]:
    """Let kernels be looked up in the library `path`. Those that are found keep it afterwards."""

    def opened() -> ctypes.CDLL:
        found = ctypes.CDLL(str(path.resolve()))
        if (abi := found.vllm_lite_abi()) != library.ABI:
            raise OSError(f"it has ABI {abi}, and this checkout needs {library.ABI}")
        return found

    try:
        opened()
    except (OSError, AttributeError) as error:
        raise ConfigError(f"--library {path} cannot be measured: {error}") from error
    try:
        with patch.object(library, "open_library", opened):
            _look_up_anew()
            yield
    finally:
        _look_up_anew()


def _look_up_anew() -> None:
    for name in ("library", "function"):
        getattr(library, name).cache_clear()


def _made(make: Make, num_threads: int) -> tuple[Call, torch.Tensor]:
    """A call of the library that is open, which has been made once, and its result."""
    torch.manual_seed(0)
    cpu.set_num_threads(num_threads)
    call, out = make()
    call()
    return call, out.clone()


def _in_turn(other: Call, here: Call, pairs: int, clock: Callable[[], float]) -> list[tuple[float, float]]:
    """Microseconds of both calls in each pair, of which the first one changes."""
    repeats = 1
    while _timed(here, repeats, clock) * repeats < LEAST_S:
        repeats *= 2
    found = []
    for number in range(pairs):
        order = (other, here) if number % 2 else (here, other)
        times = {call: 1e6 * _timed(call, repeats, clock) for call in order}
        found.append((times[other], times[here]))
    return found


def _timed(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    """Seconds of a call, after one that wakes the library's threads and lets those of the other one rest."""
    call()
    start_s = clock()
    for _ in range(repeats):
        call()
    return (clock() - start_s) / repeats


def _products(choice: LinearSelection) -> Iterator[tuple[str, Make]]:
    for dtype in choice.dtypes:
        for form in (each for each in (*FORMS, *FILE_FORMS) if each in choice.forms):
            for shape in choice.shapes:
                for rows in choice.num_rows:
                    name = f"{form} {name_of(dtype)} {rows} x {shape[1]} x {shape[0]}"
                    yield name, partial(_product, choice._replace(forms=[form], isas=()), shape, rows, dtype)


def _product(choice: LinearSelection, shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> tuple[Call, Any]:
    """Products with each copy of a weight, as many copies as the working set has."""
    (kernel,) = kernels_of(torch.randn(*shape).to(dtype), choice.working_set * MIB, choice).values()
    x, out = torch.randn(num_rows, shape[1]).to(dtype), torch.zeros(num_rows, shape[0], dtype=dtype)
    return partial(_holding, kernel.make_pass(x, out), kernel, x, out), out


def _holding(call: Call, *_: object) -> object:
    """Make a call of a program, which does not hold the memory that it reads and writes."""
    return call()


def _attention(choice: LinearSelection, cases: Sequence[AttentionSelection]) -> Iterator[tuple[str, Make]]:
    for dtype in choice.dtypes:
        for case in cases:
            heads = f"{case.heads.num_heads}/{case.heads.num_kv_heads}x{case.heads.head_size}"
            name = f"attention {name_of(dtype)} {case.num_seqs}x{case.query_len}@{case.seq_len}:{heads}"
            yield name, partial(_attend, case, dtype)


def _attend(case: AttentionSelection, dtype: torch.dtype) -> tuple[Call, torch.Tensor]:
    batches = batches_of(case, dtype)
    return partial(attend_all, batches), batches[0].out
