"""Specs of gated short convolutions: layers that keep the last few inputs of a sequence instead of KV. No torch."""

import msgspec

from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.errors import ConfigError


class ShortConvSpec(msgspec.Struct, frozen=True, tag="short_conv"):
    """A layer that computes c * convolve(b * x), with b, c and x projected from each token."""

    channels: int
    conv_size: int
    """Number of tokens that the convolution sees, including the current one."""

    beside_attention = False
    num_projections = 1
    scratch_size = 0

    @property
    def projected_size(self) -> int:
        """Output elements of the first projection per token: b, c and x."""
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
        """Name of the parts that are divided among ranks, for errors."""
        return f"{self.channels} channels of convolutions"

    def fits(self, world: int) -> bool:
        return self.channels % world == 0

    def held(self, shard: Shard) -> Split:
        """A rank's channels. Raises ConfigError if they cannot be divided."""
        if not self.fits(shard.world):
            raise ConfigError(f"tensor_parallel_size {shard.world} does not divide the {self.shared}")
        return Split.even(self.channels, shard)

    def per_rank(self, shard: Shard) -> "ShortConvSpec":
        """The layer with a rank's channels."""
        return msgspec.structs.replace(self, channels=self.held(shard).size)

    def rank_shape(self, layer: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a rank's part of a tensor; `shape` is the whole's."""
        if layer == "out_proj":
            return shape[0], self.channels
        return (self.projected_size if layer == "in_proj" else self.channels, *shape[1:])

    def parameters(self, hidden_size: int) -> int:
        return hidden_size * (self.projected_size + self.channels) + self.channels * self.conv_size
