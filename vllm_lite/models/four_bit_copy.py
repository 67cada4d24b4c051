"""A copy of a loaded model with 4-bit matrices, which drafts for it.

The layers are loaded again, in the best 4-bit form. All other parts are the model's own: the embedding, the final norm,
and an LM head that the checkpoint has quantized. Any other head is also copied in 4 bits, although that is too
inaccurate to sample from: the head is a third of a small model's bytes, and 8 bits would give three more accepted
drafts in a hundred, which are worth less than their time. The head of a large vocabulary is in pieces, so that drafts
can be limited to frequent words.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_lite.checkpoint.frequent_words import frequent_words, rest_of
from vllm_lite.checkpoint.gguf.kinds import BY_NAME
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.on_load import INT4_GROUPS, Quantization
from vllm_lite.checkpoint.quantization.spec import Awq, BitsAndBytes4, Gguf, MxFp4
from vllm_lite.checkpoint.shard import SINGLE
from vllm_lite.checkpoint.tensors.weight_bytes import COPY
from vllm_lite.errors import ConfigError
from vllm_lite.layers.weights.frequent_head import FrequentHead
from vllm_lite.layers.weights.weight_slot import WeightGroup
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.registry import Model, Sizes, build
from vllm_lite.models.weight_cache import PackedSource
from vllm_lite.models.weights import load_weights

OWN = ("layers", "lm_head", "buffers", "adapted_tokens", "adapted_head")
"""Attributes of a model that its copy does not share."""
FEW_BITS = 5.0
"""Maximum bits per weight of matrices for which a model gets no 4-bit copy."""


class CopyFiles(NamedTuple):
    """Arguments of load_weights for a copy, the folder of the tokenizer, and weights that are packed already."""

    path: str | Path
    load_format: str
    seed: int
    tokenizer: str
    packed: PackedSource | None = None


def check_copy(spec: ModelSpec, quantization: Quantization | None) -> None:
    """Raise ConfigError if a model has no use for such a copy, or cannot have one."""
    why = None
    if spec.implementation != "native" or spec.encoder is not None:
        why = "its code is that of transformers" if spec.encoder is None else "it generates nothing"
    elif quantization in INT4_GROUPS or _has_few_bits(spec.quantization):
        what = f"--quantization {quantization}" if quantization else getattr(spec.quantization, "label", "")
        why = f"its weights have 4 bits already ({what})"
    if why is not None:
        raise ConfigError(
            f"speculative_config: method self drafts with the model's own weights in 4 bits, which {spec.architecture} "
            f"cannot do: {why}; use method suffix"
        )


def _has_few_bits(quantization: Any) -> bool:
    if isinstance(quantization, Gguf):
        kinds = Counter(quantization.kinds.values())
        if not kinds:
            return False
        block = BY_NAME[kinds.most_common(1)[0][0]]
        return 8 * block.num_bytes / block.elements <= FEW_BITS
    if isinstance(quantization, Awq | BitsAndBytes4 | MxFp4):
        return True
    return (getattr(quantization, "bits", None) or 8) <= FEW_BITS


def load_copy(
    model: Model,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    files: CopyFiles,
    progress: Callable[[int, int], None],
) -> Decoder:
    """Make the copy of `model`, which is loaded and has passed check_copy."""
    if not isinstance(model, Decoder):
        raise TypeError(f"{type(model).__name__} has no copy; check_copy says so before")
    sizes = sizes._replace(adapters=None, requantizes=True)
    copy = build(model.spec, dtype, device, sizes, COPY, model.communicator)
    if not isinstance(copy, Decoder):
        raise TypeError(f"{type(copy).__name__} is another model than {type(model).__name__}")
    shares_head = model.embedding.form.quantizes(model.head_name)
    path, load_format, seed, tokenizer, packed = files
    words: tuple[range, ...] = ()
    if not shares_head and model.communicator.shard == SINGLE:
        words = frequent_words(tokenizer, model.spec.vocab_size, model.spec.eos_token_ids)
    tensors = _Tensors(model, copy, shares_head=shares_head, words=words)
    load_weights(tensors, path, load_format, seed, progress, packed)  # type: ignore[arg-type]
    return copy


class _Tensors:
    """The copy as the loader needs it: the tensors of the parts that it does not share."""

    def __init__(self, model: Decoder, copy: Decoder, *, shares_head: bool, words: tuple[range, ...]) -> None:
        self.spec = copy.spec
        self._copy, self._shares_head = copy, shares_head
        self._head_name = model.head_name
        vars(copy).update({name: part for name, part in vars(model).items() if name not in OWN})
        if shares_head:
            copy.lm_head = model.lm_head
        else:
            copy.lm_head.embedding = model.embedding
        if words:
            copy.lm_head = FrequentHead(copy.lm_head, words, rest_of(words, copy.spec.vocab_size))

    def weight_groups(self) -> Iterator[WeightGroup]:
        """Tensors of all parts that are not shared."""
        copy = self._copy
        for index, layer in enumerate(copy.layers):
            yield from layer.weight_groups(copy.names.layer.format(index))
        if not self._shares_head:
            group = copy.lm_head.group(self._head_name)
            copy.lm_head.tied = False  # else loading it would change the shared embedding
            yield group

    def ignores(self, name: str) -> bool:  # noqa: ARG002 (the loader's)
        """The model has been loaded from the same files, and has found them complete."""
        return True
