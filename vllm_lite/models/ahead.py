"""Packing of a rank's weights before its model exists, by the names of the checkpoint's tensors. No torch.

Native threads of a worker pack weights while it imports torch. This module knows the names that most families share. A
packed weight is used only if its key, which has everything that it depends on, equals the model's. Others are packed by
`weights.load_weights` as the model requests them.
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, cast

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.layer_specs.experts import ExpertsSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import GROUPS, Form, Quantization, head_form
from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.checkpoint.tensors.headers import TensorPlace, locate
from vllm_lite.checkpoint.tensors.tensor_names import canonical, is_ignored
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import VllmLiteError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.file_packer import NICENESS, FilePacker, Job, Piece
from vllm_lite.layers.attention.qkv_layout import qkv_splits
from vllm_lite.runtime import log

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors' names of the types that can be packed."""
_LAYER = re.compile(r"(.*\blayers\.(\d+)\.(?:self_attn|mlp)\.)\w+\.weight")
_SHARED = "shared_experts"
_ROUTER, _SHARED_GATE = "gate", "shared_expert_gate"
_HEADS = ("embed_tokens.weight", "lm_head.weight")
_NEVER_QUANTIZED = (f".{_ROUTER}", f".{_SHARED_GATE}")

logger = log.get(__name__)


class Slot(NamedTuple):
    """A tuple equal to the WeightSlot of the same fields, without importing torch."""

    name: str
    shape: tuple[int, int]
    start: tuple[int, int]
    size: tuple[int, int]
    order: tuple[int, ...] | None = None
    transposed: bool = False
    stacked: tuple[int, int] | None = None
    is_text: bool = False

    @classmethod
    def of(cls, name: str, rows: Split, inputs: Split) -> "Slot":
        return cls(
            f"{name}.weight",
            (rows.total, inputs.total),
            (rows.start, inputs.start),
            (rows.size, inputs.size),
            rows.order,
        )


class Wanted(NamedTuple):
    """A weight to pack: its parts of the checkpoint, and its types. Equal to the packing key of a WeightStack."""

    slots: tuple[Slot, ...]
    dtype: str
    packed_as: str


def pack_ahead(config: ResolvedConfig, rank: int, num_threads: int, niceness: int = NICENESS) -> FilePacker | None:
    """Begin to pack the weights of worker `rank`, in threads with a `niceness`. None if nothing can be packed, or the
    checkpoint cannot be read; the loader reports that error."""
    if config.device != "cpu" or config.load_format == "dummy" or not cpu.available():
        return None
    try:
        spec = load_spec(config.model, config.model_impl, config.pooling)
        if spec.implementation == "transformers":  # its weights are known only once its modules are made
            return None
        places = locate(Path(config.model))
        tied, without_kv = spec.tie_word_embeddings, spec.layers_without_kv
        stored = {
            name: place
            for name, place in ((canonical(name), place) for name, place in places.items())
            if not is_ignored(name, tied=tied, unread_layers=spec.unread_layers, without_kv=without_kv)
        }
        shard = Shard.of(config, rank, config.num_stages)
        mixed = MixedForm.of(spec, config.quantization, config.device)
        wanted = (
            Wanted(tuple(some), config.dtype, form or config.dtype)
            for slots, is_dense in _weights(stored, spec, shard)
            for form, some in groupby(slots, key=partial(_form, config.quantization, mixed, is_dense=is_dense))
        )
        if tied and config.quantization:  # the model keeps a dense embedding beside the head
            wanted = (one for one in wanted if not one.slots[0].name.endswith("embed_tokens.weight"))
        jobs = {one: job for one in wanted if (job := _job(one, stored)) is not None}
        return _begin(jobs, stored, num_threads, niceness) if jobs else None
    except (VllmLiteError, OSError, ValueError, LookupError) as error:
        logger.debug("no weights are packed ahead: %s", error)
        return None


def pack_wanted(wanted: Iterable[Hashable], folder: Path, num_threads: int) -> FilePacker | None:
    """Begin to pack the weights that a model in memory requests, by their packing keys. None if the checkpoint has none
    of them as plain dense tensors."""
    try:
        stored = {canonical(name): place for name, place in locate(folder).items()}
        keys = (Wanted(*cast("Wanted", key)) for key in wanted)
        plain = [key for key in keys if all(slot.name in stored and _is_plain(slot) for slot in key.slots)]
        jobs = {key: job for key in plain if (job := _job(key, stored)) is not None}
        return _begin(jobs, stored, num_threads, 0) if jobs else None
    except (VllmLiteError, OSError, ValueError) as error:
        logger.debug("no weights are packed from files: %s", error)
        return None


def _is_plain(slot: Slot) -> bool:
    return not slot.transposed and slot.stacked is None and not slot.is_text


def _form(quantization: Quantization | None, mixed: MixedForm | None, slot: Slot, *, is_dense: bool) -> Form | None:
    """Form to which the weight of `slot` is packed; None: the model's dtype."""
    if is_dense:
        return None
    if slot.name.endswith(_HEADS):
        return head_form(quantization)
    return quantization if mixed is None else mixed.form(slot.name)


def _begin(
    jobs: Mapping[Wanted, Job], stored: Mapping[str, TensorPlace], num_threads: int, niceness: int
) -> FilePacker | None:
    """Start the packer; None if a file was replaced since its header was read, which may have moved its tensors."""
    packer = FilePacker(jobs, num_threads, niceness)
    places = (stored[slot.name] for wanted in jobs for slot in wanted.slots)
    if all(packer.reads(place.file, place.identity) for place in places):
        return packer
    packer.close()
    return None


def _weights(
    stored: Mapping[str, TensorPlace], spec: ModelSpec, shard: Shard
) -> Iterator[tuple[tuple[Slot, ...], bool]]:
    """Slots of each weight of this stage, in the order in which models load them, and whether it is never quantized."""
    blocks = {found[1]: int(found[2]) for name in stored if (found := _LAYER.fullmatch(name))}
    hidden, held = Split.whole(spec.hidden_size), shard.stage.layers(spec.num_layers)
    for prefix, layer in sorted(blocks.items(), key=lambda block: (block[1], not block[0].endswith("attn."))):
        if layer not in held:
            continue
        if prefix.endswith("attn."):
            parts = _attention(prefix, stored, spec, layer, shard)
        elif (experts := spec.layers[layer].experts) is not None:
            parts = _experts(prefix, experts, shard)
        else:
            size = spec.layers[layer].intermediate_size or spec.intermediate_size
            parts = _mlp(prefix, stored, Split.even(size, shard), gated=spec.gated_mlp)
        for names, rows, inputs in parts:
            outputs = rows or (hidden,)
            slots = tuple(Slot.of(name, own, inputs or hidden) for name, own in zip(names, outputs, strict=True))
            if all(slot.name in stored for slot in slots):
                yield slots, names[0].endswith(_NEVER_QUANTIZED)
    head = "embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    for name in stored if shard.stage.is_last else ():
        if name == head or name.endswith(f".{head}"):
            yield (Slot.of(name.removesuffix(".weight"), Split.vocabulary(spec.vocab_size, shard), hidden),), False


Parts = Iterator[tuple[tuple[str, ...], tuple[Split, ...] | None, Split | None]]
"""Names, this rank's rows of each, and its inputs; None: the whole hidden state."""


def _attention(prefix: str, stored: Mapping[str, TensorPlace], spec: ModelSpec, layer: int, shard: Shard) -> Parts:
    own = spec.layers[layer]
    order = None if own.rope is None else own.rope.order(own.attention.head_size)
    fused = f"{prefix}qkv_proj.weight" in stored
    heads = own.attention.heads(shard)
    splits = qkv_splits(own.attention, heads, "stacked" if fused else "separate", order)
    yield (
        tuple(f"{prefix}{name}" for name in (("qkv_proj",) * 3 if fused else ("q_proj", "k_proj", "v_proj"))),
        splits,
        None,
    )
    query = heads.query.times(own.attention.head_size)
    yield (f"{prefix}o_proj",), None, query


def _mlp(prefix: str, stored: Mapping[str, TensorPlace], inner: Split, *, gated: bool) -> Parts:
    if f"{prefix}gate_up_proj.weight" in stored:
        total = 2 * inner.total
        both = Split(total, inner.start, inner.size), Split(total, inner.total + inner.start, inner.size)
        yield (f"{prefix}gate_up_proj",) * 2, both, None
        yield (f"{prefix}down_proj",), None, inner
    else:
        yield from _matrices(prefix, inner, gated=gated)


def _experts(prefix: str, own: ExpertsSpec, shard: Shard) -> Parts:
    yield (f"{prefix}{_ROUTER}",), (Split.whole(own.routing.num_experts),), None
    held, inner = own.held(shard), own.inner(shard)
    for expert in range(held.start, held.end):
        yield from _matrices(f"{prefix}experts.{expert}.", inner, gated=own.gated)
    if own.shared_intermediate_size:
        shared = Split.even(own.shared_intermediate_size, shard)
        yield from _matrices(f"{prefix}{_SHARED}.", shared, gated=own.gated)
        yield (f"{prefix}{_SHARED_GATE}",), (Split.whole(1),), None


def _matrices(prefix: str, inner: Split, *, gated: bool) -> Parts:
    first = ("gate_proj", "up_proj") if gated else ("up_proj",)
    yield tuple(f"{prefix}{name}" for name in first), (inner,) * len(first), None
    yield (f"{prefix}down_proj",), None, inner


def _job(wanted: Wanted, stored: Mapping[str, TensorPlace]) -> Job | None:
    """Make the packer's job; None if a tensor has not the shape or type that the model will expect."""
    pieces = []
    for slot in wanted.slots:
        place = stored[slot.name]
        if place.shape != slot.shape or place.dtype not in FLOATS:
            return None
        sizes = (slot.shape[1], slot.start[1], slot.start[0], slot.size[0])
        pieces.append(Piece(place.file, place.offset, FLOATS[place.dtype], *sizes, slot.order))
    form = cast("Form", wanted.packed_as) if wanted.packed_as in GROUPS else None
    return Job(tuple(pieces), wanted.slots[0].size[1], wanted.dtype, form)
