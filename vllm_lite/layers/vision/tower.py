"""The base of all towers. Every rank has a whole tower. It runs before the forward pass of a step, for a few images."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.vision import Activation, VisionSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.matmul import form_for_many_rows
from vllm_lite.layers.weights.weight_form import DenseForm, LinearShape
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack, whole_slot

S = TypeVar("S", bound=VisionSpec)


PIECE_ROWS = 64
"""Patches that are computed between two pauses: some milliseconds of one layer's matrices."""

Pieces = Generator[None, None, torch.Tensor]
"""A computation that pauses at each yield and finally returns its result."""


def drained(pieces: Pieces, progress: Callable[[], None]) -> torch.Tensor:
    """Run a computation to its end and return its result. `progress` is called at each pause."""
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
    """A tower. It is created without weights; `weight_groups` returns those that it needs."""

    def __init__(self, parts: Parts, spec: S) -> None:
        self.spec = spec
        self.dtype = parts.dtype
        self.device = parts.device
        self._weights: dict[str, Weighted] = {}
        self._matrices: dict[str, Linear] = {}
        self._form = DenseForm(form_for_many_rows(parts.head_quantization, parts.dtype, parts.device))
        color = torch.tensor([spec.mean, spec.std], dtype=torch.float32, device=parts.device)
        self._mean, self._std = color[0], color[1]

    @abstractmethod
    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:
        """Height and width in pixels of a medium with `num_tokens` vectors and this grid. Raises ValueError, with one
        sentence, if no image can have them."""

    def places(self, num_tokens: int, grid: Sequence[int]) -> torch.Tensor | None:  # noqa: ARG002
        """Indexes of a medium's tokens that have a vector: int64 [num_vectors]; None: all tokens."""
        return None

    def encode(
        self,
        images: Sequence[torch.Tensor],  # uint8 [height, width, 3] each
        progress: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """The vectors of each image: [num_vectors, hidden_size of the text model]. `progress` is called after each
        layer. A tower that encodes several images together has a method of its own."""
        return [drained(self.in_pieces(image), progress) for image in images]

    @abstractmethod
    def in_pieces(self, image: torch.Tensor) -> Pieces:
        """Encode one image, uint8 [height, width, 3], with a pause at each yield."""

    def arranged(self, vectors: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:  # noqa: ARG002
        """Arrange the vectors from `encode` in the order of the medium's tokens."""
        return vectors

    @abstractmethod
    def largest(self, num_tokens: int) -> list[torch.Tensor]:
        """Images that need the most memory of any that a step with `num_tokens` vectors can encode at once."""

    @abstractmethod
    def weight_groups(self) -> Iterator[WeightGroup]:
        """The weights, with their names in the checkpoint."""

    # ---- for towers

    def square(self, num_tokens: int) -> torch.Tensor:
        """A black square image with about `num_tokens` vectors."""
        side = max(1, math.isqrt(num_tokens)) * self.spec.patch_size * self.spec.merge
        return torch.zeros(side, side, 3, dtype=torch.uint8)

    def colors(self, images: torch.Tensor) -> torch.Tensor:  # uint8 [..., 3] -> float32 [..., 3]
        return (images.to(self.device).float() / 255 - self._mean) / self._std

    def linear(self, name: str, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x, [..., inputs], by the weight `name`, which `matrix` or `group` declared, and add its bias. With
        `out`, [num_rows, outputs], x must have two axes."""
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
        """RMS norm in float32; the product with the weight is in the dtype of x."""
        wide = x.float()
        return self._weights[name].weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The two matrices of a layer, with the activation between them."""
        return self.linear(f"{layer}.fc2", activated(self.linear(f"{layer}.fc1", x), self.spec.activation))

    def table(self, name: str) -> torch.Tensor:
        """The weight `name` itself, for example to look up its rows."""
        return self._weights[name].weight

    def group(self, name: str, stored: list[str], shape: tuple[int, ...], *, bias: bool = True) -> WeightGroup:
        """Declare the weight `name`: the checkpoint's tensors `stored`, below each other."""

        def take(weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
            self._weights[name] = Weighted(weight.flatten(1) if weight.dim() > 2 else weight, bias)

        kinds = {"weight": shape, "bias": shape[:1]} if bias else {"weight": shape}
        slots = (tuple(whole_slot(f"{each}.{kind}", *size) for each in stored) for kind, size in kinds.items())
        return WeightGroup(tuple(WeightStack(own, self.dtype, self.device) for own in slots), take)

    def matrix(
        self, name: str, stored: Sequence[str], outputs: int, inputs: int | None = None, *, bias: bool = True
    ) -> WeightGroup:
        """Declare the matrix `name`, which the kernels of text models multiply: the checkpoint's matrices `stored`, of
        `outputs` rows each, below each other. `inputs`: None means the tower's hidden size."""
        own = Split.whole(self.spec.hidden_size if inputs is None else inputs)
        shape = LinearShape(own, (Split.whole(outputs),) * len(stored), self.dtype, self.device)
        made = self._matrices.setdefault(name, Linear(shape, bias=bias, form=self._form))
        return made.group(*stored)

    def tensor(self, name: str, stored: str, shape: tuple[int, ...], *, turned: bool = False) -> WeightGroup:
        """Declare the table `name`: the checkpoint's tensor `stored`, whose name ends neither with weight nor bias.
        `turned`: the checkpoint has the matrix transposed."""

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
    """Rotate heads, [num_patches, num_heads, head_size], by turns: cos and sin, float32 [num_patches, 1, head_size].
    Elements i and i + head_size / 2 are a pair. Computes in float32."""
    cos, sin = turns
    x = heads.float()
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(heads.dtype)


def rms_normed(x: torch.Tensor, eps: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, all of it in float32. weight: float32 [size]; None: 1."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


TOWERS = {
    "AnyresSpec": "vllm_lite.layers.vision.anyres:AnyresTower",
    "Gemma3VisionSpec": "vllm_lite.layers.vision.gemma:Gemma3Tower",
    "Gemma4VisionSpec": "vllm_lite.layers.vision.gemma:Gemma4Tower",
    "PixtralVisionSpec": "vllm_lite.layers.vision.pixtral:PixtralTower",
    "Qwen2VisionSpec": "vllm_lite.layers.vision.qwen2:Qwen2Tower",
    "Qwen3VisionSpec": "vllm_lite.layers.vision.qwen:Qwen3Tower",
    "SiglipSpec": "vllm_lite.layers.vision.siglip:SiglipTower",
    "UnifiedVisionSpec": "vllm_lite.layers.vision.gemma:UnifiedTower",
}
"""The tower of each kind of VisionSpec; it is imported when a model has one."""


def make_tower(parts: Parts) -> VisionTower[Any] | None:
    """Make the vision tower of the model, if it has one."""
    vision = parts.spec.vision
    if vision is None:
        return None
    kind: type[VisionTower[Any]] = resolve_name(TOWERS[type(vision).__name__])
    return kind(parts, vision)
