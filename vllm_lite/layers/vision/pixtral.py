"""The tower of Pixtral and Mistral 3, for images of any size; patches are rotated by their row and column.

Attention is full within an image. The rotation frequencies of a head alternate between rows and columns. Mistral 3
makes one vector of `merge` x `merge` patches. Source: transformers' PixtralVisionModel.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.pixtral import PixtralVisionSpec
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.tower import Pieces, VisionTower, activated, turned
from vllm_lite.layers.weights.weight_slot import WeightGroup

ROOT, PROJECTOR = "model.vision_tower.", "model.multi_modal_projector."


class PixtralTower(VisionTower[PixtralVisionSpec]):
    """Encodes one image at a time, because their sizes differ."""

    def __init__(self, parts: Parts, spec: PixtralVisionSpec) -> None:
        super().__init__(parts, spec)
        size = spec.hidden_size // spec.num_heads
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=parts.device) / size
        frequencies = 1.0 / spec.rope_theta**steps
        self._of_rows, self._of_cols = frequencies[0::2], frequencies[1::2]  # [head_size / 4] each

    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:
        unit = self.spec.patch_size * self.spec.merge
        if len(grid) != 3 or grid[0] != 1:
            raise ValueError(f"a medium with the grid {tuple(grid)}; an image has (1, rows, columns) of vectors")
        if self.spec.num_tokens(*grid[1:]) != num_tokens:
            raise ValueError(f"a medium of {num_tokens} tokens with {grid[1]} rows of {grid[2]} vectors")
        return grid[1] * unit, grid[2] * unit

    def places(self, num_tokens: int, grid: Sequence[int]) -> torch.Tensor:  # noqa: ARG002
        """All tokens except the last one of each row, which is a break or end token."""
        _, rows, cols = grid
        return torch.arange(rows * (cols + 1)).view(rows, cols + 1)[:, :cols].flatten()

    def largest(self, num_tokens: int) -> list[torch.Tensor]:
        return [self.square(num_tokens)]

    def in_pieces(self, image: torch.Tensor) -> Pieces:
        spec, patch = self.spec, self.spec.patch_size
        rows, cols = image.shape[0] // patch, image.shape[1] // patch
        patches = self.colors(image).view(rows, patch, cols, patch, 3).permute(0, 2, 4, 1, 3).reshape(rows * cols, -1)
        hidden = self.rms_norm("norm", self.linear("patches", patches.to(self.dtype)), spec.norm_eps)
        turns = self._turns(rows, cols)
        for layer in range(spec.num_layers):
            hidden = hidden + self._attend(layer, self.rms_norm(f"{layer}.norm1", hidden, spec.norm_eps), turns)
            hidden = hidden + self._mlp(layer, self.rms_norm(f"{layer}.norm2", hidden, spec.norm_eps))
            yield
        if spec.merger_eps is not None:
            hidden = self.linear(
                "merger", self._blocks(self.rms_norm("merger.norm", hidden, spec.merger_eps), rows, cols)
            )
        return self.linear("fc2", activated(self.linear("fc1", hidden), spec.projector_activation))

    def _turns(self, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each patch: float32 [num_patches, 1, head_size] each."""
        places = torch.arange(max(rows, cols), device=self.device)
        down, across = places[:rows, None].expand(-1, cols), places[None, :cols].expand(rows, -1)
        angles = [down.reshape(-1, 1) * self._of_rows, across.reshape(-1, 1) * self._of_cols]
        both = torch.cat(angles * 2, 1)[:, None]
        return both.cos(), both.sin()

    def _attend(self, layer: int, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qkv = self.linear(f"{layer}.qkv", hidden).view(len(hidden), 3, self.spec.num_heads, -1)
        query, key = (turned(qkv[:, part], turns) for part in (0, 1))
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, qkv[:, 2]))
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.linear(f"{layer}.out", attended[0].transpose(0, 1).reshape(len(hidden), -1))

    def _mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear(f"{layer}.gate_up", hidden).chunk(2, -1)
        return self.linear(f"{layer}.down", activated(gate, self.spec.activation) * up)

    def _blocks(self, hidden: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        """Put `merge` x `merge` patches together, element by element: [num_vectors, hidden_size * merge^2]."""
        merge = self.spec.merge
        grid = hidden.view(rows // merge, merge, cols // merge, merge, -1)
        return grid.permute(0, 2, 4, 1, 3).reshape(rows * cols // merge**2, -1)

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, inner, out = self.spec, self.spec.hidden_size, self.spec.intermediate_size, self.spec.out_size
        yield self.group("patches", [f"{ROOT}patch_conv"], (size, 3, spec.patch_size, spec.patch_size), bias=False)
        yield self.group("norm", [f"{ROOT}ln_pre"], (size,), bias=False)
        for layer in range(spec.num_layers):
            own = f"{ROOT}transformer.layers.{layer}."
            yield self.matrix(f"{layer}.qkv", [f"{own}attention.{part}_proj" for part in "qkv"], size, bias=False)
            yield self.matrix(f"{layer}.out", [f"{own}attention.o_proj"], size, bias=False)
            gates = [f"{own}feed_forward.{part}_proj" for part in ("gate", "up")]
            yield self.matrix(f"{layer}.gate_up", gates, inner, bias=False)
            yield self.matrix(f"{layer}.down", [f"{own}feed_forward.down_proj"], size, inner, bias=False)
            yield self.group(f"{layer}.norm1", [f"{own}attention_norm"], (size,), bias=False)
            yield self.group(f"{layer}.norm2", [f"{own}ffn_norm"], (size,), bias=False)
        if spec.merger_eps is not None:
            yield self.group("merger.norm", [f"{PROJECTOR}norm"], (size,), bias=False)
            merging = f"{PROJECTOR}patch_merger.merging_layer"
            yield self.matrix("merger", [merging], size, size * spec.merge**2, bias=False)
        yield self.matrix("fc1", [f"{PROJECTOR}linear_1"], out, bias=spec.projector_bias)
        yield self.matrix("fc2", [f"{PROJECTOR}linear_2"], out, out, bias=spec.projector_bias)
