"""Specs of Mamba-2 layers: heads, sizes, and the states that they keep instead of KV. No torch."""

import math

import msgspec

from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.errors import ConfigError


class MambaSpec(msgspec.Struct, frozen=True, tag="mamba"):
    """A layer that keeps for each head a matrix [state_size, head_size], to which each token adds b x^T, and the last
    inputs of a short convolution. The heads of a group share b and c."""

    num_heads: int
    head_size: int
    state_size: int
    conv_size: int
    """Number of tokens that the convolution sees, including the current one."""
    step_limits: tuple[float, float] = (0.0, math.inf)
    """Lower and upper bound of a token's time step."""
    num_groups: int = 1
    """Number of groups of consecutive heads, of equal size; the output is normed over each group."""

    normed: bool = True
    """Whether the output is normed."""
    factors: tuple[float, float, float, float, float] | None = None
    """Factors on the parts of the first projection: the gate, x, b, c and time steps; None = 1."""
    output_factor: float = 1.0
    """Factor on the output of the second projection."""
    beside_attention: bool = False
    """Whether the layer also has attention, in parallel on the same input."""

    num_projections = 1

    @property
    def value_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def conv_channels(self) -> int:
        """Elements of a token's x, b and c, which go through the convolution."""
        return self.value_width + 2 * self.num_groups * self.state_size

    @property
    def scratch_size(self) -> int:
        """Float32 elements per token between the projections."""
        return self.conv_channels

    @property
    def projected_size(self) -> int:
        """Output elements of the first projection per token: the gate z, then x, b and c, and the time step of each
        head."""
        return self.value_width + self.conv_channels + self.num_heads

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Elements of the gate, x, b, c and the time steps in the first projection."""
        shared = self.num_groups * self.state_size
        return self.value_width, self.value_width, shared, shared, self.num_heads

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.conv_size - 1, self.conv_channels

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.state_size, self.head_size

    @property
    def state_elements(self) -> int:
        """Elements of one layer's state of one sequence."""
        return math.prod(self.conv_shape) + math.prod(self.matrix_shape)

    @property
    def shared(self) -> str:
        """Name of the parts that are divided among ranks, for errors."""
        groups = f" in {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.num_heads} heads of recurrent layers{groups}"

    def fits(self, world: int) -> bool:
        """Whether whole groups, or the heads of the only group, can be divided among `world` ranks."""
        return (self.num_heads if self.num_groups == 1 else self.num_groups) % world == 0

    def held(self, shard: Shard) -> Split:
        """A rank's heads. Raises ConfigError if they cannot be divided."""
        if not self.fits(shard.world):
            raise ConfigError(f"tensor_parallel_size {shard.world} does not divide the {self.shared}")
        return Split.even(self.num_heads, shard)

    def held_groups(self, shard: Shard) -> Split:
        """The groups of a rank's heads."""
        return Split.whole(1) if self.num_groups == 1 else Split.even(self.num_groups, shard)

    def per_rank(self, shard: Shard) -> "MambaSpec":
        """The layer with a rank's heads."""
        heads, groups = self.held(shard).size, self.held_groups(shard).size
        return msgspec.structs.replace(self, num_heads=heads, num_groups=groups)

    def rank_shape(self, layer: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a rank's part of a tensor; `shape` is the whole's."""
        if layer == "out_proj":
            return shape[0], self.value_width
        rows = {"in_proj": self.projected_size, "conv1d": self.conv_channels, "norm": self.value_width}
        return rows.get(layer, self.num_heads), *shape[1:]

    def parameters(self, hidden_size: int) -> int:
        matrices = hidden_size * (self.projected_size + self.value_width)
        norm = self.value_width if self.normed else 0
        return matrices + self.conv_channels * (self.conv_size + 1) + 3 * self.num_heads + norm
