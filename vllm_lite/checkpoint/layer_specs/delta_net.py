"""Specs of Gated DeltaNet layers: heads, sizes, and the states that they keep instead of KV. No torch."""

import math
from typing import Literal

import msgspec

from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.errors import ConfigError

STATE_BYTES = 4
"""Bytes of a state's element: states are float32 in any model dtype, as rounding errors accumulate."""


Projections = Literal["apart", "by key head", "b and a by key head"]
"""Storage of the first projections in a checkpoint. "apart": Q, K and V in one tensor, z, b and a in three. "by key
head": Q, K, V and z in one tensor, b and a in another, interleaved by key head with its value heads. "b and a by key
head": only b and a so."""


class DeltaNetSpec(msgspec.Struct, frozen=True, tag="delta_net"):
    """A layer that keeps one state per sequence: for each value head a matrix [key_size, value_size], corrected by each
    token, and the last inputs of a short convolution."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads: each key head serves a run of consecutive value heads."""
    key_size: int
    value_size: int
    conv_size: int
    """Number of tokens that the convolution sees, including the current one."""
    stored: Projections = "apart"

    beside_attention = False
    num_projections = 4
    """Number of first projections in a checkpoint."""

    @property
    def key_width(self) -> int:
        """Elements of a token's Q, and of its K."""
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def conv_channels(self) -> int:
        """Elements of a token's Q, K and V, which go through the convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def projected_size(self) -> int:
        """Output elements of the first projections per token: Q, K and V, the gate z, and b and a of each value
        head."""
        return self.conv_channels + self.value_width + 2 * self.num_value_heads

    @property
    def scratch_size(self) -> int:
        """Float32 elements per token between the projections."""
        return self.conv_channels

    @property
    def shared(self) -> str:
        """Name of the parts that are divided among ranks, for errors."""
        return f"{self.num_key_heads} key heads of recurrent layers"

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Shape of the convolution's part of a state: [tokens, channels]."""
        return self.conv_size - 1, self.conv_channels

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_size, self.value_size

    @property
    def state_elements(self) -> int:
        """Elements of one layer's state of one sequence."""
        return math.prod(self.conv_shape) + math.prod(self.matrix_shape)

    def fits(self, world: int) -> bool:
        """Whether the heads can be divided among `world` ranks."""
        return self.num_key_heads % world == 0

    def heads(self, shard: Shard) -> tuple[Split, Split]:
        """A rank's key heads and value heads. Raises ConfigError if they cannot be divided."""
        if not self.fits(shard.world):
            raise ConfigError(
                f"tensor_parallel_size {shard.world} does not divide the {self.num_key_heads} key heads of a "
                "recurrent layer"
            )
        return Split.even(self.num_key_heads, shard), Split.even(self.num_value_heads, shard)

    def per_rank(self, shard: Shard) -> "DeltaNetSpec":
        """The layer with a rank's heads."""
        keys, values = self.heads(shard)
        return msgspec.structs.replace(self, num_key_heads=keys.size, num_value_heads=values.size)

    def rank_shape(self, layer: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a rank's part of a tensor; `shape` is the whole's. All ranks hold the norm, which applies to each
        head."""
        if layer == "norm":
            return shape
        if layer == "out_proj":
            return shape[0], self.value_width
        rows = {
            "in_proj_qkvz": self.conv_channels + self.value_width,
            "in_proj_ba": 2 * self.num_value_heads,
            "in_proj_qkv": self.conv_channels,
            "conv1d": self.conv_channels,
            "in_proj_z": self.value_width,
        }
        return rows.get(layer, self.num_value_heads), *shape[1:]

    def parameters(self, hidden_size: int) -> int:
        matrices = hidden_size * (self.projected_size + self.value_width)
        return matrices + self.conv_channels * self.conv_size + 2 * self.num_value_heads + self.value_size
