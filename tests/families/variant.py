"""A tiny checkpoint of a family: its classes and settings in transformers, and switches whose effect the tests must
detect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.checkpoints import write_checkpoint
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, make_kv_groups

Control = Callable[[ModelSpec], ModelSpec]
"""A ModelSpec in which one switch of the family is dropped, as a family's reader that forgot it would make it."""


@dataclass(frozen=True)
class Variant:
    """`config` and `model` are names of classes of transformers; `settings` go to the config."""

    name: str
    config: str
    model: str
    settings: Mapping[str, Any]
    controls: Mapping[str, Control] = field(default_factory=dict)
    max_model_len: int = 256
    """Context at which it is compared with transformers' logits for 150 tokens; a rope may depend on it."""

    def make(self, path: Path, **others: Any) -> Path:
        """Write the checkpoint to the folder `path` and return it."""
        import transformers

        config, model = getattr(transformers, self.config), getattr(transformers, self.model)
        return write_checkpoint(path, config, model, dict(self.settings), **others)


def drop(**fields: Any) -> Control:
    """The model with these fields of ModelSpec instead of its own."""
    return lambda spec: msgspec.structs.replace(spec, **fields)


def drop_in_layers(change: Callable[[LayerSpec], LayerSpec]) -> Control:
    """The model with every layer changed."""

    def changed(spec: ModelSpec) -> ModelSpec:
        layers = tuple(map(change, spec.layers))
        return msgspec.structs.replace(spec, layers=layers, kv_groups=make_kv_groups(layers))

    return changed


def drop_in(part: str, **fields: Any) -> Control:
    """The model with these fields in a part of every layer that has it, such as "attention" or "experts.routing"."""
    path = part.split(".")

    def changed(whole: Any, depth: int = 0) -> Any:
        if depth == len(path):
            return msgspec.structs.replace(whole, **fields)
        own = getattr(whole, path[depth])
        return whole if own is None else msgspec.structs.replace(whole, **{path[depth]: changed(own, depth + 1)})

    return drop_in_layers(changed)


routing = partial(drop_in, "experts.routing")
NO_WINDOW = drop_in("attention", window=None)
NO_ROPE_SCALING = drop_in("rope", scaling=None, attention_factor=1.0)
