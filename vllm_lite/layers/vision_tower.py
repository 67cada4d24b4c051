"""A SigLIP tower and the projection behind it: tiles of an image in, vectors that a text model reads among others out.

Every rank holds all of it. It runs before the forward pass of a step, for few tiles at a time.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.vision import VisionSpec
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot

TILES_AT_ONCE = 4
"""More of them would need more memory, and gain nothing."""


class Weighted(NamedTuple):
    """A matrix or a norm with its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class VisionTower:
    """Made with no weights; `weight_groups` says which it needs."""

    def __init__(self, parts: Parts, spec: VisionSpec) -> None:
        self.spec = spec
        self.dtype = parts.dtype
        self.device = parts.device
        self.out_size = parts.spec.hidden_size
        self._weights: dict[str, Weighted] = {}
        color = torch.tensor([spec.mean, spec.std], dtype=torch.float32, device=parts.device)
        self._mean, self._std = color[0], color[1]
        self._positions = position_ids(spec.side).to(parts.device)

    def encode(
        self,
        tiles: torch.Tensor,  # uint8 [num_tiles, image_size, image_size, 3]
        progress: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """The vectors of each tile: [num_tiles, num_tokens, hidden_size of the text]. `progress` is called behind each
        layer."""
        return torch.cat([self._encode(few, progress) for few in tiles.split(TILES_AT_ONCE)])

    def _encode(self, tiles: torch.Tensor, progress: Callable[[], None]) -> torch.Tensor:
        spec, patch, side = self.spec, self.spec.patch_size, self.spec.side
        colors = (tiles.to(self.device).float() / 255 - self._mean) / self._std
        patches = colors.view(-1, side, patch, side, patch, 3).permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
        hidden = self._linear("patches", patches.to(self.dtype))
        hidden = hidden + self._weights["positions"].weight[self._positions]
        for layer in range(spec.num_layers):
            hidden = hidden + self._attend(layer, self._norm(f"{layer}.norm1", hidden))
            inner = self._linear(f"{layer}.fc1", self._norm(f"{layer}.norm2", hidden))
            tanh = "tanh" if spec.activation == "gelu_pytorch_tanh" else "none"
            hidden = hidden + self._linear(f"{layer}.fc2", functional.gelu(inner, approximate=tanh))
            progress()
        return self._linear("projection", self._merge(self._norm("norm", hidden)))

    def _attend(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:  # [num_tiles, num_patches, hidden_size]
        num_tiles, num_patches, size = hidden.shape
        qkv = self._linear(f"{layer}.qkv", hidden).view(num_tiles, num_patches, 3, self.spec.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self._linear(f"{layer}.out", attended.transpose(1, 2).reshape(num_tiles, num_patches, size))

    def _merge(self, hidden: torch.Tensor) -> torch.Tensor:
        """Put `merge` x `merge` patches side by side, row by row: [num_tiles, num_tokens, merge^2 * hidden_size]."""
        merge, few = self.spec.merge, self.spec.side // self.spec.merge
        grid = hidden.view(-1, few, merge, few, merge, self.spec.hidden_size)
        return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.spec.num_tokens, merge * merge * self.spec.hidden_size)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        own = self._weights[name]
        return functional.linear(x, own.weight, own.bias)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        own = self._weights[name]
        return functional.layer_norm(x, x.shape[-1:], own.weight, own.bias, self.spec.norm_eps)

    # ---- weights

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, inner, root = self.spec, self.spec.hidden_size, self.spec.intermediate_size, "model.vision_model."
        patch = f"{root}embeddings.patch_embedding", (size, 3, spec.patch_size, spec.patch_size)
        yield self._group("patches", [patch[0]], patch[1])
        yield self._group("positions", [f"{root}embeddings.position_embedding"], (spec.side**2, size), bias=False)
        for layer in range(spec.num_layers):
            own = f"{root}encoder.layers.{layer}."
            yield self._group(f"{layer}.qkv", [f"{own}self_attn.{part}_proj" for part in "qkv"], (size, size))
            yield self._group(f"{layer}.out", [f"{own}self_attn.out_proj"], (size, size))
            yield self._group(f"{layer}.fc1", [f"{own}mlp.fc1"], (inner, size))
            yield self._group(f"{layer}.fc2", [f"{own}mlp.fc2"], (size, inner))
            for number in "12":
                yield self._group(f"{layer}.norm{number}", [f"{own}layer_norm{number}"], (size,))
        yield self._group("norm", [f"{root}post_layernorm"], (size,))
        projection = "model.connector.modality_projection.proj"
        yield self._group("projection", [projection], (self.out_size, spec.merge**2 * size), bias=False)

    def _group(self, name: str, stored: list[str], shape: tuple[int, ...], *, bias: bool = True) -> WeightGroup:
        """Tensors that the checkpoint calls `stored`, below one another in the weight `name`."""

        def take(weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
            self._weights[name] = Weighted(weight.flatten(1) if weight.dim() > 2 else weight, bias)

        kinds = {"weight": shape, "bias": shape[:1]} if bias else {"weight": shape}
        slots = (tuple(whole_slot(f"{each}.{kind}", *size) for each in stored) for kind, size in kinds.items())
        return WeightGroup(tuple(WeightStack(own, self.dtype, self.device) for own in slots), take)


def position_ids(side: int) -> torch.Tensor:
    """int64 [side * side], the row of the position table for each patch. A patch's place, as a fraction of the side in
    float32, is looked up among the fractions at which the rows begin: rounding puts some a row too low, and the model
    has learned with that."""
    begins = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    rows = torch.bucketize(places.clamp(max=1.0 - 1e-6), begins, right=True)
    return (rows[:, None] * side + rows).flatten()
