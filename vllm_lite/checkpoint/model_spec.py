"""A checkpoint's config.json, read into one frozen `ModelSpec`: what the model is, in numbers. No torch.

The engine, the client, the planner and the worker all size things by it. Both spellings of config.json are read: the
old (`rope_theta`, `rope_scaling`, `torch_dtype`) and the new (`rope_parameters`, `dtype`). What is not supported is
refused here, by name, before any weight is opened.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.block_sparse import BlockSparse
from vllm_lite.checkpoint.shard import HeadSplit, Shard
from vllm_lite.errors import ConfigError, ModelError

T = TypeVar("T")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_SLIDING_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
FULL, SLIDING = "full_attention", "sliding_attention"
"""The values of `layer_types`."""


class Family(msgspec.Struct, frozen=True):
    """How the architectures that share one model file differ where config.json does not say it."""

    qk_norm: bool
    default_head_dim: int | None
    """Head size when config.json has none; None = hidden_size / num_attention_heads."""
    sliding: Literal["never", "all layers", "by layer"]
    """Which layers `sliding_window` is for; "by layer": those that `layer_types` or `max_window_layers` say."""


ARCHITECTURES = {
    "LlamaForCausalLM": Family(qk_norm=False, default_head_dim=None, sliding="never"),
    "MistralForCausalLM": Family(qk_norm=False, default_head_dim=None, sliding="all layers"),
    "Qwen3ForCausalLM": Family(qk_norm=True, default_head_dim=128, sliding="by layer"),
}


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding. The last four fields are used by kind "llama3" only (they stretch the long wavelengths)."""

    kind: Literal["default", "llama3"]
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class AttentionSpec(msgspec.Struct, frozen=True):
    """How a layer attends: all that a KV cache and an attention backend have to know of it."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Scores are multiplied by it."""
    window: int | None = None
    """How many tokens a query sees, itself included: query i sees the keys (i - window, i]. None = all before it."""
    soft_cap: float = 0.0
    """Scores become cap * tanh(score / cap), after scaling and before ALiBi; 0 = no cap."""
    alibi_slopes: tuple[float, ...] | None = None
    """Per head: slope * (key position - query position) is added to the score (Press et al. 2022)."""
    sinks: bool = False
    """Whether each head has a learned logit that joins the softmax and attends to nothing."""
    block_sparse: BlockSparse | None = None
    """The pattern of key blocks that a query sees; None = all."""

    @property
    def query_size(self) -> int:
        """Elements of a token's Q."""
        return self.num_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Elements of a token's Q, K and V together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    def heads(self, shard: Shard) -> HeadSplit:
        """Which heads a rank holds. Raises ConfigError if so many ranks cannot share them."""
        if not self.fits(shard.world):
            raise ConfigError(
                f"tensor_parallel_size {shard.world} does not fit {self.num_heads} heads with {self.num_kv_heads} KV "
                f"heads, which fit {_listed(filter(self.fits, range(1, self.num_heads + 1)))}"
            )
        return HeadSplit.of(self.num_heads, self.num_kv_heads, shard)

    def fits(self, world: int) -> bool:
        """Whether so many ranks can share the heads, evenly where a block-sparse pattern shifts from head to head."""
        try:
            HeadSplit.of(self.num_heads, self.num_kv_heads, Shard(0, world))
        except ValueError:
            return False
        return self.block_sparse is None or self.num_heads % world == 0

    def per_rank(self, shard: Shard) -> "AttentionSpec":
        """How the layer attends with the heads that a rank holds. Raises ConfigError if ranks cannot share them."""
        query, kv = self.heads(shard)
        slopes = None if self.alibi_slopes is None else self.alibi_slopes[query.start : query.end]
        sparse = self.block_sparse
        if sparse is not None:  # kernels take the first head to be tp_rank times the number of heads
            shifted = query if sparse.head_step >= 0 else kv
            sparse = replace(sparse, tp_rank=shifted.start // shifted.size)
        return msgspec.structs.replace(
            self, num_heads=query.size, num_kv_heads=kv.size, alibi_slopes=slopes, block_sparse=sparse
        )


class LayerSpec(msgspec.Struct, frozen=True):
    """What one layer has of its own."""

    attention: AttentionSpec
    rope: Rope | None
    """None = its heads are not rotated."""


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers whose KV blocks are allocated together, because they attend alike and see the same positions."""

    layers: tuple[int, ...]
    attention: AttentionSpec

    @property
    def window(self) -> int | None:
        return self.attention.window

    @property
    def kind(self) -> str:
        return "full" if self.window is None else "sliding"

    def kv_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """What is kept in one block: [num_layers, 2, num_kv_heads, block_size, head_size]."""
        return len(self.layers), 2, self.attention.num_kv_heads, block_size, self.attention.head_size


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder-only model is, in numbers. Built by `ModelSpec.load`; every field is validated there."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    activation: Literal["silu"]
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_groups: tuple[LayerGroup, ...]

    @classmethod
    def load(cls, path: str | Path) -> "ModelSpec":
        """Read `config.json` (and the EOS ids of `generation_config.json`) of the checkpoint folder `path`.

        Raises ModelError when a file is missing or damaged, a value is wrong, or the model is not supported.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder; a checkpoint folder with a config.json is expected")
        spec = _read(folder / "config.json", _parse_config)
        if (folder / "generation_config.json").exists():
            eos = _read(folder / "generation_config.json", _parse_generation_config)
            spec = msgspec.structs.replace(spec, eos_token_ids=eos) if eos else spec
        return spec

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def per_rank(self, shard: Shard) -> "ModelSpec":
        """The model with the heads that a rank holds: what its attention and its KV cache are made by. All other sizes
        remain those of the whole model. Raises ConfigError if so many ranks cannot share the heads."""
        layers = tuple(LayerSpec(own.attention.per_rank(shard), own.rope) for own in self.layers)
        groups = tuple(LayerGroup(group.layers, group.attention.per_rank(shard)) for group in self.kv_groups)
        return msgspec.structs.replace(self, layers=layers, kv_groups=groups)

    def check_tensor_parallel(self, tp: int) -> None:
        """Raises ConfigError, with the numbers that would do, unless `tp` ranks can share all that is split."""
        if self._fits(tp):
            return
        kinds = dict.fromkeys((own.attention.num_heads, own.attention.num_kv_heads) for own in self.layers)
        heads = " and ".join(f"{num_heads} heads with {num_kv_heads} KV heads" for num_heads, num_kv_heads in kinds)
        raise ConfigError(
            f"tensor_parallel_size {tp} does not fit this model, whose {heads}, intermediate_size "
            f"{self.intermediate_size} and vocabulary of {self.vocab_size} fit "
            f"{_listed(filter(self._fits, range(1, max(kinds)[0] + 1)))}"
        )

    def _fits(self, tp: int) -> bool:
        fits = self.intermediate_size % tp == 0 and self.vocab_size >= tp
        return fits and all(group.attention.fits(tp) for group in self.kv_groups)

    def block_elements(self, block_size: int) -> int:
        """K and V in one block. Groups share one pool, so the smaller ones are padded to the largest."""
        return max(math.prod(group.kv_shape(block_size)) for group in self.kv_groups)

    def kv_block_bytes(self, block_size: int, dtype_bytes: int, tp: int = 1) -> int:
        """Bytes of one KV block on each of `tp` ranks: K and V of `block_size` tokens in all layers of a group.

        Raises ConfigError if so many ranks cannot share the heads.
        """
        return self.per_rank(Shard(0, tp)).block_elements(block_size) * dtype_bytes

    def num_parameters(self) -> int:
        """Weights of the whole model; a tied LM head counts once."""
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        attention = sum(self._attention_parameters(layer.attention) for layer in self.layers)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + attention + self.num_layers * (mlp + 2 * self.hidden_size) + self.hidden_size

    def _attention_parameters(self, spec: AttentionSpec) -> int:
        matrices = self.hidden_size * (spec.qkv_size + spec.query_size)
        return matrices + self.attention_bias * (spec.qkv_size + self.hidden_size) + self.qk_norm * 2 * spec.head_size


def make_kv_groups(layers: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Partition the layers into groups of one block size: by how they attend, full attention first.

    All blocks have the same bytes, so a kind with fewer bytes in its layers is padded and one with more is split. Of
    all such sizes that one is taken for which padding plus groups are fewest, both in layers: a padded layer costs
    memory in every block, a group costs tables and slots in every step. 14 full and 14 sliding layers make 1 + 1
    groups of 14; 4 full and 22 sliding make 1 + 6 of 4, two of them padding; 3 full and 1 sliding make 3 + 1 of 1.
    """
    kinds: dict[AttentionSpec, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer.attention, []).append(index)
    widths = {kind: kind.num_kv_heads * kind.head_size for kind in kinds}  # of a layer in a block, per token
    widest, total = max(widths.values()), sum(widths[kind] * len(members) for kind, members in kinds.items())

    def cost(size: int) -> int:
        num_groups = sum(-(-len(members) // (size // widths[kind])) for kind, members in kinds.items())
        return num_groups * size - total + num_groups * widest

    sizes = {count * widths[kind] for kind, members in kinds.items() for count in range(1, len(members) + 1)}
    size = min(sorted(size for size in sizes if size >= widest), key=cost)
    return tuple(
        LayerGroup(tuple(members[first : first + size // widths[kind]]), kind)
        for kind, members in sorted(kinds.items(), key=lambda kind: kind[0].window or 0)
        for first in range(0, len(members), size // widths[kind])
    )


def _listed(numbers: Iterable[int]) -> str:
    """ "1, 2 or 4"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def resolve_dtype(requested: str, spec: ModelSpec) -> str:
    """The dtype to compute in: `requested` itself, or for "auto" the checkpoint's own.

    Raises ConfigError for a name that is neither.
    """
    if requested == "auto":
        return spec.dtype
    if requested not in DTYPE_BYTES:
        raise ConfigError(f"dtype {requested!r} is not supported; use auto, {', '.join(DTYPE_BYTES)}")
    return requested


# ------------------------------------------------------------------------------------ config.json as it is

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0)]
TokenId = Annotated[int, Meta(ge=0)]


class _RawRope(msgspec.Struct):
    """`rope_parameters` (new) or `rope_scaling` (old, where the kind may be called `type`)."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: float = 1.0


class _RawConfig(msgspec.Struct):
    """The keys of config.json that are read; all others are ignored, as they do not change the numbers."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)]
    num_attention_heads: Size
    rms_norm_eps: Positive
    max_position_embeddings: Size
    architectures: list[str] | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Positive | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    sliding_window: Size | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0)] = DEFAULT_MAX_WINDOW_LAYERS
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


class _RawGenerationConfig(msgspec.Struct):
    eos_token_id: TokenId | list[TokenId] | None = None


# --------------------------------------------------------------------------- from raw JSON to ModelSpec
# Below, a ModelError names the key and the value; `_read` puts the file's name before it.


def _read(source: Path, parse: Callable[[Any], T]) -> T:
    try:
        return parse(msgspec.json.decode(source.read_bytes()))
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file; a Hugging Face checkpoint folder has one") from None
    except OSError as error:
        raise ModelError(f"{source}: cannot be read ({error.strerror})") from error
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{source}: not valid JSON ({error})") from error


def _convert(raw: Any, kind: type[T], within: str = "") -> T:
    """Check `raw` against the declared type; the message shows the offending key and value."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`").removeprefix(".").partition("[")[0]
        where = ".".join(filter(None, (within, key)))
        given = f", but it is {raw[key]!r}" if isinstance(raw, dict) and key in raw else ""
        raise ModelError(f"{where}: {problem}{given}" if where else problem) from None


def _parse_config(raw_json: Any) -> ModelSpec:
    architecture, family = _family(raw_json)
    raw = _convert(raw_json, _RawConfig)
    _refuse_unsupported(raw, family)
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {raw.num_attention_heads}"
        )
    head_size, rope = _head_dim(raw, family), _rope(raw)
    attention = AttentionSpec(raw.num_attention_heads, num_kv_heads, head_size, scale=head_size**-0.5)
    layers = tuple(
        LayerSpec(msgspec.structs.replace(attention, window=window), rope) for window in _windows(raw, family)
    )
    return ModelSpec(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        layers=layers,
        norm_eps=raw.rms_norm_eps,
        activation="silu",
        max_position_embeddings=raw.max_position_embeddings,
        tie_word_embeddings=raw.tie_word_embeddings,
        attention_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias,
        qk_norm=family.qk_norm,
        bos_token_id=raw.bos_token_id,
        eos_token_ids=_as_ids(raw.eos_token_id),
        dtype=_dtype(raw),
        kv_groups=make_kv_groups(layers),
    )


def _parse_generation_config(raw_json: Any) -> tuple[int, ...]:
    return _as_ids(_convert(raw_json, _RawGenerationConfig).eos_token_id)


def _family(raw_json: Any) -> tuple[str, Family]:
    """Check the architecture before all else: a foreign model's missing keys would be the wrong thing to report."""
    names = raw_json.get("architectures") if isinstance(raw_json, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(f"architectures {names!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return name, ARCHITECTURES[name]


def _refuse_unsupported(raw: _RawConfig, family: Family) -> None:
    if raw.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {raw.hidden_act!r} is not supported; supported: silu")
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method", "unknown")
        raise ModelError(f"quantization_config {method!r} is not supported; use an unquantized checkpoint")
    known = {FULL} if family.sliding == "never" else {FULL, SLIDING}
    others = sorted(set(raw.layer_types or ()) - known)
    if others:
        raise ModelError(f"layer_types {', '.join(others)} not supported; supported: {', '.join(sorted(known))}")
    # Qwen writes a sliding_window that use_sliding_window then turns off.
    asked = raw.sliding_window if raw.use_sliding_window is None else raw.use_sliding_window
    if family.sliding == "never" and asked:
        raise ModelError(f"sliding_window {raw.sliding_window} is not supported; every layer must use full attention")


def _windows(raw: _RawConfig, family: Family) -> list[int | None]:
    """The window of each layer, None where it sees everything."""
    count, types = raw.num_hidden_layers, raw.layer_types
    window = None if family.sliding == "never" else raw.sliding_window
    if window is msgspec.UNSET:
        window = DEFAULT_SLIDING_WINDOW
    if family.sliding != "by layer":
        return [window] * count
    if not raw.use_sliding_window:
        window = None
    if types is None:
        return [None if layer < raw.max_window_layers else window for layer in range(count)]
    if len(types) != count:
        raise ModelError(f"layer_types has {len(types)} entries for {count} layers")
    if SLIDING in types and window is None:
        raise ModelError(f"layer_types has {SLIDING}, but sliding_window or use_sliding_window is off")
    return [window if kind == SLIDING else None for kind in types]


def _head_dim(raw: _RawConfig, family: Family) -> int:
    head_dim = raw.head_dim or family.default_head_dim
    if head_dim is None:
        head_dim, remainder = divmod(raw.hidden_size, raw.num_attention_heads)
        if remainder:
            raise ModelError(
                f"hidden_size {raw.hidden_size} is not a multiple of num_attention_heads {raw.num_attention_heads}; "
                "without a head_dim it must be"
            )
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd; rotary embedding turns pairs, so it must be even")
    return head_dim


def _rope(raw: _RawConfig) -> Rope:
    key = "rope_parameters" if raw.rope_parameters is not None else "rope_scaling"
    values = raw.rope_parameters or raw.rope_scaling or {}
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"{key} differs by layer type ({', '.join(values)}); one for all layers is supported")
    rope = _convert(values, _RawRope, within=key)
    theta = rope.rope_theta or raw.rope_theta or DEFAULT_ROPE_THETA
    kind = rope.rope_type or rope.type or "default"
    if rope.partial_rotary_factor != 1.0:
        raise ModelError(f"{key}.partial_rotary_factor {rope.partial_rotary_factor} is not supported; it must be 1.0")
    if kind == "default":
        return Rope(kind="default", theta=theta)
    if kind != "llama3":
        raise ModelError(f"{key}.rope_type {kind!r} is not supported; supported: default, llama3")
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    if factor is None or low is None or high is None:
        raise ModelError(f"{key} of type llama3 needs factor, low_freq_factor and high_freq_factor; it has {values}")
    if high <= low:
        raise ModelError(f"{key}.high_freq_factor {high} must be greater than low_freq_factor {low}")
    original = rope.original_max_position_embeddings or raw.max_position_embeddings
    return Rope("llama3", theta, factor, low, high, original)


def _dtype(raw: _RawConfig) -> str:
    """The checkpoint's dtype; one that does not say is taken for float32, as nothing is lost by it."""
    name = (raw.dtype or raw.torch_dtype or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return name


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
