"""Qwen3.5's tower: patches of images of any size, in blocks of `merge` x `merge` that become one vector each.

Attention is full within an image. A patch is rotated by its row and column, half of each head by one of them, and has a
position of a learned square table, whose edges are laid on the image's and which is interpolated between them. Source:
transformers' Qwen3_5VisionModel.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.vision import QwenVisionSpec
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.tower import VisionTower, turned
from vllm_lite.layers.weights.weight_slot import WeightGroup

THETA = 10000.0


class QwenTower(VisionTower[QwenVisionSpec]):
    """One image at a time: their sizes differ."""

    def __init__(self, parts: Parts, spec: QwenVisionSpec) -> None:
        super().__init__(parts, spec)
        quarter = spec.hidden_size // spec.num_heads // 4
        steps = torch.arange(0, 2 * quarter, 2, dtype=torch.float32, device=parts.device) / (2 * quarter)
        self._frequencies = 1.0 / THETA**steps  # [head_size / 4]

    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:
        patch, merge = self.spec.patch_size, self.spec.merge
        if len(grid) != 3 or grid[0] != 1 or any(side % merge for side in grid[1:]):
            raise ValueError(f"a medium with the grid {tuple(grid)}; an image has (1, rows, columns) in patches")
        if grid[1] * grid[2] != num_tokens * merge**2:
            raise ValueError(f"a medium of {num_tokens} tokens with {grid[1]} x {grid[2]} patches")
        return grid[1] * patch, grid[2] * patch

    def encode(self, images: Sequence[torch.Tensor], progress: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        return [self._encode(image, progress) for image in images]

    def largest(self, num_tokens: int) -> list[torch.Tensor]:
        return [self.square(num_tokens)]

    def _encode(self, image: torch.Tensor, progress: Callable[[], None]) -> torch.Tensor:
        spec, patch = self.spec, self.spec.patch_size
        rows, cols = image.shape[0] // patch, image.shape[1] // patch
        patches = self._blocks(self.colors(image).view(rows, patch, cols, patch, 3).permute(0, 2, 4, 1, 3))
        frames = patches[:, :, None].expand(-1, -1, spec.frames, -1, -1).flatten(1)
        hidden = self.linear("patches", frames.to(self.dtype)) + self._positions(rows, cols)
        turns = self._turns(rows, cols)
        for layer in range(spec.num_layers):
            hidden = hidden + self._attend(layer, self.norm(f"{layer}.norm1", hidden), turns)
            hidden = hidden + self.mlp(layer, self.norm(f"{layer}.norm2", hidden))
            progress()
        merged = self.norm("norm", hidden).view(-1, spec.merge**2 * spec.hidden_size)
        return self.linear("merger.fc2", functional.gelu(self.linear("merger.fc1", merged)))

    def _blocks(self, by_place: torch.Tensor) -> torch.Tensor:
        """[rows, cols, ...] -> [rows * cols, ...] in the tower's order: the patches of a block side by side."""
        rows, cols, *rest = by_place.shape
        merge = self.spec.merge
        blocks = by_place.reshape(rows // merge, merge, cols // merge, merge, *rest)
        return blocks.transpose(1, 2).reshape(rows * cols, *rest)

    def _positions(self, rows: int, cols: int) -> torch.Tensor:  # [num_patches, hidden_size]
        side, table = self.spec.side, self.table("positions")
        down, across = (torch.linspace(0, side - 1, count, device=self.device) for count in (rows, cols))
        top, left = down.int(), across.int()
        below, beside = (place.add(1).clamp(max=side - 1) for place in (top, left))
        share_y, share_x = (down - top)[:, None], (across - left)[None]
        corners = [
            (top, left, (1 - share_y) * (1 - share_x)),
            (top, beside, (1 - share_y) * share_x),
            (below, left, share_y * (1 - share_x)),
            (below, beside, share_y * share_x),
        ]
        shares = torch.stack([self._blocks(share) for _, _, share in corners])
        ids = torch.stack([self._blocks(y.long()[:, None] * side + x.long()[None]) for y, x, _ in corners])
        return (table[ids] * shares.to(table.dtype)[..., None]).sum(0)

    def _turns(self, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each patch: float32 [num_patches, 1, head_size]."""
        places = torch.arange(max(rows, cols), device=self.device)
        down, across = places[:rows, None].expand(-1, cols), places[None, :cols].expand(rows, -1)
        angles = torch.cat([self._blocks(each)[:, None] * self._frequencies for each in (down, across)], 1)
        both = torch.cat([angles, angles], 1)[:, None]
        return both.cos(), both.sin()

    def _attend(self, layer: int, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qkv = self.linear(f"{layer}.qkv", hidden).view(len(hidden), 3, self.spec.num_heads, -1)
        query, key = (turned(qkv[:, part], turns) for part in (0, 1))
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, qkv[:, 2]))
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.linear(f"{layer}.out", attended[0].transpose(0, 1).reshape(len(hidden), -1))

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, inner, root = self.spec, self.spec.hidden_size, self.spec.intermediate_size, "model.visual."
        patch = size, 3, spec.frames, spec.patch_size, spec.patch_size
        yield self.group("patches", [f"{root}patch_embed.proj"], patch)
        yield self.group("positions", [f"{root}pos_embed"], (spec.side**2, size), bias=False)
        for layer in range(spec.num_layers):
            own = f"{root}blocks.{layer}."
            yield self.group(f"{layer}.qkv", [f"{own}attn.qkv"], (3 * size, size))
            yield self.group(f"{layer}.out", [f"{own}attn.proj"], (size, size))
            yield self.group(f"{layer}.fc1", [f"{own}mlp.linear_fc1"], (inner, size))
            yield self.group(f"{layer}.fc2", [f"{own}mlp.linear_fc2"], (size, inner))
            for number in "12":
                yield self.group(f"{layer}.norm{number}", [f"{own}norm{number}"], (size,))
        merged = size * spec.merge**2
        yield self.group("norm", [f"{root}merger.norm"], (size,))
        yield self.group("merger.fc1", [f"{root}merger.linear_fc1"], (merged, merged))
        yield self.group("merger.fc2", [f"{root}merger.linear_fc2"], (spec.out_size, merged))
