"""Split of the linear layers of a model of transformers over ranks, by its own plan for tensor parallelism."""

import re
from typing import Any

from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ConfigError
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.linear import Linear

WHOLE = ("replicated_with_grad_allreduce",)
"""Styles of layers that every rank has whole."""
NUMBER = re.compile(r"\.\d+(?=\.|$)")


class TensorPlan:
    """Makes linear layers that are split over ranks by their outputs or inputs."""

    def __init__(self, model: Any, parts: Parts) -> None:
        """Raises ConfigError if there are several ranks, and transformers' plan for the model is missing or has an
        unsupported style."""
        self.parts = parts
        self._kind = model.config.model_type
        plan = getattr(model.config, "base_model_tp_plan", None) or {}
        self._styles = {f"{model.base_model_prefix}.{name}": style for name, style in plan.items()}
        if parts.shard.world > 1:
            self._check()

    def linear(self, name: str, module: Any, *, transposed: bool) -> Linear:
        """Make this rank's part of the linear layer `name`. Raises ConfigError if it cannot be split."""
        rows, columns = module.weight.shape if not transposed else module.weight.shape[::-1]
        inputs, outputs, parts = Split.whole(columns), Split.whole(rows), self.parts
        options: dict[str, Any] = {"bias": module.bias is not None, "transposed": transposed}
        style = self.style(name)
        try:
            if style == "colwise":
                return parts.linear(inputs, Split.even(rows, parts.shard), **options)
            if style == "rowwise":
                return parts.row_parallel(Split.even(columns, parts.shard), outputs, **options)
        except ValueError as error:
            raise ConfigError(f"tensor_parallel_size {parts.shard.world} does not fit {name}: {error}") from error
        return parts.linear(inputs, outputs, **options)

    def style(self, name: str) -> str | None:
        """The plan's style for a linear layer; None if every rank has it whole."""
        return self._styles.get(NUMBER.sub(".*", name)) if self.parts.shard.world > 1 else None

    def _check(self) -> None:
        world = self.parts.shard.world
        if not self._styles:
            raise ConfigError(
                f"tensor_parallel_size {world}: transformers has no plan by which ranks share a {self._kind!r}; give 1"
            )
        others = {style for style in self._styles.values() if style not in ("colwise", "rowwise", *WHOLE)}
        if others:
            raise ConfigError(
                f"tensor_parallel_size {world}: the plan by which ranks share a {self._kind!r} has styles that are not "
                f"supported ({', '.join(sorted(others))}); give 1"
            )
