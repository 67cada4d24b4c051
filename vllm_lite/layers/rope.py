"""Rotary position embedding in the NeoX order: element i of a head turns with element i + head_size / 2."""

import math

import torch

from vllm_lite.checkpoint.model_spec import Rope
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import fused
from vllm_lite.kernels.ops import Rotation


class RotaryEmbedding:
    """cos and sin of every position below `max_position`, as a float32 table [max_position, 2, head_size / 2].

    `select` fetches a step's rows once; the attention backend turns the heads of each layer with them.
    """

    def __init__(self, rope: Rope, head_size: int, max_position: int, *, device: torch.device) -> None:
        self.half = head_size // 2
        self.native = device.type == "cpu" and cpu.available()
        positions = torch.arange(max_position, dtype=torch.float32, device=device)
        angles = positions[:, None] * inverse_frequencies(rope, head_size).to(device)
        self.table = torch.stack((angles.cos(), angles.sin()), dim=1)

    def select(self, positions: torch.Tensor, out: Rotation) -> None:
        """positions: int64 [num_tokens]. A position outside of the table is an IndexError on a CPU."""
        if self.native and fused.select_rotation(self.table, positions, out):
            return
        half = self.half
        rows = torch.index_select(self.table, 0, positions)  # [num_tokens, 2, head_size / 2]
        out.cos.view(-1, 2, half).copy_(rows[:, :1])
        out.sin.view(-1, 2, half).copy_(rows[:, 1:])
        out.sin[..., :half].neg_()


def inverse_frequencies(rope: Rope, head_size: int) -> torch.Tensor:
    """Radians per position of each pair: float32 [head_size / 2].

    Kind "llama3" slows wavelengths that did not fit into the original context down by `factor`, leaves those that fit
    it `high_freq_factor` times alone, and blends linearly (in turns per context) in between.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep.clamp_(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * (frequencies / rope.factor)
