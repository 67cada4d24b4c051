"""The towers of LLaVA, LLaVA-NeXT and LLaVA-OneVision. They encode the whole image in one square. The latter two also
encode a larger copy of the image in a grid of squares, and drop the vectors of its black edges; a learned vector
follows each row of the grid. Source: transformers' LlavaModel, LlavaNextModel and LlavaOnevisionModel."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.anyres import AnyresSpec
from vllm_lite.layers.vision.siglip import TILES_AT_ONCE, Siglip
from vllm_lite.layers.vision.tower import Pieces, activated
from vllm_lite.layers.weights.weight_slot import WeightGroup

PROJECTOR = "model.multi_modal_projector."


class AnyresTower(Siglip[AnyresSpec]):
    """The input has the square of the whole image, and below it those of the grid, row by row. The grid of a medium is
    (1, height, width) of the original image in pixels."""

    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:
        if len(grid) != 3 or grid[0] != 1:
            raise ValueError(f"a medium with the grid {tuple(grid)}; an image has (1, height, width) in pixels")
        if self.spec.num_tokens(*grid[1:]) != num_tokens:
            raise ValueError(f"a medium of {num_tokens} tokens of an image of {grid[2]} x {grid[1]} pixels")
        squares = self.spec.grid(*grid[1:]) if self.spec.pinpoints else None
        count = 1 if squares is None else 1 + squares.rows * squares.cols
        return count * self.spec.image_size, self.spec.image_size

    def placed(self, patches: torch.Tensor) -> torch.Tensor:
        """Add positions; with CLIP, also put its class vector before the patches."""
        if not self.spec.is_clip:
            return super().placed(patches)
        own = self.table("own").expand(len(patches), 1, -1)
        return self.norm("first norm", torch.cat([own, patches], 1) + self.table("positions"))

    def in_pieces(self, image: torch.Tensor) -> Pieces:
        """The vectors of the image's squares, in order."""
        vectors, squares = list[torch.Tensor](), image.view(-1, *[self.spec.image_size] * 2, 3)
        for few in squares.split(TILES_AT_ONCE):
            vectors.append((yield from self._project(few)).flatten(0, 1))
        return torch.cat(vectors)

    def largest(self, num_tokens: int) -> list[torch.Tensor]:
        return [torch.cat(super().largest(num_tokens))]

    def _project(self, squares: torch.Tensor) -> Pieces:
        """[num_squares, side^2, out_size]"""
        hidden = yield from self.hidden(squares)
        inner = self.linear("fc1", hidden[:, 1:] if self.spec.is_clip else hidden)
        return self.linear("fc2", activated(inner, self.spec.projector_activation))

    def arranged(self, vectors: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
        """The vectors of the whole image, then those of the grid in the rows of the image, without the vectors of black
        edges."""
        if not self.spec.pinpoints:
            return vectors
        side, own = self.spec.side, self.spec.grid(*grid[1:])
        squares = vectors[side**2 :].view(own.rows, own.cols, side, side, -1)
        image = squares.transpose(1, 2).reshape(own.rows * side, own.cols * side, -1)
        (top, left), (height, width) = own.first, own.kept
        rows = image[top : top + height, left : left + width]
        if own.shown != own.kept:
            planes = rows.permute(2, 0, 1)[None]
            rows = functional.interpolate(planes, own.shown, mode="bilinear")[0].permute(1, 2, 0)
        ends = self.table("row end").expand(len(rows), 1, -1)
        return torch.cat([vectors[: side**2], torch.cat([rows, ends], 1).flatten(0, 1)])

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, root = self.spec, self.spec.hidden_size, "model.vision_tower."
        yield from self.layer_groups(root, spec.num_positions, patch_bias=not spec.is_clip)
        if spec.is_clip:
            yield self.tensor("own", f"{root}embeddings.class_embedding", (size,))
            yield self.group("first norm", [f"{root}pre_layrnorm"], (size,))
        out, bias = spec.out_size, spec.projector_bias
        yield self.matrix("fc1", [f"{PROJECTOR}linear_1"], out, bias=bias)
        yield self.matrix("fc2", [f"{PROJECTOR}linear_2"], out, out, bias=bias)
        if spec.pinpoints:
            yield self.tensor("row end", "model.image_newline", (spec.out_size,))
