"""vLLM's settings that do not exist here: those without effect are accepted with a notice, the others are refused.

So command lines, files and environments written for vLLM either start or get an error that says what to do. The names
are those of vLLM 0.33 and older ones. All sources use this list: `--trust-remote-code` on the command line,
`trust-remote-code: true` in a file, VLLM_LITE_TRUST_REMOTE_CODE=1, and LLM(trust_remote_code=True). vLLM's own
variables are in vllm_variables.py.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from vllm_lite.errors import ConfigError

IMAGES = "see --limit-mm-per-prompt and --max-image-pixels; only images are seen, and nothing is heard"
ONE_HOST = "the engines of -dp are on this machine, behind one address; see ray-serve for several machines"
ONE_NODE = "the workers of an engine are on one machine"
NO_CODE = "no code of a checkpoint is run or needed"
ALWAYS = "it is always so here"
NO_PLUGIN = "code is loaded for --scheduling-policy only"
NO_COMPILE = "nothing is compiled ahead: decode steps are recorded, or captured as CUDA graphs (--enforce-eager: not)"
OWN_SERVER = "uvicorn's settings are the server's own"
ONE_BACKEND = "there is one backend, llguidance"
BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
KERNELS = "kernels are chosen by --attention-backend and by the machine"
WEIGHTS_STAY = "weights stay on the device"
WHOLE_CONTEXTS = "contexts are whole"
NO_STEPS_IN_COMMON = "engines do not wait for each other's steps"
FOUND_OUT = "what an adapter holds is found out"
MAPPED = "files are mapped, and only .safetensors"
HANGS = "see --heartbeat-timeout-s and --max-restarts"


class Flags(NamedTuple):
    """Flags with the same reason. `values`: the accepted values, () for switches, None for any value."""

    names: str
    reason: str
    values: tuple[str, ...] | None = None


class Given(NamedTuple):
    """Such a setting as the user gave it: `name` is its spelling, and `value` True or False for a switch."""

    name: str
    row: Flags
    value: Any
    is_refused: bool


SWITCHES = ()
WITHOUT_EFFECT: tuple[Flags, ...] = (
    Flags("--trust-remote-code", NO_CODE, SWITCHES),
    Flags("--disable-log-requests --disable-uvicorn-access-log", ALWAYS, SWITCHES),
    Flags("--disable-frontend-multiprocessing --use-tqdm-on-load --log-error-stack", OWN_SERVER, SWITCHES),
    Flags("--uvicorn-log-level --h11-max-incomplete-event-size --h11-max-header-count", OWN_SERVER),
    Flags("--enable-prompt-tokens-details --enable-server-load-tracking --enable-request-id-headers", ALWAYS, SWITCHES),
    Flags("--max-logprobs", "up to 64 may be asked for"),
    Flags("--max-log-len", "prompts are logged only with --enable-log-requests"),
    Flags("--chat-template-content-format", "what a template can read is found out", ("auto", "string", "openai")),
    Flags("--response-role", "answers have the role assistant", ("assistant",)),
    Flags("--tokenizer-mode", "there is one kind of tokenizer", ("auto", "hf", "slow", "fast")),
    Flags("--task", "see --runner and --convert", ("auto", "generate", "embed", "embedding", "score", "classify")),
    Flags("--config-format", "the only one there is", ("auto", "hf")),
    Flags("--max-seq-len-to-capture", NO_COMPILE),
    Flags("-O --compilation-config -cc --optimization-level", NO_COMPILE),
    Flags("-pp --pipeline-parallel-size", "layers are not shared out; use -tp", ("1",)),
    Flags("--data-parallel-size-local -dpl", ONE_HOST),
    Flags("--nnodes -n", ONE_NODE, ("1",)),
    Flags("--node-rank -r", ONE_NODE, ("0",)),
    Flags("-dcp --decode-context-parallel-size -pcp --prefill-context-parallel-size", WHOLE_CONTEXTS, ("1",)),
    Flags("--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", WHOLE_CONTEXTS),
    Flags("--dcp-q-replicate", WHOLE_CONTEXTS, SWITCHES),
    Flags("--data-parallel-backend -dpb --all2all-backend --expert-placement-strategy", ONE_HOST),
    Flags("--disable-custom-all-reduce --max-parallel-loading-workers --ray-workers-use-nsight", ALWAYS, SWITCHES),
    Flags(
        "--prefix-caching-hash-algo",
        "blocks are hashed by BLAKE2b, 256 bits over the raw token ids",
        ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "builtin"),
    ),
    Flags("--data-parallel-supervisor-port --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s", ONE_HOST),
    Flags("--dp-supervisor-probe-failure-threshold", ONE_HOST),
    Flags(
        "--dp-sync-interval --ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold",
        NO_STEPS_IN_COMMON,
    ),
    Flags("--disable-nccl-for-dp-synchronization", NO_STEPS_IN_COMMON, SWITCHES),
    Flags("--cpu-offload-gb", WEIGHTS_STAY, ("0", "0.0")),
    Flags("--offload-backend", WEIGHTS_STAY, ("auto",)),
    Flags("--offload-group-size", WEIGHTS_STAY, ("0",)),
    Flags("--offload-num-in-group --offload-prefetch-step", WEIGHTS_STAY),
    Flags("--distributed-timeout-seconds --cpu-distributed-timeout-seconds --watchdog-config", HANGS),
    Flags("--enable-fault-tolerance", HANGS, SWITCHES),
    Flags("--numa-bind", "workers are bound, see --cpu-bind", SWITCHES),
    Flags("--kv-offloading-backend", "KV blocks go to host memory by the engine's own copies", ("native",)),
    Flags("--mm-processor-cache-gb --media-io-kwargs", IMAGES),
    Flags("--mm-processor-cache-type --mm-encoder-tp-mode --video-pruning-rate", IMAGES),
    Flags("--allowed-local-media-path", "no file of the server is read for a request"),
    Flags("--skip-mm-profiling --interleave-mm-strings --disable-mm-preprocessor-cache", IMAGES, ()),
    Flags("--disable-chunked-mm-input", IMAGES, SWITCHES),
    Flags("--num-lookahead-slots --stream-interval", "steps and chunks are paced by measured times"),
    Flags("--max-num-partial-prefills --max-long-partial-prefills", "prompts share a step's tokens in turn"),
    Flags("--disable-hybrid-kv-cache-manager", ALWAYS, SWITCHES),
    Flags("--kv-sharing-fast-prefill --calculate-kv-scales", "only what a model needs is done", SWITCHES),
    Flags("--safetensors-load-strategy --pt-load-map-location --ignore-patterns", MAPPED),
    Flags("--safetensors-prefetch-num-threads --safetensors-prefetch-block-size", MAPPED),
    Flags("--show-hidden-metrics-for-version", "older names are always there"),
    Flags("--aggregate-engine-logging --fail-on-environ-validation --enable-logging-iteration-details", ALWAYS, ()),
    Flags("--cudagraph-metrics --enable-mfu-metrics --enable-layerwise-nvtx-tracing", "there are none", SWITCHES),
    Flags("--exclude-tools-when-tool-choice-none --enable-scale-out --enable-sleep-mode", ALWAYS, SWITCHES),
    Flags("--structured-outputs-config.backend --guided-decoding-backend", ONE_BACKEND, BACKENDS),
    Flags("--enable-dbo --enable-eplb", "experts stay where they are", SWITCHES),
    Flags("--logprobs-mode", "logprobs are those before temperature and masks", ("raw_logprobs",)),
    Flags("--attention-config --kernel-config --moe-backend --mamba-block-size --mamba-cache-dtype", KERNELS),
    Flags("--mamba-ssm-cache-dtype --mamba-cache-mode --gdn-prefill-backend", KERNELS),
    Flags("--linear-backend --kda-decode-backend --kda-prefill-backend --mamba-backend --mamba-ssu-algorithm", KERNELS),
    Flags("--enable-flashinfer-autotune --enable-flash-late-interaction --use-fp64-gumbel", KERNELS, SWITCHES),
    Flags("--mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-processor-device --mm-hasher-algorithm", IMAGES),
    Flags("--mm-ipc-gpu-memory-gb --mm-shm-cache-max-object-size-mb --mm-tensor-ipc --video-pruning-method", IMAGES),
    Flags("--mm-encoder-only --mm-device-do-normalize", IMAGES, SWITCHES),
    Flags("--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin", IMAGES),
    Flags("--default-mm-loras --ec-manager-config", IMAGES),
    Flags("--enable-mm-embeds --trust-request-mm-kwargs --enable-tower-connector-lora", IMAGES, SWITCHES),
    Flags("--renderer-num-workers --api-server-workers", "see --api-server-count"),
    Flags(
        "-ac --ir-op-priority --sparse-indexer-topk-backend --mamba-cache-philox-rounds --replayssm-buffer-len", KERNELS
    ),
    Flags(
        "--monokernel --use-replayssm --swa-bounded-replay --enable-hc-sp --enable-ep-weight-filter", KERNELS, SWITCHES
    ),
    Flags("--enable-batch-sharded-sampling --enable-shm-tensor-arena", KERNELS, SWITCHES),
    Flags("--jit-monitor-mode", NO_COMPILE),
    Flags("--jit-monitor-verbose --sleep-mode-offload-cudagraph", NO_COMPILE, SWITCHES),
    Flags("--sleep-mode-backend", "there is one way to sleep", ("cumem",)),
    Flags("--enable-cumem-allocator --enable-nccl-comm-suspend", "memory is given back in one way", SWITCHES),
    Flags("--allow-deprecated-quantization --enable-offline-docs", ALWAYS, SWITCHES),
    Flags("--scheduler-reserve-full-isl", "prompts are admitted by the blocks they take, see --kv-watermark", SWITCHES),
    Flags("--performance-mode", "see --max-num-batched-tokens and --max-itl-ms"),
    Flags("--prefill-schedule-interval", "prompts share every step, see --max-itl-ms", ("1",)),
    Flags("--prefix-match-unit", "prefixes are found by blocks, see --block-size"),
    Flags("--prefix-cache-retention-interval", "which states are kept follows from their use"),
    Flags("--enable-mamba-shared-prefix-checkpoint", "which states are kept follows from their use", SWITCHES),
    Flags("--fully-sharded-loras --specialize-active-lora", "adapters are computed in one way", SWITCHES),
    Flags("--enable-mixed-moe-lora-format --enable-moe-shared-loras", FOUND_OUT, SWITCHES),
    Flags("--max-lora-cls-labels", FOUND_OUT),
    Flags("--lora-dtype", "adapters have the dtype of the model", ("auto",)),
    Flags("--disable-access-log-for-endpoints", "there is no access log"),
    Flags("--sse-keep-alive-interval", "an idle stream gets a comment every 15 s"),
    Flags("--fingerprint-mode", "answers have no fingerprint", ("none",)),
    Flags("--per-request-spec-decode-metrics", "see /metrics", ("none",)),
    Flags("--anthropic-disabled-thinking-effort", "thinking is turned off by the template's variables", ("auto",)),
    Flags("--cohere-format", "prompts are made by the model's template"),
    Flags("--cohere-is-reasoning-model", "see --reasoning-parser", SWITCHES),
)
"""Flags without effect here. Values other than the listed ones are refused, for the same reason."""

REFUSED: tuple[Flags, ...] = (
    Flags("--hf-config-path", "give a folder whose config.json says it, or --hf-overrides"),
    Flags("--middleware --tool-parser-plugin --reasoning-parser-plugin --tool-server", NO_PLUGIN),
    Flags("--logits-processors --io-processor-plugin --logits-processor-pattern --worker-cls", NO_PLUGIN),
    Flags("--worker-extension-cls --scheduler-cls --model-loader-extra-config", NO_PLUGIN),
    Flags("--headless --enable-prompt-embeds --skip-tokenizer-init --tokens-only", "clients send text or tokens", ()),
    Flags("--enable-ssl-refresh", "restart the server behind its --shutdown-timeout for a new certificate", SWITCHES),
    Flags("--enable-log-outputs --enable-log-deltas", "answers are not logged", SWITCHES),
    Flags("--trust-request-chat-template", "templates come with the model, or with --chat-template", SWITCHES),
    Flags("--disable-sliding-window", "a window is part of its model; shorten --max-model-len to it", SWITCHES),
    Flags("--code-revision --tokenizer-revision", "give a folder, or --revision for all"),
    Flags("--hf-token", "set HF_TOKEN, which others cannot read from the command line"),
    Flags("--master-addr --master-port --data-parallel-address -dpa --data-parallel-rpc-port -dpp", ONE_NODE),
    Flags("--data-parallel-rank -dpn --data-parallel-start-rank -dpr", ONE_HOST),
    Flags("--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe", ONE_HOST, SWITCHES),
    Flags("--data-parallel-multi-port-external-lb -dpm --enable-elastic-ep", ONE_HOST, SWITCHES),
    Flags("--elastic-ep-max-dp-size", ONE_HOST),
    Flags("--device-ids", "set CUDA_VISIBLE_DEVICES"),
    Flags("--numa-bind-nodes --numa-bind-cpus", "see --cpu-bind"),
    Flags("--fault-tolerance-config", HANGS),
    Flags("--cpu-offload-params --offload-params", WEIGHTS_STAY),
    Flags("--kv-cache-dtype-skip-layers", "all layers have the dtype of --kv-cache-dtype"),
    Flags("--enable-mamba-cache-stochastic-rounding", "states are rounded to the nearest", SWITCHES),
    Flags("--sleep-preserve-parameter-names", "at level 2 all weights are read again"),
    Flags("--lora-target-modules", "an adapter changes all modules that it has weights for"),
    Flags("--max-num-active-seqs", "see --max-num-seqs"),
    Flags("--max-num-scheduled-tokens", "see --max-num-batched-tokens"),
    Flags("--kv-transfer-config --ec-transfer-config", "prompts and answers are computed by one engine"),
    Flags("--collect-detailed-traces", "spans of --otlp-traces-endpoint are whole requests; see --record for steps"),
    Flags("--override-attention-dtype --additional-config --eplb-config", "there is no such thing"),
    Flags("--aux-output-config --engram-config --diffusion-config -dc --watermark-config", "there is no such thing"),
    Flags("--long-prefill-token-threshold", "see --max-num-batched-tokens"),
    Flags("--long-prefill-token-threshold-adaptive", "see --max-num-batched-tokens", SWITCHES),
    Flags("--model-class-overrides", 'see --hf-overrides \'{"architectures":["X"]}\''),
    Flags(
        "--enable-trace-replay",
        "tokens of an answer are not given, see logprob_token_ids and prompt_logprobs",
        SWITCHES,
    ),
    Flags("--logging-config", "see --log-level, --log-format and --log-config-file"),
    Flags("--custom-histogram-buckets", "buckets are vLLM's"),
    Flags("--fingerprint-value", "answers have no fingerprint"),
    Flags("--grpc-port", "there is HTTP alone, and AsyncClient for Python"),
    Flags("--structured-outputs-config", ONE_BACKEND),
    Flags("--return-sampling-mask --enable-return-routed-experts", "answers tell no masks and no experts", SWITCHES),
    Flags("--reasoning-config", "see --reasoning-parser"),
    Flags("--quantization-config", "see --quantization"),
    Flags("--spec-method --spec-model --spec-tokens", "see --speculative-config"),
    Flags("--weight-transfer-config", "see POST /update_weights"),
    Flags("--grpc", "there is HTTP alone, and AsyncClient for Python", SWITCHES),
    Flags("--enable-per-request-metrics", "see /metrics, and GET /v1/requests/{id}", SWITCHES),
)


@cache
def known() -> Mapping[str, tuple[Flags, bool]]:
    """Each long flag's name as a setting (trust_remote_code), with its row and whether it is refused."""
    return {
        name[2:].replace("-", "_"): (row, is_refused)
        for table, is_refused in ((WITHOUT_EFFECT, False), (REFUSED, True))
        for row in table
        for name in row.names.split()
        if name.startswith("--")
    }


def find(door: str, name: str, value: Any) -> list[Given]:
    """vLLM's settings given as `name`; `door` is the name for messages. Empty if vLLM has no such flag. An object is
    split if its keys have rows of their own: structured_outputs_config with a backend."""
    table = known()
    if isinstance(value, Mapping) and value and all(f"{name}.{key}" in table for key in value):
        return [given for key, inner in value.items() for given in find(f"{door}.{key}", f"{name}.{key}", inner)]
    if name in table:
        return [Given(door, table[name][0], value, table[name][1])]
    row, is_refused = table.get(name.removeprefix("no_"), (None, False))
    if row is None or row.values != SWITCHES:
        return []
    return [Given(door, row, not as_switch(door, value), is_refused)]


def as_switch(door: str, value: Any) -> bool:
    """Parse true, 1, yes, on and their opposites, in any case; an empty text is False. Raises ConfigError."""
    text = str("" if value is None else value).strip().lower()
    if text not in _SWITCHED:
        raise ConfigError(f"{door}: must be true or false, got {value!r}")
    return _SWITCHED[text]


_SWITCHED = {"true": True, "1": True, "yes": True, "on": True}
_SWITCHED |= {"false": False, "0": False, "no": False, "off": False, "": False, "none": False, "null": False}


def answer(given: Iterable[Given]) -> str:
    """The notice about settings without effect; "" if there are none. Raises ConfigError for a refused one."""
    kept: dict[str, list[str]] = {}
    for name, row, value, is_refused in given:
        is_asked = as_switch(name, value) if row.values == SWITCHES else value is not None
        if is_refused and is_asked:
            raise ConfigError(f"{name} of vLLM is not supported: {row.reason}")
        if row.values and is_asked and str(value) not in row.values:
            raise ConfigError(f"{name} can only be {' or '.join(row.values)} here: {row.reason}; got {str(value)!r}")
        kept.setdefault(row.reason, []).append(name)
    if not kept:
        return ""
    return "without effect here: " + "; ".join(f"{', '.join(names)} ({reason})" for reason, names in kept.items())
