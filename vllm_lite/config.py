"""EngineConfig is what a user sets; its `resolve()` returns a ResolvedConfig, in which every default has its value."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log
from vllm_lite.runtime.addresses import check_address, split_tcp
from vllm_lite.runtime.group_memory import MAX_RANKS
from vllm_lite.runtime.kv_dtypes import KV_DTYPE_BYTES, KV_DTYPE_NAMES, KV_SCALE_BYTES, KVShape
from vllm_lite.runtime.machine import has_driver, hides_gpus, lacks_for_cuda, memory_limit_bytes, parse_bytes
from vllm_lite.runtime.nested_settings import (
    DEVICE_DEFAULTS,
    Count,
    DeviceDefaults,
    KVEventsConfig,
    LoraModulePath,
    PoolerConfig,
    PoolingOptions,
    ProfilerConfig,
    Speculation,
    Threads,
    check_adapters,
)
from vllm_lite.runtime.settings import Section, Settings, about

BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128)
_SHOWN_SIZES = ", ".join(map(str, BLOCK_SIZES))
GIB = 1024**3
MAX_LORA_RANK = 1024
DEMO_MODEL = "demo"
"""The name under which the bundled model is served when no model is given."""

logger = log.get(__name__)


FULL_LOADS, LEAST_DEFAULT_BLOCKS = 4, 8192
"""Bounds of a KV cache whose size the user did not set: at most FULL_LOADS times the blocks of the largest batch, where
all beyond one batch keep prefixes, or LEAST_DEFAULT_BLOCKS blocks if that is more, which cost the engine a megabyte."""


class EngineConfig(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of one engine that serves one model. Build it with `EngineConfig.load(...)`, which checks every
    value."""

    model: Annotated[
        str,
        Section("model"),
        about("folder of a Hugging Face checkpoint, GGUF file, or hub id (org/model); 'demo' is the bundled model"),
    ] = DEMO_MODEL
    revision: Annotated[str | None, about("branch, tag or commit of a hub id (default: main)")] = None
    download_dir: Annotated[str | None, about("folder for downloads (default: the hub's cache, see HF_HOME)")] = None
    tokenizer: Annotated[str | None, about("folder with tokenizer.json, or a hub id (default: the model's)")] = None
    served_model_name: Annotated[str | None, about("name clients see (default: the hub id, or the model's folder)")] = (
        None
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], about("type of weights and KV cache")] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], about("device of the workers (auto: cuda if there is one)")] = (
        "auto"
    )
    quantization: Annotated[
        Literal["int8", "fp8", "int4", "int4_g32", "awq", "gptq", "compressed-tensors", "gguf"] | None,
        about(
            "quantize the weights of matrix products on load: fp8 and int4 in groups of 128 inputs, int4_g32 of 32; "
            "other names are those of checkpoints, which are found out as well"
        ),
    ] = None
    max_model_len: Annotated[
        Count | None,
        about("maximum tokens of prompt and output together (default, or auto: the model's, or what fits into memory)"),
    ] = None
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        about("implementation of the model (auto: this engine's own if it has one, else that of transformers)"),
    ] = "auto"
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        about("task of the model (auto: its own; pooling: also makes vectors with a model made to generate)"),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "embed"] | None,
        about("embed: make vectors with a model made to generate, although its files do not mention it; none: do not"),
    ] = "auto"
    pooler_config: Annotated[
        PoolerConfig | None, about('pooling settings as JSON, e.g. {"pooling_type":"MEAN","normalize":false}')
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None, about('JSON with keys that override those of config.json, e.g. {"architectures":["X"]}')
    ] = None
    language_model_only: Annotated[bool, about("load no vision tower, and accept no images")] = False
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"], about("format of weights; dummy: random")
    ] = "auto"
    seed: Annotated[int, about("seed of dummy weights", ge=0)] = 0
    weight_cache: Annotated[
        str | None,
        about("private folder for weights as quantized and packed for a CPU, which later starts only read"),
    ] = None

    enable_lora: Annotated[
        bool, Section("LoRA adapters"), about("serve LoRA adapters; a request selects one by its name in `model`")
    ] = False
    lora_modules: Annotated[
        tuple[LoraModulePath, ...],
        about('adapters to load at startup: name=path, or {"name":"sql","path":"/a/folder"}'),
    ] = ()
    max_loras: Annotated[int, about("maximum number of different adapters in one step", ge=1, le=1024)] = 1
    max_lora_rank: Annotated[int, about("maximum rank of an adapter", ge=1, le=MAX_LORA_RANK)] = 16
    max_cpu_loras: Annotated[
        Count | None, about("number of adapters kept in memory; others are read again when needed (default: max_loras)")
    ] = None

    block_size: Annotated[int, Section("KV cache"), about(f"tokens per KV block, one of {_SHOWN_SIZES}")] = 16
    num_gpu_blocks_override: Annotated[
        Annotated[int, Meta(ge=2)] | None, about("size of the KV pool in blocks, on any device")
    ] = None
    cpu_kvcache_space: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about(
            "GiB of KV cache on a CPU, for all its workers together (default: 4, or less: at most a quarter of the "
            f"memory, and the size of {FULL_LOADS} times max_num_seqs sequences of max_model_len)"
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, about("maximum share of a GPU's memory for weights, activations and KV cache together", gt=0, le=1)
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Count | None, about("bytes of KV cache per worker, instead of profiling the GPU's memory")
    ] = None
    kv_watermark: Annotated[float, about("share of the pool kept free when a request is admitted", ge=0, lt=1)] = 0.01
    swap_space: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        about("GiB of host memory per worker for KV and states swapped out or evicted (default: 4, on a CPU 0)"),
    ] = None
    state_cache_space: Annotated[
        Annotated[float, Meta(gt=0)] | None, about("GiB per worker for recurrent states (default: at most 2)")
    ] = None
    enable_prefix_caching: Annotated[bool, about("reuse the KV blocks of equal prefixes")] = True
    prefix_hash_seed: Annotated[
        Annotated[str, Meta(max_length=64)] | None, about("fixed seed of the prefix hash (default: random)")
    ] = None
    kv_cache_dir: Annotated[
        str | None, about("private folder for KV blocks that outlive the engine; engines of the same user may share it")
    ] = None
    kv_cache_dir_size: Annotated[str, about("maximum size of kv_cache_dir, of all engines together")] = "50GiB"
    kv_cache_preload: Annotated[
        float, about("share of the KV cache filled from kv_cache_dir at startup", ge=0, le=1)
    ] = 0.75
    kv_cache_metrics: Annotated[bool, about("measure lifetime, idle time and reuse of KV blocks")] = False
    kv_cache_metrics_sample: Annotated[float, about("share of KV blocks in kv_cache_metrics", gt=0, le=1)] = 0.01
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
        about(
            "type of the KV cache (auto: the checkpoint's; int8: faster on a CPU up to 4 heads a KV head, slower at 8)"
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "reference", "cpu", "cuda", "paged"],
        Section("kernels"),
        about("attention kernels"),
    ] = "auto"
    disable_cascade_attn: Annotated[bool, about("each sequence reads a common prefix for itself")] = False

    deterministic: Annotated[
        bool, about("tokens and logprobs of a request are bit for bit the same in any schedule; only on a CPU")
    ] = False
    exact_activations: Annotated[bool, about("leave inputs of quantized products unrounded; slower")] = False
    enforce_eager: Annotated[
        bool, about("launch each operation of a decode step separately: no CUDA graphs, no recorded programs")
    ] = False
    cudagraph_capture_sizes: Annotated[
        Annotated[tuple[Count, ...], Meta(min_length=1)] | None,
        about("numbers of sequences for which decode steps are captured, like 1,2,4,8"),
    ] = None
    max_cudagraph_capture_size: Annotated[
        Count | None, about("largest capture size (default: max_num_seqs, at most 512)")
    ] = None
    cudagraph_piece_sizes: Annotated[
        Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 20)], ...], Meta(min_length=1)] | None,
        about("numbers of tokens for which steps with prompts are captured in pieces, like 64,256; 0 for none"),
    ] = None

    max_num_seqs: Annotated[
        Count | None,
        Section("scheduler"),
        about("maximum sequences per step (default: 256, on a CPU 64; at most max_num_batched_tokens)"),
    ] = None
    max_num_batched_tokens: Annotated[
        Count | None, about("maximum tokens per step (default: 8192, on a CPU 512, and 4096 for an LLM in Python)")
    ] = None
    enable_chunked_prefill: Annotated[bool, about("spread long prompts over several steps")] = True
    max_itl_ms: Annotated[
        Annotated[float, Meta(ge=1, le=600_000)] | None,
        about("target inter-token latency: while sequences decode, prompts are cut so that no step takes longer"),
    ] = None
    scheduling_policy: Annotated[str, about("fcfs, priority, deadline, fair, or module:Class")] = "fcfs"
    preemption_mode: Annotated[
        Literal["auto", "recompute", "swap"],
        about("how a preempted sequence gets its KV back: recompute, swap, or auto (the faster one)"),
    ] = "auto"
    max_swap_blocks_per_step: Annotated[int, about("maximum KV blocks moved to or from the host per step", ge=1)] = 256
    async_scheduling: Annotated[bool, about("schedule the next step while the workers run the current one")] = True
    jump_forward: Annotated[bool, about("compute several tokens that a grammar forces in one step")] = True
    speculative_config: Annotated[
        Speculation | None, about('JSON, e.g. {"method":"suffix","num_speculative_tokens":8}')
    ] = None
    disable_adaptive_drafts: Annotated[
        bool, about("always draft the maximum, even if fewer tokens would be faster")
    ] = False

    cpu_threads: Annotated[
        Threads | None,
        Section("processes"),
        about("threads per CPU worker (default: all physical cores, or its share of them)"),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        about("workers that share the model, each with its own GPU or a part of the cores", ge=1, le=MAX_RANKS),
    ] = 1
    data_parallel_size: Annotated[
        int,
        about("engines behind one address on this machine, each with its own workers and KV cache", ge=1, le=64),
    ] = 1
    distributed_executor_backend: Annotated[
        Literal["mp", "uni", "ray"],
        about("where the workers run: mp and uni on this machine, ray on the nodes of a Ray cluster (RAY_ADDRESS)"),
    ] = "mp"
    tensor_parallel_backend: Annotated[
        Literal["auto", "shared-memory", "nccl", "gloo"],
        about("collective communication between workers (auto: shared-memory on a CPU, nccl on GPUs)"),
    ] = "auto"
    enable_expert_parallel: Annotated[
        bool, about("distribute whole experts over the workers, instead of a part of each expert; for MoE models")
    ] = False
    expert_load_metrics: Annotated[bool, about("count the tokens routed to each expert of each layer")] = False
    cpu_bind: Annotated[
        str,
        about("cores of CPU workers: auto (several do not share any), none, or a list for each, like 0-15|16-31"),
    ] = "auto"
    single_process: Annotated[bool, about("run engine and worker as threads of the client, for debugging")] = False
    address: Annotated[str | None, about("ipc://PATH for clients here (default: in a private folder)")] = None
    tcp_address: Annotated[str | None, about("tcp://IP:PORT for clients on other machines")] = None
    curve_keys: Annotated[
        str | None, about("folder made by `vllm-lite keys`: clients that may connect to tcp_address, encrypted")
    ] = None
    insecure: Annotated[bool, about("allow anyone to connect to tcp_address, without keys and unencrypted")] = False
    profiler_config: Annotated[
        ProfilerConfig | None,
        about('profile of POST /start_profile as JSON, e.g. {"profiler":"torch","torch_profiler_dir":"traces"}'),
    ] = None
    ready_timeout_s: Annotated[float, about("maximum seconds for the engine to start", gt=0)] = 600.0
    heartbeat_timeout_s: Annotated[float, about("seconds of silence after which a process counts as hung", gt=0)] = 20.0
    max_restarts: Annotated[
        int,
        about("maximum restarts in five minutes, of workers and of the engine; 0: their death ends all requests", ge=0),
    ] = 10
    recovery_timeout_s: Annotated[
        float, about("maximum seconds that clients wait for a dead engine's replacement; 0: they do not", ge=0)
    ] = 120.0
    standby_workers: Annotated[
        bool, about("keep a second group of worker processes ready to replace the first one if it dies")
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Section("log, decisions and events"), about("minimum level")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], about("format of the log on stderr")] = "text"
    log_config_file: Annotated[
        str | None, about("JSON file for Python's logging.config.dictConfig, which overrides the log settings above")
    ] = None
    disable_log_stats: Annotated[bool, about("do not log statistics while requests run")] = False
    log_stats_interval_s: Annotated[float, about("seconds between two lines of statistics", gt=0)] = 10.0
    record: Annotated[
        str | None,
        about("file for a trace of all decisions, for `replay` and `why`; an older one is kept as FILE.previous"),
    ] = None
    kv_events_config: Annotated[
        KVEventsConfig | None,
        about('JSON, e.g. {"enable_kv_cache_events":true,"endpoint":"ipc:///run/llm/events"}'),
    ] = None

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {_SHOWN_SIZES}, got {self.block_size}")
        if self.address is not None:
            check_address(self.address)
        if self.tcp_address is not None:
            self._check_tcp(self.tcp_address)
        if self.data_parallel_size > 1:
            self._check_data_parallel()
        parse_bytes("kv_cache_dir_size", self.kv_cache_dir_size)
        if self.kv_cache_dir is not None and not self.enable_prefix_caching:
            raise ValueError("kv_cache_dir keeps prefixes, and needs enable_prefix_caching")
        if self.single_process and self.distributed_executor_backend == "ray":
            raise ValueError("single_process runs the worker as a thread of this process, and ray on other machines")
        check_adapters(self.lora_modules, self.max_loras, self.max_cpu_loras, enabled=self.enable_lora)

    def _check_data_parallel(self) -> None:
        for name in ("address", "tcp_address", "single_process"):
            if getattr(self, name):
                raise ValueError(f"{name} is one engine's: leave it out, or data_parallel_size, which is above 1")

    def _check_tcp(self, address: str) -> None:
        split_tcp(address)
        if self.single_process:
            raise ValueError("tcp_address needs an engine process of its own, so it cannot go with single_process")
        if (self.curve_keys is None) is not self.insecure:
            raise ValueError(
                f"tcp_address {address} needs either curve_keys, a folder made by `vllm-lite keys`, or insecure, which "
                f"allows anyone who can reach it; got {'neither' if self.curve_keys is None else 'both'}"
            )

    @property
    def pooling(self) -> PoolingOptions:
        """The user's settings for the model's pooling, and for its config.json."""
        convert = "embed" if (self.runner, self.convert) == ("pooling", "auto") else self.convert
        blind: dict[str, Any] = {"vision_config": None} if self.language_model_only else {}
        return PoolingOptions(convert, self.pooler_config or PoolerConfig(), {**(self.hf_overrides or {}), **blind})

    @property
    def stats_interval_s(self) -> float | None:
        """Seconds between two lines of statistics in the log; None: there are none."""
        return None if self.disable_log_stats else self.log_stats_interval_s

    @property
    def logging(self) -> tuple[str, str, str | None]:
        """The arguments of log.setup() that follow the name of a process."""
        return self.log_level, self.log_format, self.log_config_file

    def resolve(
        self,
        *,
        max_position_embeddings: int,
        dtype: str,
        model_path: str,
        machine: tuple[Literal["cpu", "cuda"], int] | None = None,
        kv: KVShape | None = None,
    ) -> "ResolvedConfig":
        """Choose every default that depends on the model or the machine. Raises ConfigError.

        `machine` describes another machine than this one: its device and the bytes of its memory. Without `kv` the
        default size of the KV cache is not limited to the blocks that the model can use.
        """
        max_model_len = self.max_model_len or max_position_embeddings
        if max_model_len > max_position_embeddings:
            raise ConfigError(
                f"max_model_len must be at most the model's {max_position_embeddings} positions, got {max_model_len}"
            )
        device, memory_bytes = machine or (self.resolve_device(), memory_limit_bytes())
        self._check_parallel_backend(device)
        max_num_seqs, budget = self._step_sizes(DEVICE_DEFAULTS[device], max_model_len)
        chosen = ResolvedConfig.__annotations__
        kept = {name: getattr(self, name) for name in EngineConfig.__struct_fields__ if name not in chosen}
        kept["model"], kept["dtype"], kept["quantization"] = model_path, dtype, self.quantization
        of_model = (kv.kv_cache_dtype if kv else None) or dtype
        kept["kv_cache_dtype"] = KV_DTYPE_NAMES.get(self.kv_cache_dtype, self.kv_cache_dtype) or of_model
        if self.deterministic:
            self._check_deterministic(device)
            kept["attention_backend"] = "cpu"
        resolved = ResolvedConfig(
            **kept,
            tokenizer=self.tokenizer or model_path,
            served_model_name=self.served_model_name or Path(model_path).name,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            swap_space=DEVICE_DEFAULTS[device].swap_space if self.swap_space is None else self.swap_space,
            cpu_kvcache_space=self.cpu_kvcache_space or min(4.0, memory_bytes / 4 / self.data_parallel_size / GIB),
        )
        if kv is None or self.cpu_kvcache_space or not kv.kv_groups:
            return resolved
        value_bytes, tp = KV_DTYPE_BYTES[resolved.kv_cache_dtype], self.tensor_parallel_size
        scale_bytes = KV_SCALE_BYTES.get(resolved.kv_cache_dtype, 0)
        block_bytes = kv.kv_block_bytes(self.block_size, value_bytes, tp, scale_bytes)
        enough = resolved.enough_blocks(len(kv.kv_groups)) * block_bytes * tp / GIB
        return msgspec.structs.replace(resolved, cpu_kvcache_space=min(resolved.cpu_kvcache_space, enough))

    def _step_sizes(self, defaults: DeviceDefaults, max_model_len: int) -> tuple[int, int]:
        """The most sequences and the most tokens of one step. Raises ConfigError if they do not go together."""
        budget = self.max_num_batched_tokens
        if self.max_itl_ms is not None and not self.enable_chunked_prefill:
            raise ConfigError("max_itl_ms cuts prompts into chunks, and needs enable_chunked_prefill")
        if budget is None:
            budget = max(defaults.max_num_batched_tokens, 0 if self.enable_chunked_prefill else max_model_len)
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens must be at least max_model_len ({max_model_len}), "
                f"got {budget}"
            )
        max_num_seqs = self.max_num_seqs or min(defaults.max_num_seqs, budget)
        if budget < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({max_num_seqs}), one for every sequence of a "
                f"step, got {budget}"
            )
        return max_num_seqs, budget

    def _check_parallel_backend(self, device: str) -> None:
        """Raises ConfigError if workers on `device` cannot exchange anything in the way that was asked for."""
        for backend, wrong, right, other in (
            ("nccl", "cpu", "GPUs", "shared-memory"),
            ("shared-memory", "cuda", "a CPU", "nccl"),
        ):
            if (self.tensor_parallel_backend, device) == (backend, wrong):
                what = f"tensor_parallel_backend {backend} is for workers on {right}, but device is {device}"
                raise ConfigError(f"{what}; give auto, {other} or gloo")

    def _check_deterministic(self, device: str) -> None:
        """Raises ConfigError where a row's bits could depend on the rows beside it: for all but native CPU kernels."""
        for name, got, *fit in (
            ("device", device, "cpu"),
            ("attention_backend", self.attention_backend, "cpu", "auto"),
            ("tensor_parallel_backend", self.tensor_parallel_backend, "shared-memory", "auto"),
        ):
            if got not in fit:
                raise ConfigError(f"deterministic needs {name} {' or '.join(fit)}, got {got}; others add up by batch")

    def resolve_device(self) -> Literal["cpu", "cuda"]:
        """`device`, where "auto" is a GPU if all that it takes is there. Raises ConfigError for one that is not."""
        if self.device == "cpu":
            return "cpu"
        if self.device == "cuda" and self.distributed_executor_backend == "ray":
            return "cuda"  # this machine need not have any
        lack = lacks_for_cuda(kernels=self.attention_backend != "reference")
        if lack is None:
            return "cuda"
        if self.device == "cuda":
            raise ConfigError(f"device is cuda, but {lack}; give --device cpu to run on the CPU")
        if has_driver() and not hides_gpus():
            logger.warning("the GPU of this machine is not used: %s", lack)
        return "cpu"


class ResolvedConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An EngineConfig whose defaults have been chosen for one model on one machine; `EngineConfig.resolve()` makes it.

    The fields repeated here have defaults that had to be chosen. `model` is a folder, `dtype` and `kv_cache_dtype` are
    never "auto". A field that is still None is not wanted, or can be chosen only by the worker.
    """

    tokenizer: str
    served_model_name: str
    device: Literal["cpu", "cuda"]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    swap_space: float
    cpu_kvcache_space: float
    quantization: Literal["int8", "fp8", "int4", "int4_g32"] | None = None
    data_parallel_rank: int = 0  # which of the engines it is
    media_aside: bool = False  # beside the steps of streams, in pieces: on a CPU
    num_stages: int = 1  # that share out the layers; no setting makes it more, as pipelines are not served
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer besides those that the model's own files name. They come from the tokenizer and the
    chat template, which workers do not read."""

    @property
    def ranks_on_machine(self) -> int:
        """The workers of all engines."""
        return self.data_parallel_size * self.tensor_parallel_size * self.num_stages

    @property
    def first_rank(self) -> int:
        """Number of the workers of other engines before this engine's first."""
        return self.data_parallel_rank * self.tensor_parallel_size * self.num_stages

    @property
    def engine_name(self) -> str:
        """The engine's name in logs."""
        return "engine" if self.data_parallel_size == 1 else f"engine {self.data_parallel_rank}"

    def of_engine(self, rank: int) -> "ResolvedConfig":
        """The config of one of several engines. It writes its own record and publishes its own KV events."""
        changes: dict[str, Any] = {"data_parallel_rank": rank}
        if self.record is not None:
            changes["record"] = f"{self.record}.{rank}"
        if self.kv_events_config is not None:
            changes["kv_events_config"] = self.kv_events_config.of_engine(rank)
        return msgspec.structs.replace(self, **changes)

    def enough_blocks(self, num_groups: int) -> int:
        """Maximum number of KV blocks of a cache whose size the user did not set."""
        whole = -(-self.max_model_len // self.block_size) * num_groups
        return max(FULL_LOADS * self.max_num_seqs * whole, LEAST_DEFAULT_BLOCKS)


def demo_folder() -> str:
    """The folder of the bundled model."""
    from importlib.resources import files

    return str(files("vllm_lite") / "demo_model")
