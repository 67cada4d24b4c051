"""build(): the application for Ray Serve: HTTP replicas in front of the engine's replicas."""

import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from vllm_lite.ray.config import ROUTERS, LoadPolicy, RayServeConfig
from vllm_lite.ray.engine import EngineReplica
from vllm_lite.ray.http import HttpReplica
from vllm_lite.ray.messages import HTTP_DEPLOYMENT
from vllm_lite.runtime.nested_settings import DEVICE_DEFAULTS
from vllm_lite.server.config import Keys

HTTP_ONGOING = 10_000
"""Maximum number of concurrent requests of an HTTP replica. Its own limits refuse requests before that
(--max-num-queued-reqs)."""
UNHEALTHY_S = 10.0
"""Timeout of a health check. Serve acts after three failures."""
DRAIN_LOOK_S = 0.5
FASTER = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Settings of Serve with which a request changes no thread; our code never blocks a loop. They save a third of Serve's
cost per token. Proxies read them from the environment in which Ray was started."""
_ENVIRONMENT: dict[str, Any] = {"runtime_env": {"env_vars": FASTER}}


def build(args: Mapping[str, Any]) -> Application:
    """Make the application; `args` are settings of RayServeConfig. Without `host`, Serve's proxy is assumed to be
    public: calls that change the server then need an admin key. Raises ConfigError."""
    return build_with(RayServeConfig.load({"host": "0.0.0.0", **args}))  # noqa: S104 - nothing is bound


def build_with(config: RayServeConfig) -> Application:
    """As build(), for checked settings."""
    keys = config.keys()
    if config.prefix_hash_seed is None:
        config = msgspec.structs.replace(config, prefix_hash_seed=_hash_seed(keys))
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    engines = serve.deployment(EngineReplica).options(logging_config=quiet, **_engine_options(config))
    http = serve.deployment(serve.ingress()(HttpReplica)).options(
        name=HTTP_DEPLOYMENT,
        num_replicas=config.api_server_count,
        logging_config=quiet,
        ray_actor_options={"num_cpus": 0, **_ENVIRONMENT},
        max_ongoing_requests=HTTP_ONGOING,
        health_check_timeout_s=UNHEALTHY_S,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
    )
    encode = msgspec.msgpack.encode
    return http.bind(engines.bind(encode(config.engine())), encode(config.server()), keys)


def _hash_seed(keys: Keys) -> str:
    """The seed with which engines and routers hash blocks. It is the same when the application is deployed again, for
    example with more replicas, as running replicas continue; clients cannot know it."""
    where = ray.get_runtime_context().gcs_address if ray.is_initialized() else os.urandom(16).hex()
    return blake2b(repr((keys, where)).encode(), digest_size=16).hexdigest()


def _engine_options(config: RayServeConfig) -> dict[str, Any]:
    max_num_seqs = config.max_num_seqs or DEVICE_DEFAULTS[_device(config)].max_num_seqs
    router: dict[str, Any] = {"request_routing_stats_period_s": config.routing_stats_period_s}
    if (path := ROUTERS.get(config.routing, config.routing)) is not None:
        router["request_router_class"] = path
    options: dict[str, Any] = {
        "max_ongoing_requests": config.max_ongoing_requests or 2 * max_num_seqs,
        "ray_actor_options": {**_resources(config), **_ENVIRONMENT},
        "request_router_config": RequestRouterConfig(**router),
        "health_check_period_s": config.health_check_period_s,
        "health_check_timeout_s": UNHEALTHY_S,
        "graceful_shutdown_timeout_s": config.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": DRAIN_LOOK_S,
    }
    if config.max_replicas is None:
        return {**options, "num_replicas": config.replicas}
    target = config.target_ongoing_requests or max(1.0, max_num_seqs / 2)
    options["autoscaling_config"] = AutoscalingConfig(
        min_replicas=config.replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=target,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        policy=AutoscalingPolicy(
            policy_function=LoadPolicy, policy_kwargs={"target_kv_cache_usage": config.target_kv_cache_usage}
        ),
    )
    return options


def _resources(config: RayServeConfig) -> dict[str, float]:
    """Resources of a replica on its node, for its workers. With `--distributed-executor-backend ray`, Ray places the
    workers separately."""
    ranks = config.tensor_parallel_size
    if config.distributed_executor_backend == "ray":
        return {"num_cpus": 0}
    if _device(config) == "cuda":
        return {"num_cpus": 0, "num_gpus": ranks}
    return {"num_cpus": ranks * (config.cpu_threads or 1)}


def _device(config: RayServeConfig) -> str:
    """Device of replicas. This machine need not have it if the user sets it."""
    return config.device if config.device != "auto" else config.resolve_device()
