"""Packing of weights straight from files by native threads, while Python does other work. Does not import torch.

Each packed weight has a key that describes it. A layer asks for its weight by this key and packs the weight itself if
there is none. So packing unneeded weights costs time but never makes a result wrong.
"""

import ctypes
import os
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from vllm_lite.checkpoint.quantization.on_load import GROUPS, TILE_GROUP, Form
from vllm_lite.checkpoint.tensors.headers import identity
from vllm_lite.kernels.cpu.library import function, int32, int64, isa, pointer
from vllm_lite.kernels.cpu.pages import Pages
from vllm_lite.kernels.cpu.weights.record import QUANTIZED_TYPES, Record
from vllm_lite.runtime import log

FLOATS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Codes of dtypes.py, by name of the type."""
GROUPED4, GROUPED5, GROUPED8 = 101, 106, 102
"""kGrouped4, kGrouped5 and kGrouped8."""
FORMS = {
    "int8": GROUPED8,
    "fp8": 105,
    "int4": GROUPED4,
    "int4_g32": GROUPED4,
    "int5_g32": GROUPED5,
    "int8_g128": GROUPED8,
}
"""Type code of each form of --quantization, as in csrc/cpu/quantize.h."""
NICENESS = 5
"""Nice value that the packing threads add to their own, so that the other work of a starting process has priority."""
LOOK_EVERY_S = 0.2
_ALIGNMENT_BYTES = 64
_PENDING, _CUT_OFF = -2, -1

_BEGIN_TYPES = (pointer, int64, int32, int32)
_WAIT_TYPES = (pointer, int64, int64)

K = TypeVar("K", bound=Hashable)

logger = log.get(__name__)


def group_size(form: Form) -> int:
    """Number of inputs that share a scale. On a machine with AMX tiles, int8 has the group size that tiles multiply
    fastest; with smaller groups, prompts would take up to 1.7 times as long."""
    return TILE_GROUP if form == "int8" and isa().startswith("amx") else GROUPS[form]


class Piece(NamedTuple):
    """Rows of one tensor in a file that become consecutive rows of a weight."""

    file: Path
    offset: int
    """Offset of the tensor's first byte in the file."""
    dtype: str
    """Type in the file; one of FLOATS."""
    row_elements: int
    """Elements of a row of the tensor."""
    first_input: int
    """First element that is taken from each row."""
    first_row: int
    num_rows: int
    order: tuple[int, ...] | None = None
    """Numbers of the rows; None: the `num_rows` rows from `first_row` on."""


class Job(NamedTuple):
    """A weight to be packed: its pieces below each other, converted to `dtype` and then to `form`, if that is not
    None."""

    pieces: tuple[Piece, ...]
    num_inputs: int
    dtype: str
    form: Form | None = None

    @property
    def num_outputs(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)


class Packed(NamedTuple):
    """A weight in the layout of `linear.PackedWeight`, without its bias. The views keep the memory alive."""

    num_outputs: int
    num_inputs: int
    dtype: str
    data: memoryview
    supers: memoryview | None = None
    """float32 supers, as in PackedWeight of csrc/cpu/linear.h; None: the form has none."""
    form: Form | None = None
    """The `form` of the job."""


class _Piece(ctypes.Structure):
    """The same record as `WeightPiece` in csrc/cpu/load.cpp."""

    _fields_ = (
        ("offset", int64),
        ("row_elements", int64),
        ("first_input", int64),
        ("first_row", int64),
        ("num_rows", int64),
        ("order", pointer),
        ("file", int32),
        ("type", int32),
    )


class _Job(ctypes.Structure):
    """The same record as `WeightJob` in csrc/cpu/load.cpp."""

    _fields_ = (
        ("pieces", pointer),
        ("num_pieces", int64),
        ("num_outputs", int64),
        ("num_inputs", int64),
        ("packed", pointer),
        ("supers", pointer),
        ("row_type", int32),
        ("type", int32),
        ("group_size", int64),
    )


class _Place(NamedTuple):
    """The number of a job, and the position of its result in the packer's pages, in bytes."""

    number: int
    data: int
    data_bytes: int
    supers: int
    supers_bytes: int

    @property
    def end(self) -> int:
        return self.supers + self.supers_bytes


class FilePacker:
    """Packs `jobs` in their order, from its creation on. It must be closed; weights that were taken stay valid."""

    def __init__(self, jobs: Mapping[K, Job], num_threads: int, niceness: int = NICENESS) -> None:
        """Starts `num_threads` threads, whose nice value is higher than the caller's by `niceness`. Raises OSError if a
        file cannot be opened or memory is exhausted."""
        self.jobs: dict[Hashable, Job] = dict(jobs.items())
        self._open = ExitStack()
        self._files: dict[Path, int] = {}
        self._identities: dict[Path, tuple[int, ...]] = {}
        self._alive: list[object] = []
        self._loading: int | None = None
        try:
            for file in dict.fromkeys(piece.file for job in jobs.values() for piece in job.pieces):
                self._files[file] = self._open.enter_context(file.open("rb", buffering=0)).fileno()
                self._identities[file] = identity(os.fstat(self._files[file]))
            self._places = self._lay_out()
            self._pages = Pages.zeros(max((place.end for place in self._places.values()), default=0))
            records = (_Job * len(jobs))(*(self._record(job, self._places[key]) for key, job in jobs.items()))
            begin = function("vllm_lite_load_begin", _BEGIN_TYPES, pointer)
            self._loading = begin(ctypes.addressof(records), len(jobs), num_threads, niceness)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reads(self, file: Path, known: tuple[int, ...]) -> bool:
        """Whether the file that is open here has the `headers.identity` `known`."""
        return self._identities[file] == known

    def serves(self, wanted: Collection[Hashable]) -> bool:
        """Whether all weights that are still to be taken are in `wanted` and no file has changed since it was opened.

        If not, the packer closes itself at once, because its weights would take memory beside those that are packed
        instead.
        """
        with suppress(OSError):
            unchanged = all(identity(file.stat()) == known for file, known in self._identities.items())
            if unchanged and self._places.keys() <= set(wanted):
                return True
        self.close()
        return False

    def take(self, key: Hashable, waiting: Callable[[], object] = lambda: None) -> Packed | None:
        """Take the weight that is packed for `key`; waits for it, and helps to pack. A weight can be taken once.
        `waiting` is called every LOOK_EVERY_S seconds. Returns None if there is no such weight, or if its file cannot
        be read to the end."""
        place = self._places.get(key)
        if place is None or self._loading is None:
            return None
        wait = function("vllm_lite_load_wait", _WAIT_TYPES, int32)
        while (state := wait(self._loading, place.number, int(1e9 * LOOK_EVERY_S))) == _PENDING:
            waiting()
        if state != 0:
            reason = "a file ends too soon" if state == _CUT_OFF else os.strerror(state)
            logger.debug("weights cannot be packed ahead: %s", reason)
            return None
        del self._places[key]
        job, view = self.jobs[key], memoryview(self._pages.mapping)
        first = self._pages.start
        data = view[first + place.data : first + place.data + place.data_bytes]
        supers = view[first + place.supers : first + place.end] if place.supers_bytes else None
        return Packed(job.num_outputs, job.num_inputs, job.dtype, data, supers, job.form)

    def close(self) -> None:
        """Stop packing, and free the weights that nobody has taken."""
        if self._loading is not None:
            function("vllm_lite_load_end", (pointer,))(self._loading)
            self._loading = None
            logger.debug("%d of %d weights were packed ahead", len(self.jobs) - len(self._places), len(self.jobs))
            for place in self._places.values():
                self._pages.give_back(place.data, place.end - place.data)
        self._alive.clear()
        self._open.close()

    def _lay_out(self) -> dict[Hashable, _Place]:
        places: dict[Hashable, _Place] = {}
        end = 0
        for number, (key, job) in enumerate(self.jobs.items()):
            data = end + -end % _ALIGNMENT_BYTES
            num_bytes, num_supers = packed_size(job.num_outputs, job.num_inputs, job.dtype, job.form)
            supers = data + num_bytes + -num_bytes % _ALIGNMENT_BYTES
            places[key] = _Place(number, data, num_bytes, supers, 4 * num_supers)
            end = places[key].end
        return places

    def _record(self, job: Job, place: _Place) -> _Job:
        pieces = (_Piece * len(job.pieces))(*map(self._piece, job.pieces))
        self._alive.append(pieces)
        address = self._pages.address
        supers = address + place.supers if place.supers_bytes else None
        return _Job(
            ctypes.addressof(pieces),
            len(job.pieces),
            job.num_outputs,
            job.num_inputs,
            address + place.data,
            supers,
            FLOATS[job.dtype],
            FLOATS[job.dtype] if job.form is None else FORMS[job.form],
            0 if job.form is None else group_size(job.form),
        )

    def _piece(self, piece: Piece) -> _Piece:
        order = None
        if piece.order is not None:
            rows = (int64 * len(piece.order))(*piece.order)
            self._alive.append(rows)
            order = ctypes.addressof(rows)
        sizes = (piece.offset, piece.row_elements, piece.first_input, piece.first_row, piece.num_rows)
        return _Piece(*sizes, order, self._files[piece.file], FLOATS[piece.dtype])


def packed_size(num_outputs: int, num_inputs: int, dtype: str, form: Form | None) -> tuple[int, int]:
    """Bytes of a weight's data, and its number of supers."""
    shape = num_outputs, num_inputs
    if form is not None:
        record, num_supers = Record(), int64()
        size = function("vllm_lite_quantized_weight", QUANTIZED_TYPES, int64)
        own = (FORMS[form], group_size(form))
        return int(size(*shape, *own, ctypes.addressof(record), ctypes.addressof(num_supers))), num_supers.value
    item_bytes = 4 if dtype == "float32" else 2
    return item_bytes * int(function("vllm_lite_packed_size", (int64, int64), int64)(*shape)), 0
