"""LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors. No torch.

An adapter changes linear layers: W becomes W + scale B A, with A [rank, inputs] and B [outputs, rank]. The file's
tensors say which layers these are, so that the forms of `target_modules` need not be understood.
"""

import math
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import regex

from vllm_lite.checkpoint.headers import FLOAT_BYTES, Tensor, read_file_header
from vllm_lite.checkpoint.tensor_names import canonical
from vllm_lite.checkpoint.typed_json import Positive, Size, convert, read_json
from vllm_lite.config import MAX_LORA_RANK
from vllm_lite.errors import ModelError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_SHOWN = 3
"""Names of tensors and layers in an error."""
PATTERN_TIMEOUT_S = 1.0
"""All patterns of a config together take no longer for all layers, on a core of their own."""
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")

REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules that replace the model's (modules_to_save)",
    "trainable_token_indices": "trained token vectors (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "target_parameters": "parameters that are no linear layers (target_parameters)",
    "alora_invocation_tokens": "aLoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of its own (lora_bias)",
    "arrow_config": "Arrow",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Keys of a config under which stands what is not served -> what that is called."""
CHANGE_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways of `init_lora_weights` that change the base model's weights, too."""


class _Config(msgspec.Struct):
    peft_type: str
    r: Size
    lora_alpha: Positive
    bias: str = "none"
    use_rslora: bool = False
    rank_pattern: dict[str, Size] | None = None
    alpha_pattern: dict[str, Positive] | None = None
    init_lora_weights: bool | str | None = True


class LoraModule(NamedTuple):
    """What an adapter has for one linear layer: A and B are its tensors `down` and `up`."""

    rank: int
    scale: float
    down: str
    up: str


class LoraCheckpoint(NamedTuple):
    """An adapter whose files are complete and whose config is understood."""

    file: Path
    modules: dict[str, LoraModule]
    """By the canonical name of the layer."""

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules.values())


def is_lora(folder: str | Path) -> bool:
    """Whether there is an adapter in `folder`, be it one that can be served or not."""
    return os.path.exists(os.path.join(folder, CONFIG_FILE))  # also for what cannot be a path


def read_lora(folder: str | Path) -> LoraCheckpoint:
    """Read the config and the header of the adapter in `folder`. Raises ModelError for what cannot be served."""
    folder = Path(folder)
    file = folder / WEIGHTS_FILE
    config = read_json(folder / CONFIG_FILE, _parse)
    if not file.is_file():
        other = "; adapter_model.bin cannot be used" if (folder / "adapter_model.bin").exists() else ""
        raise ModelError(f"{folder}: has no {WEIGHTS_FILE}{other}")
    found: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for name, tensor in read_file_header(file).items():
        if ".base_layer." in name:  # PEFT also saves the table or the head that an adapter is for
            continue
        matrix = _MATRIX.fullmatch(name)
        if matrix is None or tensor.dtype not in FLOAT_BYTES or len(tensor.shape) != 2:
            raise ModelError(
                f"{file}: tensor {_shown(name)}, {tensor.dtype} {list(tensor.shape)}, is not served: an adapter "
                "must consist of float matrices lora_A and lora_B of linear layers"
            )
        found.setdefault(matrix[1], {})[matrix[2]] = name, tensor
    if not found:
        raise ModelError(f"{file}: has no tensors")
    scale_of = _Scales(config, folder / CONFIG_FILE)
    return LoraCheckpoint(file, {_canonical(name): _module(name, parts, scale_of) for name, parts in found.items()})


def _parse(raw: Any) -> _Config:
    config = convert(raw, _Config)
    if config.peft_type != "LORA":
        raise ModelError(f"peft_type is {config.peft_type!r}; LORA is served")
    for key, what in REFUSED.items():
        if raw.get(key):
            raise ModelError(f"{key} is set: adapters with {what} are not served")
    if config.bias != "none":
        raise ModelError(f"bias is {config.bias!r}: adapters that change biases are not served; it must be 'none'")
    way = config.init_lora_weights
    if isinstance(way, str) and way.lower().startswith(CHANGE_BASE):
        raise ModelError(
            f"init_lora_weights is {way!r}, which changes the base model as well; convert the adapter with PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    return config


class _Scales:
    """The scale of each layer, as PEFT finds it: patterns are regular expressions for the end of a layer's name."""

    def __init__(self, config: _Config, source: Path) -> None:
        self._config, self._source = config, source
        self._until_s = time.thread_time() + PATTERN_TIMEOUT_S
        try:
            self._alphas = [
                (regex.compile(rf"(?:.*\.)?(?:{pattern})"), alpha)
                for pattern, alpha in (config.alpha_pattern or {}).items()
            ]
        except regex.error as error:
            raise ModelError(f"{source}: alpha_pattern is not a regular expression: {error}") from error

    def of(self, module: str, rank: int) -> float:
        alpha = self._config.lora_alpha
        try:
            for pattern, its_own in self._alphas:
                if pattern.fullmatch(module, timeout=max(1e-3, self._until_s - time.thread_time())):
                    alpha = its_own
                    break
        except TimeoutError as error:
            raise ModelError(
                f"{self._source}: the patterns in alpha_pattern take over {PATTERN_TIMEOUT_S:g} s to match"
            ) from error
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)


def _module(name: str, parts: dict[str, tuple[str, Tensor]], scales: _Scales) -> LoraModule:
    if len(parts) != 2:
        raise ModelError(f"the adapter has only lora_{next(iter(parts))} of {_shown(name)}; A and B are needed")
    (down, first), (up, second) = parts["A"], parts["B"]
    rank = first.shape[0]
    if second.shape[1] != rank or not 0 < rank <= MAX_LORA_RANK:
        raise ModelError(
            f"lora_A of {_shown(name)} is {list(first.shape)} and lora_B {list(second.shape)}; they must share a rank "
            f"of at most {MAX_LORA_RANK}"
        )
    return LoraModule(rank, scales.of(name, rank), down, up)


def _canonical(name: str) -> str:
    return canonical(f"{name}.weight").removesuffix(".weight")


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) < 200 else ascii(name[:200])  # a stranger's
