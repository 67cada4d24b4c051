"""Settings with several keys, written as JSON objects: values of fields of EngineConfig."""

import re
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from vllm_lite.runtime.addresses import check_address, offset

Threads = Annotated[int, Meta(ge=1, le=4096)]
"""Bounded, as OpenMP crashes with very many threads; 4,096 were tested, more than any machine has."""
Count = Annotated[int, Meta(ge=1)]
OlderMTP = Literal["deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"]
"""vLLM's names of the method mtp for single families."""
WITH_MODEL = ("draft_model", "eagle3")
"""Methods that draft with a checkpoint of their own."""
DRAFTS = {"self": 15}
"""Default maximum number of drafts per sequence and step, for methods that do best with more than 4."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: draft the next tokens and keep those that the model confirms; the output is the same, in
    fewer steps. Names are vLLM's; a `model` without a method is a draft model.

    "ngram" looks for the last `prompt_lookup_max` to `prompt_lookup_min` tokens earlier in the sequence, and drafts the
    tokens that followed there. "suffix" looks for the longest suffix of at most `suffix_decoding_max_tree_depth`
    tokens, also in the latest `suffix_decoding_max_cached_requests` answers of the same adapter and cache salt, and
    drafts `suffix_decoding_max_spec_factor` tokens per matching token, while at least a share of
    `suffix_decoding_min_token_prob` of its occurrences agree. "self" drafts with a copy of the model in 4 bits.
    "draft_model" drafts with the smaller `model`, a folder or hub id, whose weights are quantized by `quantization`.
    "mtp" drafts with the checkpoint's own MTP head, "eagle3" with an EAGLE-3 head, which is `model`.
    """

    method: Literal["ngram", "suffix", "self", "draft_model", "mtp", "eagle3", OlderMTP] = "ngram"
    model: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    quantization: Literal["int8", "fp8", "int4", "int4_g32"] | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 0
    """Maximum number of drafts per sequence and step. By default that of DRAFTS, or 4."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 4
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 1
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=1, le=256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0, le=64)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1

    def __post_init__(self) -> None:
        if self.method.endswith("_mtp"):
            msgspec.structs.force_setattr(self, "method", "mtp")
        if self.model is not None and self.method == "ngram":
            msgspec.structs.force_setattr(self, "method", "draft_model")
        if not self.num_speculative_tokens:
            msgspec.structs.force_setattr(self, "num_speculative_tokens", DRAFTS.get(self.method, 4))
        if (self.method in WITH_MODEL) != (self.model is not None):
            needs = "needs" if self.model is None else "takes no"
            raise ValueError(f"method {self.method} {needs} model, the folder or hub id of a checkpoint that drafts")
        if self.quantization is not None and self.model is None:
            raise ValueError("quantization is that of a model that drafts, and there is none")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of /start_profile and /stop_profile; the names are vLLM's.

    "torch": each worker writes a trace of its operations and kernels into `torch_profiler_dir`, for Perfetto or
    chrome://tracing, and a table of the most expensive ones. "cuda": workers start and stop the range of a profiler
    that they run under (Nsight). Both show the named parts of a step.
    """

    profiler: Literal["torch", "cuda"] | None = None
    torch_profiler_dir: Annotated[str, Meta(max_length=4096)] = ""
    torch_profiler_with_stack: bool = False
    """vLLM's default is true, with which torch takes half a minute to write 200 steps of a small model."""
    torch_profiler_with_flops: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True
    ignore_frontend: bool = False
    """Without effect: only workers are profiled."""
    delay_iterations: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    max_iterations: Annotated[int, Meta(ge=0, le=1 << 20)] = 0

    def __post_init__(self) -> None:
        if self.profiler == "torch" and not self.torch_profiler_dir:
            raise ValueError("profiler torch needs torch_profiler_dir, a folder for its traces")
        if "://" in self.torch_profiler_dir:
            raise ValueError(f"torch_profiler_dir must be a folder of this machine, got {self.torch_profiler_dir!r}")


class LoraModulePath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter loaded at start: `path` is a folder as PEFT writes it, or a hub id. `base_model_name` is the name of
    its parent in lists of models, instead of the model's."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    base_model_name: str | None = None

    @classmethod
    def from_text(cls, text: str) -> "LoraModulePath":
        """Parse name=path, or a JSON object. Raises ValueError."""
        if text.startswith("{"):
            return msgspec.json.decode(text, type=cls)
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ValueError(f'an adapter must be given as name=path or {{"name": ..., "path": ...}}, got {text!r}')
        return cls(name=name, path=path)


_ADAPTER_NAME = re.compile(r"[\w.:/@+-]{1,128}")


def wrong_adapter_name(name: str) -> str | None:
    """Return what is wrong with an adapter's name, or None. Commas are not allowed, as metrics join names by commas."""
    if _ADAPTER_NAME.fullmatch(name):
        return None
    return f"an adapter's name has letters, digits and . _ : / @ + - only, 128 at most; got {name[:200]!r}"


def check_adapters(
    modules: tuple[LoraModulePath, ...], max_loras: int, max_cpu_loras: int | None, *, enabled: bool
) -> None:
    """Raise ValueError for settings of adapters that contradict each other."""
    names = [module.name for module in modules]
    if names and not enabled:
        raise ValueError("lora_modules needs enable_lora")
    for wrong in filter(None, map(wrong_adapter_name, names)):
        raise ValueError(f"lora_modules: {wrong}")
    if len(set(names)) < len(names):
        raise ValueError(f"the names of lora_modules must differ, got {', '.join(names)}")
    if max_cpu_loras is not None and max_cpu_loras < max_loras:
        raise ValueError(f"max_cpu_loras must be at least max_loras ({max_loras}), got {max_cpu_loras}")


KV_EVENTS_SOCKET = "kv-events"
"""Name of the events' socket in an engine's folder."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache events for routers: a ZeroMQ PUB socket publishes them, another one replays batches.

    Events have the prompts' token ids, so endpoints are on this machine only: ipc://PATH, which only this user can
    open, or tcp://127.0.0.1:PORT, which every local user can. By default it is a socket in the engine's own folder,
    named in the engine's log. `event_format` is the encoding of events: "array" as vLLM's consumers up to version 0.23
    expect, "map" as later ones do. `hash_format` "int" gives the last 64 bits of a block's hash, for consumers that
    want numbers. `tiers` adds events of the host tier and the disk, with `medium` "CPU" and "DISK", for consumers that
    read the medium.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 10_000
    topic: str = ""
    event_format: Literal["array", "map"] = "array"
    hash_format: Literal["bytes", "int"] = "bytes"
    tiers: bool = False

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is None:
                continue
            if not endpoint.startswith(("ipc:///", "tcp://127.0.0.1:", "tcp://[::1]:")):
                raise ValueError(
                    f"KV events carry token ids and stay on this machine: give tcp://127.0.0.1:PORT or ipc:///PATH, "
                    f"got {endpoint!r}"
                )
            if endpoint.startswith("ipc://"):
                check_address(endpoint)

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def is_on_tcp(self) -> bool:
        """Whether an endpoint is on TCP, to which other users of this machine can connect."""
        return any((endpoint or "").startswith("tcp://") for endpoint in (self.endpoint, self.replay_endpoint))

    def of_engine(self, rank: int) -> "KVEventsConfig":
        """Settings with the endpoints of engine number `rank` of several, as in vLLM."""
        endpoint = self.endpoint and offset(self.endpoint, rank)
        replay = self.replay_endpoint and offset(self.replay_endpoint, rank)
        return msgspec.structs.replace(self, endpoint=endpoint, replay_endpoint=replay)

    def in_folder(self, folder: str) -> "KVEventsConfig":
        """Settings with an endpoint in the engine's folder, unless the user has set one."""
        return self if self.endpoint else msgspec.structs.replace(self, endpoint=f"ipc://{folder}/{KV_EVENTS_SOCKET}")


POOLING_TYPES = ("LAST", "MEAN", "CLS")
LONGEST_TEXT = 131_072
"""Default maximum number of tokens of a text with enable_chunked_processing."""


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of a model's own pooling. Names are vLLM's; of two names for the same thing, the later field wins.

    `task` restricts requests to one task; a classifier of pairs still scores. With `enable_chunked_processing`, a text
    longer than the model's maximum, up to `max_embed_len`, is split into chunks, and its vector is the mean of theirs.
    """

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    enable_chunked_processing: bool = False
    max_embed_len: Annotated[int, Meta(ge=1, le=4_194_304)] | None = None

    def __post_init__(self) -> None:
        if self.max_embed_len is not None and not self.enable_chunked_processing:
            raise ValueError("max_embed_len needs enable_chunked_processing: it is the longest text cut into chunks")
        for name in ("pooling_type", "seq_pooling_type"):
            value = getattr(self, name)
            if value is not None and value.upper() not in POOLING_TYPES:
                raise ValueError(f"{name} must be one of {', '.join(POOLING_TYPES)}, got {value!r}")


class PoolingOptions(NamedTuple):
    """The user's settings for pooling, named as in EngineConfig."""

    convert: str | None = "auto"
    pooler_config: PoolerConfig = PoolerConfig()
    hf_overrides: dict[str, Any] | None = None


class DeviceDefaults(NamedTuple):
    """Defaults that depend on the device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    swap_space: float  # GiB; 0 on a CPU, where host memory is the same memory


DEVICE_DEFAULTS = {"cpu": DeviceDefaults(64, 512, 0.0), "cuda": DeviceDefaults(256, 8192, 4.0)}
