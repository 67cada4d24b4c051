"""Starts an engine: checks the model, creates a private folder, starts the process and waits until it serves.

After that the engine's supervisor replaces it when it dies.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import msgspec

from vllm_lite.checkpoint import hub
from vllm_lite.checkpoint.config_json import load_spec, resolve_dtype
from vllm_lite.checkpoint.draft_model import check_mtp_head, check_vocabulary, with_drafter
from vllm_lite.checkpoint.fitting import check_settings, on_load
from vllm_lite.checkpoint.gguf.files import gguf_files
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.sizing import check_sizes
from vllm_lite.client.engines import instances
from vllm_lite.client.engines.connection import RUN_DIR
from vllm_lite.client.engines.instances import InstanceRecord, Process
from vllm_lite.client.engines.session import Session
from vllm_lite.client.engines.supervisor import EngineSupervisor
from vllm_lite.client.text.end_tokens import find_end_tokens, writes_text
from vllm_lite.client.text.tokenizer_formats import conversion
from vllm_lite.config import DEMO_MODEL, EngineConfig, ResolvedConfig, demo_folder
from vllm_lite.errors import ConfigError, EngineError, ModelError
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol.api import Welcome
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.addresses import check_address, split_tcp
from vllm_lite.runtime.cpu_binding import check_binding
from vllm_lite.runtime.kv_dtypes import KV_DTYPE_BYTES, KV_SCALE_BYTES
from vllm_lite.runtime.machine import memory_limit_bytes
from vllm_lite.runtime.nested_settings import KVEventsConfig, LoraModulePath
from vllm_lite.transport.keys import load_engine_keys
from vllm_lite.transport.zmq import answers

ENGINE_MODULE = "vllm_lite.engine.process"
LONGEST_SOCKET = "workers-99.9999"
"""Longest name of a socket in the engine's folder, that of a late worker group (executor/select.py). A TMPDIR that is
too long for it is refused at the start, and not only when workers are replaced for the tenth time."""
SPAWNS_ENGINE = "checks the model, starts the engine"
ENCODER_SEQS, ENCODER_TOKENS = 256, 2048
"""Default texts and tokens per step of an encoder, if the longest text does not need more."""
CPU_STEP_TOKENS = 4096
"""Default maximum tokens of a step on a CPU if no stream waits for next tokens."""
CPU_STEP_WORK, CPU_STEP_PAIRS = 2 << 40, 1 << 27
"""Limits of such a step: tokens times active parameters, and tokens times attended positions, so that slow machines
finish a layer long before heartbeat_timeout_s."""
STOP_GRACE_S = 4.0
"""Seconds in which an engine has to end its workers before it is killed together with them."""

logger = log.get(__name__)


class LaunchedEngine:
    """An engine that ends with this object, or with this process. It is replaced if it dies. Created by launch()."""

    def __init__(self, config: ResolvedConfig, address: str, run_dir: str) -> None:
        self.config = config
        self.address = address
        self.run_dir = run_dir
        """Private folder of this user, removed when the engine has ended for good."""
        self._launcher = os.getpid()
        self._ended = threading.Event()
        self._session: Session | None = None
        self._record: InstanceRecord | None = None
        self._record_lock = threading.Lock()
        settings = EngineSettings(config=config, address=address, run_dir=run_dir, launch=os.urandom(8).hex())
        self._supervisor = EngineSupervisor(ENGINE_MODULE, settings, self)

    @property
    def session(self) -> Session:
        """The session that waited for the engine; the caller of launch() may use it."""
        self.check_process()
        if self._session is None:
            raise EngineError("the engine is not ready")
        return self._session

    def check_process(self) -> None:
        """Raise EngineError in a forked process."""
        if self.is_forked:
            raise EngineError(
                "this process was forked from the one that launched the engine, and cannot use it: create the LLM in "
                "this process, or connect an AsyncClient to its address"
            )

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of the object in a forked process, which has none of the threads."""
        return os.getpid() != self._launcher

    @property
    def engine(self) -> Welcome:
        """The engine's Welcome: its model, limits and epoch."""
        return self.session.welcome

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self.address,)

    @property
    def pid(self) -> int:
        """Pid of the engine's current process."""
        return self._supervisor.pid

    def wait_until_ready(self, stopped: Callable[[], bool]) -> None:
        """Wait until the engine serves. Raises EngineError or ModelError with the engine's reason, or its end."""
        self._session = Session.connect(
            self.address,
            timeout_s=self.config.ready_timeout_s,
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
            recovery_timeout_s=self.config.recovery_timeout_s,
            alive=lambda: "stopped while it was starting" if stopped() else self.alive(),
        )
        self._supervisor.serves()
        self._update_record(ready=True)

    def announce(self, url: str) -> None:
        """Record for `vllm-lite ps` that this process serves the engine over HTTP."""
        self._update_record(server=Process.of(os.getpid()), url=url)

    def alive(self) -> str | None:
        """None while the engine runs or is being replaced, else its end: "killed by SIGKILL", "exit status 1"."""
        return self._supervisor.ended

    @property
    def reason(self) -> str:
        """Reason why the engine ended, in one sentence, with the root cause if it is known."""
        return str(self.session.dead or f"the engine ended: {self.alive()}")

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` until the engine has ended for good. Returns whether it has."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Abort all requests, end the engine and its workers, and remove their folder. May be called repeatedly. In a
        forked process it does nothing."""
        if self.is_forked:
            return
        if self._session is not None:
            self._session.close()
        self._supervisor.stop(STOP_GRACE_S)
        self._remove_files()

    # ---- called by the supervisor

    def on_life(self, pid: int, *, is_ready: bool) -> None:
        """Record the engine's current process."""
        if self.config.single_process:  # the engine has no process of its own
            return
        with suppress(OSError):  # the process has ended already
            engine = Process.of(pid)
            if self._record is None:
                launcher = Process.of(os.getpid())
                self._record = InstanceRecord(
                    model=self.config.served_model_name,
                    address=self.address,
                    started_s=time.time(),
                    engine=engine,
                    launcher=launcher,
                )
            self._update_record(engine=engine, ready=is_ready)

    def may_restart(self) -> bool:
        return not instances.is_ending(self.run_dir)

    def on_end(self, reason: str) -> None:
        if self._session is not None:
            self._session.fail(reason)
        self._remove_files()
        self._ended.set()

    def _update_record(self, **changes: object) -> None:
        with self._record_lock:
            if self._record is not None:
                self._record = msgspec.structs.replace(self._record, **changes)
                instances.write(self.run_dir, self._record)

    def _remove_files(self) -> None:
        """Remove the files that a killed engine has left."""
        supervise.remove_dir(self.run_dir)
        if self.address.startswith("ipc://") and not answers(self.address):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)


def launch(
    config: EngineConfig,
    stopped: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[ResolvedConfig], None] = lambda _: None,
    *,
    streams: bool = True,
    template: str | None = None,
) -> LaunchedEngine:
    """Start one engine with `config` and wait until it serves, or until `stopped()` returns True.

    `meanwhile` is called with the resolved config while the engine starts; its exceptions end the engine. `streams`:
    whether clients will stream tokens, or only read whole results. `template`: a chat template other than the
    checkpoint's.
    Raises ModelError or ConfigError before any process starts, EngineError or ModelError if the engine cannot start.
    """
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size}, and one engine is started here; use `serve` or LLM"
        )
    resolved = resolve(config, stopped, streams=streams, template=template)
    _check_free(resolved.address)
    _check_tcp(resolved)
    launched = spawn(resolved)
    finish(launched, stopped, meanwhile)
    return launched


def finish(launched: "Starting", stopped: Callable[[], bool], meanwhile: Callable[[ResolvedConfig], None]) -> None:
    """Second half of launch(): call `meanwhile`, and wait until the engine serves."""
    log.moment("server", SPAWNS_ENGINE)
    try:
        meanwhile(launched.config)
        log.moment("server", "tokenizer, template")
        launched.wait_until_ready(stopped)
        log.moment("server", "waits for the engine")
    except BaseException:
        launched.close()
        raise


class Starting(Protocol):
    config: ResolvedConfig

    def wait_until_ready(self, stopped: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...


def spawn(config: ResolvedConfig, *, publishes: bool = False) -> LaunchedEngine:
    """Start one engine's process in a folder of its own. With `publishes` it publishes KV events there, unless the user
    has set an endpoint or turned off the prefix cache."""
    run_dir = supervise.make_dir(RUN_DIR)
    try:
        address = config.address or _private_address(config, run_dir)
        events = config.kv_events_config
        if publishes and config.enable_prefix_caching and events is None:
            events = KVEventsConfig(enable_kv_cache_events=True)
        if events is not None:
            config = msgspec.structs.replace(config, kv_events_config=events.in_folder(run_dir))
        return LaunchedEngine(config, address, run_dir)
    except BaseException:
        supervise.remove_dir(run_dir)
        raise


def _with_adapters(config: EngineConfig, stopped: Callable[[], bool]) -> EngineConfig:
    """Download adapters that are given as hub ids."""

    def here(module: LoraModulePath) -> LoraModulePath:
        if not hub.is_hub_id(module.path):
            return module
        source = hub.HubSource(module.path, None, config.download_dir)
        return msgspec.structs.replace(module, path=hub.local_folder(source, stopped, "adapter"))

    return msgspec.structs.replace(config, lora_modules=tuple(map(here, config.lora_modules)))


def _with_draft_model(config: EngineConfig, stopped: Callable[[], bool]) -> EngineConfig:
    """Download the draft model, if it is given as a hub id."""
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        return config
    path = hub.local_folder(hub.HubSource(speculation.model, None, config.download_dir), stopped, "model")
    return msgspec.structs.replace(config, speculative_config=msgspec.structs.replace(speculation, model=path))


def resolve(
    config: EngineConfig,
    stopped: Callable[[], bool] = lambda: False,
    *,
    streams: bool = True,
    template: str | None = None,
) -> ResolvedConfig:
    """Resolve every default of `config`, and download its model and tokenizer if they are hub ids. `streams` and
    `template`: see launch().

    Raises ModelError or ConfigError, and EngineError if `stopped()` during a download.
    """
    name = config.model
    if name == DEMO_MODEL:
        path = demo_folder()
    else:
        source = hub.HubSource(name, config.revision, config.download_dir)
        path = hub.local_folder(source, stopped, "model without weights" if config.load_format == "dummy" else "model")
        if hub.is_hub_id(name):
            config = msgspec.structs.replace(config, served_model_name=config.served_model_name or name)
    spec = load_spec(path, config.model_impl, config.pooling)  # a damaged file is one before its tokenizer is converted
    if config.tokenizer is not None:
        source = hub.HubSource(config.tokenizer, None, config.download_dir)
        config = msgspec.structs.replace(config, tokenizer=hub.local_folder(source, stopped, "tokenizer"))
    elif gguf_files(Path(path)):  # its tokenizer is converted to files in this folder
        config = msgspec.structs.replace(config, tokenizer=str(conversion.folder_of(path)))
    config = _with_draft_model(_with_adapters(config, stopped), stopped)
    config = msgspec.structs.replace(config, quantization=on_load(config, spec))
    check_settings(config, spec)
    check_vocabulary(config.speculative_config, config.tokenizer or path)
    check_mtp_head(config, path, spec)
    if spec.encoder is not None:
        config = _for_encoder(config, spec)
    if config.distributed_executor_backend == "ray" and not _has_ray():
        raise ConfigError("distributed_executor_backend ray needs the package ray: pip install 'vllm-lite[ray]'")
    _warn_of_experts(config, spec)
    if config.pooler_config is not None and spec.pooling is None:
        logger.warning("pooler_config does nothing: this model makes no vectors; ask for them with --convert embed")
    resolved = config.resolve(
        max_position_embeddings=spec.max_position_embeddings,
        dtype=resolve_dtype(config.dtype, spec),
        model_path=path,
        kv=(cached := with_drafter(config, spec.shared_by(config.tensor_parallel_size))),
    )
    if streams and resolved.device == "cpu":
        resolved = msgspec.structs.replace(resolved, media_aside=spec.vision is not None)
    if not streams and config.max_num_batched_tokens is None:
        resolved = _with_large_steps(resolved, spec)
    if writes_text(spec):
        resolved = msgspec.structs.replace(resolved, end_token_ids=_end_token_ids(resolved, spec, template))
    value_bytes = KV_DTYPE_BYTES[resolved.kv_cache_dtype]
    scale_bytes = KV_SCALE_BYTES.get(resolved.kv_cache_dtype, 0)
    block_bytes = cached.kv_block_bytes(resolved.block_size, value_bytes, resolved.tensor_parallel_size, scale_bytes)
    if config.distributed_executor_backend == "ray":
        return resolved  # whose workers are elsewhere
    check_sizes(resolved, block_bytes, memory_limit_bytes())
    check_binding(resolved.cpu_bind, resolved.ranks_on_machine, resolved.device)
    return resolved


def _end_token_ids(config: ResolvedConfig, spec: ModelSpec, template: str | None) -> tuple[int, ...]:
    """The end tokens of the tokenizer and the chat template. None of a damaged file, which the client reports."""
    try:
        found = find_end_tokens(config.model, config.tokenizer, spec, template)
    except ModelError as error:
        logger.debug("end tokens: %s", error)
        return ()
    if (problem := found.problem) is not None:
        logger.warning("%s: %s", config.model, problem)
    return found.ids


def _has_ray() -> bool:
    """Whether the package is installed; any folder called ray on the path can be imported as well."""
    found = find_spec("ray")
    return found is not None and found.origin is not None


def _for_encoder(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The settings of a model that reads each text at once and keeps nothing of it: no chunks, no cache, no tiers.
    Short texts are to fill a step, and so are long ones. Settings of chats, as a file with many models has them for
    all, do nothing."""
    idle = [name for name in ("kv_cache_dir", "max_itl_ms") if getattr(config, name) is not None]
    if idle:
        logger.info("%s: nothing to do for an encoder, which keeps no KV and has no streams", " and ".join(idle))
    longest = config.max_model_len or spec.max_position_embeddings
    return msgspec.structs.replace(
        config,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        swap_space=0.0,
        kv_cache_dir=None,
        max_itl_ms=None,
        max_num_seqs=config.max_num_seqs or ENCODER_SEQS,
        max_num_batched_tokens=config.max_num_batched_tokens or max(ENCODER_TOKENS, longest),
    )


def _with_large_steps(config: ResolvedConfig, spec: ModelSpec) -> ResolvedConfig:
    """The config with large steps for a CPU that only computes whole results: no stream waits for a step of seconds."""
    if config.device != "cpu" or config.max_itl_ms is not None or not config.enable_chunked_prefill:
        return config
    most = min(CPU_STEP_TOKENS, CPU_STEP_WORK // spec.active_parameters(), CPU_STEP_PAIRS // config.max_model_len)
    return msgspec.structs.replace(config, max_num_batched_tokens=max(config.max_num_batched_tokens, most))


def _warn_of_experts(config: EngineConfig, spec: ModelSpec) -> None:
    """Log a warning for expert settings that have no effect."""
    has_none = spec.experts is None
    if config.enable_expert_parallel and (has_none or config.tensor_parallel_size == 1):
        why = "the model has no experts" if has_none else "tensor_parallel_size is 1"
        logger.warning("enable_expert_parallel changes nothing: %s", why)
    if config.expert_load_metrics and has_none:
        logger.warning("expert_load_metrics counts nothing: the model has no experts")


def _check_free(address: str | None) -> None:
    """Refuse an address at which another engine answers: clients would reach that one."""
    if address is not None and address.startswith("ipc://") and answers(address):
        raise ConfigError(f"address {address} is in use by another engine; choose another, or stop that one")


def _check_tcp(config: ResolvedConfig) -> None:
    """Check the keys and the port of tcp_address here, where the error reaches the user directly."""
    if config.curve_keys is not None:
        load_engine_keys(config.curve_keys)
    if config.tcp_address is None:
        return
    host, port = split_tcp(config.tcp_address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.tcp_address}: {error.strerror}; choose another") from error


def _private_address(config: ResolvedConfig, run_dir: str) -> str:
    if config.single_process:
        return f"inproc://{Path(run_dir).name}"
    try:
        check_address(f"ipc://{run_dir}/{LONGEST_SOCKET}")
    except ValueError as error:
        raise ConfigError(f"{error}; set TMPDIR to a shorter folder") from error
    return f"ipc://{run_dir}/engine"
