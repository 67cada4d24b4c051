"""Use of the package transformers: making models from a config.json, without weights, network, hub kernels or foreign
code. A worker imports it when it makes the first such model.
"""

import os
from pathlib import Path
from typing import Any

import torch

from vllm_lite.checkpoint.typed_json import read_json
from vllm_lite.errors import ConfigError, ModelError

INTERFACE = "vllm_lite"
"""Name of this engine's attention in transformers."""


def load_library() -> Any:
    """Import `transformers`. Raises ConfigError if it is not installed."""
    os.environ["USE_HUB_KERNELS"] = "0"  # read at import; hub kernels are foreign code
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"this model needs transformers 5, which cannot be imported ({error}); pip install "
            "'vllm_lite[transformers]', or choose a model that has a native implementation"
        ) from error
    return transformers


def make_skeleton(folder: str, dtype: torch.dtype, max_model_len: int) -> Any:
    """Make transformers' causal language model for the checkpoint in `folder`: parameters on the meta device, buffers
    that are not in checkpoints on the CPU. Ropes that depend on a length are for `max_model_len`.

    Raises ConfigError if transformers is missing, ModelError if it has no such model.
    """
    library = load_library()
    config = _text_config(folder)
    classes = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes:
        raise ModelError(
            f"{folder}: transformers {library.__version__} has no language model for {config.model_type!r}"
        )
    config.dtype, config.use_cache = dtype, False
    config._attn_implementation = INTERFACE  # noqa: SLF001 (the only way to choose it before the model is made)
    try:
        with torch.device("meta"):
            model = classes[type(config)](config)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (INTERFACE,):  # the model takes only its own attention
            raise ModelError(
                f"{config.model_type!r} cannot be served through transformers: it does not attend through its "
                "attention interface"
            ) from error
        raise ModelError(
            f"{folder}: transformers cannot make a {config.model_type!r} of config.json: {error}"
        ) from error
    config.pad_token_id = None  # else transformers searches each step for padding, to warn of it
    _make_buffers(model)
    _pin_ropes(model, max_model_len)
    return model.eval()


def _text_config(folder: str) -> Any:
    """Read the config of the text model into transformers' class for it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def parse(raw: Any) -> Any:
        kind = raw.get("model_type")
        if kind not in CONFIG_MAPPING:
            version = load_library().__version__
            raise ModelError(f"model_type {kind!r} is not one that transformers {version} has")
        try:
            whole = CONFIG_MAPPING[kind].from_dict(raw)
            text = whole.get_text_config(decoder=True)
            if text is not whole and raw.get("tie_word_embeddings") is not None:
                text.tie_word_embeddings = raw["tie_word_embeddings"]  # set for the whole model
            return text
        except Exception as error:
            raise ModelError(f"transformers does not accept it: {error}") from error

    return read_json(Path(folder) / "config.json", parse)


@torch.no_grad()
def _make_buffers(model: Any) -> None:
    """Compute buffers that are not in checkpoints, like those of ropes, as transformers does."""
    for module in model.modules():
        missing = [name for name in module._non_persistent_buffers_set if _is_meta(module._buffers.get(name))]  # noqa: SLF001
        for name in missing:
            module._buffers[name] = torch.zeros_like(module._buffers[name], device="cpu")  # noqa: SLF001
        if missing:
            model._init_weights(module)  # noqa: SLF001


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _pin_ropes(model: Any, max_model_len: int) -> None:
    """Fix ropes that transformers chooses by the longest sequence of a batch to those for `max_model_len`, so that a
    request's result does not depend on others. Raises ModelError for one that cannot be fixed."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if not any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in kinds):
            continue
        if isinstance(kind, dict) or not hasattr(module, "inv_freq") or kind not in ROPE_INIT_FUNCTIONS:
            raise ModelError(
                f"{model.config.model_type!r} has a rope that depends on the longest sequence of a batch ({kind}) and "
                "cannot be pinned to one length, so it is not supported"
            )
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=max_model_len)
        module.inv_freq.copy_(frequencies)
        module.attention_scaling, module.rope_type = scaling, "pinned"
