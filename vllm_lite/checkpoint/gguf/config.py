"""Derives a config.json from the metadata of a GGUF file, so that its family reads it like any other."""

from typing import Any

from vllm_lite.checkpoint.gguf.architecture import Architecture
from vllm_lite.checkpoint.gguf.architectures import ARCHITECTURES, key_of
from vllm_lite.checkpoint.gguf.header import GgufHeader
from vllm_lite.checkpoint.gguf.metadata import Metadata
from vllm_lite.errors import ModelError

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
"""Names of the norm epsilon in families."""
FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors with the rope divisor of each pair of a head; Llama 3.1's apply to all lengths."""
END_TOKENS = ("eos", "eot", "eom")
HARMONY = "gpt-oss"
"""The architecture whose `eot`, <|end|>, closes each channel of an answer and may be followed by another, so it is no
end token."""


def architecture_of(header: GgufHeader) -> Architecture:
    """The architecture of a file. Raises ModelError, with its name, if no native family has it."""
    key = key_of(header)
    if key is None:
        name = header.metadata.get("general.architecture")
        supported = ", ".join(key for key in ARCHITECTURES if " " not in key)
        raise ModelError(f"general.architecture {name!r} is not supported in GGUF files; supported: {supported}")
    return ARCHITECTURES[key]


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Make the config.json of a file. Raises ModelError, with the key, for a missing or invalid one."""
    of, own = Metadata(header), architecture_of(header)
    vocab_size, hidden_size = _matrix(of, "token_embd.weight")
    if of.integer("embedding_length") != hidden_size:
        raise ModelError(
            f"{of.named('embedding_length')} is {of.integer('embedding_length')} and token_embd.weight has "
            f"{hidden_size} columns"
        )
    config: dict[str, Any] = {
        "architectures": [own.name],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": of.num_layers,
        "num_attention_heads": of.same("attention.head_count"),
        "num_key_value_heads": _shared(of, own, "attention.head_count_kv"),
        "head_dim": of.head_size,
        "max_position_embeddings": of.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": of.token("bos"),
        "eos_token_id": end_ids(of) or None,
        "dtype": _dtype(header),
        "rope_theta": of.number("rope.freq_base", None),
        "rope_parameters": _rope(of, own),
        "original_max_position_embeddings": of.integer("rope.scaling.original_context_length", None),
        "partial_rotary_factor": _rotated_part(of),
    }
    if not own.has_latents:
        of.must_be("attention.value_length", of.head_size)
    inner = _shared(of, own, "feed_forward_length")
    eps = of.number("attention.layer_norm_rms_epsilon", None) or of.number("attention.layer_norm_epsilon", None)
    config |= {} if inner is None else {"intermediate_size": inner}
    config |= {} if eps is None else dict.fromkeys(EPSILONS, eps)
    config |= own.own(of)
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def _shared(of: Metadata, own: Architecture, key: str) -> int | None:
    """A number that all layers share; None if it is missing, or given per layer."""
    return None if key in own.by_layer else of.same(key, None)


def _matrix(of: Metadata, name: str) -> tuple[int, int]:
    shape = of.shape(name)
    if len(shape) != 2:
        raise ModelError(f"tensor {name!r} has the shape {list(shape)}; it must be a matrix")
    return shape[0], shape[1]


def end_ids(of: Metadata) -> list[int]:
    """Token ids that end an answer, by the file's named tokens."""
    ids = (of.token(name) for name in END_TOKENS if not (name == "eot" and of.architecture == HARMONY))
    return list(dict.fromkeys(id_ for id_ in ids if id_ is not None))


def _dtype(header: GgufHeader) -> str:
    """The compute dtype: that of the matrices if all are floats of one type, else bfloat16."""
    kinds = {tensor.kind.name for name, tensor in header.tensors.items() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rotated_part(of: Metadata) -> float | None:
    """Fraction of each head that is rotated; None for all of it."""
    size = of.integer("rope.dimension_count", None)
    if not size or size == of.head_size:
        return None
    if not 0 < size < of.head_size:
        raise ModelError(f"{of.named('rope.dimension_count')} {size} is more than the {of.head_size} of a head")
    return size / of.head_size


def _rope(of: Metadata, own: Architecture) -> dict[str, Any] | None:
    """The rope_parameters of config.json; None without scaling."""
    factors = {name: found for name in FACTORS if (found := of.factors(f"{name}.weight"))}
    if factors:
        plain = factors.get("rope_freqs")
        long, short = (factors.get(f"rope_factors_{name}", plain) for name in ("long", "short"))
        if long is None or short is None:
            raise ModelError(f"of rope_factors_long and rope_factors_short it has only {', '.join(factors)}")
        attention = 1.0 if plain is not None else of.number("rope.scaling.attn_factor", None)
        longrope = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        return _without_none(longrope | {"attention_factor": attention})
    kind = of.text("rope.scaling.type", "none")
    factor = of.number("rope.scaling.factor", None)
    if kind == "none" or not factor:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(f"{of.named('rope.scaling.type')} {kind!r} is not supported; supported: none, linear, yarn")
    log_multiplier = of.number("rope.scaling.yarn_log_multiplier", None)
    magnitude = float(f"{10 * log_multiplier:.7g}") if log_multiplier else None
    return _without_none(
        {
            **own.yarn,
            "rope_type": "yarn",
            "factor": factor,
            "mscale": magnitude,
            "mscale_all_dim": magnitude,
            "beta_fast": of.number("rope.scaling.yarn_beta_fast", None),
            "beta_slow": of.number("rope.scaling.yarn_beta_slow", None),
            "llama_4_scaling_beta": of.number("attention.temperature_scale", None) or None,
            "original_max_position_embeddings": of.integer("rope.scaling.original_context_length", None),
        }
    )


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
