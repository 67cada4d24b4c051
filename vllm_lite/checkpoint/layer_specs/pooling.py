"""PoolingSpec: a checkpoint's pooler: how hidden states become a text's vector, and the parts after them. No torch.

sentence-transformers' modules.json lists the parts of an embedding model; a classifier's config.json names its labels.
Other checkpoints pool by `--convert` and `--pooler-config`.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.checkpoint.typed_json import Size, convert, read_json
from vllm_lite.errors import ModelError
from vllm_lite.runtime.nested_settings import LONGEST_TEXT, PoolerConfig, PoolingOptions
from vllm_lite.runtime.untrusted_files import MAX_TOKENIZER_BYTES, read_bounded

Kind = Literal["last", "mean", "cls"]
"""Pooling of a text's hidden states: the last token's, the mean of all, or the first token's."""
OutputActivation = Literal["sigmoid", "softmax", "none"]
HeadActivation = Activation | Literal["tanh", "none"]

MODULES_FILE = "modules.json"
_MODES: dict[str, Kind] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
"""Supported pooling modes of sentence-transformers."""
_TORCH_ACTIVATIONS: dict[str, HeadActivation] = {
    "Tanh": "tanh",
    "Identity": "none",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
_OUTPUT_ACTIVATIONS: dict[str, OutputActivation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}


class DenseSpec(msgspec.Struct, frozen=True):
    """A linear layer after the pooling, in a folder of its own in the checkpoint."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: HeadActivation


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head with a number for each label: output(norm(activation(dense(x)))) of the pooled state x.

    Names are those of the checkpoint's tensors; an empty one means that the part is absent. With `tokens`, the output
    is the difference of their rows of the LM head, the second's minus the first's.
    """

    output: str = "score"
    output_bias: bool = False
    dense: str = ""
    dense_bias: bool = True
    activation: HeadActivation = "none"
    norm: str = ""
    tokens: tuple[int, int] | None = None


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rules to make vectors of hidden states, or numbers for labels if there is a `head`."""

    kind: Kind
    tasks: tuple[str, ...]
    """Tasks as named in protocol/pooling.py."""
    generates: bool = False
    """Whether the model also generates text."""
    normalize: bool = True
    """Whether vectors are normalized by default."""
    dense: tuple[DenseSpec, ...] = ()
    head: HeadSpec | None = None
    activation: OutputActivation = "none"
    labels: tuple[str, ...] = ()
    matryoshka: tuple[int, ...] = ()
    makes_pairs: Literal["", "pair", "template"] = ""
    longest_text: int = 0
    """Maximum tokens of a text whose vector is the mean over chunks; 0: a text must fit the model."""
    tag_biases: tuple[float, ...] = ()
    """Values of Calibration for paths through the tags of spans; () without a calibration."""

    def size(self, hidden_size: int) -> int:
        """Elements of a vector."""
        return self.dense[-1].outputs if self.dense else hidden_size


# ---- classifiers


class _ClassifierConfig(msgspec.Struct):
    """Keys of a classifier's config.json."""

    num_labels: Size | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None


def classifier(raw_json: dict[str, Any], head: HeadSpec, kind: Kind) -> PoolingSpec:
    """The pooler of a text classifier; with a single label it scores pairs. Raises ModelError."""
    raw = convert(raw_json, _ClassifierConfig)
    names = raw.id2label or {}
    count = len(names) or raw.num_labels or 2
    labels = tuple(names.get(str(index), f"LABEL_{index}") for index in range(count))
    tasks: tuple[str, ...] = ("classify", "score") if count == 1 else ("classify",)
    return PoolingSpec(
        kind=kind,
        tasks=tasks,
        head=head,
        activation=_output_activation(raw, count),
        labels=labels,
        makes_pairs="pair",
    )


CALIBRATION_FILE = "viterbi_calibration.json"


class Calibration(msgspec.Struct):
    """Biases on the transitions of a path through the tags of spans (B, I, E, S) and the background between them, in
    the order of PoolerInfo.tag_biases."""

    transition_bias_background_stay: float
    transition_bias_background_to_start: float
    transition_bias_inside_to_continue: float
    transition_bias_inside_to_end: float
    transition_bias_end_to_background: float
    transition_bias_end_to_start: float


class _OperatingPoint(msgspec.Struct):
    biases: Calibration


class _CalibrationFile(msgspec.Struct):
    operating_points: dict[str, _OperatingPoint]


def token_classifier(
    raw_json: dict[str, Any], head: HeadSpec, folder: Path, default_labels: tuple[str, ...] = ()
) -> PoolingSpec:
    """The pooler of a token classifier, with `default_labels` if config.json has none. Raises ModelError."""
    raw = convert(raw_json, _ClassifierConfig)
    if raw.id2label is None and raw.num_labels is None and default_labels:
        raw_json = raw_json | {"id2label": {str(index): name for index, name in enumerate(default_labels)}}
    made = classifier(raw_json, head, "cls")
    return msgspec.structs.replace(
        made, tasks=("token_classify",), makes_pairs="", tag_biases=_read_calibration(folder / CALIBRATION_FILE)
    )


def _read_calibration(file: Path) -> tuple[float, ...]:
    """The biases of the file's default operating point; () without a file. Raises ModelError."""
    if not file.exists():
        return ()
    points = read_json(file, lambda raw: convert(raw, _CalibrationFile)).operating_points
    if "default" not in points:
        raise ModelError(f"{file}: operating_points has no 'default', which is the one that is used")
    return msgspec.structs.astuple(points["default"].biases)


def _output_activation(raw: _ClassifierConfig, num_labels: int) -> OutputActivation:
    """The activation of outputs: by sentence-transformers' name, or by the problem type, as in transformers'
    pipelines."""
    named = (raw.sentence_transformers or {}).get("activation_fn") or raw.sbert_ce_default_activation_function
    if named is not None:
        short = str(named).rpartition(".")[2]
        if short not in _OUTPUT_ACTIVATIONS:
            raise ModelError(f"activation {named!r} is not supported; supported: {', '.join(_OUTPUT_ACTIVATIONS)}")
        return _OUTPUT_ACTIVATIONS[short]
    if raw.problem_type == "regression":
        return "none"
    if raw.problem_type == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


# ---- sentence-transformers


class _Module(msgspec.Struct):
    path: str
    type: str


class _PoolingConfig(msgspec.Struct):
    """Keys of 1_Pooling/config.json: the older flags, and the newer name."""

    pooling_mode: str | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True


class _DenseConfig(msgspec.Struct):
    in_features: Size
    out_features: Size
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"


class _TransformerConfig(msgspec.Struct):
    max_seq_length: Size | None = None


class SentenceModules(msgspec.Struct, frozen=True):
    """Parts of a sentence-transformers model."""

    kind: Kind
    normalize: bool
    dense: tuple[DenseSpec, ...]
    max_seq_length: int | None = None


def read_modules(folder: Path) -> SentenceModules | None:
    """Read the parts listed in modules.json; None without it, or if it describes no vectors. Raises ModelError."""
    if not (folder / MODULES_FILE).exists():
        return None
    modules = read_json(folder / MODULES_FILE, lambda raw: convert(raw, list[_Module]))
    kind: Kind | None = None
    normalize, dense = False, list[DenseSpec]()
    for module in modules:
        name = module.type.rpartition(".")[2]
        place = folder / _inside(module.path)
        if name == "Pooling":
            kind = read_json(place / "config.json", _read_mode)
        elif name == "Dense":
            dense.append(read_json(place / "config.json", partial(_read_dense, module.path)))
        elif name == "Normalize":
            normalize = True
        elif name not in ("Transformer", "Dropout"):
            raise ModelError(
                f"{folder / MODULES_FILE}: module {module.type!r} is not supported; supported: Transformer, Pooling, "
                "Dense, Normalize"
            )
    if kind is None:
        return None
    file = folder / "sentence_bert_config.json"
    longest = read_json(file, lambda raw: convert(raw, _TransformerConfig)).max_seq_length if file.exists() else None
    return SentenceModules(kind, normalize, tuple(dense), longest)


def task_prompts(folder: Path) -> dict[str, str]:
    """The model's prefixes for texts, by the use of their vectors; {} if it has none."""
    for name, key in (("config.json", "task_instructions"), ("config_sentence_transformers.json", "prompts")):
        try:
            prompts = msgspec.json.decode(read_bounded(folder / name))[key]
            return msgspec.convert(prompts, dict[str, str])
        except (OSError, KeyError, TypeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return {}


def _inside(path: str) -> str:
    """Check that a module's folder is within the model's. Raises ModelError."""
    if path.startswith("/") or ".." in Path(path).parts:
        raise ModelError(f"{MODULES_FILE} names the folder {path!r}, which is not within the model's")
    return path


def _read_mode(raw_json: Any) -> Kind:
    raw = convert(raw_json, _PoolingConfig)
    modes = [raw.pooling_mode] if raw.pooling_mode else []
    modes += [
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name in raw.__struct_fields__
        if name.startswith("pooling_mode_") and getattr(raw, name)
    ]
    if len(set(modes)) != 1 or modes[0] not in _MODES:
        raise ModelError(f"pooling modes {', '.join(modes) or 'none'} are not supported; one of {', '.join(_MODES)} is")
    if not raw.include_prompt:
        raise ModelError("include_prompt false is not supported; the tokens of an instruction must count")
    return _MODES[modes[0]]


def _read_dense(path: str, raw_json: Any) -> DenseSpec:
    raw = convert(raw_json, _DenseConfig)
    name = raw.activation_function.rpartition(".")[2]
    if name not in _TORCH_ACTIVATIONS:
        raise ModelError(f"activation_function {name!r} is not supported; supported: {', '.join(_TORCH_ACTIVATIONS)}")
    return DenseSpec(path, raw.in_features, raw.out_features, raw.bias, _TORCH_ACTIVATIONS[name])


# ---- the choice


def embedder(
    raw_json: dict[str, Any], modules: SentenceModules | None, default: Kind, *, generates: bool
) -> PoolingSpec:
    """The pooler of an embedding model. `default`: the family's pooling kind if no file gives one."""
    dimensions = raw_json.get("matryoshka_dimensions")
    return PoolingSpec(
        kind=default if modules is None else modules.kind,
        tasks=("embed", "token_embed"),
        generates=generates,
        normalize=True if modules is None else modules.normalize,
        dense=() if modules is None else modules.dense,
        matryoshka=tuple(dimensions) if isinstance(dimensions, list) else (),
    )


def adjusted(spec: PoolingSpec, options: PoolingOptions) -> PoolingSpec:
    """Apply the user's options to the pooler. Raises ModelError for a task that it lacks."""
    asked: PoolerConfig = options.pooler_config
    if asked.task is not None:
        if asked.task not in spec.tasks:
            raise ModelError(
                f"pooler_config.task is {asked.task}, and this model can be asked to {' or '.join(spec.tasks)}"
            )
        also = ("score",) if asked.task == "classify" else ()
        tasks = tuple(task for task in spec.tasks if task in (asked.task, *also))
        spec = msgspec.structs.replace(spec, tasks=tasks)
    kind = asked.seq_pooling_type or asked.pooling_type
    if kind is not None:
        spec = msgspec.structs.replace(spec, kind=_MODES[kind.lower()])
    if asked.enable_chunked_processing and "embed" in spec.tasks:
        spec = msgspec.structs.replace(spec, longest_text=asked.max_embed_len or LONGEST_TEXT)
    active = asked.normalize if asked.use_activation is None else asked.use_activation
    if active is not None:
        spec = msgspec.structs.replace(spec, normalize=active)
        if not active:
            spec = msgspec.structs.replace(spec, activation="none")
    return spec


# ---- rerankers that answer by a token


class _Vocabulary(msgspec.Struct):
    vocab: Any = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def tokens_head(raw_json: dict[str, Any], folder: Path) -> HeadSpec | None:
    """The head of a reranker that answers by one of two tokens, named in `classifier_from_token` as ["no", "yes"].

    None if there are none. Raises ModelError.
    """
    names = raw_json.get("classifier_from_token")
    if not names:
        return None
    if not isinstance(names, list) or len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise ModelError(f"classifier_from_token must be two tokens, like ['no', 'yes'], got {names!r}")
    file = read_json(folder / "tokenizer.json", lambda raw: convert(raw, _TokenizerFile), max_bytes=MAX_TOKENIZER_BYTES)
    known = {token.content: token.id for token in file.added_tokens}
    if isinstance(file.model.vocab, dict):
        known |= file.model.vocab
    missing = [name for name in names if name not in known]
    if missing:
        raise ModelError(f"classifier_from_token {missing[0]!r} is not a token of the vocabulary")
    return HeadSpec(output="", tokens=(known[names[0]], known[names[1]]))
