"""The sampler's pass from logits to tokens on a GPU. Kernel: csrc/cuda/sampler.cuh; the reference is
worker/sampling/sampler.py."""

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cuda.fused import vector_width
from vllm_lite.kernels.cuda.launcher import Arg, Launcher, require
from vllm_lite.kernels.cuda.patience import PATIENCE_S, Wait
from vllm_lite.kernels.sampling import DRAW, Picked

SOURCE = "sampler.cuh"
THREADS = 1024
SHARED_BYTES = 37632
MAX_PARTS, ROW_BYTES = 16, 25104
"""As kMaxParts and RowParts in the source."""
BLOCKS = 64
"""Total blocks if there are few rows: about half of a large GPU's multiprocessors, and only a few microseconds for
merging their results."""
MIN_PART = 4096
"""Minimum tokens of a part that is worth a block."""

PICKED = np.dtype([("token", np.int64), ("best", np.float32), ("limit", np.float32)])
"""The kernel's output per row; the same record as `Picked` in csrc/cuda/sampler.cuh."""


def pick(
    launcher: Launcher,
    logits: torch.Tensor,  # float32 [num_rows, vocab], each row contiguous
    draws: NDArray[np.void],  # DRAW [num_rows]
    patience_s: float = PATIENCE_S,
) -> Picked:
    """Pick one token per row; the logits are unchanged. The token of a row that is not finite is undefined.

    Waits for the device: the results are one small copy. Raises ValueError for wrong shapes or types, and
    DeviceHungError if the device takes longer than `patience_s`.
    """
    return PickedLater(pick_on_device(launcher, logits, draws), patience_s).wait()


class PickedLater:
    """The result of `pick_on_device` on the device, and its asynchronous copy to the host."""

    def __init__(self, records: torch.Tensor, patience_s: float = PATIENCE_S) -> None:  # uint8 [num_rows, 16]
        self.tokens = records.view(torch.int64)[:, 0]
        """int64 [num_rows], on the device."""
        self.pending: Wait | None = None
        """The wait for the copy; None: it is complete."""
        if not records.is_cuda:
            self._host = records.clone()
            return
        self._host = torch.empty(records.shape, dtype=records.dtype, pin_memory=True)
        self._host.copy_(records, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending = Wait(event, "a step", patience_s)

    def is_done(self) -> bool:
        """Whether `wait` would return at once. Raises DeviceHungError like `wait`."""
        return self.pending is None or self.pending.is_over()

    def wait(self) -> Picked:
        """Wait for the results. Raises DeviceHungError after the timeout."""
        if self.pending is not None:
            self.pending.wait()
        records = self._host.numpy().view(PICKED).reshape(-1)
        return Picked(records["token"], records["best"], records["limit"])


def parts_for(num_rows: int, vocab: int) -> int:
    """Number of blocks per row."""
    return max(1, min(MAX_PARTS, BLOCKS // num_rows, vocab // MIN_PART))


def pick_on_device(
    launcher: Launcher,
    logits: torch.Tensor,  # float32 [num_rows, vocab], each row contiguous
    draws: NDArray[np.void],  # DRAW [num_rows]
    parts: int | None = None,  # blocks per row, up to MAX_PARTS; None: chosen here. No bit depends on it
) -> torch.Tensor:  # uint8 [num_rows, 16], PICKED records on the device
    """As `pick`, without waiting for the device."""
    require(
        logits.dtype == torch.float32 and logits.dim() == 2 and logits.stride(1) == 1 and logits.shape[1] > 0,
        f"logits must be float32 [num_rows, vocab] with contiguous rows, got {logits.dtype} {list(logits.shape)}",
    )
    num_rows, vocab = logits.shape
    require(
        draws.dtype == DRAW and draws.flags.c_contiguous and draws.shape == (num_rows,),
        f"draws must be a contiguous array of {num_rows} DRAW records, got {draws.dtype} {list(draws.shape)}",
    )
    picked = torch.empty(num_rows, PICKED.itemsize, dtype=torch.uint8, device=logits.device)
    if num_rows:
        records = torch.from_numpy(draws.view(np.uint8))
        if logits.is_cuda:  # from other memory than pinned the copy would wait for all that was launched before
            records = records.pin_memory()
        on_device = records.to(logits.device, non_blocking=True)
        parts = parts_for(num_rows, vocab) if parts is None else parts
        width = vector_width(vocab, logits)
        args: tuple[Arg, ...] = (logits, np.int64(logits.stride(0)), np.int32(vocab), on_device)
        rows: tuple[Arg, ...] = ()
        if parts > 1:
            rows = (torch.zeros(num_rows, ROW_BYTES, dtype=torch.uint8, device=logits.device),)
        for kernel in _kernels(draws, vocab, parts):
            given = (*args, *rows) if kernel == "coarse_part" else (*args, *rows, picked)
            launch = launcher.kernel(SOURCE, f"{kernel}<{width}>")
            launch((num_rows, parts, 1), (THREADS, 1, 1), given, SHARED_BYTES)
    return picked


def _kernels(draws: NDArray[np.void], vocab: int, parts: int) -> tuple[str, ...]:
    """Kernels to launch: one with a block per row, or several for rows in parts."""
    if parts == 1:
        return ("pick",)
    random = draws["temperature"] > 0
    if not random.any():
        return ("best_part",)
    filtered = random & ((draws["top_k"] < vocab) | (draws["top_p"] < 1))
    return ("best_part", "coarse_part", "draw_part") if filtered.any() else ("best_part", "draw_part")
