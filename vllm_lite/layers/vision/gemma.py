"""Gemma's towers: a SigLIP for Gemma 3, and for images of any size a tower for Gemma 4 and two matrices for Gemma 4
Unified.

`merge` x `merge` patches become one vector. Gemma 4 has learned positions along each axis. Source: transformers'
Gemma3Model, Gemma4VisionModel and Gemma4UnifiedVisionEmbedder.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch.nn import functional

from vllm_lite.checkpoint.layer_specs.gemma_vision import Gemma3VisionSpec, Gemma4VisionSpec, UnifiedVisionSpec
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.siglip import SiglipTower
from vllm_lite.layers.vision.tower import Pieces, VisionTower, activated, rms_normed
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot

NORM_EPS = 1e-5
"""Epsilon of those norms of the Unified model that have a bias."""
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LIMITS = ("input_min", "input_max", "output_min", "output_max")

S = TypeVar("S", Gemma4VisionSpec, UnifiedVisionSpec)


class Gemma3Tower(SiglipTower):
    """Normalizes and projects the mean of each `merge` x `merge` patches."""

    def __init__(self, parts: Parts, spec: Gemma3VisionSpec) -> None:
        super().__init__(parts, spec)
        self._positions = torch.arange(spec.side**2, device=parts.device)

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = self.merged(hidden).mean(2)
        return self.linear("projection", rms_normed(mean, self.spec.norm_eps, 1 + self.table("soft norm").float()))

    def weight_groups(self) -> Iterator[WeightGroup]:
        size, root, projector = self.spec.hidden_size, "model.vision_tower.", "model.multi_modal_projector."
        yield from self.layer_groups(root, self.spec.side**2)
        yield self.group("norm", [f"{root}post_layernorm"], (size,))
        yield self.group("soft norm", [f"{projector}mm_soft_emb_norm"], (size,), bias=False)
        shape = self.spec.out_size, size
        yield self.tensor("projection", f"{projector}mm_input_projection_weight", shape, turned=True)


class GridTower(VisionTower[S]):
    """Encodes one image at a time, because their sizes differ. A medium's grid is (1, rows, columns) of its vectors."""

    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:
        spec = self.spec
        if len(grid) != 3 or grid[0] != 1 or grid[1] * grid[2] != num_tokens:
            raise ValueError(f"a medium of {num_tokens} tokens with the grid {tuple(grid)}; it has (1, rows, columns)")
        if max(grid) * self.patches_along > spec.num_positions:
            raise ValueError(f"a medium with the grid {tuple(grid)}; there are positions for {spec.num_positions}")
        unit = spec.patch_size * spec.merge
        return grid[1] * unit, grid[2] * unit

    def largest(self, num_tokens: int) -> list[torch.Tensor]:
        return [self.square(min(num_tokens, self.spec.most_tokens))]

    @property
    @abstractmethod
    def patches_along(self) -> int:
        """Number of positions along a side of the square that becomes one vector."""

    def patches(self, image: torch.Tensor, size: int) -> tuple[torch.Tensor, int, int]:
        """The patches of an image, float32 [num_patches, size * size * 3], row by row, and the numbers of rows and
        columns."""
        rows, cols = image.shape[0] // size, image.shape[1] // size
        grid = self.colors(image).view(rows, size, cols, size, 3).transpose(1, 2)
        return grid.reshape(rows * cols, -1), rows, cols

    def axes(self, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Column and row of each patch: int64 [num_patches] each."""
        down, across = (torch.arange(count, device=self.device) for count in (rows, cols))
        return across.repeat(rows), down.repeat_interleave(cols)


class UnifiedTower(GridTower[UnifiedVisionSpec]):
    """Computes norm, matrix, norm, positions, norm and matrix, in this order."""

    patches_along = 1

    def in_pieces(self, image: torch.Tensor) -> Pieces:
        patches, rows, cols = self.patches(image, self.spec.patch_size * self.spec.merge)
        hidden = self.linear("dense", self.norm("norm1", patches.to(self.dtype), NORM_EPS))
        hidden = self.norm("norm2", hidden, NORM_EPS)
        across, down = self.axes(rows, cols)
        table = self.table("positions")  # [num_positions, 2, hidden_size]
        hidden = self.norm("norm3", hidden + (table[across, 0] + table[down, 1]), NORM_EPS)
        yield
        return self.linear("projection", rms_normed(hidden, self.spec.norm_eps))

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, root = self.spec, self.spec.hidden_size, "model.embed_vision."
        yield self.group("norm1", [f"{root}patch_ln1"], (spec.token_bytes,))
        yield self.matrix("dense", [f"{root}patch_dense"], size, spec.token_bytes)
        yield self.group("norm2", [f"{root}patch_ln2"], (size,))
        yield self.tensor("positions", f"{root}pos_embedding", (spec.num_positions, 2, size))
        yield self.group("norm3", [f"{root}pos_norm"], (size,))
        yield self.matrix("projection", [f"{root}embedding_projection"], spec.out_size, bias=False)


class Gemma4Tower(GridTower[Gemma4VisionSpec]):
    """Has full attention within an image. The first half of each head is rotated by the patch's column, the second by
    its row."""

    def __init__(self, parts: Parts, spec: Gemma4VisionSpec) -> None:
        super().__init__(parts, spec)
        half = spec.head_size // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=parts.device) / half
        self._frequencies = 1.0 / spec.theta**steps  # [head_size / 4]
        self._limits: dict[str, list[float]] = {}

    @property
    def patches_along(self) -> int:
        return self.spec.merge

    def in_pieces(self, image: torch.Tensor) -> Pieces:
        spec = self.spec
        patches, rows, cols = self.patches(image, spec.patch_size)
        across, down = self.axes(rows, cols)
        table = self.table("positions")  # [2, num_positions, hidden_size]
        hidden = self.linear("patches", (2 * (patches - 0.5)).to(self.dtype)) + (table[0][across] + table[1][down])
        angles = torch.stack([across, down], 1)[:, :, None] * self._frequencies  # [num_patches, 2, head_size / 4]
        turns = tuple(torch.cat([each, each], -1).to(self.dtype)[:, None] for each in (angles.cos(), angles.sin()))
        for layer in range(spec.num_layers):
            attended = self._attend(layer, self._rms(f"{layer}.input_layernorm", hidden), turns)
            hidden = hidden + self._rms(f"{layer}.post_attention_layernorm", attended)
            made = self._mlp(layer, self._rms(f"{layer}.pre_feedforward_layernorm", hidden))
            hidden = hidden + self._rms(f"{layer}.post_feedforward_layernorm", made)
            yield
        pooled = hidden.view(rows // spec.merge, spec.merge, cols // spec.merge, spec.merge, -1).float().mean((1, 3))
        vectors = pooled.flatten(0, 1).to(self.dtype).float() * spec.hidden_size**0.5
        if spec.standardized:
            vectors = (vectors - self.table("bias").float()) * self.table("scale").float()
        return self.linear("projection", rms_normed(vectors.to(self.dtype), spec.norm_eps))

    def _rms(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_normed(x, self.spec.norm_eps, self.table(name).float())

    def _attend(self, layer: int, hidden: torch.Tensor, turns: tuple[torch.Tensor, ...]) -> torch.Tensor:
        spec, heads = self.spec, (len(hidden), self.spec.num_heads, self.spec.head_size)
        query, key, value = (self._matrix(f"{layer}.{part}_proj", hidden).view(heads) for part in "qkv")
        query, key = (_turned(self._rms(f"{layer}.{name}", part), turns) for name, part in (("q", query), ("k", key)))
        value = rms_normed(value, spec.norm_eps)
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        return self._matrix(f"{layer}.o_proj", attended[0].transpose(0, 1).flatten(1))

    def _mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        gate = activated(self._matrix(f"{layer}.gate_proj", x), self.spec.activation)
        return self._matrix(f"{layer}.down_proj", gate * self._matrix(f"{layer}.up_proj", x))

    def _matrix(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if (limits := self._limits.get(name)) is None:
            return self.linear(name, x)
        return self.linear(name, x.clamp(*limits[:2])).clamp(*limits[2:])

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, root = self.spec, self.spec.hidden_size, "model.vision_tower."
        embedder, width = f"{root}patch_embedder.", spec.num_heads * spec.head_size
        yield self.matrix("patches", [f"{embedder}input_proj"], size, 3 * spec.patch_size**2, bias=False)
        yield self.tensor("positions", f"{embedder}position_embedding_table", (2, spec.num_positions, size))
        shapes = dict.fromkeys(MATRICES, (width, size)) | {"o_proj": (size, width)}
        shapes |= dict.fromkeys(("gate_proj", "up_proj"), (spec.intermediate_size, size))
        shapes["down_proj"] = size, spec.intermediate_size
        for layer in range(spec.num_layers):
            own = f"{root}encoder.layers.{layer}."
            for part, shape in shapes.items():
                block = "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                yield self.matrix(f"{layer}.{part}", [f"{own}{block}.{part}.linear"], *shape, bias=False)
                if spec.clipped:
                    yield self._limit_group(f"{layer}.{part}", f"{own}{block}.{part}.")
            for part in "qk":
                yield self.group(f"{layer}.{part}", [f"{own}self_attn.{part}_norm"], (spec.head_size,), bias=False)
            for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                name = f"{place}_layernorm"
                yield self.group(f"{layer}.{name}", [f"{own}{name}"], (size,), bias=False)
        if spec.standardized:
            yield self.tensor("bias", f"{root}std_bias", (size,))
            yield self.tensor("scale", f"{root}std_scale", (size,))
        projection = "model.embed_vision.embedding_projection"
        yield self.matrix("projection", [projection], spec.out_size, bias=False)

    def _limit_group(self, name: str, prefix: str) -> WeightGroup:
        """The checkpoint's limits of a matrix's inputs and outputs, to which they are clamped."""

        def take(limits: torch.Tensor) -> None:
            self._limits[name] = limits.tolist()

        slots = tuple(whole_slot(f"{prefix}{limit}", 1) for limit in LIMITS)
        return WeightGroup((WeightStack(slots, torch.float32, self.device),), take)


def _turned(heads: torch.Tensor, turns: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rotate heads, [num_patches, num_heads, head_size]. In each half of a head, elements i and i + head_size / 4 are a
    pair."""
    cos, sin = turns  # [num_patches, 1, 2, head_size / 2]
    x = heads.unflatten(-1, (2, -1))
    first, second = x.chunk(2, -1)
    result: torch.Tensor = x * cos + torch.cat([-second, first], -1) * sin
    return result.flatten(-2)
