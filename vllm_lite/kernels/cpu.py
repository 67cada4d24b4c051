"""The compiled library of csrc/cpu, called through ctypes on raw data pointers.

Every kernel has a plain torch twin, which is its reference and runs where there is no library.
"""

import ctypes
from functools import cache
from importlib.resources import as_file, files

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite import log

ABI = 1
LIBRARY = "libvllm_lite_cpu.so"

DRAW = np.dtype(
    [
        ("row", np.int64),  # of the logits
        ("seed", np.uint64),
        ("child", np.uint32),
        ("position", np.uint32),
        ("offset", np.float32),  # subtracted from the logits: the row's largest
        ("temperature", np.float32),  # above 0
    ]
)
"""One draw; the same record as `Draw` in csrc/cpu/sampler.cpp."""

_logger = log.get(__name__)
_pointer, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES = {
    "vllm_lite_draw": [_pointer, _int64, _int32, _int64, _pointer, _pointer],
    "vllm_lite_noise": [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, _int32, _pointer, _pointer],
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, opened once; None, with one line in the log, where it is missing or of another version."""
    try:
        return _open()
    except (OSError, AttributeError) as error:
        _logger.warning("no native CPU kernels: random sampling runs in plain torch, about 4 times slower (%s)", error)
        return None


def _open() -> ctypes.CDLL:
    # Not beside __file__: in an editable install the library and the sources lie in two folders.
    resource = files("vllm_lite") / "_native" / LIBRARY
    if not resource.is_file():
        raise OSError(f"{LIBRARY} was not built when the package was installed; that takes a C++ compiler")
    with as_file(resource) as path:
        opened = ctypes.CDLL(str(path))
    abi = opened.vllm_lite_abi()
    if abi != ABI:
        raise OSError(f"{LIBRARY} has ABI {abi}, this package needs {ABI}; install the package again")
    for name, argtypes in _SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = argtypes, None
    return opened


def available() -> bool:
    return library() is not None


def draw(
    logits: torch.Tensor,  # float32 [num_rows, vocab], on the CPU, each row contiguous
    draws: NDArray[np.void],  # DRAW [num_draws]
) -> torch.Tensor:  # int64 [num_draws]
    """For each draw the first token with the largest (logit - offset) / temperature + noise; 0 if all are -infinity.

    The noise is defined in vllm_lite/worker/sampler.py.
    """
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 rows on the CPU, got {logits.dtype} {list(logits.shape)}")
    if draws.dtype != DRAW or not draws.flags.c_contiguous or draws.ndim != 1:
        raise ValueError(f"draws must be a contiguous array of DRAW records, got {draws.dtype}")
    rows = draws["row"]
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits):
        raise ValueError(f"rows must lie in [0, {len(logits)}), got {rows.tolist()}")
    tokens = torch.empty(len(draws), dtype=torch.int64)
    _loaded().vllm_lite_draw(
        logits.data_ptr(), logits.stride(0), logits.shape[1], len(draws), draws.ctypes.data, tokens.data_ptr()
    )
    return tokens


def noise(
    seed: int, child: int, position: int, vocab_size: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:  # both [vocab]
    """The hash and the noise of every token of one row. For tests: `draw` computes them on its way."""
    hashes, values = np.empty(vocab_size, np.uint32), np.empty(vocab_size, np.float32)
    _loaded().vllm_lite_noise(seed, child, position, vocab_size, hashes.ctypes.data, values.ctypes.data)
    return hashes, values


def _loaded() -> ctypes.CDLL:
    opened = library()
    if opened is None:
        raise RuntimeError("no native CPU kernels; ask available() first")
    return opened
