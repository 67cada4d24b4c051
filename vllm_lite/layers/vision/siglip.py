"""SigLIP, and the tower of Idefics 3 and SmolVLM: SigLIP on tiles of an image, followed by a projection."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.vision import SiglipSpec, TileVisionSpec
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.tower import Pieces, VisionTower, drained
from vllm_lite.layers.weights.weight_slot import WeightGroup

TILES_AT_ONCE = 4
"""Tiles that are computed together: more would need more memory and be no faster."""
T = TypeVar("T", bound=TileVisionSpec)


class Siglip(VisionTower[T]):
    """Layers over the patches of tiles. `_positions` has, for each patch, its row in the position table."""

    def __init__(self, parts: Parts, spec: T) -> None:
        super().__init__(parts, spec)
        self._positions = torch.arange(spec.side**2, device=parts.device)

    def hidden(self, tiles: torch.Tensor) -> Pieces:
        """Run all layers: tiles, uint8 [num_tiles, image_size, image_size, 3] -> [num_tiles, side^2, hidden_size].
        Ignores pixels after the last whole patch. Pauses after each layer."""
        spec, patch, side = self.spec, self.spec.patch_size, self.spec.side
        seen = tiles[:, : side * patch, : side * patch]
        colors = self.colors(seen).reshape(-1, side, patch, side, patch, 3)
        patches = colors.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
        hidden = self.placed(self.linear("patches", patches.to(self.dtype)))
        for layer in range(spec.num_layers):
            hidden = hidden + self._attend(layer, self.norm(f"{layer}.norm1", hidden))
            hidden = hidden + self.mlp(layer, self.norm(f"{layer}.norm2", hidden))
            yield
        return hidden

    def placed(self, patches: torch.Tensor) -> torch.Tensor:  # [num_tiles, num_patches, hidden_size]
        """Add positions to patches: the input of the first layer."""
        return patches + self.table("positions")[self._positions]

    def largest(self, num_tokens: int) -> list[torch.Tensor]:  # noqa: ARG002
        return [torch.zeros(self.spec.image_size, self.spec.image_size, 3, dtype=torch.uint8)] * TILES_AT_ONCE

    def _attend(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:  # [num_tiles, num_patches, hidden_size]
        num_tiles, num_patches, size = hidden.shape
        qkv = self.linear(f"{layer}.qkv", hidden).view(num_tiles, num_patches, 3, self.spec.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.linear(f"{layer}.out", attended.transpose(1, 2).reshape(num_tiles, num_patches, size))

    def layer_groups(self, root: str, num_positions: int, *, patch_bias: bool = True) -> Iterator[WeightGroup]:
        """The weights of `hidden`, whose names in the checkpoint begin with `root`."""
        spec, size, inner = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        patch = f"{root}embeddings.patch_embedding", (size, 3, spec.patch_size, spec.patch_size)
        yield self.group("patches", [patch[0]], patch[1], bias=patch_bias)
        yield self.group("positions", [f"{root}embeddings.position_embedding"], (num_positions, size), bias=False)
        for layer in range(spec.num_layers):
            own = f"{root}encoder.layers.{layer}."
            yield self.matrix(f"{layer}.qkv", [f"{own}self_attn.{part}_proj" for part in "qkv"], size)
            yield self.matrix(f"{layer}.out", [f"{own}self_attn.out_proj"], size)
            yield self.matrix(f"{layer}.fc1", [f"{own}mlp.fc1"], inner)
            yield self.matrix(f"{layer}.fc2", [f"{own}mlp.fc2"], size, inner)
            for number in "12":
                yield self.group(f"{layer}.norm{number}", [f"{own}layer_norm{number}"], (size,))


class SiglipTower(Siglip[SiglipSpec]):
    """SigLIP, followed by a projection of each `merge` x `merge` patches to one vector."""

    def __init__(self, parts: Parts, spec: SiglipSpec) -> None:
        super().__init__(parts, spec)
        self._positions = position_ids(spec.side).to(parts.device)

    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:  # noqa: ARG002
        if num_tokens != self.spec.num_tokens:
            raise ValueError(f"a medium of {num_tokens} tokens; a tile has {self.spec.num_tokens}")
        return self.spec.image_size, self.spec.image_size

    def encode(self, images: Sequence[torch.Tensor], progress: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        few = (images[first : first + TILES_AT_ONCE] for first in range(0, len(images), TILES_AT_ONCE))
        return [vectors for tiles in few for vectors in drained(self._encode(torch.stack(list(tiles))), progress)]

    def in_pieces(self, image: torch.Tensor) -> Pieces:
        return (yield from self._encode(image[None]))[0]

    def _encode(self, tiles: torch.Tensor) -> Pieces:
        return self.projected(self.norm("norm", (yield from self.hidden(tiles))))

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tiles, num_patches, hidden_size] -> [num_tiles, num_tokens, out_size]"""
        return self.linear("projection", self.merged(hidden).flatten(2))

    def merged(self, hidden: torch.Tensor) -> torch.Tensor:
        """Put `merge` x `merge` patches side by side, row by row: [num_tiles, num_tokens, merge^2, hidden_size]."""
        merge, few = self.spec.merge, self.spec.side // self.spec.merge
        grid = hidden.view(-1, few, merge, few, merge, self.spec.hidden_size)
        return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.spec.num_tokens, merge * merge, self.spec.hidden_size)

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, root = self.spec, self.spec.hidden_size, "model.vision_model."
        yield from self.layer_groups(root, spec.side**2)
        yield self.group("norm", [f"{root}post_layernorm"], (size,))
        projection = "model.connector.modality_projection.proj"
        yield self.matrix("projection", [projection], spec.out_size, spec.merge**2 * size, bias=False)


def position_ids(side: int) -> torch.Tensor:
    """The row of the position table for each patch, int64 [side * side]. It is found by comparing the patch's position,
    as a float32 fraction of the side, with the fractions at which rows begin. Rounding makes some rows one too low; the
    model was trained with these."""
    begins = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    rows = torch.bucketize(places.clamp(max=1.0 - 1e-6), begins, right=True)
    return (rows[:, None] * side + rows).flatten()
