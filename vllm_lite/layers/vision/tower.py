"""The base of all towers. Every rank holds all of one. It runs before the forward pass of a step, for few images."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.vision import VisionSpec
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot

S = TypeVar("S", bound=VisionSpec)


class Weighted(NamedTuple):
    """A matrix or a norm with its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class VisionTower(ABC, Generic[S]):
    """Made with no weights; `weight_groups` says which it needs."""

    def __init__(self, parts: Parts, spec: S) -> None:
        self.spec = spec
        self.dtype = parts.dtype
        self.device = parts.device
        self._weights: dict[str, Weighted] = {}
        color = torch.tensor([spec.mean, spec.std], dtype=torch.float32, device=parts.device)
        self._mean, self._std = color[0], color[1]

    @abstractmethod
    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:
        """Height and width in pixels of a medium of so many vectors and this grid. Raises ValueError, in one sentence,
        if there is none."""

    @abstractmethod
    def encode(
        self,
        images: Sequence[torch.Tensor],  # uint8 [height, width, 3] each
        progress: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """The vectors of each image: [num_tokens, hidden_size of the text]. `progress` is called behind each layer."""

    @abstractmethod
    def weight_groups(self) -> Iterator[WeightGroup]:
        """The weights, by their names in the checkpoint."""

    # ---- for towers

    def colors(self, images: torch.Tensor) -> torch.Tensor:  # uint8 [..., 3] -> float32 [..., 3]
        return (images.to(self.device).float() / 255 - self._mean) / self._std

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        own = self._weights[name]
        return functional.linear(x, own.weight, own.bias)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        own = self._weights[name]
        return functional.layer_norm(x, own.weight.shape, own.weight, own.bias, self.spec.norm_eps)

    def mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Two matrices with GELU between them."""
        tanh = "tanh" if self.spec.activation == "gelu_pytorch_tanh" else "none"
        return self.linear(f"{layer}.fc2", functional.gelu(self.linear(f"{layer}.fc1", x), approximate=tanh))

    def table(self, name: str) -> torch.Tensor:
        """A matrix whose rows are looked up."""
        return self._weights[name].weight

    def group(self, name: str, stored: list[str], shape: tuple[int, ...], *, bias: bool = True) -> WeightGroup:
        """Tensors that the checkpoint calls `stored`, below one another in the weight `name`."""

        def take(weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
            self._weights[name] = Weighted(weight.flatten(1) if weight.dim() > 2 else weight, bias)

        kinds = {"weight": shape, "bias": shape[:1]} if bias else {"weight": shape}
        slots = (tuple(whole_slot(f"{each}.{kind}", *size) for each in stored) for kind, size in kinds.items())
        return WeightGroup(tuple(WeightStack(own, self.dtype, self.device) for own in slots), take)
