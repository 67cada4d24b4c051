"""Rotary position embedding in the order of the kernels: element i of a head is rotated with i + head_size / 2.

If a checkpoint rotates other pairs, or only a part of each head, the rows of Q and K are permuted to this order when
they are loaded (`Rope.order`). Elements that are not rotated have cos 1 and sin 0.
"""

import math

import torch
from torch.nn import functional

from vllm_lite.attention.step_batch import AXIS_BITS, AXIS_MASK
from vllm_lite.checkpoint.layer_specs.rope import Dynamic, LinearScaling, Llama3, LongRope, Proportional, Rope, Yarn
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import fused
from vllm_lite.kernels.ops import Rotation


class RotaryEmbedding:
    """cos and sin of every position below `max_position`, as a float32 table [max_position, 2, head_size / 2].

    `select` looks up a step's rows once; the attention backend rotates the heads of each layer by them.
    """

    def __init__(self, rope: Rope, head_size: int, max_position: int, *, device: torch.device) -> None:
        self.half = head_size // 2
        self.axes: torch.Tensor | None = None
        if rope.axes is not None:
            axes = torch.tensor(rope.axes, dtype=torch.int64, device=device)
            self.axes = functional.pad(axes, (0, self.half - len(axes)))  # unrotated pairs: any axis
        self.native = device.type == "cpu" and cpu.available()
        frequencies = inverse_frequencies(rope, head_size, max_position)
        positions = torch.arange(max_position, dtype=torch.float32, device=device)
        angles = positions[:, None] * frequencies.to(device)
        self.table = torch.empty(max_position, 2, self.half, device=device)
        turning = self.table[:, :, : len(frequencies)]
        torch.cos(angles, out=turning[:, 0])
        torch.sin(angles, out=turning[:, 1])
        if rope.attention_factor != 1.0:
            turning *= rope.attention_factor
        self.table[:, 0, len(frequencies) :] = 1.0
        self.table[:, 1, len(frequencies) :] = 0.0

    def select(self, positions: torch.Tensor, out: Rotation) -> None:
        """positions: int64 [num_tokens]. A position outside of the table is an IndexError on a CPU."""
        if self.native and fused.select_rotation(self.table, positions, out):
            return
        self._put(torch.index_select(self.table, 0, positions), out)

    def select_axes(self, positions: torch.Tensor, out: Rotation) -> None:
        """Look up rotations for positions that may differ between axes, as `on_axes` encodes them."""
        if self.axes is None:
            return self.select(positions, out)
        time = positions & AXIS_MASK
        along = torch.stack([time, time + (positions >> AXIS_BITS & AXIS_MASK), time + (positions >> 2 * AXIS_BITS)])
        rows = self.table[along]  # [3, num_tokens, 2, head_size / 2]
        pairs = torch.arange(self.half, device=rows.device)
        self._put(rows[self.axes, :, :, pairs].permute(1, 2, 0), out)
        return None

    def _put(self, rows: torch.Tensor, out: Rotation) -> None:  # [num_tokens, 2, head_size / 2]
        half = self.half
        out.cos.view(-1, 2, half).copy_(rows[:, :1])
        out.sin.view(-1, 2, half).copy_(rows[:, 1:])
        out.sin[..., :half].neg_()


def inverse_frequencies(rope: Rope, head_size: int, max_position: int) -> torch.Tensor:
    """Radians per position of each rotated pair: float32 [rotary_size / 2].

    Some kinds depend on the maximum length of a sequence, `max_position`.
    """
    size = rope.rotary_size or head_size
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies: torch.Tensor = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Proportional(num_pairs=num_pairs, factor=factor):
            frequencies[num_pairs:] = 0.0
            return frequencies / factor
        case Dynamic(factor=factor, original=original):
            grown = factor * max(max_position, original) / original - (factor - 1)
            return 1.0 / (torch.tensor(rope.theta * grown ** (size / (size - 2))) ** exponents)
        case LongRope(short=short, long=long, original=original):
            return 1.0 / (torch.tensor(long if max_position > original else short) * rope.theta**exponents)
        case Llama3() as llama3:
            return _llama3(frequencies, llama3)
        case Yarn() as yarn:
            return _yarn(frequencies, rope.theta, yarn)


def _llama3(frequencies: torch.Tensor, rope: Llama3) -> torch.Tensor:
    """Blend scaled and unscaled frequencies linearly in rotations per original context (Llama 3)."""
    turns = rope.original * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep.clamp_(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * (frequencies / rope.factor)


def _yarn(frequencies: torch.Tensor, theta: float, rope: Yarn) -> torch.Tensor:
    """Blend scaled and unscaled frequencies linearly in the index of the pair (YaRN)."""
    size = 2 * len(frequencies)

    def pair_of(turns: float) -> float:
        """Index of the pair with `turns` rotations in the original context, as a fraction."""
        return size * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # avoids a division by 0
    kept = 1.0 - ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp_(0.0, 1.0)
    return frequencies / rope.factor * (1.0 - kept) + frequencies * kept
