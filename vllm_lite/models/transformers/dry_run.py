"""A step without weights, to check before loading that the engine can serve a model of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, make_kv_groups
from vllm_lite.errors import ModelError
from vllm_lite.models.transformers.attention import PagedAttention, Seen

NUM_TOKENS = 3


@torch.inference_mode()
def observe(model: Any, paged: PagedAttention, spec: ModelSpec) -> list[Seen]:
    """Find the attention of each layer. `spec`: with this rank's heads.

    Raises ModelError, with the layer, unless every layer attends exactly once through the engine, with the heads and
    the window that `spec` has.
    """
    kind = model.config.model_type
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    _run(model, input_ids=ids, position_ids=ids)
    return [_check(kind, layer, own, paged.seen.get(layer, [])) for layer, own in enumerate(spec.layers)]


@torch.inference_mode()
def observe_head(model: Any, hidden_size: int, num_tokens: int) -> None:
    """Raise ModelError unless `model`, with a body that returns its `inputs_embeds`, computes logits of them for
    `num_tokens` tokens of the vocabulary."""
    hidden = torch.zeros(1, NUM_TOKENS, hidden_size, dtype=model.config.dtype, device="meta")
    shape, expected = tuple(_run(model, inputs_embeds=hidden).logits.shape), (1, NUM_TOKENS, num_tokens)
    if shape != expected:
        raise ModelError(
            f"{model.config.model_type!r} cannot be served through transformers: its logits have the shape {shape} "
            f"where {expected} is expected"
        )


def _run(model: Any, **inputs: torch.Tensor) -> Any:
    """Run `model` on inputs on the meta device. Raises ModelError, with its name, if it fails."""
    kind = model.config.model_type
    try:
        with _buffers_on_meta(model):
            return model(**inputs, use_cache=False)
    except ModelError as error:
        raise ModelError(f"{kind!r} cannot be served through transformers: {error}") from None
    except Exception as error:
        raise ModelError(
            f"{kind!r} cannot be served through transformers: its code failed in a dry run: {error}"
        ) from error


@contextmanager
def _buffers_on_meta(model: Any) -> Iterator[None]:
    kept = [(module._buffers, dict(module._buffers)) for module in model.modules()]  # noqa: SLF001
    for buffers, values in kept:
        buffers.update({name: None if value is None else value.to("meta") for name, value in values.items()})
    try:
        yield
    finally:
        for buffers, values in kept:
            buffers.update(values)


def _check(kind: str, layer: int, own: LayerSpec, seen: list[Seen]) -> Seen:
    """Check the layer's attention against config.json, and return it."""
    where = f"{kind!r} cannot be served through transformers: layer {layer}"
    if len(seen) != 1:
        times = (
            "does not attend through its attention interface" if not seen else f"attends {len(seen)} times in a step"
        )
        raise ModelError(f"{where} {times}")
    found, expected = seen[0], own.attention
    for what, got, wanted in (
        ("query heads", found.num_heads, expected.num_heads),
        ("KV heads", found.num_kv_heads, expected.num_kv_heads),
        ("elements in a head", found.head_size, expected.head_size),
        ("elements in a head's values", found.value_size, expected.head_size),
        ("as window", found.window, expected.window),
    ):
        if got != wanted:
            raise ModelError(f"{where} has {got} {what}, and by its config.json {wanted}")
    return found


def as_observed(spec: ModelSpec, seen: list[Seen]) -> ModelSpec:
    """Return `spec` with scales, soft caps and sinks of layers, which config.json does not have."""
    layers = tuple(
        msgspec.structs.replace(
            layer,
            attention=msgspec.structs.replace(layer.attention, scale=one.scale, soft_cap=one.soft_cap, sinks=one.sinks),
        )
        for layer, one in zip(spec.layers, seen, strict=True)
    )
    groups = make_kv_groups(layers)
    if [group.layers for group in groups] != [group.layers for group in spec.kv_groups]:
        raise ModelError(
            f"{spec.architecture}: its layers differ in scales, soft caps or sinks, which is not supported"
        )
    return msgspec.structs.replace(spec, layers=layers, kv_groups=groups)
