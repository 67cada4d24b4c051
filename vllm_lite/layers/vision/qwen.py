"""Towers of Qwen, for images of any size. Each block of `merge` x `merge` patches becomes one vector.

A patch is rotated by its row and column, one half of each head by either. In Qwen3-VL and Qwen3.5, it also gets a
learned position: a square table is stretched to the size of the image and interpolated. There, a patch attends to its
whole image; qwen2.py has the earlier models. Sources: transformers' Qwen3VLVisionModel and Qwen3_5VisionModel.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from vllm_lite.checkpoint.layer_specs import activation
from vllm_lite.checkpoint.layer_specs.qwen_vision import Qwen3VisionSpec, QwenVisionSpec
from vllm_lite.checkpoint.layer_specs.vision import Activation
from vllm_lite.kernels.ops import Rotation, WideNormWeights
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.vision.attention import TowerAttention, TowerPlan
from vllm_lite.layers.vision.tower import PIECE_ROWS, Pieces, VisionTower, drained
from vllm_lite.layers.weights.weight_slot import WeightGroup

Q = TypeVar("Q", bound=QwenVisionSpec)
Side = tuple[int, int]
"""Rows and columns of an image, in patches."""

ACTIVATIONS: Mapping[Activation, activation.Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
"""Names of config.json for activations -> names of our kernels."""


THETA = 10000.0
ROOT = "model.visual."
PATCHES_AT_ONCE = 2048
"""Maximum patches of images that are computed together: more would need more memory and be no faster."""


def parts_of(rows: torch.Tensor, at_once: int | None) -> list[slice]:
    """Slices of `at_once` rows each; None: one slice of all rows."""
    size = at_once or len(rows)
    return [slice(first, first + size) for first in range(0, len(rows), size)]


class LayerRows(NamedTuple):
    """Buffers that the layers of a tower share."""

    hidden: torch.Tensor  # [num_patches, hidden_size], to which each layer adds
    qkv: torch.Tensor  # [num_patches, 3 * hidden_size]
    attended: torch.Tensor  # [num_patches, hidden_size]
    normed: torch.Tensor  # [patches computed together, hidden_size], input and output of every block
    inner: torch.Tensor  # [patches computed together, outputs of fc1]


class QwenTower(VisionTower[Q]):
    """Encodes images of any sizes, whose patches are concatenated."""

    def __init__(self, parts: Parts, spec: Q) -> None:
        super().__init__(parts, spec)
        quarter = spec.hidden_size // spec.num_heads // 4
        steps = torch.arange(0, 2 * quarter, 2, dtype=torch.float32, device=parts.device) / (2 * quarter)
        self._frequencies = 1.0 / THETA**steps  # [head_size / 4]
        self.ops = ops_for(parts.device)
        self.attention = TowerAttention(parts, spec.num_heads, spec.hidden_size // spec.num_heads)

    def shape(self, num_tokens: int, grid: Sequence[int]) -> tuple[int, int]:
        patch, merge = self.spec.patch_size, self.spec.merge
        if len(grid) != 3 or grid[0] != 1 or any(side % merge for side in grid[1:]):
            raise ValueError(f"a medium with the grid {tuple(grid)}; an image has (1, rows, columns) in patches")
        if grid[1] * grid[2] != num_tokens * merge**2:
            raise ValueError(f"a medium of {num_tokens} tokens with {grid[1]} x {grid[2]} patches")
        return grid[1] * patch, grid[2] * patch

    def encode(self, images: Sequence[torch.Tensor], progress: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        patch, vectors, few = self.spec.patch_size, list[torch.Tensor](), list[torch.Tensor]()
        left = PATCHES_AT_ONCE
        for image in images:
            size = image.shape[0] * image.shape[1] // patch**2
            if few and size > left:
                vectors += self._encoded(few, progress)
                few, left = [], PATCHES_AT_ONCE
            few.append(image)
            left -= size
        return vectors + (self._encoded(few, progress) if few else [])

    def in_pieces(self, image: torch.Tensor) -> Pieces:
        side = self._side(image)
        return (yield from self.encode_patches(self._patches(image, *side), [side], PIECE_ROWS))

    def _encoded(self, images: Sequence[torch.Tensor], progress: Callable[[], None]) -> list[torch.Tensor]:
        sides = list(map(self._side, images))
        patches = torch.cat([self._patches(image, *side) for image, side in zip(images, sides, strict=True)])
        made = drained(self.encode_patches(patches, sides, None), progress)
        return list(made.split([rows * cols // self.spec.merge**2 for rows, cols in sides]))

    def _side(self, image: torch.Tensor) -> Side:
        return image.shape[0] // self.spec.patch_size, image.shape[1] // self.spec.patch_size

    def largest(self, num_tokens: int) -> list[torch.Tensor]:
        return [self.square(num_tokens)]

    @abstractmethod
    def encode_patches(self, patches: torch.Tensor, sides: Sequence[Side], at_once: int | None) -> Pieces:
        """Encode the patches of several images, [num_patches, pixels of all frames]; pauses after each `at_once`
        patches of a layer (None: all)."""

    # ---- for towers

    def _patches(self, image: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        patch = self.spec.patch_size
        patches = self.blocks(self.colors(image).view(rows, patch, cols, patch, 3).permute(0, 2, 4, 1, 3))
        return patches[:, :, None].expand(-1, -1, self.spec.frames, -1, -1).flatten(1).to(self.dtype)

    def blocks(self, by_place: torch.Tensor) -> torch.Tensor:
        """[rows, cols, ...] -> [rows * cols, ...] in the tower's order, in which the patches of a block are
        consecutive."""
        rows, cols, *rest = by_place.shape
        merge = self.spec.merge
        blocks = by_place.reshape(rows // merge, merge, cols // merge, merge, *rest)
        return blocks.transpose(1, 2).reshape(rows * cols, *rest)

    def projected(self, patches: torch.Tensor, at_once: int | None) -> Pieces:
        """Project patches to [num_patches, hidden_size]. Pauses as `layer` does."""
        rows = patches.new_empty(len(patches), self.spec.hidden_size)
        for some in parts_of(patches, at_once):
            self.linear("patches", patches[some], rows[some])
            yield
        return rows

    def rotation(self, sides: Sequence[Side]) -> Rotation:
        """cos and sin of each patch, by its row and column. Elements i and i + head_size / 2 of a head are a pair."""
        angles = torch.cat([self._angles(*side) for side in sides])
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return Rotation(torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1))

    def _angles(self, rows: int, cols: int) -> torch.Tensor:  # float32 [num_patches, head_size / 2]
        places = torch.arange(max(rows, cols), device=self.device)
        down, across = places[:rows, None].expand(-1, cols), places[None, :cols].expand(rows, -1)
        return torch.cat([self.blocks(each)[:, None] * self._frequencies for each in (down, across)], 1)

    @property
    def inner_size(self) -> int:
        """Outputs of a layer's first matrix."""
        return self.spec.intermediate_size

    def layer_rows(self, hidden: torch.Tensor, at_once: int | None) -> LayerRows:
        """Buffers for layers over `hidden`, [num_patches, hidden_size], of which `at_once` patches are computed
        together (None: all)."""
        size, num_patches = self.spec.hidden_size, len(hidden)
        few = min(num_patches, at_once or num_patches)
        shapes = (num_patches, 3 * size), (num_patches, size), (few, size), (few, self.inner_size)
        return LayerRows(hidden, *(hidden.new_empty(shape) for shape in shapes))

    def layer(
        self,
        layer: int,
        rows: LayerRows,
        plan: TowerPlan,
        rotation: Rotation | None = None,
        at_once: int | None = None,
    ) -> Iterator[None]:
        """Add the output of layer `layer` to `rows.hidden`; pauses after each `at_once` patches (None: all)."""
        parts = parts_of(rows.hidden, at_once)
        for some in parts:
            hidden = rows.hidden[some]
            normed = rows.normed[: len(hidden)]
            self.norm(f"{layer}.norm1", hidden, out=normed)
            self.linear(f"{layer}.qkv", normed, rows.qkv[some])
            yield
        yield from self.attention.forward(rows.qkv, plan, rotation, rows.attended)
        for some in parts:
            hidden = rows.hidden[some]
            normed = rows.normed[: len(hidden)]
            self.linear(f"{layer}.out", rows.attended[some], normed)
            self.ops.add(hidden, normed)
            self.norm(f"{layer}.norm2", hidden, out=normed)
            self.feed_forward(layer, normed, rows.inner[: len(hidden)])
            self.ops.add(hidden, normed)
            yield

    def norm(
        self, name: str, x: torch.Tensor, eps: float | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalize x over its last axis; into `out` unless that is None."""
        own, out = self._weights[name], torch.empty_like(x) if out is None else out
        weights = own.weight.float(), None if own.bias is None else own.bias.float()
        self.ops.wide_norm(x, WideNormWeights(*weights, eps or self.spec.norm_eps, centered=True), out)
        return out

    def feed_forward(self, layer: int, x: torch.Tensor, inner: torch.Tensor) -> None:
        """Replace x, [.., hidden_size], by the output of a layer's MLP. inner: a buffer, [.., inner_size]."""
        self.linear(f"{layer}.fc1", x, inner)
        self.linear(f"{layer}.fc2", self.activate(inner), x)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the tower's activation to x in place: [.., inner_size] -> [.., intermediate_size]."""
        kind = ACTIVATIONS.get(self.spec.activation)
        if kind is None:
            return x.mul_(torch.sigmoid(1.702 * x))
        self.ops.activate(kind, x)
        return x

    def merged(self, name: str, blocks: torch.Tensor, at_once: int | None = None) -> Pieces:
        """Turn blocks of patches into vectors of the text model: [num_tokens, merge^2 * hidden_size] -> [.., out_size].
        Pauses as `layer` does; a block counts as merge^2 patches."""
        vectors = list[torch.Tensor]()
        for some in blocks.split(max(1, at_once // self.spec.merge**2) if at_once else len(blocks)):
            inner = self.linear(f"{name}.fc1", some)
            self.ops.activate("gelu", inner)
            vectors.append(self.linear(f"{name}.fc2", inner))
            yield
        return torch.cat(vectors)

    @property
    def block_size(self) -> int:
        """Elements of a block of patches."""
        return self.spec.merge**2 * self.spec.hidden_size

    def patch_shape(self) -> tuple[int, ...]:
        spec = self.spec
        return spec.hidden_size, 3, spec.frames, spec.patch_size, spec.patch_size

    def merger_groups(self, name: str, first: str, second: str) -> Iterator[WeightGroup]:
        """The weights of `merged`; `first` and `second` are the names of its matrices in the checkpoint."""
        yield self.matrix(f"{name}.fc1", [first], self.block_size, self.block_size)
        yield self.matrix(f"{name}.fc2", [second], self.spec.out_size, self.block_size)


class Qwen3Tower(QwenTower[Qwen3VisionSpec]):
    """The tower of Qwen3-VL and Qwen3.5."""

    def encode_patches(self, patches: torch.Tensor, sides: Sequence[Side], at_once: int | None) -> Pieces:
        yield
        hidden = yield from self.projected(patches, at_once)
        ids, shares = (torch.cat(each, 1) for each in zip(*(self._corners(*side) for side in sides), strict=True))
        for some in parts_of(hidden, at_once):
            hidden[some] += (self.table("positions")[ids[:, some]] * shares[:, some, None]).sum(0)
            yield
        rotation, in_pieces = self.rotation(sides), at_once is not None
        plan = self.attention.plan([rows * cols for rows, cols in sides], in_pieces=in_pieces)
        rows, deep = self.layer_rows(hidden, at_once), list[torch.Tensor]()
        for layer in range(self.spec.num_layers):
            yield from self.layer(layer, rows, plan, rotation, at_once)
            if layer in self.spec.deep_layers:
                name = f"deep{len(deep)}"
                own = self.norm(f"{name}.norm", hidden.view(-1, self.block_size))
                deep.append((yield from self.merged(name, own, at_once)))
        vectors = yield from self.merged("merger", self.norm("norm", hidden).view(-1, self.block_size), at_once)
        return torch.cat([vectors, *deep], 1)

    def _corners(self, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:  # [4, num_patches] each
        """For each patch of an image, the four entries of the position table around it, and the weight of each."""
        side = self.spec.side
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
        shares = torch.stack([self.blocks(share) for _, _, share in corners])
        ids = torch.stack([self.blocks(y.long()[:, None] * side + x.long()[None]) for y, x, _ in corners])
        return ids, shares.to(self.dtype)

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, inner = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        yield self.group("patches", [f"{ROOT}patch_embed.proj"], self.patch_shape())
        yield self.group("positions", [f"{ROOT}pos_embed"], (spec.side**2, size), bias=False)
        for layer in range(spec.num_layers):
            own = f"{ROOT}blocks.{layer}."
            yield self.matrix(f"{layer}.qkv", [f"{own}attn.qkv"], 3 * size)
            yield self.matrix(f"{layer}.out", [f"{own}attn.proj"], size)
            yield self.matrix(f"{layer}.fc1", [f"{own}mlp.linear_fc1"], inner)
            yield self.matrix(f"{layer}.fc2", [f"{own}mlp.linear_fc2"], size, inner)
            for number in "12":
                yield self.group(f"{layer}.norm{number}", [f"{own}norm{number}"], (size,))
        yield self.group("norm", [f"{ROOT}merger.norm"], (size,))
        yield from self.merger_groups("merger", f"{ROOT}merger.linear_fc1", f"{ROOT}merger.linear_fc2")
        for index in range(spec.num_deep):
            name, own = f"deep{index}", f"{ROOT}deepstack_merger_list.{index}."
            yield self.group(f"{name}.norm", [f"{own}norm"], (self.block_size,))
            yield from self.merger_groups(name, f"{own}linear_fc1", f"{own}linear_fc2")
