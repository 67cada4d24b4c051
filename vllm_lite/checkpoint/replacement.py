"""check_same_model(): whether the weights in one folder can replace others: the same model, trained further."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.gguf.checkpoint import GgufCheckpoint
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.tensors.headers import locate, read_headers
from vllm_lite.errors import ModelError

_MAY_DIFFER = frozenset({"folder", "dtype", "bos_token_id"})
"""Fields of ModelSpec that do not affect a running engine."""
_IN_PARTS = (tuple, msgspec.Struct)
"""Types of fields that are too long for an error: their first difference is named."""
_HEADS = frozenset({"lm_head.weight"})
"""A tied head may be in the files or not."""
_MAX_CHARS = 120


class Weights(NamedTuple):
    """A checkpoint's spec and tensor shapes, read without loading it."""

    spec: ModelSpec
    shapes: dict[str, tuple[int, ...]]
    """Shapes by tensor name; empty if files are not compared."""


def read_weights(folder: str, model_impl: str, *, has_files: bool) -> Weights:
    """Read configuration and headers. Raises ModelError for missing, damaged, truncated or unsupported files. Without
    `has_files`, only the configuration is read."""
    spec = load_spec(folder, model_impl)
    if not has_files:
        return Weights(spec, {})
    if GgufCheckpoint.find(Path(folder)) is None:
        locate(Path(folder))  # every tensor is within its file
    return Weights(spec, {name: tuple(tensor.shape) for name, tensor in read_headers(Path(folder)).items()})


def check_same_model(folder: str, new: Weights, served: Weights) -> None:
    """Raise ModelError, with the first difference, unless both are weights of one model. Differences beyond headers are
    found by the loader."""
    for name in ModelSpec.__struct_fields__:
        values = getattr(new.spec, name), getattr(served.spec, name)
        if values[0] != values[1] and name not in _MAY_DIFFER:
            is_long = isinstance(values[0], _IN_PARTS) or isinstance(values[1], _IN_PARTS)
            where = f"{name}, {_difference(*values)}" if is_long else f"{name}, {_both(*values)}"
            raise ModelError(f"{folder}: it is not the model that is served: it differs in its {where}")
    for name in sorted(new.shapes.keys() & served.shapes.keys()):
        if new.shapes[name] != served.shapes[name]:
            shapes = _both(list(new.shapes[name]), list(served.shapes[name]))
            raise ModelError(f"{folder}: it is not the model that is served: its tensor {name} has the shape {shapes}")
    missing = sorted(served.shapes.keys() - new.shapes.keys() - _HEADS)
    if missing and new.shapes.keys() & served.shapes.keys():
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: it lacks the tensor {missing[0]}{more} of the model that is served")


def _difference(new: object, old: object) -> str:
    """Describe the first difference of two composite values."""
    if isinstance(new, tuple) and isinstance(old, tuple):
        if len(new) != len(old):
            return f"of which there are {len(new)}, not {len(old)}"
        return next(_difference(*pair) for pair in zip(new, old, strict=True) if pair[0] != pair[1])
    if isinstance(new, msgspec.Struct) and type(new) is type(old):
        for name in new.__struct_fields__:
            values = getattr(new, name), getattr(old, name)
            if values[0] != values[1]:
                return f"{name} {_difference(*values)}"
    return _both(new, old)


def _both(new: object, old: object) -> str:
    return f"{_short(new)}, not {_short(old)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."
