"""Gated DeltaNet layers in numbers: heads, sizes, and what they keep of a sequence instead of KV. No torch."""

import math
from typing import Literal

import msgspec

from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.errors import ConfigError

STATE_BYTES = 4
"""States are float32, whatever the model is computed in: what is rounded in one step is in all later ones."""


Projections = Literal["apart", "by key head", "b and a by key head"]
"""How a checkpoint stores the first projections: Q, K and V in one tensor, z, b and a in three; or Q, K, V and z in
one, and b and a in another, where behind what a key head has of one stands what its value heads have of the next; or so
with b and a alone."""


class DeltaNetSpec(msgspec.Struct, frozen=True, tag="delta_net"):
    """A layer that keeps one state of a whole sequence: for each value head a matrix [key_size, value_size], to which
    each token adds a correction, and the last inputs of a short convolution."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads: each of those serves so many value heads, one behind the other."""
    key_size: int
    value_size: int
    conv_size: int
    """How many tokens the convolution sees, the present one included."""
    stored: Projections = "apart"

    beside_attention = False
    num_projections = 4
    """How many projections of a token a checkpoint has."""

    @property
    def key_width(self) -> int:
        """Elements of a token's Q, and of its K."""
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def conv_channels(self) -> int:
        """Elements of a token's Q, K and V, which pass the convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def projected_size(self) -> int:
        """Elements of a token that the first projections give: Q, K and V, the gate z, and b and a of each value
        head."""
        return self.conv_channels + self.value_width + 2 * self.num_value_heads

    @property
    def scratch_size(self) -> int:
        """Elements of a token, of float32, between the projections."""
        return self.conv_channels

    @property
    def shared(self) -> str:
        """A name for the parts that ranks share."""
        return f"{self.num_key_heads} key heads of recurrent layers"

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The part of a state that the convolution keeps: [tokens, channels]."""
        return self.conv_size - 1, self.conv_channels

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_size, self.value_size

    @property
    def state_elements(self) -> int:
        """Elements of one layer's state of one sequence."""
        return math.prod(self.conv_shape) + math.prod(self.matrix_shape)

    def fits(self, world: int) -> bool:
        """Whether so many ranks can share the heads."""
        return self.num_key_heads % world == 0

    def heads(self, shard: Shard) -> tuple[Split, Split]:
        """The key heads and the value heads that a rank holds. Raises ConfigError if ranks cannot share them."""
        if not self.fits(shard.world):
            raise ConfigError(
                f"tensor_parallel_size {shard.world} does not divide the {self.num_key_heads} key heads of a "
                "recurrent layer"
            )
        return Split.even(self.num_key_heads, shard), Split.even(self.num_value_heads, shard)

    def per_rank(self, shard: Shard) -> "DeltaNetSpec":
        """The layer with the heads that a rank holds."""
        keys, values = self.heads(shard)
        return msgspec.structs.replace(self, num_key_heads=keys.size, num_value_heads=values.size)

    def rank_shape(self, layer: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor, `shape` being that of the whole. All hold the norm, which is over
        each head."""
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
