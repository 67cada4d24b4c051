"""Runs the application on a cluster, and removes it again."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from vllm_lite.errors import ConfigError, EngineError
from vllm_lite.ray.app import FASTER, build_with
from vllm_lite.ray.config import RayServeConfig

KEEP_ALIVE_S = 300


@contextmanager
def deployed(config: RayServeConfig, name: str, on_connected: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Run the application `name` of Ray Serve, at the root path of Serve's proxies; yields its URL. It runs on the
    cluster of RAY_ADDRESS or of this machine; if there is none, one is started and ended here. `on_connected` is called
    once Ray has set its signal handlers.

    Raises ConfigError if the cluster cannot be reached, EngineError if the application does not start.
    """
    if "RAY_ADDRESS" not in os.environ:
        for variable, value in FASTER.items():  # for processes that ray.init() may start
            os.environ.setdefault(variable, value)
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS"), logging_level="warning", ignore_reinit_error=True)
    except ConnectionError as error:
        raise ConfigError(f"the Ray cluster of RAY_ADDRESS cannot be reached: {error}") from error
    on_connected()
    application = build_with(config)
    scheme = "https" if config.ssl_certfile else "http"
    options = HTTPOptions(
        host=config.host,
        port=config.port,
        keep_alive_timeout_s=KEEP_ALIVE_S,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
    )
    try:
        serve.start(
            proxy_location=config.proxy_location,
            http_options=options,
            logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        )
        try:
            _start(application, name)
            yield f"{scheme}://{config.host}:{config.port}"
        finally:
            serve.delete(name)
    finally:
        ray.shutdown()


def _start(application: Application, name: str) -> None:
    """Start the application; returns when all replicas serve. Raises EngineError."""
    try:
        serve.run(application, name=name, route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"the application does not start on Ray Serve: {error}") from error
