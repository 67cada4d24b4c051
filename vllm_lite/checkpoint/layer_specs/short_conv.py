"""Gated short convolutions in numbers: layers that keep the last few inputs of a sequence instead of KV. No torch."""

import msgspec

from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.errors import ConfigError


class ShortConvSpec(msgspec.Struct, frozen=True, tag="short_conv"):
    """A layer that gives c * convolve(b * x), with b, c and x projected from each token."""

    channels: int
    conv_size: int
    """How many tokens the convolution sees, the present one included."""

    beside_attention = False
    num_projections = 1
    scratch_size = 0

    @property
    def projected_size(self) -> int:
        """Elements of a token that the first projection gives: b, c and x."""
        return 3 * self.channels

    @property
    def value_width(self) -> int:
        return self.channels

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.conv_size - 1, self.channels

    @property
    def state_elements(self) -> int:
        """Elements of one layer's state of one sequence."""
        return (self.conv_size - 1) * self.channels

    @property
    def shared(self) -> str:
        """A name for the parts that ranks share."""
        return f"{self.channels} channels of convolutions"

    def fits(self, world: int) -> bool:
        return self.channels % world == 0

    def held(self, shard: Shard) -> Split:
        """The channels that a rank holds. Raises ConfigError if ranks cannot share them."""
        if not self.fits(shard.world):
            raise ConfigError(f"tensor_parallel_size {shard.world} does not divide the {self.shared}")
        return Split.even(self.channels, shard)

    def per_rank(self, shard: Shard) -> "ShortConvSpec":
        """The layer with the channels that a rank holds."""
        return msgspec.structs.replace(self, channels=self.held(shard).size)

    def rank_shape(self, layer: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor, `shape` being that of the whole."""
        if layer == "out_proj":
            return shape[0], self.channels
        return (self.projected_size if layer == "in_proj" else self.channels, *shape[1:])

    def parameters(self, hidden_size: int) -> int:
        return hidden_size * (self.projected_size + self.channels) + self.channels * self.conv_size
