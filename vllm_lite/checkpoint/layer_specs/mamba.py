"""Mamba-2 layers in numbers: heads, sizes, and what they keep of a sequence instead of KV. No torch."""

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
    """How many tokens the convolution sees, the present one included."""
    step_limits: tuple[float, float] = (0.0, math.inf)
    """The least and the most that a token's time step is."""
    num_groups: int = 1
    """Heads are in so many groups of one size, one behind the other; what a token gets is normed over a group."""

    normed: bool = True
    """Whether what a token gets is normed at all."""
    factors: tuple[float, float, float, float, float] | None = None
    """What the parts of the first projection are multiplied by: the gate, x, b, c and time steps; None = by nothing."""
    output_factor: float = 1.0
    """What the second projection gives is multiplied by it."""
    beside_attention: bool = False
    """Whether attention stands beside it in the layer, and reads the same."""

    num_projections = 1

    @property
    def value_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def conv_channels(self) -> int:
        """Elements of a token's x, b and c, which pass the convolution."""
        return self.value_width + 2 * self.num_groups * self.state_size

    @property
    def scratch_size(self) -> int:
        """Elements of a token, of float32, between the projections."""
        return self.conv_channels

    @property
    def projected_size(self) -> int:
        """Elements of a token that the first projection gives: the gate z, then x, b and c, and the time step of each
        head."""
        return self.value_width + self.conv_channels + self.num_heads

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Elements of the gate, of x, b, c and of the time steps in the first projection."""
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
        """A name for the parts that ranks share."""
        groups = f" in {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.num_heads} heads of recurrent layers{groups}"

    def fits(self, world: int) -> bool:
        """Ranks share whole groups, or the heads of the only one."""
        return (self.num_heads if self.num_groups == 1 else self.num_groups) % world == 0

    def held(self, shard: Shard) -> Split:
        """The heads that a rank holds. Raises ConfigError if ranks cannot share them."""
        if not self.fits(shard.world):
            raise ConfigError(f"tensor_parallel_size {shard.world} does not divide the {self.shared}")
        return Split.even(self.num_heads, shard)

    def held_groups(self, shard: Shard) -> Split:
        """The groups that those are of."""
        return Split.whole(1) if self.num_groups == 1 else Split.even(self.num_groups, shard)

    def per_rank(self, shard: Shard) -> "MambaSpec":
        """The layer with the heads that a rank holds."""
        heads, groups = self.held(shard).size, self.held_groups(shard).size
        return msgspec.structs.replace(self, num_heads=heads, num_groups=groups)

    def rank_shape(self, layer: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor, `shape` being that of the whole."""
        if layer == "out_proj":
            return shape[0], self.value_width
        rows = {"in_proj": self.projected_size, "conv1d": self.conv_channels, "norm": self.value_width}
        return rows.get(layer, self.num_heads), *shape[1:]

    def parameters(self, hidden_size: int) -> int:
        matrices = hidden_size * (self.projected_size + self.value_width)
        norm = self.value_width if self.normed else 0
        return matrices + self.conv_channels * (self.conv_size + 1) + 3 * self.num_heads + norm
