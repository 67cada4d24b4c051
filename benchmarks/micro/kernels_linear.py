"""Linear layers on a CPU: our kernels, torch's, and oneDNN's with packed weights take turns in the same run.

Each call uses another copy of the weight, and the copies do not fit into the caches together, unless a smaller working
set is asked for. So with few rows the speed of memory, or of a cache, is the limit, with which the kernels are
compared. Ours are calls of a recorded program, as in a decode step. With one thread the measured time is CPU time,
which a busy machine hardly lengthens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from micro.kernels_timing import Row, best_times, clock_for, name_of, read_bandwidth_gb_s
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.dtypes import FLOATS
from vllm_lite.kernels.cpu.library import ISAS, function, int32
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear
from vllm_lite.kernels.gguf_blocks import BLOCK, BlockRows
from vllm_lite.kernels.grouped import E4M3, INT4, INT8, GroupedWeight
from vllm_lite.layers.weights import onednn

MIB = 1 << 20
MIN_TIME_S = 0.3  # for each kernel
TABLE = torch.linspace(-1, 1, 16).pow(3)
"""16 values that are not integers, like those of NF4."""

Pass = Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]
"""Makes a function that computes out = x W^T with each copy of W once, of x [num_rows, inputs] and out [num_rows,
outputs]."""

FORMS: dict[str, Callable[[torch.Tensor], PackedWeight]] = {
    "dense": PackedWeight,
    "int8": lambda weight: PackedWeight(weight, form="int8"),
    "int4_g32": lambda weight: PackedWeight(_grouped(weight, INT4, 32)),
    "int4_on_load": lambda weight: PackedWeight(weight, form="int4_g32"),
    "int4_g128_on_load": lambda weight: PackedWeight(weight, form="int4"),
    "int5_on_load": lambda weight: PackedWeight(weight, form="int5_g32"),
    "int4_g128": lambda weight: PackedWeight(_grouped(weight, INT4, 128)),
    "int8_g32": lambda weight: PackedWeight(_grouped(weight, INT8, 32)),
    "int8_g128": lambda weight: PackedWeight(_grouped(weight, INT8, 128)),
    "fp8_g128": lambda weight: PackedWeight(_grouped(weight, E4M3, 128)),
    "table_g64": lambda weight: PackedWeight(_grouped(weight, TABLE, 64)),
}
"""Name -> function that packs a weight for our kernels. `torch` and `onednn` are measured beside them."""
FILE_FORMS = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
"""Types of GGUF files, for weights that have whole blocks of them. They are measured only if named."""
OTHERS = ("torch", "onednn")
NAMES = (*FORMS, *FILE_FORMS, *OTHERS)


class LinearSelection(NamedTuple):
    """Shapes, types and forms to measure."""

    shapes: Sequence[tuple[int, int]] = ((4096, 1024), (4096, 4096), (2048, 768))
    """Outputs and inputs."""
    num_rows: Sequence[int] = (1, 4, 8, 32, 128, 512)
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
    forms: Sequence[str] = (*FORMS, *OTHERS)
    isas: Sequence[str] = ()
    """Instruction sets of our kernels, measured in turn; if empty, only the one in use."""
    working_set: int = 128
    """MiB that all copies of a weight have together, or more; 128 are more than two threads can cache."""


ALL = LinearSelection()


def choose(texts: Mapping[str, str]) -> LinearSelection:
    """Parse lists such as `shapes` 6144x1024,1024x3072 and `rows` 1,32; missing lists are those of ALL. Raises
    ValueError for anything that cannot be measured."""
    lists = {name: text.split(",") for name, text in texts.items()}
    choice = ALL
    if shapes := lists.get("shapes"):
        choice = choice._replace(shapes=[_shape(text) for text in shapes])
    if rows := lists.get("rows"):
        choice = choice._replace(num_rows=[_positive(text) for text in rows])
    if dtypes := lists.get("dtypes"):
        known = {name_of(dtype): dtype for dtype in FLOATS}
        choice = choice._replace(dtypes=[known[_one_of(known, name)] for name in dtypes])
    if forms := lists.get("forms"):
        choice = choice._replace(forms=[_one_of(NAMES, name) for name in forms])
    if working_set := texts.get("working_set"):
        choice = choice._replace(working_set=_positive(working_set))
    return choice._replace(isas=[_one_of(ISAS, name) for name in lists.get("isas", ())])


def _one_of(known: Iterable[str], name: str) -> str:
    if name not in known:
        raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return name


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2:
        raise ValueError(f"a shape must be outputs x inputs, such as 6144x1024, got {text!r}")
    return _positive(parts[0]), _positive(parts[1])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"a size must be a whole number above 0, got {text!r}")
    return int(text)


def measure(num_threads: int, choice: LinearSelection) -> Iterator[Row]:
    before = cpu.isa()
    try:
        for dtype in choice.dtypes:
            yield from _measure(num_threads, dtype, choice)
    finally:
        _set_isa(before)


def _set_isa(name: str) -> None:
    if not function("vllm_lite_set_isa", (int32,), int32)(ISAS.index(name)):
        raise ValueError(f"this machine does not have the instruction set {name!r}")


class _Kernel(NamedTuple):
    num_bytes: int
    """Bytes of one copy."""
    num_copies: int
    make_pass: Pass


def _measure(num_threads: int, dtype: torch.dtype, choice: LinearSelection) -> Iterator[Row]:
    """Measure all shapes and numbers of rows. `gb_s` is the speed at which weights are read, `limit` the speed at which
    the same number of threads reads memory, or as many bytes as the copies have from a cache."""
    limit, working_set = 0.0, choice.working_set * MIB
    read_bytes = working_set if choice.working_set < ALL.working_set else 4 * working_set
    for num_outputs, num_inputs in choice.shapes:
        limit = max(limit, read_bandwidth_gb_s(num_threads, read_bytes))
        kernels = kernels_of(torch.randn(num_outputs, num_inputs).to(dtype), working_set, choice)
        for num_rows in choice.num_rows:
            x = torch.randn(num_rows, num_inputs).to(dtype)
            out = torch.empty(num_rows, num_outputs, dtype=dtype).fill_(0)  # pages are allocated by a first write
            passes = [kernel.make_pass(x, out) for kernel in kernels.values()]
            best = best_times(clock_for(num_threads), passes, MIN_TIME_S)
            for (name, own), pass_s in zip(kernels.items(), best, strict=True):
                seconds = pass_s / own.num_copies
                speed = own.num_bytes / seconds / 1e9
                shape = f"{num_rows} x {num_inputs} x {num_outputs}"
                kernel = f"{name} {name_of(dtype)}, threads: {num_threads}"
                row = Row(kernel=kernel, shape=shape, us=seconds * 1e6, gb_s=speed, limit=limit, share=speed / limit)
                yield row | {"gflop_s": 2e-9 * num_rows * num_inputs * num_outputs / seconds}


def kernels_of(weight: torch.Tensor, working_set: int, choice: LinearSelection) -> dict[str, _Kernel]:
    """The kernels by name, each with as many copies of the weight as have the bytes of the working set."""
    kernels: dict[str, _Kernel] = {}
    for form in [name for name in (*FORMS, *FILE_FORMS) if name in choice.forms]:
        pack = FORMS.get(form) or partial(_of_file, form)
        first = pack(weight)
        packed = [first, *(pack(weight) for _ in range(-(-working_set // first.num_bytes) - 1))]
        for isa in choice.isas or (cpu.isa(),):
            of = f" {isa}" if choice.isas else ""
            kernels[f"own {form}{of}"] = _Kernel(first.num_bytes, len(packed), partial(_recorded, isa, packed))
    if not set(OTHERS) & set(choice.forms):
        return kernels
    dense = [weight.clone() for _ in range(-(-working_set // weight.nbytes))]
    if "torch" in choice.forms:
        kernels["torch.mm"] = _Kernel(weight.nbytes, len(dense), partial(_in_turn, _mm, dense))
    reordered = [one for one in map(onednn.pack, dense) if one is not None] if "onednn" in choice.forms else []
    if reordered:
        kernels["oneDNN packed"] = _Kernel(weight.nbytes, len(reordered), partial(_in_turn, _onednn, reordered))
    return kernels


def _of_file(kind: str, weight: torch.Tensor) -> PackedWeight:
    """A weight of this shape from random blocks of a GGUF type, whose numbers do not change the times. Raises
    ValueError for inputs that are no whole blocks."""
    elements, num_bytes = BLOCK[kind]
    if weight.shape[1] % elements:
        raise ValueError(f"blocks of {kind} have {elements} inputs, of which {weight.shape[1]} is no multiple")
    shape = (weight.shape[0], weight.shape[1] // elements * num_bytes)
    return PackedWeight(BlockRows(kind, torch.randint(60, shape, dtype=torch.uint8)))


def _grouped(weight: torch.Tensor, values: torch.Tensor, group_size: int) -> GroupedWeight:
    """A weight of this shape with random codes: their values do not change the times."""
    codes = torch.randint(len(values) // 2 - 1, weight.shape, dtype=torch.uint8)  # all codes below that of fp8's NaN
    return GroupedWeight(codes, values, torch.ones(len(weight), weight.shape[1] // group_size), group_size)


def _recorded(isa: str, packed: Sequence[PackedWeight], x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    program = Program()
    for weight in packed:
        program.record(partial(linear, x, weight, out))

    def replay() -> None:
        if cpu.isa() != isa:
            _set_isa(isa)
        program.replay()

    return replay


def _in_turn(
    product: Callable[[Any, torch.Tensor, torch.Tensor], object],
    weights: Sequence[Any],
    x: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[], object]:
    return lambda: [product(weight, x, out) for weight in weights]


def _mm(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def _onednn(weight: Any, x: torch.Tensor, _: torch.Tensor) -> None:
    onednn.packed_linear(x, weight, None)  # allocates its result: it takes no `out`
