"""The base of all towers. Every rank holds all of one. It runs before the forward pass of a step, for few images."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.vision import Activation, VisionSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.weight_form import DenseForm, LinearShape
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack, whole_slot

S = TypeVar("S", bound=VisionSpec)


PIECE_ROWS = 64
"""Patches that are computed together where a tower pauses: some milliseconds of one layer's matrices."""

Pieces = Generator[None, None, torch.Tensor]
"""A computation that pauses at each yield, and returns its result."""


def drained(pieces: Pieces, progress: Callable[[], None]) -> torch.Tensor:
    """The result, without a pause. `progress` is called where there would be one."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result
        progress()


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
        self._matrices: dict[str, Linear] = {}
        self._form = DenseForm(parts.head_quantization)
        color = torch.tensor([spec.mean, spec.std], dtype=torch.float32, device=parts.device)
        self._mean, self._std = color[0], color[1]

    @abstractmethod
    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:
        """Height and width in pixels of a medium of so many vectors and this grid. Raises ValueError, in one sentence,
        if there is none."""

    def places(self, num_tokens: int, grid: Sequence[int]) -> torch.Tensor | None:  # noqa: ARG002
        """Tokens of a medium that have a vector, counted from its first: int64 [num_vectors]; None: all of them."""
        return None

    @abstractmethod
    def encode(
        self,
        images: Sequence[torch.Tensor],  # uint8 [height, width, 3] each
        progress: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """The vectors of each image: [num_vectors, hidden_size of the text]. `progress` is called behind each layer."""

    @abstractmethod
    def in_pieces(self, image: torch.Tensor) -> Pieces:
        """As `encode`, for one image, with a pause at each yield."""

    def arranged(self, vectors: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:  # noqa: ARG002
        """The vectors of a medium with this grid in the order of its tokens, of those that `encode` made."""
        return vectors

    @abstractmethod
    def largest(self, num_tokens: int) -> list[torch.Tensor]:
        """Images that need as much memory at once as any of a step that computes so many vectors."""

    @abstractmethod
    def weight_groups(self) -> Iterator[WeightGroup]:
        """The weights, by their names in the checkpoint."""

    # ---- for towers

    def square(self, num_tokens: int) -> torch.Tensor:
        """A black image of about so many vectors."""
        side = max(1, math.isqrt(num_tokens)) * self.spec.patch_size * self.spec.merge
        return torch.zeros(side, side, 3, dtype=torch.uint8)

    def colors(self, images: torch.Tensor) -> torch.Tensor:  # uint8 [..., 3] -> float32 [..., 3]
        return (images.to(self.device).float() / 255 - self._mean) / self._std

    def linear(self, name: str, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x times a `matrix`, or a `group` that is stored with more than two axes; x: [..., inputs]. In `out` if there
        is one, [num_rows, outputs], and then x has two axes."""
        made = self._matrices.get(name)
        if made is None:
            own = self._weights[name]
            product = functional.linear(x, own.weight, own.bias)
            return product if out is None else out.copy_(product)
        rows = x.reshape(-1, x.shape[-1])
        if out is None:
            out = x.new_empty(len(rows), sum(part.size for part in made.shape.outputs))
        made.forward(rows if rows.stride(1) == 1 else rows.contiguous(), out)
        return out.view(*x.shape[:-1], -1)

    def norm(self, name: str, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        own = self._weights[name]
        return functional.layer_norm(x, own.weight.shape, own.weight, own.bias, eps or self.spec.norm_eps)

    def rms_norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        """In float32, but for the weight."""
        wide = x.float()
        return self._weights[name].weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Two matrices with an activation between them."""
        return self.linear(f"{layer}.fc2", activated(self.linear(f"{layer}.fc1", x), self.spec.activation))

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

    def matrix(
        self, name: str, stored: Sequence[str], outputs: int, inputs: int | None = None, *, bias: bool = True
    ) -> WeightGroup:
        """Matrices that the checkpoint calls `stored`, of so many outputs each, below one another in the product
        `name`, by the kernels of text models. `inputs`: None is the tower's size."""
        own = Split.whole(self.spec.hidden_size if inputs is None else inputs)
        shape = LinearShape(own, (Split.whole(outputs),) * len(stored), self.dtype, self.device)
        made = self._matrices.setdefault(name, Linear(shape, bias=bias, form=self._form))
        return made.group(*stored)

    def tensor(self, name: str, stored: str, shape: tuple[int, ...], *, turned: bool = False) -> WeightGroup:
        """The tensor `stored`, called neither weight nor bias, as the table `name` of this shape; of a matrix `turned`
        the checkpoint has the axes exchanged."""

        def take(weight: torch.Tensor) -> None:
            self._weights[name] = Weighted(weight)

        slot = WeightSlot(stored, shape, (0,) * len(shape), shape, transposed=turned)
        return WeightGroup((WeightStack((slot,), self.dtype, self.device),), take)


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(x)
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")


def turned(heads: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """heads: [num_patches, num_heads, head_size]; turns: cos and sin, float32 [num_patches, 1, head_size]. Element i
    turns with i + head_size / 2, in float32."""
    cos, sin = turns
    x = heads.float()
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(heads.dtype)


def rms_normed(x: torch.Tensor, eps: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, all of it in float32. weight: float32 [size]; None: 1."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)
