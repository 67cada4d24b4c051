"""The towers of Qwen2-VL and Qwen2.5-VL, which have no learned positions.

In most layers of Qwen2.5-VL, a patch attends to the patches of its window only; so patches are sorted by window.
Source: transformers' Qwen2_5_VisionTransformerPretrainedModel.
"""

from collections.abc import Iterator, Sequence

import torch

from vllm_lite.checkpoint.layer_specs.qwen_vision import Qwen2VisionSpec
from vllm_lite.kernels.ops import Rotation, WideNormWeights
from vllm_lite.layers.vision.qwen import ROOT, QwenTower, Side
from vllm_lite.layers.vision.tower import Pieces
from vllm_lite.layers.weights.weight_slot import WeightGroup


class Qwen2Tower(QwenTower[Qwen2VisionSpec]):
    """The tower of Qwen2-VL and Qwen2.5-VL."""

    def encode_patches(self, patches: torch.Tensor, sides: Sequence[Side], at_once: int | None) -> Pieces:
        spec, few = self.spec, self.spec.merge**2
        order, lengths = self._windows(sides)

        def in_order(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(-1, few, *rows.shape[1:])[order].flatten(0, 1)

        yield
        hidden = yield from self.projected(in_order(patches), at_once)
        rotation = Rotation(*map(in_order, self.rotation(sides)))
        whole = self.attention.plan([rows * cols for rows, cols in sides], in_pieces=at_once is not None)
        windows = self.attention.plan([few * length for length in lengths], in_pieces=at_once is not None)
        rows = self.layer_rows(hidden, at_once)
        for layer in range(spec.num_layers):
            plan = whole if layer in spec.full_layers or not spec.window else windows
            yield from self.layer(layer, rows, plan, rotation, at_once)
        merged = yield from self.merged("merger", self.norm("norm", hidden).view(-1, self.block_size), at_once)
        vectors = torch.empty_like(merged)
        vectors[order] = merged
        return vectors

    def _windows(self, sides: Sequence[Side]) -> tuple[torch.Tensor, list[int]]:
        """The tokens of all images in the order of windows, and the number of tokens of each window, which is smaller
        at the right and bottom edges. Without windows, each image is one window."""
        merge, windows, first = self.spec.merge, list[torch.Tensor](), 0
        for rows, cols in ((rows // merge, cols // merge) for rows, cols in sides):
            places = torch.arange(first, first + rows * cols, device=self.device).view(rows, cols)
            side = self.spec.window or max(rows, cols)
            windows += [cut.flatten() for above in places.split(side) for cut in above.split(side, 1)]
            first += rows * cols
        return torch.cat(windows), list(map(len, windows))

    def norm(
        self, name: str, x: torch.Tensor, eps: float | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self.spec.is_gated:
            return super().norm(name, x, eps, out)
        weights = WideNormWeights(self.table(name).float(), None, eps or self.spec.norm_eps, centered=False)
        out = torch.empty_like(x) if out is None else out
        self.ops.wide_norm(x, weights, out)
        return out

    @property
    def inner_size(self) -> int:
        return super().inner_size * (2 if self.spec.is_gated else 1)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        if not self.spec.is_gated:
            return super().activate(x)
        out = x[:, : self.spec.intermediate_size]
        self.ops.activate_and_mul("silu", x, out)
        return out

    def weight_groups(self) -> Iterator[WeightGroup]:
        spec, size, inner = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        first, second = (["gate_proj", "up_proj"], "down_proj") if spec.is_gated else (["fc1"], "fc2")
        yield self.group("patches", [f"{ROOT}patch_embed.proj"], self.patch_shape(), bias=False)
        for layer in range(spec.num_layers):
            own = f"{ROOT}blocks.{layer}."
            yield self.matrix(f"{layer}.qkv", [f"{own}attn.qkv"], 3 * size)
            yield self.matrix(f"{layer}.out", [f"{own}attn.proj"], size)
            yield self.matrix(f"{layer}.fc1", [f"{own}mlp.{name}" for name in first], inner)
            yield self.matrix(f"{layer}.fc2", [f"{own}mlp.{second}"], size, inner)
            for number in "12":
                yield self.group(f"{layer}.norm{number}", [f"{own}norm{number}"], (size,), bias=not spec.is_gated)
        yield self.group("norm", [f"{ROOT}merger.ln_q"], (size,), bias=not spec.is_gated)
        yield from self.merger_groups("merger", f"{ROOT}merger.mlp.0", f"{ROOT}merger.mlp.2")
