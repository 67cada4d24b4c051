"""vLLM's environment variables: each is read as a setting, has no effect (with a notice), or is refused.

Names are without VLLM_: all of vLLM 0.33 and some older ones; a * at the end stands for any suffix. A refused variable
is accepted if it is empty, 0, false or none, or has one of the row's values.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from vllm_lite.runtime.settings_sources import ENV_PREFIX, is_of_service
from vllm_lite.runtime.vllm_settings import (
    ALWAYS,
    HANGS,
    IMAGES,
    KERNELS,
    NO_COMPILE,
    NO_PLUGIN,
    ONE_BACKEND,
    ONE_HOST,
    OWN_SERVER,
    WEIGHTS_STAY,
    Flags,
    Given,
)

PREFIX = "VLLM_"
UNSET = ("", "0", "0.0", "false", "none")

BUILD = "it concerns how vLLM is built and installed"
NOTHING_SENT = "nothing is sent to anybody"
LOG = "see --log-level, --log-format and --log-config-file"
SOCKETS = "processes of a server speak through private sockets below TMPDIR"
LIMITS = "the limits of a request are fixed; the error of a request beyond one names it"
BOUNDED = "the time of patterns and templates is bounded"
NO_TRANSFER = "prompts and answers are computed by one engine"
OFFLOADED = "KV blocks go to host memory by the engine's own copies, see --swap-space"
TEMPLATE = "prompts are made by the model's template, see --default-chat-template-kwargs"
RAY = "Ray places one worker on each GPU, on one machine if all fit"


class Taken(NamedTuple):
    """A variable that is a setting here. `read` computes the setting's value from the text and all other settings."""

    setting: str
    read: Callable[[str, Mapping[str, Any]], Any] = lambda text, _: text


def _of_all_workers(text: str, values: Mapping[str, Any]) -> Any:
    """The GiB of all workers; vLLM's variable is per worker. None for 0, with which the engine chooses."""
    try:
        return float(text) * int(values.get("tensor_parallel_size") or 1) or None
    except ValueError:
        return text


LEVELS = {"warn": "warning", "critical": "error", "fatal": "error", "notset": "debug", "trace": "debug"}

TAKEN = {
    "VLLM_API_KEY": Taken("api_key"),  # a server that needed this key must not be open here
    "VLLM_BATCH_INVARIANT": Taken("deterministic"),
    "VLLM_CPU_KVCACHE_SPACE": Taken("cpu_kvcache_space", _of_all_workers),
    "VLLM_CPU_OMP_THREADS_BIND": Taken("cpu_bind", lambda text, _: "none" if text == "nobind" else text),
    "VLLM_ENGINE_READY_TIMEOUT_S": Taken("ready_timeout_s"),
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": Taken("max_request_bytes"),
    "VLLM_LOGGING_CONFIG_PATH": Taken("log_config_file"),
    "VLLM_LOGGING_LEVEL": Taken("log_level", lambda text, _: LEVELS.get(text.lower(), text.lower())),
    "VLLM_LOG_STATS_INTERVAL": Taken("log_stats_interval_s", lambda text, _: None if text.startswith("-") else text),
}
"""Each is used if neither the setting's own variable nor its flag is given."""

WITHOUT_EFFECT: tuple[Flags, ...] = (
    Flags("TARGET_DEVICE", "see --device"),
    Flags("MAIN_CUDA_VERSION USE_PRECOMPILED* SKIP_PRECOMPILED_VERSION_SUFFIX SKIP_VERSION_SUFFIX", BUILD),
    Flags("DOCKER_BUILD_CONTEXT BUILD_COMMIT BUILD_PIPELINE BUILD_URL IMAGE_TAG CONFIG_ROOT CACHE_ROOT", BUILD),
    Flags("NCCL_SO_PATH NCCL_INCLUDE_PATH CUDART_SO_PATH *CUDA_COMPATIBILITY* WSL2_ENABLE_PIN_MEMORY", BUILD),
    Flags("USAGE_STATS_SERVER NO_USAGE_STATS DO_NOT_TRACK USAGE_SOURCE", NOTHING_SENT),
    Flags("CONFIGURE_LOGGING LOGGING_STREAM LOGGING_PREFIX LOGGING_COLOR DISABLE_LOG_LOGO PROCESS_NAME_PREFIX", LOG),
    Flags("LOG_BATCHSIZE_INTERVAL LOG_MODEL_INSPECTION REQUEST_BODY_LOG_LEVEL RINGBUFFER_WARNING_INTERVAL", LOG),
    Flags("TRACE_FUNCTION GC_DEBUG DEBUG_WORKSPACE DEBUG_MFU_METRICS DEBUG_DUMP_PATH", "see --record, for debugging"),
    Flags("*_SCOPES_FOR_PROFILING GPU_SYNC_CHECK CPU_CI_ENV TEST_FORCE_LOAD_FORMAT", "it is for vLLM's developers"),
    Flags("HOST_IP PORT LOOPBACK_IP RPC_BASE_PATH RPC_TIMEOUT USE_SPINLOOP_EXT MQ_MAX_CHUNK_BYTES_MB", SOCKETS),
    Flags("MSGPACK_ZERO_COPY_THRESHOLD OBJECT_STORAGE_SHM_BUFFER_NAME", SOCKETS),
    Flags("ALLOW_INSECURE_SERIALIZATION", "nothing is pickled"),
    Flags("WORKER_MULTIPROC_METHOD", "processes are started, never forked"),
    Flags("ENABLE_V1_MULTIPROCESSING", "see --single-process"),
    Flags("EXECUTE_MODEL_TIMEOUT_SECONDS KEEP_ALIVE_ON_ENGINE_DEATH", HANGS),
    Flags("WORKER_SHUTDOWN_TIMEOUT_SECONDS", "see --shutdown-timeout"),
    Flags("HTTP_TIMEOUT_KEEP_ALIVE V1_OUTPUT_PROC_CHUNK_SIZE *RUST_FRONTEND* USE_RUST_BENCH USE_FASTOKENS", OWN_SERVER),
    Flags("SERVER_DEV_MODE", "its routes are always there; with --api-key they need --admin-api-key"),
    Flags(
        "ALLOW_RUNTIME_LORA_UPDATING",
        "with --enable-lora adapters may be loaded at run time, see POST /v1/load_lora_adapter",
    ),
    Flags("ALLOW_LONG_MAX_MODEL_LEN", "see --hf-overrides '{\"max_position_embeddings\":N}'"),
    Flags("ENABLE_RESPONSES_API_STORE", "answers are kept unless a request says not to, see --responses-store"),
    Flags("MAX_N_SEQUENCES MAX_COMPLETION_PROMPTS MAX_STOP_STRINGS MAX_NUM_BAD_WORDS MAX_BAD_WORDS_*", LIMITS),
    Flags("CHAT_TEMPLATE_* REGEX_COMPILATION_TIMEOUT_S TOOL_PARSE_REGEX_TIMEOUT_SECONDS", BOUNDED),
    Flags("ENFORCE_STRICT_TOOL_CALLING TOOL_JSON_ERROR_AUTOMATIC_RETRY", "see --tool-strict-level"),
    Flags("BEAM_ALWAYS_CONSTRAIN_OUTPUT USE_EXPERIMENTAL_PARSER_CONTEXT GPT_OSS_HARMONY_*", TEMPLATE),
    Flags("GPT_OSS_SYSTEM_TOOL_MCP_LABELS", "no tools are run by the server"),
    Flags("XGRAMMAR_CACHE_MB V1_USE_OUTLINES_CACHE", ONE_BACKEND),
    Flags("COMPUTE_NANS_IN_LOGITS RAISE_ON_LOGIT_NANS DISABLE_REQUEST_ID_RANDOMIZATION USE_V1", ALWAYS),
    Flags("USE_V2_MODEL_RUNNER MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", ALWAYS),
    Flags("KV_EVENTS_USE_INT_BLOCK_HASHES", "see hash_format of --kv-events-config"),
    Flags("PP_LAYER_PARTITION", "layers are not shared out; use -tp"),
    Flags("CPU_NUM_OF_RESERVED_CPU", "see --cpu-threads and --cpu-bind"),
    Flags("RAY_BUNDLE_INDICES RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS RAY_EXTRA_ENV_VAR*", RAY),
    Flags("USE_RAY_COMPILED_DAG* USE_RAY_SPMD_WORKER USE_RAY_WRAPPED_PP_COMM", RAY),
    Flags("DP_MASTER_IP DP_MASTER_PORT RANDOMIZE_DP_DUMMY_INPUTS ELASTIC_EP_*", ONE_HOST),
    Flags("WEIGHT_OFFLOADING_*", WEIGHTS_STAY),
    Flags("USE_SIMPLE_KV_OFFLOAD KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", OFFLOADED),
    Flags("NIXL_* MOONCAKE_* P2P_* EC_SIDE_CHANNEL_* GPU_NIC_PCIE_MAPPING NIC_SELECTION_VARS", NO_TRANSFER),
    Flags(
        "ASSETS_CACHE* *_FETCH_TIMEOUT MEDIA_* MAX_MEDIA_* MAX_AUDIO_* MAX_IMAGE_PIXELS MAX_EMBED_DECODE_BYTES", IMAGES
    ),
    Flags("VIDEO_LOADER_BACKEND", IMAGES),
    Flags("FASTSAFETENSORS_QUEUE_SIZE", "files are mapped, and only .safetensors"),
    Flags("DISABLE_COMPILE_CACHE COMPILE_CACHE_SAVE_FORMAT USE_AOT_COMPILE FORCE_AOT_LOAD USE_MEGA_AOT_*", NO_COMPILE),
    Flags("USE_STANDALONE_COMPILE ENABLE_PREGRAD_PASSES USE_BREAKABLE_CUDAGRAPH PATTERN_MATCH_DEBUG", NO_COMPILE),
    Flags("USE_BYTECODE_HOOK USE_LAYERNAME ENABLE_INDUCTOR_* ENABLE_CUDAGRAPH_GC ENABLE_STARTUP_PLAN", NO_COMPILE),
    Flags("TORCH_COMPILE_* TRITON_JIT_WARMUP_NUM_THREADS", NO_COMPILE),
    Flags("ROCM_* XPU_* XLA_* TPU_*", "there are kernels for CPUs and for NVIDIA's GPUs"),
    Flags("ATTENTION_BACKEND FLASH_ATTN_VERSION MLA_DISABLE KV_CACHE_LAYOUT SSM_CONV_STATE_LAYOUT", KERNELS),
    Flags("USE_DEEP_GEMM* MOE_USE_DEEP_GEMM DEEP_GEMM_WARMUP DEEPEP* USE_FLASHINFER_* FLASHINFER_*", KERNELS),
    Flags("HAS_FLASHINFER_CUBIN BLOCKSCALE_FP8_GEMM_FLASHINFER ALLREDUCE_* USE_NCCL_SYMM_MEM DISABLE_PYNCCL", KERNELS),
    Flags("DISTRIBUTED_USE_SPLIT_GROUP SKIP_P2P_CHECK DBO_COMM_SMS DCP_Q_REPLICATE USE_DIRECT_DCP_*", KERNELS),
    Flags("MARLIN_* HUMMING_* USE_TRITON_* TRITON_FORCE_FIRST_CONFIG TRITON_USE_TD TUNED_CONFIG_FOLDER", KERNELS),
    Flags("MXFP*_EMULATION_DEQUANT_AT_LOAD B12X_MOE_FP4_FORCE_A16 MAX_TOKENS_PER_EXPERT_FP4_MOE", KERNELS),
    Flags("USE_FUSED_MOE_GROUPED_TOPK MOE_SKIP_PADDING DISABLE_DSV4_* DISABLE_SHARED_EXPERTS_STREAM", KERNELS),
    Flags("*_STREAM_TOKEN_THRESHOLD MULTI_STREAM_GEMM_TOKEN_THRESHOLD KIMI_K3_* STEP5_* ENABLE_GEMM_RS", KERNELS),
    Flags("ENABLE_HPC_OPS USE_OINK_OPS USE_HW_AGNOSTIC DISABLED_KERNELS GDN_DECODE_KERNEL REPLICATE_EMBED", KERNELS),
    Flags("ENABLE_FLA_PACKED_RECURRENT_DECODE SPARSE_INDEXER_MAX_LOGITS_MB LORA_*_PDL LORA_*_STREAM", KERNELS),
    Flags("ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE ADAPTIVE_VERIFICATION_*", KERNELS),
    Flags("CPU_ATTN_SPLIT_KV CPU_INT4_W4A8 CPU_MOE_PREPACK CPU_SGL_KERNEL ZENTORCH_WEIGHT_PREPACK", KERNELS),
    Flags("FLOAT32_MATMUL_PRECISION", "products of float32 are computed in float32"),
    Flags("SYSTEM_START_DATE", TEMPLATE),
)
"""Variables without effect here."""

REFUSED: tuple[Flags, ...] = (
    Flags("USE_MODELSCOPE", "models come from Hugging Face's hub, see HF_ENDPOINT, or from a folder"),
    Flags("MODEL_REDIRECT_PATH", "give the folder as MODEL"),
    Flags("PLUGINS", NO_PLUGIN),
    Flags("LORA_RESOLVER_*", "give adapters by --lora-modules, or load them by POST /v1/load_lora_adapter"),
    Flags("DP_RANK DP_RANK_LOCAL", ONE_HOST),
    Flags("DP_SIZE", "see --data-parallel-size", ("1",)),
    Flags("RAY_PER_WORKER_GPUS", RAY, ("1", "1.0")),
    Flags("SKIP_MODEL_NAME_VALIDATION", "give the names that clients use by --served-model-name"),
    Flags("DEBUG_LOG_API_SERVER_RESPONSE", "answers are not logged"),
    Flags("ENABLE_COHERE_API", "there are Cohere's routes for vectors and rankings, and none for chats"),
    Flags("MOE_ROUTING_SIMULATION_STRATEGY", "tokens go to the experts that the model chooses"),
    Flags("TORCH_PROFILER_*", "see --profiler-config"),
)


def find(variable: str) -> tuple[Flags, bool] | None:
    """The row of a variable that is not a setting here, and whether it is refused; None for a variable that vLLM does
    not have."""
    for table, is_refused in ((WITHOUT_EFFECT, False), (REFUSED, True)):
        for row in table:
            if any(is_named(pattern, variable) for pattern in row.names.split()):
                return row, is_refused
    return None


def is_named(pattern: str, variable: str) -> bool:
    """Whether a row's name, or pattern, matches `variable`."""
    return fnmatchcase(variable, PREFIX + pattern)


def given(env: Mapping[str, str]) -> Iterator[Given]:
    """Each variable of vLLM in `env` that is not a setting here. The value is None for a refused one that is off."""
    for variable in sorted(env):
        is_vllms = variable.startswith(PREFIX) and not variable.startswith(ENV_PREFIX) and variable not in TAKEN
        if is_vllms and not is_of_service(variable, env[variable]):
            row, is_refused = find(variable) or (None, False)
            if row is not None:
                value = env[variable].strip().lower()
                asks = is_refused and value not in (*UNSET, *(row.values or ()))
                yield Given(variable, Flags(row.names, row.reason), value if asks else None, is_refused)


def taken(env: Mapping[str, str], values: Mapping[str, Any], fields: frozenset[str]) -> dict[str, tuple[str, Any]]:
    """Setting -> (variable, value), for settings in `fields`; `values` are those given in other ways."""
    found = {}
    for variable, row in TAKEN.items():
        text = env.get(variable)
        if row.setting in fields and text is not None and (text or variable == "VLLM_API_KEY"):
            value = row.read(text, values)
            if value is not None:
                found[row.setting] = variable, value
    return found
