"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors. No torch.

An adapter changes linear layers: W becomes W + scale B A, with A [rank, inputs] and B [outputs, rank]. For a token
embedding table, the inputs are tokens. The file's tensors show which layers are adapted, so `target_modules` need not
be interpreted.
"""

import math
import os
import re
import time
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import regex

from vllm_lite.checkpoint.tensors.headers import TensorPlace, locate_in, read_file_header, shown
from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.checkpoint.typed_json import Positive, Size, convert, read_json
from vllm_lite.config import MAX_LORA_RANK
from vllm_lite.errors import ModelError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_SHOWN = 3
"""Maximum number of tensor or layer names in an error."""
PATTERN_TIMEOUT_S = 1.0
"""CPU seconds for all patterns of a config, compiled and matched with all layers."""
LM_HEAD = "lm_head"
"""Canonical name of the LM head."""
EXPERT, EXPERTS_DOWN = ".experts.", "down_proj"
"""Substring before the number of an expert, and the last of the fused parameters."""
_NAME = re.compile(r"[\w.-]+")
_MATRIX = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:([AB])(?:\.default)?\.weight|embedding_([AB])(?:\.default)?"
    r"|(magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
MAGNITUDE = "magnitude_vector"

REFUSED = {
    "modules_to_save": "whole modules that replace the model's (modules_to_save)",
    "trainable_token_indices": "trained token vectors (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "aLoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of its own (lora_bias)",
    "arrow_config": "Arrow",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Config keys of unsupported features -> their descriptions."""
CHANGE_BASE = ("pissa", "olora", "corda", "loftq")
"""Values of `init_lora_weights` that also change the base model's weights."""


class _Config(msgspec.Struct):
    peft_type: str
    r: Size
    lora_alpha: Positive
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, Size] | None = None
    alpha_pattern: dict[str, Positive] | None = None
    init_lora_weights: bool | str | None = True
    ensure_weight_tying: bool = False
    target_parameters: list[str] | None = None


class LoraModule(NamedTuple):
    """An adapter's matrices for one linear layer, or an embedding table: positions of A [rank, inputs] and B [outputs,
    rank] in the file."""

    rank: int
    scale: float
    down: TensorPlace
    up: TensorPlace
    is_table: bool = False
    magnitude: TensorPlace | None = None
    """Norms of the rows of W + scale B A, for DoRA."""
    num_experts: int = 0
    """Number of experts whose matrices are stacked, A [experts * rank, inputs], B [outputs, rank * experts]; 0: a
    single layer."""


class LoraCheckpoint(NamedTuple):
    """An adapter with complete files and a supported config."""

    file: Path
    modules: dict[str, LoraModule]
    """Modules by the canonical name of the layer."""

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules.values())


def is_lora(folder: str | Path) -> bool:
    """Whether there is an adapter in `folder`, supported or not."""
    return os.path.exists(os.path.join(folder, CONFIG_FILE))  # also valid for strings that cannot be paths


def read_lora(folder: str | Path) -> LoraCheckpoint:
    """Read the config and the header of the adapter in `folder`. Raises ModelError for an unsupported one."""
    folder = Path(folder)
    file = folder / WEIGHTS_FILE
    config = read_json(folder / CONFIG_FILE, _parse, owner="the folder of an adapter in PEFT's format")
    if not file.is_file():
        other = "; adapter_model.bin cannot be used" if (folder / "adapter_model.bin").exists() else ""
        raise ModelError(f"{folder}: has no {WEIGHTS_FILE}{other}")
    found: dict[str, dict[str, TensorPlace]] = {}
    places = locate_in(file)
    for name, tensor in read_file_header(file).items():
        matrix = _MATRIX.fullmatch(name)
        if matrix is None and ".base_layer." in name:  # PEFT also saves an adapted table or head itself
            continue
        part = None if matrix is None else matrix[2] or matrix[4] or f"embedding_{matrix[3]}"
        if matrix is None or part is None or name not in places or len(tensor.shape) != (1 if part == MAGNITUDE else 2):
            raise ModelError(
                f"{file}: tensor {shown(name)}, {tensor.dtype} {list(tensor.shape)}, is not served: an adapter "
                "must consist of float matrices lora_A and lora_B of linear layers, or lora_embedding_A and _B"
            )
        found.setdefault(matrix[1], {})[part] = places[name]
    if not found:
        raise ModelError(f"{file}: has no tensors")
    scales, parameters = _Scales(config, folder / CONFIG_FILE), _parameters(found, config)
    fused = frozenset(parameters.values())
    found = {parameters.get(name, name): parts for name, parts in found.items()}
    single = {name.partition(EXPERT)[0] for name in found if EXPERT in name and name not in fused}
    if single & {name.partition(EXPERT)[0] for name in fused}:
        raise ModelError(f"{file}: has matrices of all experts of a layer together, and of some by themselves")
    for name, parts in found.items():
        if config.use_dora != (MAGNITUDE in parts):
            says, has = ("is", "no") if config.use_dora else ("is not", "a")
            raise ModelError(
                f"{folder / CONFIG_FILE}: use_dora {says} set, and {shown(name)} has {has} lora_{MAGNITUDE}"
            )
    modules = {_canonical(name): _module(name, parts, scales, is_fused=name in fused) for name, parts in found.items()}
    if config.ensure_weight_tying and any(module.is_table or name == LM_HEAD for name, module in modules.items()):
        raise ModelError(
            f"{folder / CONFIG_FILE}: ensure_weight_tying is set: adapters that token vectors and LM head have in "
            "common are not served"
        )
    return LoraCheckpoint(file, modules)


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


class _Patterns:
    """Numbers per layer, with PEFT's rules: patterns are regular expressions for the end of a layer's name, and the
    first match applies. Plain names, of which there may be thousands, are looked up."""

    def __init__(self, key: str, numbers: Mapping[str, float], source: Path, until_s: float) -> None:
        """`until_s`: the thread's CPU time at which the patterns' time is used up."""
        self._key, self._source, self._until_s = key, source, until_s
        self._named: dict[str, tuple[int, float]] = {}
        self._expressions: list[tuple[int, float, Any]] = []
        for place, (pattern, number) in enumerate(numbers.items()):
            if _NAME.fullmatch(pattern):
                self._named[pattern] = place, number
            else:
                self._expressions.append((place, number, self._compiled(pattern)))

    def of(self, module: str, default: float) -> float:
        """The number of the first pattern that matches the name of `module`, or `default`."""
        parts = module.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        behind = len(self._named) + len(self._expressions), default
        place, number = min((self._named[end] for end in ends if end in self._named), default=behind)
        for its_place, its_number, pattern in self._expressions:
            if its_place > place:
                break
            try:
                if pattern.fullmatch(module, timeout=self._left_s()):
                    return its_number
            except TimeoutError:
                raise self._too_slow() from None
        return number

    def _compiled(self, pattern: str) -> Any:
        self._left_s()
        try:
            return regex.compile(rf"(?:.*\.)?(?:{pattern})")
        except regex.error as error:
            raise ModelError(f"{self._source}: {self._key} is not a regular expression: {error}") from error

    def _left_s(self) -> float:
        left_s = self._until_s - time.thread_time()
        if left_s <= 0:
            raise self._too_slow()
        return left_s

    def _too_slow(self) -> ModelError:
        return ModelError(
            f"{self._source}: the patterns in {self._key} take over {PATTERN_TIMEOUT_S:g} s to compile and match"
        )


class _Scales:
    """The scale of each layer, and the rank of stacked experts."""

    def __init__(self, config: _Config, source: Path) -> None:
        self._config, self._source = config, source
        self._ranks = {config.r, *(config.rank_pattern or {}).values()}
        self._until_s = time.thread_time() + PATTERN_TIMEOUT_S
        self._alphas = _Patterns("alpha_pattern", config.alpha_pattern or {}, source, self._until_s)

    def of(self, module: str, rank: int) -> float:
        """Return the scale of a layer whose matrices have `rank`. Raises ModelError if the config lacks this rank."""
        if rank not in self._ranks:
            known = ", ".join(map(str, sorted(self._ranks)[:8]))
            raise ModelError(f"{self._source}: r and rank_pattern say {known}, but {shown(module)} has rank {rank}")
        alpha = self._alphas.of(module, self._config.lora_alpha)
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)

    def rank_of(self, module: str) -> int:
        """The config's rank for a layer."""
        return int(self._rank_patterns.of(module, self._config.r))

    @cached_property
    def _rank_patterns(self) -> _Patterns:
        """Ranks in the config, used if the tensors do not show them."""
        return _Patterns("rank_pattern", self._config.rank_pattern or {}, self._source, self._until_s)


def _parameters(found: Collection[str], config: _Config) -> dict[str, str]:
    """Map an adapter's names for fused expert parameters to the names of the adapted parameters. PEFT names the first
    of a module's own parameters `base_layer`, and the last one like the module, as each wraps the previous one."""
    targets = {target.rsplit(".", 1)[-1] for target in config.target_parameters or ()}
    first = "up_proj" if "up_proj" in targets else "gate_up_proj"
    named = {}
    for name in found:
        if name.endswith(".experts.base_layer"):
            named[name] = name.removesuffix("base_layer") + first
        elif name.endswith(".experts"):
            both = f"{name}.base_layer" in found
            named[name] = f"{name}.{EXPERTS_DOWN if both or EXPERTS_DOWN in targets else first}"
    return named


def _module(name: str, parts: dict[str, TensorPlace], scales: _Scales, *, is_fused: bool) -> LoraModule:
    is_table = "embedding_A" in parts or "embedding_B" in parts
    pair = ("embedding_A", "embedding_B") if is_table else ("A", "B")
    if parts.keys() - {MAGNITUDE} != {*pair}:
        only = ", ".join(f"lora_{part}" for part in sorted(parts))
        raise ModelError(f"the adapter has only {only} of {shown(name)}; A and B are needed")
    if is_fused and MAGNITUDE in parts:
        raise ModelError(f"{shown(name)} has lora_{MAGNITUDE}: DoRA of experts' parameters is not served")
    down, up = (parts[part] for part in pair)
    num_experts = 0
    if is_fused and down.shape[0] == up.shape[1]:
        num_experts, rest = divmod(down.shape[0], scales.rank_of(name))
        num_experts = 0 if rest else num_experts
    rank = down.shape[0] // (num_experts or 1)
    if up.shape[1] != down.shape[0] or not 0 < rank <= MAX_LORA_RANK:
        raise ModelError(
            f"lora_A of {shown(name)} is {list(down.shape)} and lora_B {list(up.shape)}; they must share a rank "
            f"of at most {MAX_LORA_RANK}"
        )
    return LoraModule(rank, scales.of(name, rank), down, up, is_table, parts.get(MAGNITUDE), num_experts)


def _canonical(name: str) -> str:
    return canonical(f"{name}.weight").removesuffix(".weight")
